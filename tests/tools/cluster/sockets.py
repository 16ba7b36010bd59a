"""Plain sockets on both sides of a proxy, for tests to control."""

import socket

_SILENCE_S = 0.2


class Connection:
    """The client's and the server's socket of one connection."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server

    def send_request(self, data: bytes) -> bytes:
        """Send data from the client, and return what the server receives."""
        self.client.sendall(data)
        return self.server.recv(4096)

    def send_response(self, data: bytes) -> bytes:
        """Send data from the server, and return what the client receives."""
        self.server.sendall(data)
        return self.client.recv(4096)


class Listener:
    """A server whose connections a test controls."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(5)
        self.address: tuple[str, int] = self._socket.getsockname()
        self._open: list[socket.socket] = []

    def accept(self) -> socket.socket:
        connection, _ = self._socket.accept()
        connection.settimeout(5)
        self._open.append(connection)
        return connection

    def connect_through(self, port: int) -> Connection:
        """Connect a client to this port of the loopback address, and accept its connection at the server."""
        client = socket.create_connection(("127.0.0.1", port), 5)
        self._open.append(client)
        return Connection(client, self.accept())

    def close(self) -> None:
        for connection in (*self._open, self._socket):
            connection.close()


def receives_nothing(connection: socket.socket) -> bool:
    """Return whether the socket receives nothing for a moment."""
    connection.settimeout(_SILENCE_S)
    try:
        return connection.recv(4096) is None
    except TimeoutError:
        return True
    finally:
        connection.settimeout(5)
