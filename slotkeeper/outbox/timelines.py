"""What became of jobs, many in one look: what their traces are made of.  Payloads and results are not read."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson
from sqlalchemy import bindparam, select

from slotkeeper.db import Database
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.notifications import parse_message_id
from slotkeeper.jobs.tables import events, jobs
from slotkeeper.jobs.values import Event
from slotkeeper.outbox.tables import tries

_JOBS = select(jobs.c.id, jobs.c.model, jobs.c.tenant, jobs.c.traceparent).where(
    jobs.c.id.in_(bindparam("p_jobs", expanding=True))
)
_TRANSITIONS = (
    select(events.c.id, events.c.job_id, events.c.type, events.c.at_ms, events.c.attempt, events.c.data)
    .where(events.c.job_id.in_(bindparam("p_jobs", expanding=True)), events.c.actor.is_(None))
    .order_by(events.c.id)
)
_ARRIVED = select(tries.c.message, tries.c.job_id, tries.c.at_ms, tries.c.number).where(
    tries.c.receiver.in_(bindparam("p_jobs", expanding=True)), tries.c.outcome == "delivered"
)
_TYPES = frozenset(EVENT_TYPES.values())


@dataclass(frozen=True, slots=True)
class CallbackDelivery:
    """A message to a job's callback URL that has arrived, after so many tries.  `owed_ms`: when its job ended."""

    id: str
    ended_ms: int
    delivered_ms: int
    tries: int


@dataclass(frozen=True, slots=True)
class JobTimeline:
    """A job's transitions, oldest first.  `traceparent`: in which trace it was submitted; None: in nobody's."""

    job_id: str
    model: str
    tenant: str
    traceparent: str | None
    transitions: list[Event] = field(default_factory=list)
    arrived: list[CallbackDelivery] = field(default_factory=list)


def read_timelines(database: Database, job_ids: Iterable[str]) -> dict[str, JobTimeline]:
    """Three looks, however many jobs; those that have been removed are left out.  Raises RecordUnavailable."""
    asked = {"p_jobs": sorted(set(job_ids))}
    with database.read() as connection:
        found = {row.id: JobTimeline(*row) for row in connection.execute(_JOBS, asked)}
        for it in connection.execute(_TRANSITIONS, asked):
            if it.job_id in found and it.type in _TYPES:
                event = Event(it.id, it.job_id, it.type, it.at_ms, it.attempt, orjson.loads(it.data))
                found[it.job_id].transitions.append(event)
        for one in connection.execute(_ARRIVED, asked):
            if one.job_id in found and (owed_ms := _ended_ms(found[one.job_id], one.message)) is not None:
                found[one.job_id].arrived.append(CallbackDelivery(one.message, owed_ms, one.at_ms, one.number))
    return found


def _ended_ms(trail: JobTimeline, message_id: str) -> int | None:
    """When the job came to the end that this message tells."""
    if (named := parse_message_id(message_id)) is None:
        return None
    _, attempt, state = named
    ends = (it.at_ms for it in trail.transitions if (it.type, it.attempt) == (EVENT_TYPES[state], attempt))
    return next(ends, None)
