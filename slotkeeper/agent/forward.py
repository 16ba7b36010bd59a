"""Runs that a local server carries out: one request for each."""

import http.client
import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit

from slotkeeper.serve.exact import dumps, loads
from slotkeeper.serve.served_function import Context, InvalidRequest, Model, NotStarted

_MAX_ERROR_CHARS = 500
_MAX_RESPONSE_BYTES = 64 << 20
_CONNECT_S = 3.0
_LOOK_S = 0.5
_WRONG, _NOT_NOW = frozenset({400, 413, 415, 422}), frozenset({429, 503})


class ServerError(Exception):
    """The local server answered with an error, or broke the connection: another try may do better."""


def forward_to(url: str) -> Model:
    """Return a model that sends each payload to a local server, and returns the JSON of its response."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def run(context: Context) -> object:
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection, is_over = kind(parts.hostname or "", port, timeout=_CONNECT_S), threading.Event()
        try:
            try:
                connection.connect()
            except OSError as error:
                raise NotStarted(f"the local server refuses connections: {error}") from None
            connection.sock.settimeout(None)  # A run may take as long as it likes.
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            threading.Thread(target=_close_when_canceled, args=(context, connection.sock, is_over), daemon=True).start()
            connection.request("POST", path, dumps(context.payload), {"Content-Type": "application/json"})
            response = connection.getresponse()
            body = response.read(_MAX_RESPONSE_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            context.check()
            raise ServerError(f"the local server broke the connection: {error!r}") from None
        finally:
            is_over.set()
            connection.close()
        return _read(response.status, body)

    return run


def _read(status: int, body: bytes) -> object:
    if 200 <= status < 300:
        if len(body) > _MAX_RESPONSE_BYTES:
            raise InvalidRequest(f"the result is larger than {_MAX_RESPONSE_BYTES >> 20} MiB")
        try:
            return loads(body)
        except ValueError as error:
            raise ServerError(f"the local server's answer is not JSON: {error}") from None
    text = f"the local server answered {status}: {body.decode(errors='replace')[:_MAX_ERROR_CHARS]}"
    if status in _WRONG:
        raise InvalidRequest(text)
    if status in _NOT_NOW:
        raise NotStarted(text)
    raise ServerError(text)


def _close_when_canceled(context: Context, connection: socket.socket, is_over: threading.Event) -> None:
    """Break the connection of a run that is canceled: no other sign reaches a local server."""
    while not is_over.wait(_LOOK_S):
        if context.canceled:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            return


def refuses_connections(url: str) -> bool:
    """Return whether no process listens at the address of a local server.  One that is only slow may be running."""
    parts = urlsplit(url)
    address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
