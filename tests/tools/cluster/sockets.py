"""Plain sockets on both sides of a proxy, in the hands of a test."""

import socket

_A_MOMENT_S = 0.2


class Conversation:
    """A client and the server that it reached: two plain sockets."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server

    def says(self, data: bytes) -> bytes:
        """What the server hears when the client sends this."""
        self.client.sendall(data)
        return self.server.recv(4096)

    def hears(self, data: bytes) -> bytes:
        self.server.sendall(data)
        return self.client.recv(4096)


class Listener:
    """A server whose conversations a test holds in its hands."""

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

    def reached_by(self, port: int) -> Conversation:
        """A client that has come in by this port of the loopback address."""
        client = socket.create_connection(("127.0.0.1", port), 5)
        self._open.append(client)
        return Conversation(client, self.accept())

    def close(self) -> None:
        for connection in (*self._open, self._socket):
            connection.close()


def hears_nothing(connection: socket.socket) -> bool:
    """That nothing comes is seen by waiting for it, and by nothing else."""
    connection.settimeout(_A_MOMENT_S)
    try:
        return connection.recv(4096) is None
    except TimeoutError:
        return True
    finally:
        connection.settimeout(5)
