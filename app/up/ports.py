"""Ports: whether they can be had, before anything is started."""

import errno
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from app.up.errors import UpError

_QUIET = range(10_240, 32_768)  # below those from which systems choose for outgoing connections
_HERE = "127.0.0.1"
_given = set[int]()


@dataclass(frozen=True, slots=True)
class Port:
    """A port that is needed, what for, and the variable that sets it."""

    number: int
    role: str
    variable: str
    host: str = _HERE


def check_ports(ports: Iterable[Port]) -> None:
    """Raises UpError for the first port that cannot be had, or that two of them want."""
    wanted: dict[int, Port] = {}
    for port in ports:
        if other := wanted.get(port.number):
            raise UpError(
                f"Port {port.number} is wanted for {other.role} and for {port.role}: "
                f"set {other.variable} or {port.variable} to another one."
            )
        wanted[port.number] = port
        if reason := _why_not_free(port.host, port.number):
            raise UpError(reason.format(port=port))


def free_port() -> int:
    """A port of the loopback address that nobody has, for a listener that may come a while later.

    No outgoing connection is given it, and this process not again.  Raises UpError when there is none.
    """
    draw = random.SystemRandom()
    for _ in _QUIET:
        number = draw.choice(_QUIET)
        if number not in _given and _why_not_free(_HERE, number) is None:
            _given.add(number)
            return number
    raise UpError(f"No port from {_QUIET.start} to {_QUIET.stop - 1} is free on {_HERE}.")


def is_open(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection((host, port), timeout_s):
            return True
    except OSError:
        return False


def _why_not_free(host: str, number: int) -> str | None:
    """Why nobody could listen there; None: somebody could."""
    try:
        family, *_, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As the servers do: not in TIME_WAIT.
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
            "set SLOTKEEPER_HOST or {port.variable} to what can be had."
        )
    return None
