"""What a run does while the database is away: it asks again, for as long as the run is this worker's."""

import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import structlog

from slotkeeper.db import Write
from slotkeeper.errors import CommitUnknown, DatabaseUnavailable
from slotkeeper.redis.scripts import Command
from tasks.worker.event_loop import WorkerLoop
from tasks.worker.heartbeat import LeaseWatch

T = TypeVar("T")
log = structlog.get_logger(__name__)

_AGAIN_S = 1.0
_LAST_TRIES_S = 3.0  # A worker that is told to stop goes on trying for so long: another can resume what is stored.


class RetryingIo:
    """The Io of one run's steps (routing/dispatch/run_steps.py), which repeats what the database refuses.

    Raises DatabaseUnavailable when the run is not this worker's any more, or the worker has been stopping for too long.
    """

    __slots__ = ("_engine", "_watch")

    def __init__(self, engine: WorkerLoop, watch: LeaseWatch) -> None:
        self._engine, self._watch = engine, watch

    def redis(self, command: Command[T]) -> Awaitable[T]:
        return self._engine.redis(command)

    def commit(self, write: Write[T]) -> Awaitable[T]:
        return self._repeat_while_away(partial(self._engine.commit, write))

    def run_in_thread(self, act: Callable[..., T], *args: Any) -> Awaitable[T]:
        return self._repeat_while_away(partial(self._engine.run_in_thread, act, *args))

    async def wait_until_known(self, unknown: CommitUnknown, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask what became of a start whose COMMIT was not answered.

        Raises what `ask` raises but DatabaseUnavailable, or `unknown` if the worker has to stop before it is found out.
        """
        while not (self._watch.lost or self._watch.stop):
            await self._watch.sleep(_AGAIN_S)
            try:
                return await ask()
            except DatabaseUnavailable as error:
                log.warning("start_not_known", job_id=self._watch.lease.job_id, error=str(error))
        raise unknown

    async def _repeat_while_away(self, act: Callable[[], Awaitable[T]]) -> T:
        ends: float | None = None
        while True:
            try:
                return await act()
            except DatabaseUnavailable:
                now = self._engine.loop.time()
                if self._watch.stop:
                    ends = ends or now + _LAST_TRIES_S
                if self._watch.lost or (ends is not None and now >= ends):
                    raise
                # Not all at the same moment, in which they would make one batch again that may be what is too much.
                await self._watch.sleep(_AGAIN_S * random.uniform(0.5, 1.5))
