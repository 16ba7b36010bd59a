"""One agent's connection, and the requests that travel over it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from slotkeeper.tunnel.frames import TunnelError
from slotkeeper.tunnel.sender import Sender
from slotkeeper.tunnel.streams import (
    BodyEnded,
    ControlReceived,
    DataReceived,
    ResponseReceived,
    Side,
    StreamReset,
    Tunnel,
    WindowOpened,
)

_STREAMS_PER_SLOT, _FURTHER_STREAMS = 2, 16


class NotSent(Exception):
    """The request has certainly not left: the connection ended, or has too many requests."""


class TooManyStreams(NotSent):
    """So many requests are on their way to the node that no more are sent."""


class Cut(Exception):
    """The connection ended, or the agent gave the request up, after it may have left."""


class NodeResponse(NamedTuple):
    """The head of a response; `Exchange.read` returns its body."""

    status: int
    headers: Mapping[str, str]


class Exchange:
    """One request to the node, and its response."""

    def __init__(self, connection: "NodeConnection", stream: int) -> None:
        self.stream, self._connection = stream, connection
        self._head: asyncio.Future[NodeResponse] = asyncio.get_running_loop().create_future()
        self._body = asyncio.Queue[bytes | Exception]()  # Bounded by the stream's window.
        self._has_ended = False  # All of the body is in the queue.
        self.can_send = asyncio.Event()

    async def head(self) -> NodeResponse:
        """Wait for the head of the response.  Raises NotSent, Cut."""
        return await self._head

    async def read(self) -> AsyncIterator[tuple[bytes, bool]]:
        """Yield the body of the response in pieces, and whether each is the last, which may be empty.  Raises Cut."""
        is_last = False
        while not is_last:
            piece = await self._body.get()
            if isinstance(piece, Exception):
                raise piece
            is_last = self._has_ended and self._body.empty()
            yield piece, is_last
            self._connection.note_consumed(self.stream, len(piece))

    def close(self) -> None:
        """Give the request up, unless it is over."""
        self._connection.close_stream(self)

    # -- called by the connection ----------------------------------------------------------------------------

    def on_head(self, head: Mapping[str, Any]) -> None:
        status, headers = head.get("status"), head.get("headers")
        if not isinstance(status, int) or not 200 <= status <= 599 or not isinstance(headers, dict):
            raise TunnelError("the head of a response has no status, or no headers")
        texts = {str(name).lower(): value for name, value in headers.items() if isinstance(value, str)}
        if not self._head.done():
            self._head.set_result(NodeResponse(status, texts))

    def on_data(self, data: bytes) -> None:
        self._body.put_nowait(data)

    def on_end(self) -> None:
        self._has_ended = True
        if self._body.empty():
            self._body.put_nowait(b"")

    def fail(self, error: Exception) -> None:
        if not self._head.done():
            self._head.set_exception(error)
            self._head.exception()  # It may not be awaited any more.
        self._body.put_nowait(error)
        self.can_send.set()


class NodeConnection:
    """The tunnel of one agent, after it was verified.

    send: sends one message.  on_control: is given the agent's control messages.
    """

    def __init__(
        self,
        node: str,
        number: int,
        instance: str,
        slots: int,
        send: Callable[[bytes], Awaitable[None]],
        on_control: Callable[[dict[str, Any]], None],
    ) -> None:
        self.node, self.number, self.instance = node, number, instance
        self.takes_jobs, self.reason = True, ""
        self.digest = ""
        """Of its declaration, as the catalog has it."""
        self._tunnel = Tunnel(Side.GATEWAY, _STREAMS_PER_SLOT * slots + _FURTHER_STREAMS)
        self._sender = Sender(self._tunnel, send)
        self._on_control = on_control
        self._exchanges: dict[int, Exchange] = {}
        self.is_lost = False
        self._idle: asyncio.Event | None = None  # that `wait_idle` waits for

    @property
    def stream_count(self) -> int:
        return len(self._exchanges)

    def send_control(self, kind: str, **members: Any) -> None:
        """Send a control message."""
        self._tunnel.send_control({"type": kind, **members})
        self._sender.wake()

    async def wait_idle(self) -> None:
        """Wait until no request is on its way."""
        if self._exchanges:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    async def request(self, head: Mapping[str, Any], body: AsyncIterator[bytes]) -> Exchange:
        """Send a request, and return its exchange when its body has left.  Raises NotSent.

        head: method, path, headers.
        """
        if self.is_lost:
            raise NotSent("the node is not connected")
        if not self._tunnel.has_room:
            raise TooManyStreams("too many requests are on their way to the node")
        exchange = Exchange(self, self._tunnel.open(dict(head)))
        self._exchanges[exchange.stream] = exchange
        try:
            async for piece in body:
                await self._sender.send_body(exchange.stream, piece, exchange.can_send)
        except BaseException:
            exchange.close()
            raise
        self._tunnel.end(exchange.stream)
        self._sender.wake()
        return exchange

    def receive(self, message: str | bytes) -> None:
        """Handle a message of the agent.  Raises TunnelError."""
        for event in self._tunnel.receive(message):
            if isinstance(event, ControlReceived):
                self._on_control(event.message)
                continue
            exchange = self._exchanges.get(event.stream)
            if exchange is None:
                continue
            match event:
                case ResponseReceived(_, head):
                    exchange.on_head(head)
                case DataReceived(_, data):
                    exchange.on_data(data)
                case BodyEnded():
                    exchange.on_end()
                    self._forget(exchange)
                case StreamReset(_, code):
                    exchange.fail(Cut(code))
                    self._forget(exchange)
                case WindowOpened():
                    exchange.can_send.set()
                case _:
                    pass
        self._sender.wake()  # It may have to reset a stream.

    def lose(self) -> None:
        """End all requests, because the WebSocket is closed."""
        self.is_lost = True
        self._sender.close()
        was_sent = {reset.stream: reset.was_sent for reset in self._tunnel.lose()}
        for exchange in list(self._exchanges.values()):
            # What a stream that the tunnel has forgotten asked for has left.
            error = Cut("the connection ended") if was_sent.get(exchange.stream, True) else NotSent("it ended before")
            exchange.fail(error)
            self._forget(exchange)

    def note_consumed(self, stream: int, size: int) -> None:
        """Note that so many bytes of a response were passed on."""
        self._tunnel.consumed(stream, size)
        self._sender.wake()

    def close_stream(self, exchange: Exchange) -> None:
        """Reset a stream that is not over."""
        if exchange.stream in self._exchanges:
            self._tunnel.reset(exchange.stream, "abandoned")
            self._sender.wake()
            exchange.fail(Cut("it was given up"))
            self._forget(exchange)

    def _forget(self, exchange: Exchange) -> None:
        self._exchanges.pop(exchange.stream, None)
        exchange.can_send.set()
        if not self._exchanges and self._idle is not None:
            self._idle.set()
