"""What time brings about: delayed jobs are due, deadlines pass, what ended long ago is removed."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from jobs.crash import crash_at
from jobs.record import Job, now_ms
from jobs.states import State, Why
from jobs.store import Error, Moved
from routing.dispatcher import Dispatcher
from routing.each import alone

# Jobs that one transaction moves: whoever else writes waits for it.
_CHUNK = 250


def promote_due(dispatcher: Dispatcher, within_s: float = float("inf")) -> int:
    """Queue the delayed jobs whose time has come; answers how many.  After `within_s` the rest is left to the next."""

    def act(batch: Sequence[Any]) -> None:
        crash_at("promote_committed")
        dispatcher.enqueue(batch)

    return _in_batches(lambda: dispatcher.store.promote_due(now_ms(), _CHUNK), act, within_s)


def expire_overdue(dispatcher: Dispatcher, within_s: float = float("inf")) -> int:
    """End the jobs whose deadline has passed, whatever they are doing; answers how many.

    The deadlines stand in the record, so however long nobody looked, none is missed (R122).  `within_s`: as above.
    """

    def act(ended: Sequence[Moved]) -> None:
        crash_at("expire_committed")
        dispatcher.withdraw_all([moved.job for moved in ended])  # or tells their workers, who free the slots
        for moved in ended:
            with alone("announce", job_id=moved.job.id):
                dispatcher.announce_end(moved)

    return _in_batches(lambda: _end_overdue(dispatcher), act, within_s)


def _end_overdue(dispatcher: Dispatcher) -> list[Moved]:
    now = now_ms()
    ended = [_end(dispatcher, job, now) for job in dispatcher.store.overdue(now, _CHUNK)]
    return [moved for moved in ended if moved is not None]


def _end(dispatcher: Dispatcher, job: Job, now: int) -> Moved | None:
    error = Error("deadline_passed", f"Its deadline passed while it was {job.state}.")
    if job.state is State.RUNNING:
        return dispatcher.store.settle(job.id, job.attempt, Why.DEADLINE_PASSED, now, error=error)
    return dispatcher.store.end_waiting(job.id, Why.DEADLINE_PASSED, now, error)


def purge(dispatcher: Dispatcher, retention_s: int, within_s: float = float("inf")) -> int:
    """Remove what ended longer ago than `retention_s`; answers how many jobs.  `within_s`: as above."""
    dispatcher.store.forget_keys(now_ms())
    until, removed = time.monotonic() + within_s, 0
    while gone := dispatcher.store.purge(now_ms() - retention_s * 1000, _CHUNK):
        removed += gone
        crash_at("purge_committed")
        if time.monotonic() >= until:
            break
    return removed


def _in_batches(take: Callable[[], Sequence[Any]], act: Callable[[Sequence[Any]], None], within_s: float) -> int:
    """Take batch after batch and act on each, for a while; answers how many in all."""
    until, done = time.monotonic() + within_s, 0
    while batch := take():
        act(batch)
        done += len(batch)
        if time.monotonic() >= until:
            break
    return done
