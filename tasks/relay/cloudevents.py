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
_RETRIED_REASONS = frozenset({Reason.SERVER_ERROR, Reason.SERVER_LOST, Reason.LEASE_EXPIRED})


def subject_of(entry: OutboxEvent) -> str:
    """What it is about: a job's id, else the kind and name of what an act changes."""
    if entry.event.job_id:
        return entry.event.job_id
    for kind, name in (("server", entry.server), ("model", entry.model), ("tenant", entry.tenant)):
        if name:
            return f"{kind}/{name}"
    return "slotkeeper"


def to_cloudevent(entry: OutboxEvent, source: str) -> dict[str, Any]:
    """An event as a CloudEvent.  `source` and its `id` tell it from all others."""
    event, subject = entry.event, subject_of(entry)
    at = iso_time(event.at_ms)
    cloudevent = {
        "specversion": "1.0",
        "id": str(event.id),
        "source": source,
        "type": event.type,
        "subject": subject,
        "time": at,
        "datacontenttype": "application/json",
        "partitionkey": subject,
        "data": _event_data(entry, at),
    }
    if event.data.get("why") in _RETRIED_REASONS:
        cloudevent["alias"] = _FAILED
    return cloudevent


def to_json(entry: OutboxEvent, source: str) -> str:
    """The same as JSON."""
    return orjson.dumps(to_cloudevent(entry, source)).decode()


def event_data(entry: OutboxEvent) -> dict[str, Any]:
    """What an event says: of a transition, of an act, or of what was noticed."""
    return _event_data(entry, iso_time(entry.event.at_ms))


def _event_data(entry: OutboxEvent, at: str) -> dict[str, Any]:
    event = entry.event
    if entry.actor is not None:
        about = {"job_id": event.job_id, "model": entry.model, "server": entry.server, "tenant": entry.tenant}
        known = {name: value for name, value in about.items() if value}
        return {"actor": entry.actor, **known, **event.data, "at": at}
    if "why" not in event.data:
        return {"subject": event.job_id, **event.data, "at": at}
    data = {
        "job_id": event.job_id,
        "model": entry.model,
        "tenant": entry.tenant,
        "priority": entry.priority,
        "server": entry.server,
        "attempt": event.attempt,
        "why": event.data["why"],
        "at": at,
    }
    if event.data["why"] in _RETRIED_REASONS:
        data["retry_in_ms"] = event.data.get("retry_in_ms", 0)
    if "worker" in event.data:
        data["worker"] = event.data["worker"]
    if "error" in event.data:
        data["error"] = event.data["error"]
    return data


def iso_time(at_ms: int) -> str:
    """ISO 8601 in UTC with milliseconds."""
    return f"{_format_second(at_ms // 1000)}.{at_ms % 1000:03d}Z"


@lru_cache(maxsize=64)
def _format_second(at_s: int) -> str:
    """Events are told in the order of their times, so a second comes many times in a row."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%S}"
