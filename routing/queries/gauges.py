"""Read present numbers for metrics: lane depths, offers, pending webhooks, quarantined slots.

Redis is read in many small pipelines, so that other clients do not wait.  The pipelines see different moments, so a sum
can differ by the jobs that move in between.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, func, select

from slotkeeper.db import Database
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.statements import unindexed
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs, messages
from slotkeeper.redis.scripts import Scripts

MAX_LANES = 20_000
"""Lanes that are read; the others are left out, because reading them takes seconds."""
_PIPELINE_LENGTH = 200
_PENDING = select(func.count(), func.min(messages.c.next_ms)).where(messages.c.state == "pending")
# By the index of states: at most as many jobs run as there are slots, but a model may have had very many jobs.
_RUNNING = select(func.count()).where(
    jobs.c.state == State.RUNNING.value, unindexed(jobs.c.model) == bindparam("p_model")
)
_QUEUED = select(func.count()).where(jobs.c.state == State.QUEUED.value, jobs.c.model == bindparam("p_model"))


@dataclass(frozen=True, slots=True)
class LaneDepth:
    """Jobs in a lane.  `first_ms`: when the one that is next was accepted, ms since the epoch.

    Under `edf` another may have been accepted before it.
    """

    model: str
    priority: int
    jobs: int
    first_ms: int


@dataclass(frozen=True, slots=True)
class PendingWebhooks:
    """Messages to webhooks and to the `callback_url` of jobs.

    `pending`: number of messages neither delivered nor given up.  `late_ms`: for how long the oldest attempt is due.
    """

    pending: int
    late_ms: int


# -- from Redis ------------------------------------------------------------------------------------------------


def read_lane_depths(scripts: Scripts, fleets: Sequence[str]) -> list[LaneDepth]:
    """Return the depth of each lane that has jobs.  Raises redis errors."""
    accounts = [
        (fleet, account.decode())
        for fleet, fields in zip(fleets, _read_lanes(scripts, "HKEYS", [(fleet, "") for fleet in fleets]), strict=True)
        for account in fields
    ]
    lanes = [
        (fleet, f"{prefix.decode()}|{account}")
        for (fleet, account), fields in zip(accounts, _read_lanes(scripts, "HKEYS", accounts), strict=True)
        for prefix in fields
    ]
    del lanes[MAX_LANES:]
    counts, heads = _read_lanes(scripts, "ZCARD", lanes), _read_lanes(scripts, "ZRANGE", lanes, 0, 0)
    return [
        _lane_depth(lane, count, head[0].decode())
        for (_, lane), count, head in zip(lanes, counts, heads, strict=True)
        if head
    ]


def read_offer_counts(scripts: Scripts, fleets: Sequence[str]) -> dict[str, int]:
    """Return fleet -> number of offers since its queue was created.  Raises redis errors."""
    with scripts.redis.pipeline(transaction=False) as pipe:
        for fleet in fleets:
            pipe.hget(scripts.keys.fleet_key(fleet, "meta"), "offers")
        counts = pipe.execute(raise_on_error=False)
    return {fleet: int(n or 0) for fleet, n in zip(fleets, counts, strict=True) if not isinstance(n, Exception)}


def _lane_depth(lane: str, count: int, head: str) -> LaneDepth:
    """`lane`: "<priority>|<digest>|<tenant>|<model>".  `head`: its first job, "<job>@<created_ms>"."""
    priority, _, rest = lane.partition("|")
    return LaneDepth(rest.rpartition("|")[2], int(priority), count, int(head.rpartition("@")[2]))


def _read_lanes(scripts: Scripts, command: str, members: Sequence[tuple[str, str]], *args: int) -> list[Any]:
    """Run a command for each (fleet, member) on the key `lanes:<member>` of the fleet; member "": on `lanes`.

    Returns the results; () where the command failed.  Raises redis errors.
    """
    results: list[Any] = []
    for start in range(0, len(members), _PIPELINE_LENGTH):
        with scripts.redis.pipeline(transaction=False) as pipe:
            for fleet, member in members[start : start + _PIPELINE_LENGTH]:
                key = scripts.keys.fleet_key(fleet, "lanes")
                pipe.execute_command(command, f"{key}:{member}" if member else key, *args)
            results += pipe.execute(raise_on_error=False)
    return [() if isinstance(result, Exception) else result for result in results]


# -- from the database -----------------------------------------------------------------------------------------


def count_pending_webhooks(database: Database, now_ms: int) -> PendingWebhooks:
    """Raises DatabaseUnavailable."""
    with database.read() as connection:
        pending, next_ms = connection.execute(_PENDING).one()
    return PendingWebhooks(pending, 0 if next_ms is None else max(now_ms - next_ms, 0))


def count_quarantined_slots(database: Database) -> Counter[tuple[str, str]]:
    """Return (model, reason) -> number of quarantined slots.  Raises DatabaseUnavailable."""
    return Counter((slot.model, slot.reason) for slot in quarantine.list_all(database))


def count_model_work(database: Database, model: str, *, count_queued: bool) -> tuple[int, int]:
    """Return how many jobs of a model are queued, and how many run.  Raises DatabaseUnavailable.

    `count_queued`: False returns 0 for the queued jobs without counting them, which takes long if there are many.
    """
    with database.read() as connection:
        queued = connection.execute(_QUEUED, {"p_model": model}).scalar() or 0 if count_queued else 0
        return queued, connection.execute(_RUNNING, {"p_model": model}).scalar() or 0
