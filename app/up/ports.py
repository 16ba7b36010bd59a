"""Checks whether ports are free, and whether a process listens on one."""

import errno
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from app.up.errors import UpError

_RANGE = range(10_240, 32_768)  # below the ephemeral ports of outgoing connections
_LOOPBACK = "127.0.0.1"
_given = set[int]()


@dataclass(frozen=True, slots=True)
class Port:
    """A port that is needed, the role that needs it, and the variable that sets it."""

    number: int
    role: str
    variable: str
    host: str = _LOOPBACK


def check_ports(ports: Iterable[Port]) -> None:
    """Check that all ports are free and different.  Raises UpError for the first that is not."""
    by_number: dict[int, Port] = {}
    for port in ports:
        if other := by_number.get(port.number):
            raise UpError(
                f"Port {port.number} is needed by {other.role} and by {port.role}: "
                f"set {other.variable} or {port.variable} to another one."
            )
        by_number[port.number] = port
        if reason := _why_not_free(port.host, port.number):
            raise UpError(reason.format(port=port))


def free_port() -> int:
    """Return a free port of the loopback address, for a process that starts to listen later.

    No outgoing connection gets the port meanwhile, and this function returns it only once.

    Raises UpError: no port is free.
    """
    generator = random.SystemRandom()
    for _ in _RANGE:
        number = generator.choice(_RANGE)
        if number not in _given and _why_not_free(_LOOPBACK, number) is None:
            _given.add(number)
            return number
    raise UpError(f"No port from {_RANGE.start} to {_RANGE.stop - 1} is free on {_LOOPBACK}.")


def is_open(host: str, port: int) -> bool:
    """Return whether a process listens on this port."""
    try:
        with socket.create_connection((host, port), 1.0):
            return True
    except OSError:
        return False


def _why_not_free(host: str, number: int) -> str | None:
    """Return why no process can listen on this port, as a format with `port`; None: the port is free."""
    try:
        family, *_, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As the servers do: TIME_WAIT is no obstacle.
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror:
        return f"{host!r} is no address of this machine: set SLOTKEEPER_HOST to one."
    except PermissionError:
        return "Port {port.number} for {port.role} is reserved for root: set {port.variable} to one above 1023."
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                "Port {port.number} for {port.role} is taken by another program: "
                "stop that program, or set {port.variable} to a free port."
            )
        return (
            f"Nobody can listen on port {number} of {host!r} ({error.strerror}): "
            "set SLOTKEEPER_HOST or {port.variable} to an available one."
        )
    return None
