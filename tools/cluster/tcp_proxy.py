"""A TCP proxy between processes and their servers that injects faults of a network.

    with Proxy(seed=7) as proxy:
        proxy_port = proxy.open("redis", ("127.0.0.1", 6379))
        proxy_port.blackhole(Direction.ANSWERS)  # connections stay open, and answers do not arrive
        proxy_port.restore()

One thread with one event loop serves all ports.  Any thread may call a port's methods.  A port has no knowledge of the
protocol; its stream filter may have (protocol_filters.py).
"""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self, TypeVar

T = TypeVar("T")

_PIECE = 1 << 16
_CALL_S = 10.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time: closing sends RST

Address = tuple[str, int]


class Direction(StrEnum):
    """The direction of the bytes of a connection."""

    REQUESTS = "requests"  # from the client
    ANSWERS = "answers"


class Cut(Exception):
    """Raised by a stream filter to reset the connection; the current piece does not pass."""


class StreamFilter(Protocol):
    """Gets all bytes of one connection, and returns the bytes that pass.  Raises Cut."""

    def requests(self, piece: bytes) -> bytes: ...

    def answers(self, piece: bytes) -> bytes: ...


class Later(Protocol):
    """Sends these bytes to the port's server on a separate connection, `after_s` seconds from now."""

    def __call__(self, data: bytes, after_s: float) -> None: ...


class ProxyPort:
    """A port of the loopback address that leads to a server."""

    def __init__(self, call: "_Call", name: str, server: Address, rng: random.Random) -> None:
        self.name = name
        self.port = 0
        self._call, self._server, self._rng = call, server, rng
        self._make_filter: Callable[[Later], StreamFilter] | None = None
        self._flowing = {direction: asyncio.Event() for direction in Direction}
        self._delay_s = 0.0
        self._links: set[_Link] = set()
        self._resets = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # -- from any thread -----------------------------------------------------------------------------------

    def reset(self) -> int:
        """Reset all connections, and return how many there were.  New connections are accepted."""
        return self._call(self._reset_links)

    def blackhole(self, *directions: Direction) -> None:
        """Hold back all bytes in these directions (none given: both).

        Connections stay open, and new ones are accepted.
        """

        def close() -> None:
            for direction in directions or tuple(Direction):
                self._flowing[direction].clear()

        self._call(close)

    def restore(self) -> None:
        """End `blackhole` and `delay`: bytes that were held back arrive now."""
        self._call(self._open_both)

    def delay(self, mean_s: float) -> None:
        """Delay each piece by up to twice `mean_s`, in order."""
        self._call(lambda: setattr(self, "_delay_s", mean_s))

    def redirect(self, server: Address, *, keeps_connections: bool = False) -> None:
        """Connect new clients to another server.  Existing connections are reset, or stay with the old server."""

        def switch() -> None:
            self._server = server
            if not keeps_connections:
                self._reset_links()

        self._call(switch)

    def filter_streams(self, make_filter: Callable[[Later], StreamFilter]) -> Self:
        """Filter new connections, each with its own filter.  `make_filter`: makes the filter of a connection."""
        self._make_filter = make_filter
        return self

    # -- in the loop ---------------------------------------------------------------------------------------

    async def listen(self) -> None:
        self._open_both()
        listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = listener.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        resets = self._resets
        try:
            server = await asyncio.open_connection(*self._server)
        except OSError:
            _reset(writer)
            return
        link = _Link((reader, writer), server)
        if resets != self._resets:  # `reset` was called while this connection was being made
            link.reset()
            return
        self._links.add(link)
        try:
            await self._forward(link)
        except (OSError, Cut):
            link.reset()
        finally:
            self._links.discard(link)
            link.close()

    async def _forward(self, link: "_Link") -> None:
        stream_filter = self._make_filter(self._send_later) if self._make_filter else None
        (client, to_client), (server, to_server) = link.client, link.server
        pumps = (
            asyncio.ensure_future(
                self._pump(Direction.REQUESTS, client, to_server, stream_filter.requests if stream_filter else None)
            ),
            asyncio.ensure_future(
                self._pump(Direction.ANSWERS, server, to_client, stream_filter.answers if stream_filter else None)
            ),
        )
        try:
            await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump(
        self,
        direction: Direction,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        filter_piece: Callable[[bytes], bytes] | None,
    ) -> None:
        while piece := await source.read(_PIECE):
            if filter_piece is not None:
                piece = filter_piece(piece)
            if self._delay_s:
                await asyncio.sleep(self._rng.uniform(0, 2 * self._delay_s))
            await self._flowing[direction].wait()
            sink.write(piece)
            await sink.drain()
        await self._flowing[direction].wait()
        with suppress(OSError):
            sink.write_eof()

    def _send_later(self, data: bytes, after_s: float) -> None:
        task = asyncio.ensure_future(self._send(data, after_s))
        self._tasks.add(task)  # a reference, or the task could be garbage-collected
        task.add_done_callback(self._tasks.discard)

    async def _send(self, data: bytes, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(*self._server)
            writer.write(data)
            await reader.read(_PIECE)
            writer.close()

    def _reset_links(self) -> int:
        self._resets += 1
        for link in self._links:
            link.reset()
        return len(self._links)

    def _open_both(self) -> None:
        self._delay_s = 0.0
        for event in self._flowing.values():
            event.set()


class Proxy(threading.Thread):
    """The thread that serves all ports while its context is active.  `seed`: of the random delays."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(name="proxy", daemon=True)
        self._seed = seed
        self._loop = asyncio.new_event_loop()

    def open(self, name: str, server: Address, port: int = 0) -> ProxyPort:
        """Return a port that leads to `server`, a free one unless `port` is given.  Raises OSError."""
        proxy_port = ProxyPort(self._call, name, server, random.Random(f"{self._seed} {name}"))
        proxy_port.port = port
        asyncio.run_coroutine_threadsafe(proxy_port.listen(), self._loop).result(_CALL_S)
        return proxy_port

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()

    def run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    def _call(self, act: Callable[[], T]) -> T:
        async def done() -> T:
            return act()

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result(_CALL_S)


class _Call(Protocol):
    def __call__(self, act: Callable[[], T], /) -> T: ...


_End = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """One connection through a port: its client's end and its server's."""

    def __init__(self, client: _End, server: _End) -> None:
        self.client, self.server = client, server

    def reset(self) -> None:
        for _, writer in (self.client, self.server):
            _reset(writer)

    def close(self) -> None:
        for _, writer in (self.client, self.server):
            writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
