"""Make the bodies of webhook messages: the standard body, or one from a template for receivers such as Slack.

A template is a JSON object whose strings contain names: {"text": "{{model}}: job {{job_id}} is {{status}}"}.  It is
validated when it is stored, and it can name only values that the standard body contains.  Values are inserted into the
strings of the parsed template, not into its JSON text, so a value cannot change the structure of the body.  A string
that consists of one name becomes the value itself: "{{result}}".  {{error.message|slack}} escapes the value, so that
Slack shows it literally and finds no mention or link in it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from slotkeeper import json_text, large_json
from slotkeeper.clock import iso_time
from slotkeeper.errors import InvalidRequest
from slotkeeper.jobs.batches import BatchProgress
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES
from slotkeeper.jobs.values import Job
from slotkeeper.outbox.event_reader import OutboxEvent
from slotkeeper.outbox.subscriptions import Subscription
from slotkeeper.outbox.webhook_messages import Message

MAX_TEMPLATE_BYTES = 4096
MAX_TEMPLATE_NAMES = 20
"""Occurrences of names in a template."""
MAX_VALUE_CHARS = 1000
"""Characters of a value that is inserted into a string; longer values are cut."""
_MAX_DEPTH = 10

TEMPLATE_FIELDS = (
    *("type", "at", "job_id", "model", "tenant", "priority", "server", "attempt", "why", "retry_in_ms"),
    *("status", "result", "error.code", "error.message"),
)
# Possessive quantifiers: the pattern never backtracks, so the time to match is linear in the length of any text.
_NAME = re.compile(r"\{\{\s*+((?:[^{}\s]++|\s++(?!\}\}))*+)\s*+\}\}")
_RESULT_PATH = re.compile(r"result(\.[A-Za-z0-9_-]{1,64}){1,5}")
_SLACK = "|slack"
_SLACK_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_SLACK_HOSTS = frozenset({"hooks.slack.com", "hooks.slack-gov.com"})
_SLACK_TEMPLATE = '{"text": "{{model}}: {{type}}, job {{job_id|slack}} {{error.message|slack}}"}'
_END_STATES = {EVENT_TYPES[state]: state for state in FINAL_STATES}
_TEST_JOB = "00000000-0000-7000-8000-000000000000"


def job_end_data(message: Message, job: Job) -> dict[str, Any]:
    """Return the data of a message for a job's `callback_url`: the end of the job that the message was made for.

    If the job has another state than that end, because it was revived, its result is left out.
    """
    state = _END_STATES[message.type]
    data: dict[str, Any] = {"job_id": job.id, "model": job.model, "status": state.value}
    if job.state is state:
        data["attempts"] = job.attempts
        data |= _result_and_error(job)
    return data


def batch_end_data(progress: BatchProgress) -> dict[str, Any]:
    """Return the data of the message for a batch's `callback_url`."""
    batch = progress.batch
    by_state = {state.value: count for state, count in progress.by_state.items()}
    about = {"batch": batch.id, "name": batch.name, "status": "ended", "by_state": by_state}
    return about | {"lines": batch.lines, "refused": batch.refused, "canceled": batch.cancel_ms is not None}


def event_data(entry: OutboxEvent, job: Job | None) -> dict[str, Any]:
    """Return the data of a webhook's message about an event.

    job: the current state of the job, for the event of its end; it may have been revived since.
    """
    event = entry.event
    data: dict[str, Any] = {
        "job_id": event.job_id,
        "model": entry.model,
        "tenant": entry.tenant,
        "priority": entry.priority,
        "server": entry.server,
        "attempt": event.attempt,
        "why": event.data.get("why"),
    }
    if "retry_in_ms" in event.data:
        data["retry_in_ms"] = event.data["retry_in_ms"]
    if "error" in event.data:
        data["error"] = event.data["error"]
    state = _END_STATES.get(event.type)
    if state is not None:
        data["status"] = state.value
        if job is not None and job.state is state:
            data |= _result_and_error(job)
    return data


def test_data(tenant: str) -> dict[str, Any]:
    """Return the data of a test message: the end of a job that does not exist."""
    return {
        "job_id": _TEST_JOB,
        "model": "test",
        "tenant": tenant,
        "priority": 5,
        "server": None,
        "attempt": 1,
        "why": "finished",
        "status": "completed",
        "result": {"test": True},
        "error": None,
    }


def template_of(receiver: Subscription) -> str | None:
    """Return the template of a subscription, by default one that Slack accepts if the URL is Slack's.

    Returns None if the message has the standard body.
    """
    if receiver.template is None and urlsplit(receiver.url).hostname in _SLACK_HOSTS:
        return _SLACK_TEMPLATE
    return receiver.template


def message_body(message: Message, data: Mapping[str, Any], template: str | None) -> bytes:
    """Return the body of a message: the template's, or by default the one that Standard Webhooks recommends.

    By default the body for a job's `callback_url` is the data alone.
    """
    at = iso_time(message.at_ms)
    if template is None and message.of_job:
        return json_text.dumps(dict(data))
    if template is None:
        return json_text.dumps({"type": message.type, "timestamp": at, "data": dict(data)})
    return json_text.dumps(_fill(json_text.loads(template), {"type": message.type, "at": at, **data}))


def validate_template(template: Any) -> str:
    """Return a template as JSON text to be stored.

    Raises InvalidRequest, which names the error and what is allowed.
    """
    if not isinstance(template, dict):
        raise _invalid('is a JSON object, such as {"text": "{{model}}: {{status}}"}')
    try:
        text = json_text.dumps(template)
    except (ValueError, RecursionError):
        raise _invalid("is no JSON that can be stored") from None
    if len(text) > MAX_TEMPLATE_BYTES:
        raise _invalid(f"has {len(text)} bytes; make it shorter, {MAX_TEMPLATE_BYTES} are allowed")
    names = list(_find_names(template))
    if len(names) > MAX_TEMPLATE_NAMES:
        raise _invalid(f"names {len(names)} values; {MAX_TEMPLATE_NAMES} are allowed")
    for name in (name.removesuffix(_SLACK) for name in names):
        if name not in TEMPLATE_FIELDS and not _RESULT_PATH.fullmatch(name):
            raise _invalid(
                f"names {name[:80]!r}, which is not told; there are {', '.join(TEMPLATE_FIELDS)}, "
                "and result.… for a part"
            )
    if sum(name.startswith("result") for name in names) > 3:
        raise _invalid("names the result more than three times")
    return text.decode()


def _invalid(why: str) -> InvalidRequest:
    return InvalidRequest("template", f"template {why}")


def _find_names(part: Any, depth: int = 0) -> Iterator[str]:
    """Yield the names in a template.  Raises InvalidRequest if it cannot be parsed."""
    if depth > _MAX_DEPTH:
        raise _invalid(f"is more than {_MAX_DEPTH} levels deep")
    match part:
        case dict():
            for key, value in part.items():
                if "{{" in key:
                    raise _invalid("has a name in a key; names stand in values")
                yield from _find_names(value, depth + 1)
        case list():
            for value in part:
                yield from _find_names(value, depth + 1)
        case str():
            if "{{" in _NAME.sub("", part):
                raise _invalid("has a {{ without its }}")
            yield from _NAME.findall(part)


def _fill(part: Any, data: Mapping[str, Any]) -> Any:
    match part:
        case dict():
            return {key: _fill(value, data) for key, value in part.items()}
        case list():
            return [_fill(value, data) for value in part]
        case str():
            whole = _NAME.fullmatch(part)
            if whole and len(_NAME.findall(part)) == 1 and not whole[1].endswith(_SLACK):
                return _look_up(whole[1], data)
            return _NAME.sub(lambda found: _insert_value(found[1], data), part)
    return part


def _insert_value(name: str, data: Mapping[str, Any]) -> str:
    text = _as_text(_look_up(name.removesuffix(_SLACK), data))
    return text.translate(_SLACK_ESCAPES) if name.endswith(_SLACK) else text


def _look_up(name: str, data: Mapping[str, Any]) -> Any:
    """Return the value that a name such as `result.images.0` refers to; None: there is no such value."""
    if name not in TEMPLATE_FIELDS and not _RESULT_PATH.fullmatch(name):
        return None
    found: Any = data
    for step in name.split("."):
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and len(step) < 10:
            found = found[int(step)] if int(step) < len(found) else None
        elif isinstance(found, json_text.RawJson):
            try:
                found = found.get(step)
            except KeyError:
                return None
        else:
            return None
    return found


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json_text.dumps(value).decode()
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 1]}…"


def _result_and_error(job: Job) -> dict[str, Any]:
    return {
        "result": large_json.parse_stored(job.result) if job.result else None,
        "error": {"code": job.error_code, "message": job.error_message} if job.error_code else None,
    }
