"""A proxy between processes and what they reach over TCP, which fails as networks fail.

    with Proxy(seed=7) as proxy:
        door = proxy.open("redis", ("127.0.0.1", 6379))
        door.blackhole(Direction.ANSWERS)  # connections stay, nothing is heard on them any more
        door.restore()

One thread with one event loop carries all doors.  A door's methods may be called from any thread.  What a door knows
of the protocol that passes through it stands in a sieve (protocol_filters.py).
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
    """Which bytes of a connection."""

    REQUESTS = "requests"  # from whoever connected
    ANSWERS = "answers"


class Cut(Exception):
    """A sieve wants the connection to end here; the piece at hand does not pass."""


class StreamFilter(Protocol):
    """Sees all bytes of one connection, and answers which pass.  Raises Cut."""

    def requests(self, piece: bytes) -> bytes: ...

    def answers(self, piece: bytes) -> bytes: ...


class Later(Protocol):
    """Send these bytes to the door's server on a connection of their own, `after_s` seconds from now."""

    def __call__(self, data: bytes, after_s: float) -> None: ...


class ProxyPort:
    """A port of the loopback address that leads to a server."""

    def __init__(self, call: "_Call", name: str, server: Address, chance: random.Random) -> None:
        self.name = name
        self.port = 0
        self._call, self._server, self._chance = call, server, chance
        self._sieve: Callable[[Later], StreamFilter] | None = None
        self._open = {way: asyncio.Event() for way in Direction}
        self._delay_s = 0.0
        self._links: set[_Link] = set()
        self._cuts = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # -- from any thread -----------------------------------------------------------------------------------

    def reset(self) -> int:
        """Reset every connection, answering how many there were.  New ones are welcome."""
        return self._call(self._cut)

    def blackhole(self, *ways: Direction) -> None:
        """Carry no more bytes in these ways (none named: in both); connections stay, and new ones are accepted."""

        def hush() -> None:
            for way in ways or tuple(Direction):
                self._open[way].clear()

        self._call(hush)

    def restore(self) -> None:
        """End `silence` and `delay`: what was held back arrives now."""
        self._call(self._speak)

    def delay(self, mean_s: float) -> None:
        """Let each piece arrive up to twice as late as this, in order."""
        self._call(lambda: setattr(self, "_delay_s", mean_s))

    def redirect(self, server: Address, *, keeps_connections: bool = False) -> None:
        """From now on to another server; those who are connected to the old one are cut off, or stay with it."""

        def change() -> None:
            self._server = server
            if not keeps_connections:
                self._cut()

        self._call(change)

    def filter_streams(self, sieve: Callable[[Later], StreamFilter]) -> Self:
        """Have new connections pass a sieve, one of its own for each."""
        self._sieve = sieve
        return self

    # -- in the loop ---------------------------------------------------------------------------------------

    async def listen(self) -> None:
        self._speak()
        listener = await asyncio.start_server(self._welcome, "127.0.0.1", self.port)
        self.port = listener.sockets[0].getsockname()[1]

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cuts = self._cuts
        try:
            server = await asyncio.open_connection(*self._server)
        except OSError:
            _reset(writer)
            return
        link = _Link((reader, writer), server)
        if cuts != self._cuts:  # one came while this connection was being made
            link.reset()
            return
        self._links.add(link)
        try:
            await self._carry(link)
        except (OSError, Cut):
            link.reset()
        finally:
            self._links.discard(link)
            link.close()

    async def _carry(self, link: "_Link") -> None:
        sieve = self._sieve(self._later) if self._sieve else None
        (client, to_client), (server, to_server) = link.client, link.server
        pumps = (
            asyncio.ensure_future(self._pump(Direction.REQUESTS, client, to_server, sieve.requests if sieve else None)),
            asyncio.ensure_future(self._pump(Direction.ANSWERS, server, to_client, sieve.answers if sieve else None)),
        )
        try:
            await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump(
        self,
        way: Direction,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        sieve: Callable[[bytes], bytes] | None,
    ) -> None:
        while piece := await source.read(_PIECE):
            if sieve is not None:
                piece = sieve(piece)
            if self._delay_s:
                await asyncio.sleep(self._chance.uniform(0, 2 * self._delay_s))
            await self._open[way].wait()
            sink.write(piece)
            await sink.drain()
        await self._open[way].wait()
        with suppress(OSError):
            sink.write_eof()

    def _later(self, data: bytes, after_s: float) -> None:
        task = asyncio.ensure_future(self._send(data, after_s))
        self._tasks.add(task)  # or it would be collected before it is done
        task.add_done_callback(self._tasks.discard)

    async def _send(self, data: bytes, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(*self._server)
            writer.write(data)
            await reader.read(_PIECE)
            writer.close()

    def _cut(self) -> int:
        self._cuts += 1
        for link in self._links:
            link.reset()
        return len(self._links)

    def _speak(self) -> None:
        self._delay_s = 0.0
        for event in self._open.values():
            event.set()


class Proxy(threading.Thread):
    """While entered: carries what passes its doors."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(name="proxy", daemon=True)
        self._seed = seed
        self._loop = asyncio.new_event_loop()

    def open(self, name: str, server: Address, port: int = 0) -> ProxyPort:
        """A door to `server`, on a free port unless one is given.  Raises OSError."""
        door = ProxyPort(self._call, name, server, random.Random(f"{self._seed} {name}"))
        door.port = port
        asyncio.run_coroutine_threadsafe(door.listen(), self._loop).result(_CALL_S)
        return door

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
    """One connection through a door: its client's end and its server's."""

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
