"""Transitions and callback deliveries of many jobs, in three reads.  Payloads and results are not read."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson
from sqlalchemy import bindparam, select

from slotkeeper.db import Database
from slotkeeper.jobs.events import EVENT_TYPES, TRANSITION_TYPES
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
_DELIVERED = (
    select(tries.c.message, tries.c.job_id, tries.c.at_ms, tries.c.number)
    .where(tries.c.receiver.in_(bindparam("p_jobs", expanding=True)), tries.c.outcome == "delivered")
    .order_by(tries.c.id)
)


@dataclass(frozen=True, slots=True)
class CallbackDelivery:
    """A message that was delivered to a job's callback URL.

    id: the webhook-id of the message.  ended_ms: when the job ended.  tries: the number of attempts.
    """

    id: str
    ended_ms: int
    delivered_ms: int
    tries: int


@dataclass(frozen=True, slots=True)
class JobTimeline:
    """A job's transitions and callback deliveries, the oldest first.

    traceparent: the W3C trace context that the job was submitted with, if any.
    """

    job_id: str
    model: str
    tenant: str
    traceparent: str | None
    transitions: list[Event] = field(default_factory=list)
    deliveries: list[CallbackDelivery] = field(default_factory=list)


def read_timelines(database: Database, job_ids: Iterable[str]) -> dict[str, JobTimeline]:
    """Return the timelines by job id, with three reads for any number of jobs.

    Jobs that have been removed are left out.  Raises DatabaseUnavailable.
    """
    params = {"p_jobs": sorted(set(job_ids))}
    with database.read() as connection:
        found = {row.id: JobTimeline(*row) for row in connection.execute(_JOBS, params)}
        for row in connection.execute(_TRANSITIONS, params):
            if row.job_id in found and row.type in TRANSITION_TYPES:
                event = Event(row.id, row.job_id, row.type, row.at_ms, row.attempt, orjson.loads(row.data))
                found[row.job_id].transitions.append(event)
        for sent in connection.execute(_DELIVERED, params):
            if sent.job_id in found and (ended_ms := _find_end_ms(found[sent.job_id], sent.message)) is not None:
                delivery = CallbackDelivery(sent.message, ended_ms, sent.at_ms, sent.number)
                found[sent.job_id].deliveries.append(delivery)
    return found


def _find_end_ms(timeline: JobTimeline, message_id: str) -> int | None:
    """Return when the job reached the end that this message reports; None: that event is not stored."""
    if (named := parse_message_id(message_id)) is None:
        return None
    _, attempt, state = named
    ends = (
        event.at_ms for event in timeline.transitions if (event.type, event.attempt) == (EVENT_TYPES[state], attempt)
    )
    return next(ends, None)
