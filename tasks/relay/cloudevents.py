"""Events as CloudEvents 1.0, in JSON, structured mode: one text for all sinks.  Plain dicts: they are made for each."""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import orjson

from slotkeeper.jobs.states import Reason
from slotkeeper.outbox.event_reader import OutboxEvent

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
# A run that went wrong and is tried again: a job's failure in the words of other queues, where ours only ends a job.
_FAILED = "job.failed"
_TRIED_AGAIN = frozenset({Reason.SERVER_ERROR, Reason.SERVER_LOST, Reason.LEASE_EXPIRED})


def subject_of(it: OutboxEvent) -> str:
    """What it is about: a job's id, else the kind and name of what an act changes."""
    if it.event.job_id:
        return it.event.job_id
    for kind, name in (("server", it.server), ("model", it.model), ("tenant", it.tenant)):
        if name:
            return f"{kind}/{name}"
    return "slotkeeper"


def to_cloudevent(it: OutboxEvent, source: str) -> dict[str, Any]:
    """An event as a CloudEvent.  `source` and its `id` tell it from all others."""
    event, subject = it.event, subject_of(it)
    at = iso_time(event.at_ms)
    made = {
        "specversion": "1.0",
        "id": str(event.id),
        "source": source,
        "type": event.type,
        "subject": subject,
        "time": at,
        "datacontenttype": "application/json",
        "partitionkey": subject,
        "data": _told(it, at),
    }
    if event.data.get("why") in _TRIED_AGAIN:
        made["alias"] = _FAILED
    return made


def to_json(it: OutboxEvent, source: str) -> str:
    """The same as JSON."""
    return orjson.dumps(to_cloudevent(it, source)).decode()


def told(it: OutboxEvent) -> dict[str, Any]:
    """What an event says: of a transition, of an act, or of what was noticed."""
    return _told(it, iso_time(it.event.at_ms))


def _told(it: OutboxEvent, at: str) -> dict[str, Any]:
    event = it.event
    if it.actor is not None:
        about = {"job_id": event.job_id, "model": it.model, "server": it.server, "tenant": it.tenant}
        known = {name: value for name, value in about.items() if value}
        return {"actor": it.actor, **known, **event.data, "at": at}
    if "why" not in event.data:
        return {"subject": event.job_id, **event.data, "at": at}
    said = {
        "job_id": event.job_id,
        "model": it.model,
        "tenant": it.tenant,
        "priority": it.priority,
        "server": it.server,
        "attempt": event.attempt,
        "why": event.data["why"],
        "at": at,
    }
    if event.data["why"] in _TRIED_AGAIN:
        said["retry_in_ms"] = event.data.get("retry_in_ms", 0)
    if "worker" in event.data:
        said["worker"] = event.data["worker"]
    if "error" in event.data:
        said["error"] = event.data["error"]
    return said


def iso_time(at_ms: int) -> str:
    """ISO 8601 in UTC with milliseconds."""
    return f"{_second(at_ms // 1000)}.{at_ms % 1000:03d}Z"


@lru_cache(maxsize=64)
def _second(at_s: int) -> str:
    """Events are told in the order of their times, so a second comes many times in a row."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%S}"
