"""Redis as an event loop reaches it: on one connection, where nothing waits for the answer to what was asked before.

What is asked in one turn of the loop leaves in one write, and Redis answers in the order in which it was asked.  Calls
of a script that joins them (slotkeeper/redis/signatures.py) become one, in the place of the first.
redis-py connects and shakes hands; then commands and answers go past it, since its streams, and tasks that wait at
them, would cost more than what they carry.
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
from redis.exceptions import ConnectionError as Broken
from redis.exceptions import InvalidResponse, OutOfMemoryError, RedisError
from redis.exceptions import TimeoutError as Silent

from slotkeeper.redis.scripts import Command, Scripts, is_unknown_function, make_async_connection
from slotkeeper.redis.signatures import join_commands

log = structlog.get_logger(__name__)

_MORE = object()  # The next answer has not come whole.
_MOST_JOINED = 32  # calls; Redis serves nobody else while it works them off


@dataclass(slots=True)
class _Pending:
    """`packed`: the command as it is sent; `until`: when its answer comes too late, by the loop's clock."""

    packed: bytes
    read: Callable[[Any], Any]
    answer: "asyncio.Future[Any]"
    until: float
    command: Command[Any] | None = None  # None: it has been sent twice, or is not a script
    number: int = -1
    after: "_Pending | None" = None  # what told Redis the script's text, before it was sent again
    again: Command[Any] | None = None  # what was sent again then

    @property
    def join_key(self) -> Hashable:
        """What those have in common that may be joined; None: it is sent by itself."""
        return None if self.command is None else self.command.join_key

    def settle(self, found: Any) -> None:
        if self.answer.done():  # Nobody waits for it any more.
            return
        try:
            if isinstance(found, RedisError):
                raise found
            self.answer.set_result(self.read(found))
        except Exception as error:
            self.answer.set_exception(error)


class _JoinedPending(_Pending):
    """Calls of one kind that are sent as one; each has its own part of the answer."""

    def __init__(self, parts: Sequence[_Pending]) -> None:
        commands, first = [part.command for part in parts if part.command is not None], parts[0]
        whole = join_commands(commands)
        super().__init__(whole.packed, first.read, first.answer, first.until, whole, first.number)
        self._parts = [(part, command.entry_count) for part, command in zip(parts, commands, strict=True)]

    def settle(self, found: Any) -> None:
        rest = None if isinstance(found, RedisError) else iter(found)
        for part, entries in self._parts:
            part.settle(found if rest is None else list(islice(rest, entries)))


def _join(asked: list[_Pending]) -> list[_Pending]:
    """The same, where those of one kind, up to as many as may be, are one in the place of the first."""
    groups: list[list[_Pending]] = []
    of_kind: dict[Hashable, list[_Pending]] = {}
    for one in asked:
        group = of_kind.get(one.join_key)
        if group is None or len(group) == _MOST_JOINED:
            groups.append(group := [])
            if one.join_key is not None:
                of_kind[one.join_key] = group
        group.append(one)
    return [its[0] if len(its) == 1 else _JoinedPending(its) for its in groups]


class _Connection(asyncio.Protocol):
    """A connection on which hands have been shaken.

    `heard`: what takes its answers, one by one; `over`: why it is not used any more.
    """

    def __init__(
        self, transport: asyncio.WriteTransport, heard: Callable[[Any], None], over: "asyncio.Future[Exception]"
    ) -> None:
        self._transport, self._heard, self.over = transport, heard, over
        self._reader = hiredis.Reader(InvalidResponse, DefaultParser.parse_error, notEnoughData=_MORE)
        transport.set_protocol(self)

    def send(self, packed: list[bytes]) -> None:
        try:
            self._transport.write(b"".join(packed))
        except Exception as error:
            self.end(error)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (found := self._reader.gets()) is not _MORE:
                self._heard(found)
        except Exception as error:
            self.end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.end(Broken(f"The connection to Redis broke: {error or 'it was closed'}."))

    def end(self, why: Exception) -> None:
        if not self.over.done():
            self.over.set_result(why)
        self._transport.abort()


class Pipeline:
    """Runs scripts for the tasks of one event loop, and is used in that loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, scripts: Scripts, timeout_s: float) -> None:
        self._loop, self._scripts, self._timeout_s = loop, scripts, timeout_s
        self._connection = make_async_connection(scripts.redis)
        self._next: list[_Pending] = []  # to be sent in this turn, or when there is a line
        self._sent: deque[_Pending] = deque()  # on the line, and not answered yet
        self._numbers = count()  # in the order of sending
        self._told: dict[str, _Pending] = {}  # script -> what told Redis its text
        self._line: _Connection | None = None
        self._life: asyncio.Task[None] | None = None  # of the connection, from its making to its end
        self._is_watched = False

    def execute(self, command: Command[Any]) -> "asyncio.Future[Any]":
        """Run a script.  The future has what the command reads in its answer, or a RedisError."""
        asked = self._asked(command.packed, command.target.read)
        asked.command = command
        self._send(asked)
        return asked.answer

    async def close(self) -> None:
        """Break off; what is not answered yet ends with an error."""
        if self._life is not None:
            self._life.cancel()
            with suppress(asyncio.CancelledError):
                await self._life
        self._fail(Broken("The connection to Redis was closed."))  # A life that had not begun leaves that to us.

    def _asked(self, packed: bytes, read: Callable[[Any], Any]) -> _Pending:
        until = self._loop.time() + self._timeout_s
        return _Pending(packed, read, self._loop.create_future(), until)

    def _send(self, asked: _Pending) -> None:
        asked.number = next(self._numbers)
        self._next.append(asked)
        if self._life is None:
            self._life = self._loop.create_task(self._serve_connection())
        elif self._line is not None and len(self._next) == 1:
            self._loop.call_soon(self._flush, self._line)

    def _flush(self, line: _Connection) -> None:
        """In one write.  What a line that is over has not taken fails when its life ends."""
        if line.over.done():
            return
        now, self._next = _join(self._next), []
        self._sent += now
        if not self._is_watched:
            self._watch()
        line.send([asked.packed for asked in now])

    async def _serve_connection(self) -> None:
        """A connection's life, from the first command on, until it breaks or Redis is silent for too long."""
        why: Exception = Broken("The connection to Redis was closed.")
        try:
            self._line = await self._connect()
            self._flush(self._line)
            why = await self._line.over
        except Exception as error:
            why = error
        finally:
            self._life = self._line = None
            self._fail(_foreseen(why))
            await self._connection.disconnect(nowait=True)

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connection.connect()
        except TimeoutError as error:
            raise Silent("Redis has not let us in in time.") from error
        writer = self._connection._writer  # All that we take of what redis-py keeps to itself.
        if writer is None or await self._connection.can_read():
            raise Broken("Redis has said what nobody asked, or has closed the connection.")
        return _Connection(writer.transport, self._on_reply, self._loop.create_future())

    def _fail(self, why: RedisError) -> None:
        """None of these will be answered; whether they were run is not known."""
        lost = [*self._sent, *self._next]
        self._sent, self._next, self._told = deque(), [], {}
        for asked in lost:
            asked.settle(why)

    def _on_reply(self, found: Any) -> None:
        """Raises RedisError: no answer can be told from another any more, or Redis does not serve us."""
        if isinstance(found, hiredis.PushNotification):  # It may come at any time, and answers nothing.
            return
        if isinstance(found, Broken):
            raise found
        if not self._sent:
            raise Broken("Redis has said what nobody asked.")
        self._take(self._sent[0], found)
        self._sent.popleft()  # Not before: if it could not be taken, its asker hears of that.

    def _take(self, asked: _Pending, found: Any) -> None:
        """An answer.  What Redis does not know is sent once more, after its text."""
        command = asked.command
        if is_unknown_function(found) and command is not None:
            asked.command, asked.again = None, command
            asked.after = self._load_script(command.target.script, asked.number)
            self._send(asked)
        elif is_unknown_function(found) and asked.after is not None:
            self._heed_not_loaded(asked, asked.after.answer.exception() or found)
        else:
            asked.settle(found)

    def _heed_not_loaded(self, asked: _Pending, why: Any) -> None:
        """A Redis that is too full to load a function still evaluates its text."""
        if isinstance(why, OutOfMemoryError) and asked.again is not None:
            asked.packed, asked.again = hiredis.pack_command(self._scripts.eval_command(asked.again)), None
            self._send(asked)
        else:
            asked.settle(why)

    def _load_script(self, script: str, number: int) -> _Pending:
        """Tell Redis the text of a script, unless that was done after command `number` had been sent."""
        told = self._told.get(script)
        if told is None or told.number < number:
            text = hiredis.pack_command(self._scripts.load_command(script))
            self._told[script] = told = self._asked(text, lambda answer: answer)
            self._send(told)
        return told

    def _watch(self) -> None:
        """Look again when the oldest answer must have come."""
        self._is_watched = bool(self._sent)
        if not self._sent or self._line is None:
            return
        until = self._sent[0].until
        if self._loop.time() < until:
            self._loop.call_at(until, self._watch)
        else:
            self._line.end(Silent("Redis has not answered in time."))


def _foreseen(why: Exception) -> RedisError:
    if isinstance(why, RedisError):
        return why
    log.error("redis_connection_failed", exc_info=why)
    return Broken(f"The connection to Redis failed: {why!r}.")
