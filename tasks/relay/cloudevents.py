"""Convert events to CloudEvents 1.0 in JSON, structured mode, the same text for all sinks.

They are plain dicts and not objects of the SDK, because one is made for every event.
"""

from typing import Any

import orjson

from slotkeeper.clock import iso_time
from slotkeeper.jobs.states import Reason
from slotkeeper.outbox.event_reader import OutboxEvent

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
# The alias of a failed run whose job is retried.  Other queues report each failed attempt under this type; here the
# type itself is used only for the end of a job.
_FAILED = "job.failed"
_RETRIED_REASONS = frozenset({Reason.SERVER_ERROR, Reason.SERVER_LOST, Reason.LEASE_EXPIRED})


def subject_of(entry: OutboxEvent) -> str:
    """Return the subject of an event: the job's id, or for an audit entry the kind and name of the changed object."""
    if entry.event.job_id:
        return entry.event.job_id
    for kind, name in (("server", entry.server), ("model", entry.model), ("tenant", entry.tenant)):
        if name:
            return f"{kind}/{name}"
    return "slotkeeper"


def to_json(entry: OutboxEvent, source: str) -> str:
    """Return an event as a CloudEvent in JSON, which `source` and its `id` identify."""
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
    return orjson.dumps(cloudevent).decode()


def event_data(entry: OutboxEvent) -> dict[str, Any]:
    """Return the data of an event: a transition of a job, an audit entry, or an observation."""
    return _event_data(entry, iso_time(entry.event.at_ms))


def _event_data(entry: OutboxEvent, at: str) -> dict[str, Any]:
    event = entry.event
    if entry.actor is not None:
        changed = {"job_id": event.job_id, "model": entry.model, "server": entry.server, "tenant": entry.tenant}
        named = {name: value for name, value in changed.items() if value}
        return {"actor": entry.actor, **named, **event.data, "at": at}
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
