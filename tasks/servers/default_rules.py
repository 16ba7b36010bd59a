"""The slot protocol as rules.  They follow a description's own rules, so the first match is the user's.

Three thoughts run through them.  "Busy" and "not reachable" cost the job nothing.  What the server
answered in words costs one retry, unless it says that the request itself is wrong.  A poll that
failed says nothing about the job: it stays pending, and the caller's max_poll_time is the end.
"""

from functools import cache
from typing import Any

from tasks.servers.description import EventRule, HealthRule, Rule

DONE_WORDS = ["success", "completed", "done"]
FAILED_WORDS = ["failed", "error"]
CANCELED_WORDS = ["canceled", "cancelled"]
PENDING_WORDS = ["processing", "queued", "pending", "running", "starting", "accepted", "in_progress"]

_ANY_STATUS = ["1xx", "2xx", "3xx", "4xx", "5xx"]


def _word(words: list[str], then: str, **more: Any) -> dict[str, Any]:
    return {"if": {"status": "2xx", "pointer": "/status", "value": words}, "then": then, **more}


def _status(status: Any, then: str, **more: Any) -> dict[str, Any]:
    return {"if": {"status": status}, "then": then, **more}


def _no_response(connection: Any, then: str, **more: Any) -> dict[str, Any]:
    return {"if": {"connection": connection}, "then": then, **more}


_FINAL = {"if": {"pointer": "/retryable", "value": False}, "then": "failed", "code": "job_failed"}
# A poll's 4xx and 5xx are about the poll, whatever else they say.
_POLL_FINAL = {
    "if": {"status": "2xx", "pointer": "/retryable", "value": False},
    "then": "failed",
    "code": "job_failed",
}

_SUBMIT = [
    _word(DONE_WORDS, "done"),
    _word(PENDING_WORDS, "pending"),
    _status([409, 429, 503], "busy"),
    # A gateway could not reach the server.  This costs the job nothing and counts against the server.
    # It is not quite "certainly not sent": after a 504 the server behind may be at work.  A server
    # behind a gateway that does so says it with one rule of its own: 504 -> unknown.
    _status([502, 504], "unreachable", code="bad_gateway"),
    _FINAL,
    {"if": {"status": "4xx", "pointer": "/retryable", "value": True}, "then": "retry", "code": "server_error"},
    _word(FAILED_WORDS, "retry", code="job_failed"),
    _word(CANCELED_WORDS, "canceled"),
    _status([400, 413, 415, 422], "failed", code="bad_request"),
    # Somebody has registered a wrong address or key.  The job is not to blame, and can be run
    # once it is set right; but it must not circle for ever, so it pays with a retry.
    _status([401, 403, 404, 405], "retry", code="misconfigured"),
    _status(["4xx", "5xx"], "retry", code="server_error"),
]
_SUBMIT_END = [
    _no_response("connect", "unreachable", code="connect_failed"),
    _no_response("timeout", "unknown", code="no_answer"),
    _no_response("reset", "unknown", code="connection_lost"),
    _status(_ANY_STATUS, "retry", code="bad_answer"),  # garbage, a redirect, no word we know
]

_POLL = [
    _word(DONE_WORDS, "done"),
    _word(PENDING_WORDS, "pending"),
    _word(CANCELED_WORDS, "canceled"),
    _POLL_FINAL,
    _word(FAILED_WORDS, "retry", code="job_failed"),
    # With JSON, it is the server that does not know the id; without, it may be a proxy's page.
    {"if": {"status": 404, "pointer": ""}, "then": "lost", "code": "not_found"},
    _no_response(["connect", "timeout", "reset"], "pending", code="poll_failed"),
    _status(["4xx", "5xx"], "pending", code="poll_failed"),
    _status(_ANY_STATUS, "pending", code="bad_answer"),
]

_RESULT = [
    {"if": {"status": "2xx"}, "then": "done"},
    {"if": {"status": 404, "pointer": ""}, "then": "lost", "code": "not_found"},
    _no_response(["connect", "timeout", "reset"], "pending", code="poll_failed"),
    _status(_ANY_STATUS, "pending", code="poll_failed"),
]

_CANCEL = [
    _word([*FAILED_WORDS, "completed", "not_found"], "failed"),  # "success" may be about the cancel
    {"if": {"status": "2xx"}, "then": "canceled"},
    _status(_ANY_STATUS, "failed"),
    _no_response(["connect", "timeout", "reset"], "failed"),
]

_HEALTH = [
    _status("2xx", "up"),
    _status([408, 409, 429, 503], "busy"),  # 503 while weights are loading is not death
    _status([502, 504], "down"),
    _status("5xx", "garbage"),
    _status(_ANY_STATUS, "foreign"),
    _no_response("timeout", "busy"),  # health can hang for as long as a generation takes
    _no_response(["connect", "reset"], "down"),
]


_END_WORDS_RULE = {
    "if": {"pointer": "/status", "value": [*DONE_WORDS, *FAILED_WORDS, *CANCELED_WORDS]},
    "then": "end",
}
_STREAM = [{"if": {"pointer": "/error"}, "then": "retry", "code": "job_failed"}]


@cache
def event_rules(is_read_whole: bool) -> tuple[EventRule, ...]:
    """What follows a stream's own rules.  `is_read_whole`: an event with a word for its end is the answer."""
    return tuple(EventRule.model_validate(rule) for rule in ([_END_WORDS_RULE] if is_read_whole else []) + _STREAM)


@cache
def submit_rules(id_pointer: str, is_async: bool) -> tuple[Rule, ...]:
    """What follows a submit step's own rules."""
    if not is_async:
        return _rules([*_SUBMIT, *_SUBMIT_END])
    # A server described as async need not say "processing": an id is enough, beside no other word.
    unnamed = [
        {"if": {"status": "2xx", "pointer": "/status"}, "then": "retry", "code": "bad_answer"},
        {"if": {"status": "2xx", "pointer": id_pointer}, "then": "pending"},
    ]
    return _rules([*_SUBMIT, *unnamed, *_SUBMIT_END])


@cache
def poll_rules() -> tuple[Rule, ...]:
    """What follows the own rules of a status step, and of what is pushed to us."""
    return _rules(_POLL)


@cache
def result_rules() -> tuple[Rule, ...]:
    """What follows a result step's own rules."""
    return _rules(_RESULT)


@cache
def cancel_rules() -> tuple[Rule, ...]:
    """What follows a cancel step's own rules."""
    return _rules(_CANCEL)


@cache
def health_rules() -> tuple[HealthRule, ...]:
    """What follows a health step's own rules."""
    return tuple(HealthRule.model_validate(rule) for rule in _HEALTH)


def _rules(data: list[dict[str, Any]]) -> tuple[Rule, ...]:
    return tuple(Rule.model_validate(rule) for rule in data)
