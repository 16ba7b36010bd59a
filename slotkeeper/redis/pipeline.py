"""Redis from an event loop: one connection, one write per turn, joined calls.

Commands of one turn of the loop leave in one write, without waiting for earlier replies; Redis replies in order.  Calls
of a script that joins them (signatures.py) become one call, in the place of the first.

redis-py connects and authenticates.  Then commands and replies bypass its streams: they, and the tasks that wait at
them, cost a connection and some 100 µs for each command.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import hiredis
import structlog
from redis.asyncio.connection import DefaultParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, OutOfMemoryError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from slotkeeper.redis.connections import make_async_connection
from slotkeeper.redis.scripts import Command, Scripts, is_unknown_function
from slotkeeper.redis.signatures import join_commands

log = structlog.get_logger(__name__)

_INCOMPLETE = object()  # The next reply has not arrived whole.
_MAX_JOINED = 32  # calls; Redis serves no other client while it executes them


@dataclass(slots=True)
class _Pending:
    """A command whose reply is awaited.

    packed: the command as it is sent.  until: when its reply is too late, by the loop's clock.
    command: None: it has been sent twice, or is not a script.  load: the command that loaded the script before this one
    was sent again; repeated: the command that was sent again.
    """

    packed: bytes
    read: Callable[[Any], Any]
    future: "asyncio.Future[Any]"
    until: float
    command: Command[Any] | None = None
    number: int = -1
    load: "_Pending | None" = None
    repeated: Command[Any] | None = None

    @property
    def join_key(self) -> Hashable:
        """Return the key of the commands that may be joined with this one; None: it is sent by itself."""
        return None if self.command is None else self.command.join_key

    def set_reply(self, reply: Any) -> None:
        if self.future.done():  # It was canceled.
            return
        try:
            if isinstance(reply, RedisError):
                raise reply
            self.future.set_result(self.read(reply))
        except Exception as error:
            self.future.set_exception(error)


class _JoinedPending(_Pending):
    """Calls with one join key that are sent as one call; each gets its part of the reply."""

    def __init__(self, parts: Sequence[_Pending]) -> None:
        commands, first = [part.command for part in parts if part.command is not None], parts[0]
        whole = join_commands(commands)
        super().__init__(whole.packed, first.read, first.future, first.until, whole, first.number)
        self._parts = [(part, command.entry_count) for part, command in zip(parts, commands, strict=True)]

    def set_reply(self, reply: Any) -> None:
        entries = None if isinstance(reply, RedisError) else iter(reply)
        for part, count_of_part in self._parts:
            part.set_reply(reply if entries is None else list(islice(entries, count_of_part)))


def _join(commands: list[_Pending]) -> list[_Pending]:
    """Return the commands, with those that may be joined as one, in the place of the first."""
    groups: list[list[_Pending]] = []
    by_key: dict[Hashable, list[_Pending]] = {}
    for pending in commands:
        group = by_key.get(pending.join_key)
        if group is None or len(group) == _MAX_JOINED:
            groups.append(group := [])
            if pending.join_key is not None:
                by_key[pending.join_key] = group
        group.append(pending)
    return [group[0] if len(group) == 1 else _JoinedPending(group) for group in groups]


class _Connection(asyncio.Protocol):
    """A connection after redis-py has authenticated.

    on_reply: called with each reply.  closed: the error that closed the connection.
    """

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        on_reply: Callable[[Any], None],
        closed: "asyncio.Future[Exception]",
    ) -> None:
        self._transport, self._on_reply, self.closed = transport, on_reply, closed
        self._reader = hiredis.Reader(InvalidResponse, DefaultParser.parse_error, notEnoughData=_INCOMPLETE)
        transport.set_protocol(self)

    def send(self, packed: list[bytes]) -> None:
        try:
            self._transport.write(b"".join(packed))
        except Exception as error:
            self.close(error)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                self._on_reply(reply)
        except Exception as error:
            self.close(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.close(RedisConnectionError(f"The connection to Redis broke: {error or 'it was closed'}."))

    def close(self, why: Exception) -> None:
        if not self.closed.done():
            self.closed.set_result(why)
        self._transport.abort()


class Pipeline:
    """Runs scripts for the tasks of one event loop.  Used in that loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, scripts: Scripts, timeout_s: float) -> None:
        self._loop, self._scripts, self._timeout_s = loop, scripts, timeout_s
        self._redis_connection = make_async_connection(scripts.redis)
        self._unsent: list[_Pending] = []  # to be sent in this turn, or when there is a connection
        self._sent: deque[_Pending] = deque()  # without a reply
        self._numbers = count()  # in the order of sending
        self._loads: dict[str, _Pending] = {}  # script -> the command that loaded it
        self._connection: _Connection | None = None
        self._serving: asyncio.Task[None] | None = None  # from the first command until the connection breaks
        self._is_watched = False

    def execute(self, command: Command[Any]) -> "asyncio.Future[Any]":
        """Run a script.  The future has its result, or a RedisError."""
        pending = self._make_pending(command.packed, command.target.read)
        pending.command = command
        self._send(pending)
        return pending.future

    def reconnect(self) -> None:
        """Close the connection, so that the next command leaves by a new one.  Commands without a reply fail."""
        if self._connection is not None:
            self._connection.close(RedisConnectionError("The connection was closed: Redis may have been replaced."))

    async def close(self) -> None:
        """Close the connection.  Commands without a reply fail."""
        if self._serving is not None:
            self._serving.cancel()
            with suppress(asyncio.CancelledError):
                await self._serving
        # A task that was canceled before its first step has not done so.
        self._fail(RedisConnectionError("The connection to Redis was closed."))

    def _make_pending(self, packed: bytes, read: Callable[[Any], Any]) -> _Pending:
        return _Pending(packed, read, self._loop.create_future(), self._loop.time() + self._timeout_s)

    def _send(self, pending: _Pending) -> None:
        pending.number = next(self._numbers)
        self._unsent.append(pending)
        if self._serving is None:
            self._serving = self._loop.create_task(self._serve_connection())
        elif self._connection is not None and len(self._unsent) == 1:
            self._loop.call_soon(self._flush, self._connection)

    def _flush(self, connection: _Connection) -> None:
        """Send all commands of this turn in one write."""
        if connection.closed.done():  # `_serve_connection` fails what was not sent.
            return
        commands, self._unsent = _join(self._unsent), []
        self._sent += commands
        if not self._is_watched:
            self._watch()
        connection.send([pending.packed for pending in commands])

    async def _serve_connection(self) -> None:
        """Connect, and wait until the connection breaks or Redis does not reply in time."""
        why: Exception = RedisConnectionError("The connection to Redis was closed.")
        try:
            self._connection = await self._connect()
            self._flush(self._connection)
            why = await self._connection.closed
        except Exception as error:
            why = error
        finally:
            self._serving = self._connection = None
            self._fail(_as_redis_error(why))
            await self._redis_connection.disconnect(nowait=True)

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis_connection.connect()
        except TimeoutError as error:
            raise RedisTimeoutError("Redis did not accept the connection in time.") from error
        # The only private attribute of redis-py that is used: see the module's docstring for the figure.
        writer = self._redis_connection._writer
        if writer is None or await self._redis_connection.can_read():
            raise RedisConnectionError("Redis sent an unexpected reply, or closed the connection.")
        return _Connection(writer.transport, self._on_reply, self._loop.create_future())

    def _fail(self, why: RedisError) -> None:
        """Fail all commands without a reply; whether Redis ran them is not known."""
        lost = [*self._sent, *self._unsent]
        self._sent, self._unsent, self._loads = deque(), [], {}
        for pending in lost:
            pending.set_reply(why)

    def _on_reply(self, reply: Any) -> None:
        """Raises RedisError if replies cannot be assigned to commands any more, or Redis refuses the connection."""
        if isinstance(reply, hiredis.PushNotification):  # It may come at any time, and answers no command.
            return
        if isinstance(reply, RedisConnectionError):
            raise reply
        if not self._sent:
            raise RedisConnectionError("Redis sent an unexpected reply.")
        self._handle_reply(self._sent[0], reply)
        self._sent.popleft()  # Not earlier: if handling it raises, `_fail` fails this command, too.

    def _handle_reply(self, pending: _Pending, reply: Any) -> None:
        """Set the reply.  If Redis does not know the script, load it and send the command once more."""
        command = pending.command
        if is_unknown_function(reply) and command is not None:
            pending.command, pending.repeated = None, command
            pending.load = self._load_script(command.target.script, pending.number)
            self._send(pending)
        elif is_unknown_function(reply) and pending.load is not None:
            self._handle_failed_load(pending, pending.load.future.exception() or reply)
        else:
            pending.set_reply(reply)

    def _handle_failed_load(self, pending: _Pending, why: Any) -> None:
        """Send the script's text for EVAL: a Redis that is too full to load a function still evaluates it."""
        if isinstance(why, OutOfMemoryError) and pending.repeated is not None:
            pending.packed = hiredis.pack_command(self._scripts.eval_command(pending.repeated))
            pending.repeated = None
            self._send(pending)
        else:
            pending.set_reply(why)

    def _load_script(self, script: str, number: int) -> _Pending:
        """Load a script, unless that was done after command `number` had been sent."""
        load = self._loads.get(script)
        if load is None or load.number < number:
            text = hiredis.pack_command(self._scripts.load_command(script))
            self._loads[script] = load = self._make_pending(text, lambda reply: reply)
            self._send(load)
        return load

    def _watch(self) -> None:
        """Close the connection if the oldest command got no reply in time, else look again when its time is over."""
        self._is_watched = bool(self._sent)
        if not self._sent or self._connection is None:
            return
        until = self._sent[0].until
        if self._loop.time() < until:
            self._loop.call_at(until, self._watch)
        else:
            self._connection.close(RedisTimeoutError("Redis did not reply in time."))


def _as_redis_error(why: Exception) -> RedisError:
    if isinstance(why, RedisError):
        return why
    log.error("redis_connection_failed", exc_info=why)
    return RedisConnectionError(f"The connection to Redis failed: {why!r}.")
