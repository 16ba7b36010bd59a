"""A proxy to PostgreSQL that loses responses, or stops to forward, when the test says so."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import make_url

_PIECE = 65_536


class Network:
    """Forwards bytes between a port of this host and the server's socket.  These take effect at once:

    `silent`      open connections stay open, and nothing is forwarded on them again
    `loses`       a COMMIT is forwarded, and its connection breaks before the response
    `swallows`    a COMMIT is not forwarded, nor anything after it on its connection
    `closed`      new connections are refused
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.silent = threading.Event()
        self.loses = self.swallows = self.closed = False
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def fall_silent(self) -> None:
        """Stop to forward on the connections that are open now; later ones work."""
        self.silent.set()
        self.silent = threading.Event()

    def close(self) -> None:
        self._listener.close()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.closed:
                    client.close()
                    continue
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._path)
                self._sockets += [client, server]
                _Connection(self, client, server)


class _Connection:
    def __init__(self, network: Network, client: socket.socket, server: socket.socket) -> None:
        self.network, self.silent, self.deaf = network, network.silent, False
        self.client, self.server = client, server
        for act in (self._to_server, self._to_client):
            threading.Thread(target=act, daemon=True).start()

    def _to_server(self) -> None:
        with suppress(OSError):
            while data := self.client.recv(_PIECE):
                if b"COMMIT" in data and self.network.swallows:
                    self.silent = threading.Event()
                    self.silent.set()
                self.deaf = self.deaf or (b"COMMIT" in data and self.network.loses)
                if not self.silent.is_set():
                    self.server.sendall(data)
            if not self.silent.is_set():
                self.server.close()

    def _to_client(self) -> None:
        with suppress(OSError):
            while data := self.server.recv(_PIECE):
                if self.silent.is_set():
                    continue
                if self.deaf:
                    self.client.shutdown(socket.SHUT_RDWR)
                    self.server.shutdown(socket.SHUT_RDWR)
                    return
                self.client.sendall(data)
            if not self.silent.is_set():
                self.client.shutdown(socket.SHUT_RDWR)


@contextmanager
def between(url: str) -> Iterator[tuple[Network, str]]:
    """Yield a proxy to the PostgreSQL of `url`, and the URL through the proxy."""
    parsed = make_url(url)
    network = Network(f"{parsed.query['host']}/.s.PGSQL.5432")
    through = parsed.difference_update_query(["host"]).set(host="127.0.0.1", port=network.port)
    try:
        yield network, through.render_as_string(hide_password=False)
    finally:
        network.close()
