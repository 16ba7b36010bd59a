"""The side of the workers: an ASGI application that passes their requests on to nodes.

    POST /n/<node>/<number>/run           number: of the connection that the worker knows; 0: it knows none
    GET  /n/<node>/<number>/status/<id>
    POST /n/<node>/<number>/cancel/<id>
    GET  /n/<node>/<number>/health
    GET  /ping/<node>                     whether the node answers, for other gateways

| status | the node |
|---|---|
| 502 | is not connected, and certainly did not get the request |
| 504 | lost its connection after the request may have left |
| 421 | has another connection by now |
| 503, 410 | is absent, for a shorter or longer time than its model waits (polls) |
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from hmac import compare_digest
from typing import Any

import orjson
import structlog
from redis.exceptions import RedisError

from app.gateway.connection import Cut, NodeConnection, NotSent, TooManyStreams
from app.gateway.connections import Connections

log = structlog.get_logger(__name__)

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_NODE_PATH = re.compile(r"/n/(n_[0-9a-f]{1,64})/([0-9]{1,19})(/(?:run|health|status/[^/]+|cancel/[^/]+))")
_PING_PATH = re.compile(r"/ping/(n_[0-9a-f]{1,64})")
_METHODS = {"run": "POST", "cancel": "POST", "status": "GET", "health": "GET"}
_NOT_PASSED_ON = frozenset({"authorization", "host", "connection", "transfer-encoding", "content-length", "expect"})
_PASSED_BACK = frozenset({"content-type", "retry-after", "x-job-id", "cache-control"})
_PING_S = 3.0


class WorkerSide:
    """The ASGI application.  keys: with which workers and other gateways authenticate."""

    def __init__(self, connections: Connections, keys: tuple[str, ...]) -> None:
        self._connections, self._keys = connections, tuple(f"Bearer {key}".encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("authorization", "").encode("latin-1")
        if not any(compare_digest(given, key) for key in self._keys):
            await _answer(send, 401, "wrong_key")
        elif match := _PING_PATH.fullmatch(scope["path"]):
            await self._answer_ping(send, match[1])
        elif (match := _NODE_PATH.fullmatch(scope["path"])) and scope["method"] == _METHODS[match[3].split("/")[1]]:
            await self._pass_on(scope, receive, send, headers, match)
        else:
            await _answer(send, 404, "no_such_path")

    async def _pass_on(
        self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str], match: re.Match[str]
    ) -> None:
        node, number, path = match[1], int(match[2]), match[3]
        connection = self._connections.find(node)
        is_stale = connection is not None and number not in (0, connection.number) and path != "/health"
        if connection is None or is_stale:
            await self._answer_for_absent(send, node, path, headers, is_other=connection is not None)
            return
        sent = {name: value for name, value in headers.items() if name not in _NOT_PASSED_ON}
        sent["x-node-declaration"] = connection.digest
        raw_path = scope["raw_path"].decode("latin-1").split("/", 4)[4]
        head = {"method": scope["method"], "path": f"/{raw_path}", "headers": sent}
        await self._exchange(connection, head, receive, send)

    async def _exchange(
        self, connection: NodeConnection, head: Mapping[str, Any], receive: Receive, send: Send
    ) -> None:
        try:
            exchange = await connection.request(head, _read_body(receive))
        except TooManyStreams as error:
            await _answer(send, 503, "too_many_streams", str(error))
            return
        except NotSent as error:
            await _answer(send, 502, "node_not_connected", str(error))
            return
        except (ClientGone, ValueError) as error:  # ValueError: a head that is too long
            await _answer(send, 400, "not_passed_on", str(error))
            return
        watcher = asyncio.ensure_future(_close_when_gone(receive, exchange.close))
        has_begun = False
        try:
            response = await exchange.head()
            await send(_start(response.status, response.headers))
            has_begun = True
            async for piece, is_last in exchange.read():
                await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
        except NotSent as error:
            await _answer(send, 502, "node_not_connected", str(error))
        except Cut as error:
            if has_begun:  # The worker's connection must break, for a body that ends in order would be complete.
                raise
            await _answer(send, 504, "node_cut", str(error))
        finally:
            watcher.cancel()
            exchange.close()

    async def _answer_for_absent(
        self, send: Send, node: str, path: str, headers: Mapping[str, str], *, is_other: bool
    ) -> None:
        """Answer a request to a node that is not connected here, or over another connection."""
        if is_other:
            await _answer(send, 421, "node_moved")
        elif path == "/run":
            await _answer(send, 502, "node_not_connected", "the node is not connected")
        elif path == "/health":
            await _answer(send, 503, "node_away", "the node is not connected")
        else:
            try:
                await _answer(send, *await self._connections.describe_absence(node, headers.get("x-model", "")))
            except RedisError:
                await _answer(send, 503, "node_away", "Redis does not answer")

    async def _answer_ping(self, send: Send, node: str) -> None:
        connection, answers = self._connections.find(node), False
        if connection is not None:
            with suppress(TimeoutError, NotSent, Cut):
                async with asyncio.timeout(_PING_S):
                    head = {"method": "GET", "path": "/health", "headers": {}}
                    exchange = await connection.request(head, _no_body())
                    try:
                        await exchange.head()
                        answers = True
                    finally:
                        exchange.close()
        await _answer(send, 200 if answers else 404, "ok" if answers else "no_answer")


class ClientGone(Exception):
    """The worker has closed its connection before its request was complete."""


async def _read_body(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the body of a worker's request.  Raises ClientGone."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone("the worker has gone")
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body"):
            return


async def _no_body() -> AsyncIterator[bytes]:
    return
    yield b""


async def _close_when_gone(receive: Receive, close: Callable[[], None]) -> None:
    """Give the request up when the worker closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    close()


async def _answer(send: Send, status: int, code: str, message: str = "") -> None:
    body = orjson.dumps({"error": code, **({"detail": message} if message else {})})
    await send(_start(status, {"content-type": "application/json"}, len(body)))
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _start(status: int, headers: Mapping[str, str], length: int | None = None) -> dict[str, Any]:
    passed = {name: value for name, value in headers.items() if name in _PASSED_BACK and value.isprintable()}
    if length is not None:
        passed["content-length"] = str(length)
    encoded = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in passed.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}
