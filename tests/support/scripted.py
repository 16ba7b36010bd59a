"""A server in the test's process that sends exactly the bytes that the test sets, also invalid ones.

    with Scripted(lambda seen: answer({"status": "success"})) as server:
        ...
        assert server.seen[0].path == "/generate"

Every inference server of a test is this or the reference server.
"""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import orjson

_ENDS_S = 10.0


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]  # lower-case names
    body: bytes
    connection: int  # counted from 1

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


Act = bytes | Callable[[socket.socket], object]  # bytes to send, or a function of the socket


class Scripted:
    """Answers each request with `act(seen)`.  Use as a context manager: its threads end with it."""

    def __init__(self, act: Callable[[Seen], Act]) -> None:
        self.act = act
        self.seen: list[Seen] = []
        self.connections = 0
        self.stopped = threading.Event()  # hanging acts wait for it
        self._open: dict[threading.Thread, socket.socket] = {}

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        _shut(self._listener)  # A close alone would not wake the thread that accepts connections.
        self._listener.close()
        self._accepting.join(_ENDS_S)
        left = dict(self._open)
        for sock in left.values():
            _shut(sock)
        for thread in left:
            thread.join(_ENDS_S)

    def _accept(self) -> None:
        while not self.stopped.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(sock, self.connections), daemon=True)
            self._open[thread] = sock
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        with sock, sock.makefile("rb") as stream:
            try:
                while (seen := _read_request(stream, number)) is not None:
                    self.seen.append(seen)
                    act = self.act(seen)
                    sock.sendall(act) if isinstance(act, bytes) else act(sock)
            except (OSError, ValueError):
                pass
        self._open.pop(threading.current_thread(), None)


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _read_request(stream: Any, number: int) -> Seen | None:
    first = stream.readline()
    if not first:
        return None
    method, path, _ = first.decode().split(" ", 2)
    headers: dict[str, str] = {}
    while (line := stream.readline().decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = stream.read(int(headers.get("content-length", 0)))
    return Seen(method, path, headers, body, number)


def answer(body: Any = b"", status: int = 200, /, **headers: str) -> bytes:
    """Return an HTTP response.  A body that is not bytes is sent as JSON.  Header names have _ for -."""
    payload = body if isinstance(body, bytes) else orjson.dumps(body)
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(payload)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + payload


def always(act: Act) -> Callable[[Seen], Act]:
    """Return a function that does the same for every request."""
    return lambda _seen: act


def reset(sock: socket.socket) -> None:
    """Close the connection with a reset instead of an end of file."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise ConnectionAbortedError  # out of the loop that serves the connection, which closes it


def hang_up(sock: socket.socket) -> None:
    """Close the connection with an end of file and without a response, as an idle connection is closed."""
    sock.shutdown(socket.SHUT_RDWR)


def refused_url() -> str:
    """Return an address that refuses connections: the port is bound, so that no other process listens there."""
    _BOUND.bind(("127.0.0.1", 0)) if _BOUND.getsockname()[1] == 0 else None
    return f"http://127.0.0.1:{_BOUND.getsockname()[1]}"


_BOUND = socket.socket()
