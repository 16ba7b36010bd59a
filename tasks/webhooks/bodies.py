"""What receivers of webhooks read: our own form, or a template for those that have a form of their own, as Slack has.

A template is JSON in whose texts names stand: {"text": "{{model}}: job {{job_id}} is {{status}}"}.  It is checked when
it is stored.  It names what is told anyway and nothing else; a value is put into the text that has been read, never
into JSON, so it can only ever be text.  A text that is one name alone becomes the value itself: "{{result}}".
{{error.message|slack}} is what Slack shows as it is, and takes for no mention or link.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from slotkeeper import json_text, large_json
from slotkeeper.errors import InvalidRequest
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES
from slotkeeper.jobs.values import Job
from slotkeeper.outbox.event_reader import OutboxEvent
from slotkeeper.outbox.subscriptions import Subscription
from slotkeeper.outbox.webhook_messages import Message

MAX_TEMPLATE_BYTES = 4096
MAX_TEMPLATE_NAMES = 20
"""Places of a template where something is put in."""
MAX_VALUE_CHARS = 1000
"""Characters of a value that is put into a text."""
_MAX_DEPTH = 10

TEMPLATE_FIELDS = (
    *("type", "at", "job_id", "model", "tenant", "priority", "server", "attempt", "why", "retry_in_ms"),
    *("status", "result", "error.code", "error.message"),
)
# Nothing in it can be taken in two ways, so any text is gone through once, however it was made.
_NAME = re.compile(r"\{\{\s*+((?:[^{}\s]++|\s++(?!\}\}))*+)\s*+\}\}")
_RESULT_PATH = re.compile(r"result(\.[A-Za-z0-9_-]{1,64}){1,5}")
_SLACK = "|slack"
_SLACKS = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_SLACK_HOSTS = frozenset({"hooks.slack.com", "hooks.slack-gov.com"})
_SLACK_TEMPLATE = '{"text": "{{model}}: {{type}}, job {{job_id|slack}} {{error.message|slack}}"}'
_END_STATES = {EVENT_TYPES[state]: state for state in FINAL_STATES}
_TEST_JOB = "00000000-0000-7000-8000-000000000000"


def job_end_data(message: Message, job: Job) -> dict[str, Any]:
    """What a job's `callback_url` is told: how the job ended, at the time when the message was owed."""
    state = _END_STATES[message.type]
    data: dict[str, Any] = {"job_id": job.id, "model": job.model, "status": state.value}
    if job.state is state:
        data["attempts"] = job.attempts
        data |= _job_end(job)
    return data


def event_data(entry: OutboxEvent, job: Job | None) -> dict[str, Any]:
    """What is said of an event.  `job`: as it stands now, where its end is told; it may have gone on since."""
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
            data |= _job_end(job)
    return data


def test_data(tenant: str) -> dict[str, Any]:
    """What a test says: as the end of a job, of which there is none."""
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
    """Return the template of a subscription; Slack takes its own form alone.  None: the body is ours."""
    if receiver.template is None and urlsplit(receiver.url).hostname in _SLACK_HOSTS:
        return _SLACK_TEMPLATE
    return receiver.template


def message_body(message: Message, data: Mapping[str, Any], template: str | None) -> bytes:
    """A message as it is sent: as Standard Webhooks advises, or as the template says; to a job's `callback_url` the
    data alone."""
    at = _iso_time(message.at_ms)
    if template is None and message.of_job:
        return json_text.dumps(dict(data))
    if template is None:
        return json_text.dumps({"type": message.type, "timestamp": at, "data": dict(data)})
    return json_text.dumps(_fill(json_text.loads(template), {"type": message.type, "at": at, **data}))


def validate_template(template: Any) -> str:
    """A template as it is stored.  Raises InvalidRequest, which says what is wrong and what may stand there."""
    if not isinstance(template, dict):
        raise _invalid('is a JSON object, such as {"text": "{{model}}: {{status}}"}')
    try:
        text = json_text.dumps(template)
    except (ValueError, RecursionError):
        raise _invalid("is no JSON that can be stored") from None
    if len(text) > MAX_TEMPLATE_BYTES:
        raise _invalid(f"has {len(text)} bytes; make it shorter, {MAX_TEMPLATE_BYTES} are allowed")
    names = list(_names(template))
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


def _names(part: Any, depth: int = 0) -> Iterator[str]:
    """What a template names.  Raises InvalidRequest where it cannot be told."""
    if depth > _MAX_DEPTH:
        raise _invalid(f"is more than {_MAX_DEPTH} levels deep")
    match part:
        case dict():
            for key, value in part.items():
                if "{{" in key:
                    raise _invalid("has a name in a key; names stand in values")
                yield from _names(value, depth + 1)
        case list():
            for value in part:
                yield from _names(value, depth + 1)
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
    return text.translate(_SLACKS) if name.endswith(_SLACK) else text


def _look_up(name: str, data: Mapping[str, Any]) -> Any:
    """What stands at `result.images.0`; None: nothing does."""
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


def _job_end(job: Job) -> dict[str, Any]:
    return {
        "result": large_json.parse_stored(job.result) if job.result else None,
        "error": {"code": job.error_code, "message": job.error_message} if job.error_code else None,
    }


def _iso_time(at_ms: int) -> str:
    whole = datetime.fromtimestamp(at_ms // 1000, UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{at_ms % 1000:03d}Z"
