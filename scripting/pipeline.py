"""Redis as an event loop reaches it: on one connection, where nothing waits for the answer to what was asked before.

What is asked in one turn of the loop leaves in one write, and Redis answers in the order in which it was asked.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn

import hiredis
import structlog
from redis.exceptions import ConnectionError as Broken
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as Silent

from scripting.scripts import Command, Scripts, connection_for, is_missing

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Asked:
    """`packed`: the command as it is sent; `until`: when its answer comes too late, by the loop's clock."""

    packed: bytes
    read: Callable[[Any], Any]
    answer: "asyncio.Future[Any]"
    until: float
    command: Command[Any] | None = None  # None: it has been sent twice, or is not a script
    number: int = -1
    after: "_Asked | None" = None  # what told Redis the script's text, before it was sent again

    def settle(self, found: Any) -> None:
        if self.answer.done():  # Nobody waits for it any more.
            return
        try:
            if isinstance(found, RedisError):
                raise found
            self.answer.set_result(self.read(found))
        except Exception as error:
            self.answer.set_exception(error)


class Pipeline:
    """Runs scripts for the tasks of one event loop, and is used in that loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, scripts: Scripts, timeout_s: float) -> None:
        self._loop, self._scripts, self._timeout_s = loop, scripts, timeout_s
        self._connection = connection_for(scripts.redis)
        self._next: list[_Asked] = []  # to be sent in this turn
        self._sent: deque[_Asked] = deque()  # not answered yet
        self._numbers = count()  # in the order of sending
        self._told: dict[str, _Asked] = {}  # script -> what told Redis its text
        self._wanted = asyncio.Event()
        self._life: asyncio.Task[None] | None = None  # of the connection, from its making to its end

    def ask(self, command: Command[Any]) -> "asyncio.Future[Any]":
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

    def _asked(self, packed: bytes, read: Callable[[Any], Any]) -> _Asked:
        until = self._loop.time() + self._timeout_s
        return _Asked(packed, read, self._loop.create_future(), until)

    def _send(self, asked: _Asked) -> None:
        asked.number = next(self._numbers)
        self._next.append(asked)
        self._wanted.set()
        if self._life is None:
            self._life = self._loop.create_task(self._live())

    async def _live(self) -> None:
        """A connection's life, from the first command on, until it breaks or Redis is silent for too long."""
        why: RedisError = Broken("The connection to Redis was closed.")
        try:
            await self._connect()
            async with asyncio.TaskGroup() as tasks:
                for act in (self._write(), self._read(), self._watch()):
                    tasks.create_task(act)
        except* RedisError as errors:
            why = next(error for error in errors.exceptions if isinstance(error, RedisError))
        except* Exception as errors:
            log.exception("redis_connection_failed")
            why = Broken(f"The connection to Redis failed: {errors.exceptions[0]!r}.")
        finally:
            self._life = None
            self._fail(why)
            await self._connection.disconnect(nowait=True)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connection.connect()
        except TimeoutError as error:
            raise Silent("Redis has not let us in in time.") from error

    def _fail(self, why: RedisError) -> None:
        """None of these will be answered; whether they were run is not known."""
        lost = [*self._sent, *self._next]
        self._sent, self._next, self._told = deque(), [], {}
        for asked in lost:
            asked.settle(why)

    async def _write(self) -> NoReturn:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            now, self._next = self._next, []
            self._sent += now
            await self._connection.send_packed_command([asked.packed for asked in now], check_health=False)

    async def _read(self) -> NoReturn:
        """Also while nothing is asked, so that a connection that was closed is not used again."""
        while True:
            try:
                found = await self._connection.read_response(timeout=math.inf, disconnect_on_error=False)
            except ResponseError as error:
                found = error
            if not self._sent:
                raise Broken("Redis has said what nobody asked.")
            self._take(self._sent.popleft(), found)

    def _take(self, asked: _Asked, found: Any) -> None:
        """An answer.  What Redis does not know is sent once more, after its text."""
        command = asked.command
        if is_missing(found) and command is not None:
            asked.command, asked.after = None, self._tell(command.target.script, asked.number)
            self._send(asked)
        elif is_missing(found) and asked.after is not None:
            asked.settle(asked.after.answer.exception() or found)
        else:
            asked.settle(found)

    def _tell(self, script: str, number: int) -> _Asked:
        """Tell Redis the text of a script, unless that was done after command `number` had been sent."""
        told = self._told.get(script)
        if told is None or told.number < number:
            text = hiredis.pack_command(self._scripts.load_words(script))
            self._told[script] = told = self._asked(text, lambda answer: answer)
            self._send(told)
        return told

    async def _watch(self) -> NoReturn:
        """One look in the time in which an answer must come is enough while there is none to be waited for."""
        while True:
            until = self._sent[0].until if self._sent else math.inf
            now = self._loop.time()
            if now >= until:
                raise Silent("Redis has not answered in time.")
            await asyncio.sleep(min(until - now, self._timeout_s))
