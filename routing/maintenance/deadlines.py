"""What time brings about: delayed jobs are due, deadlines pass, what ended long ago is removed."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from routing.dispatch.dispatcher import Dispatcher
from routing.queue.fleets import isolate_errors
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.jobs import ledger
from slotkeeper.jobs.store import Transition
from slotkeeper.jobs.values import Quarantine
from slotkeeper.outbox import retention

# Jobs that one transaction moves: whoever else writes waits for it, and a due job for a batch of deadlines.
_CHUNK = 200


def promote_due_jobs(dispatcher: Dispatcher, within_s: float = float("inf")) -> int:
    """Queue the delayed jobs whose time has come; answers how many.  After `within_s` the rest is left to the next."""

    def act(batch: Sequence[Any]) -> None:
        crash_at("promote_committed")
        dispatcher.enqueue(batch)

    return _in_batches(lambda: dispatcher.store.promote_due(now_ms(), _CHUNK), act, within_s)


def expire_deadlines(dispatcher: Dispatcher, within_s: float = float("inf")) -> int:
    """End the jobs whose deadline has passed, whatever they are doing; answers how many.

    The deadlines stand in the record, so however long nobody looked, none is missed.  `within_s`: as above.
    """

    def act(ended: Sequence[Transition]) -> None:
        crash_at("expire_committed")
        dispatcher.withdraw([moved.job for moved in ended])  # or tells their workers, who free the slots
        for moved in ended:
            with isolate_errors("announce", job_id=moved.job.id):
                dispatcher.notify_ended(moved)

    def take() -> list[Transition]:
        now = now_ms()
        quarantine = Quarantine("deadline_passed", now + dispatcher.settings.withhold_max_ms)
        return dispatcher.store.expire_overdue(now, _CHUNK, quarantine)

    return _in_batches(take, act, within_s)


def purge_ended_jobs(dispatcher: Dispatcher, retention_s: int, within_s: float = float("inf")) -> int:
    """Remove what ended longer ago than `retention_s`; answers how many jobs.  `within_s`: as above."""
    dispatcher.store.delete_expired_keys(now_ms())
    ledger.fold(dispatcher.store.database)
    until, removed = time.monotonic() + within_s, 0
    while gone := retention.delete_ended_jobs(dispatcher.store.database, now_ms() - retention_s * 1000, _CHUNK):
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
