"""Sockets that listen, and the limit of open files, for the processes that serve."""

import resource
import socket

from slotkeeper.errors import InvalidSetting

_SPARE_FILES = 1024  # file descriptors for the database, Redis, and other open files besides connections
_BACKLOG = 4096


def listen(host: str, port: int, what: str, advice: str) -> list[socket.socket]:
    """Listen on each address of this host name.  `what` cannot listen, and `advice` is what to do: for the error.

    Raises InvalidSetting.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return [
            socket.create_server(address[:2], family=family, backlog=_BACKLOG) for family, _, _, _, address in found
        ]
    except OSError as error:
        raise InvalidSetting(f"{what} cannot listen on {host}, port {port}: {error.strerror}.  {advice}") from None


def connection_limit(requested: int) -> int:
    """Raise the limit of open files as needed, and return the number of connections that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = requested + _SPARE_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(requested, max(soft - _SPARE_FILES, soft // 2))
