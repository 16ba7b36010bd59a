"""How things stand in the record at this moment, in few numbers: what is owed, and what is withheld."""

from collections import Counter
from dataclasses import dataclass

from sqlalchemy import bindparam, func, select

from slotkeeper.db import Database
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.statements import unindexed
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs, messages

_OWED = select(func.count(), func.min(messages.c.next_ms)).where(messages.c.state == "pending")
# Found among the running ones, of which there are no more than slots, and not among all that the model ever had.
_RUNNING = select(func.count()).where(
    jobs.c.state == State.RUNNING.value, unindexed(jobs.c.model) == bindparam("p_model")
)
_QUEUED = select(func.count()).where(jobs.c.state == State.QUEUED.value, jobs.c.model == bindparam("p_model"))


@dataclass(frozen=True, slots=True)
class PendingWebhooks:
    """Messages of webhooks, and of jobs' `callback_url`.

    `pending`: those that are neither delivered nor given up.  `late_ms`: since when the oldest try is due.
    """

    pending: int
    late_ms: int


def count_pending_webhooks(database: Database, now_ms: int) -> PendingWebhooks:
    """Raises DatabaseUnavailable."""
    with database.read() as connection:
        pending, next_ms = connection.execute(_OWED).one()
    return PendingWebhooks(pending, 0 if next_ms is None else max(now_ms - next_ms, 0))


def count_quarantined_slots(database: Database) -> Counter[tuple[str, str]]:
    """Return (model, reason) -> number of quarantined slots.  Raises DatabaseUnavailable."""
    return Counter((slot.model, slot.reason) for slot in quarantine.list_all(database))


def count_model_work(database: Database, model: str, *, known: bool) -> tuple[int, int]:
    """How many jobs of a model are queued, and how many run.  `known`: somebody else says how many are queued, so 0.

    Raises DatabaseUnavailable.
    """
    with database.read() as connection:
        queued = 0 if known else connection.execute(_QUEUED, {"p_model": model}).scalar() or 0
        return queued, connection.execute(_RUNNING, {"p_model": model}).scalar() or 0
