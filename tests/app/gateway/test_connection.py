"""Requests over the connection of one agent, and their outcome when the connection ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from app.gateway.connection import Cut, Exchange, NodeConnection, NotSent, TooManyStreams
from slotkeeper.tunnel.streams import (
    TO_GATEWAY_WINDOW,
    BodyEnded,
    DataReceived,
    RequestReceived,
    Side,
    StreamReset,
    Tunnel,
)

_HEAD = {"method": "POST", "path": "/run", "headers": {}}


class Agent:
    """The other end: it receives what is sent, unless the wire is held."""

    def __init__(self, slots: int = 1) -> None:
        self.tunnel, self.events = Tunnel(Side.AGENT, 1000), list[Any]()
        self.wire = asyncio.Event()
        self.wire.set()
        self.controls = list[dict[str, Any]]()
        self.connection = NodeConnection("n1", 1, "i1", slots, self._take, self.controls.append)

    async def _take(self, message: bytes) -> None:
        await self.wire.wait()
        self.events += self.tunnel.receive(message)

    def answer(self, stream: int, body: bytes = b"", status: int = 200, *, end: bool = True) -> None:
        self.tunnel.respond(stream, {"status": status, "headers": {"Content-Type": "application/json"}})
        self.tunnel.send(stream, body)
        if end:
            self.tunnel.end(stream)
        self.flush()

    def flush(self) -> None:
        while (message := self.tunnel.next_message()) is not None:
            self.connection.receive(message)

    async def begin(self, *pieces: bytes) -> Exchange:
        async def body() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        exchange = await self.connection.request(_HEAD, body())
        await asyncio.sleep(0)
        return exchange


def _run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(within())


def test_a_request_and_its_response_are_forwarded_completely() -> None:
    async def test() -> None:
        agent = Agent()
        exchange = await agent.begin(b"{", b"}")
        await asyncio.sleep(0.01)
        assert [type(event) for event in agent.events] == [RequestReceived, DataReceived, DataReceived, BodyEnded]
        agent.answer(exchange.stream, b"yes", 201)
        head = await exchange.head()
        assert (head.status, head.headers["content-type"]) == (201, "application/json")
        assert [piece async for piece in exchange.read()] == [(b"yes", True)]
        await agent.connection.wait_idle()

    _run(test)


def test_a_request_is_not_sent_only_if_nothing_of_it_left() -> None:
    async def test() -> None:
        agent = Agent()
        sent = await agent.begin(b"{}")
        await asyncio.sleep(0.01)
        agent.wire.clear()
        on_its_way = await agent.begin(b"{}")
        await asyncio.sleep(0.01)
        waiting = await agent.begin(b"{}")
        agent.connection.lose()
        for exchange, expected in ((sent, Cut), (on_its_way, Cut), (waiting, NotSent)):
            with pytest.raises(expected):
                await exchange.head()
        with pytest.raises(NotSent):
            await agent.begin()

    _run(test)


def test_a_response_that_is_cut_in_its_body_breaks() -> None:
    async def test() -> None:
        agent = Agent()
        exchange = await agent.begin(b"{}")
        await asyncio.sleep(0.01)
        agent.answer(exchange.stream, b"half", end=False)
        await exchange.head()
        agent.connection.lose()
        with pytest.raises(Cut):
            [piece async for piece in exchange.read()]

    _run(test)


def test_a_request_that_its_worker_abandons_also_ends_at_the_agent() -> None:
    async def test() -> None:
        agent = Agent()
        exchange = await agent.begin(b"{}")
        exchange.close()
        with pytest.raises(Cut):
            await exchange.head()
        await asyncio.sleep(0.01)
        assert StreamReset(exchange.stream, "abandoned") in agent.events
        assert agent.connection.stream_count == 0

    _run(test)


def test_a_node_gets_no_more_requests_than_its_slots_explain() -> None:
    async def test() -> None:
        agent = Agent(slots=1)
        for _ in range(18):
            await agent.begin(b"{}")
        with pytest.raises(TooManyStreams):
            await agent.begin(b"{}")

    _run(test)


def test_a_large_result_waits_for_a_slow_worker() -> None:
    async def test() -> None:
        agent = Agent()
        exchange = await agent.begin(b"{}")
        await asyncio.sleep(0.01)
        body = bytes(3 * TO_GATEWAY_WINDOW)
        agent.tunnel.respond(exchange.stream, {"status": 200, "headers": {}})
        sent = agent.tunnel.send(exchange.stream, body)
        assert sent == TO_GATEWAY_WINDOW
        agent.flush()
        received = 0
        async for piece, _ in exchange.read():
            received += len(piece)
            await asyncio.sleep(0)
            if sent < len(body):
                sent += agent.tunnel.send(exchange.stream, body[sent:])
                agent.flush()
            if sent == len(body):
                agent.tunnel.end(exchange.stream)
                agent.flush()
        assert received == len(body)

    _run(test)
