"""A connection that has carried a response, and whether it may carry the next."""

import asyncio
import socket

import pytest

from tasks.servers import http_connection
from tasks.servers.http_connection import HttpConnection, ParseTurns


class Handler:
    """Ignores a response."""

    def on_headers(self, status: int, headers: object) -> None: ...
    def on_body(self, piece: object) -> None: ...
    def on_complete(self) -> None: ...
    def on_failure(self, *_: object) -> None: ...
    def on_too_many_pieces(self) -> None: ...


@pytest.mark.parametrize("unrequested", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno"])
def test_a_connection_with_received_data_that_are_not_parsed_yet_is_not_reused(
    unrequested: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response ends where its connection's turn is over, and the server has sent more than that."""
    monkeypatch.setattr(http_connection, "_TURN_S", 0.0)
    returned: list[HttpConnection] = []

    async def receive() -> bool:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            client.setblocking(False)
            connection = HttpConnection(client, returned.append, lambda _: None, ParseTurns())
            await asyncio.get_running_loop().create_connection(lambda: connection, sock=client)
            connection.send_request(Handler(), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"", is_bodiless=False)  # type: ignore[arg-type]
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
            length = http_connection._SLICE_BYTES - len(head % 1000)
            connection.data_received(head % length + b"x" * length + unrequested)
            assert returned == [connection]
            return connection.is_reusable

    assert asyncio.run(receive()) is (unrequested == b"")
