"""The slot protocol as rules.  They follow the rules of the description, which therefore match first.

"Busy" and "unreachable" cost the job nothing.  Any other response to a submit costs one retry, unless it means that the
request itself is wrong.  A failed poll means nothing for the job: it stays pending until max_poll_time.
"""

from functools import cache
from typing import Any

from tasks.servers.description import EventRule, HealthRule, Rule

DONE_WORDS = ["success", "completed", "done"]
FAILED_WORDS = ["failed", "error"]
CANCELED_WORDS = ["canceled", "cancelled"]
PENDING_WORDS = ["processing", "queued", "pending", "running", "starting", "accepted", "in_progress"]

_ANY_STATUS = ["1xx", "2xx", "3xx", "4xx", "5xx"]


def _word_rule(words: list[str], then: str, **more: Any) -> dict[str, Any]:
    return {"if": {"status": "2xx", "pointer": "/status", "value": words}, "then": then, **more}


def _status_rule(status: Any, then: str, **more: Any) -> dict[str, Any]:
    return {"if": {"status": status}, "then": then, **more}


def _connection_rule(connection: Any, then: str, **more: Any) -> dict[str, Any]:
    return {"if": {"connection": connection}, "then": then, **more}


_FINAL = {"if": {"pointer": "/retryable", "value": False}, "then": "failed", "code": "job_failed"}
# A 4xx or 5xx is the result of the poll, not of the job, whatever its body contains.
_POLL_FINAL = {
    "if": {"status": "2xx", "pointer": "/retryable", "value": False},
    "then": "failed",
    "code": "job_failed",
}

_SUBMIT = [
    _word_rule(DONE_WORDS, "done"),
    _word_rule(PENDING_WORDS, "pending"),
    _status_rule([409, 429, 503], "busy"),
    # A gateway could not reach the server.  This costs the job nothing, and counts as a failure of the server.  After a
    # 504 the server may still run the job: the description of such a server needs the rule 504 -> unknown.
    _status_rule([502, 504], "unreachable", code="bad_gateway"),
    _FINAL,
    {"if": {"status": "4xx", "pointer": "/retryable", "value": True}, "then": "retry", "code": "server_error"},
    _word_rule(FAILED_WORDS, "retry", code="job_failed"),
    _word_rule(CANCELED_WORDS, "canceled"),
    _status_rule([400, 413, 415, 422], "failed", code="bad_request"),
    # The registered URL or key is wrong.  The job can run after the operator has corrected it, but it must not be sent
    # for ever: it costs a retry.
    _status_rule([401, 403, 404, 405], "retry", code="misconfigured"),
    _status_rule(["4xx", "5xx"], "retry", code="server_error"),
]
_SUBMIT_END = [
    _connection_rule("connect", "unreachable", code="connect_failed"),
    _connection_rule("timeout", "unknown", code="no_answer"),
    _connection_rule("reset", "unknown", code="connection_lost"),
    _status_rule(_ANY_STATUS, "retry", code="bad_answer"),  # unreadable, a redirect, or an unknown status word
]

_POLL = [
    _word_rule(DONE_WORDS, "done"),
    _word_rule(PENDING_WORDS, "pending"),
    _word_rule(CANCELED_WORDS, "canceled"),
    _POLL_FINAL,
    _word_rule(FAILED_WORDS, "retry", code="job_failed"),
    # JSON: the server does not know the id.  Anything else may be a page of a proxy.
    {"if": {"status": 404, "pointer": ""}, "then": "lost", "code": "not_found"},
    _connection_rule(["connect", "timeout", "reset"], "pending", code="poll_failed"),
    _status_rule(["4xx", "5xx"], "pending", code="poll_failed"),
    _status_rule(_ANY_STATUS, "pending", code="bad_answer"),
]

_RESULT = [
    {"if": {"status": "2xx"}, "then": "done"},
    {"if": {"status": 404, "pointer": ""}, "then": "lost", "code": "not_found"},
    _connection_rule(["connect", "timeout", "reset"], "pending", code="poll_failed"),
    _status_rule(_ANY_STATUS, "pending", code="poll_failed"),
]

_CANCEL = [
    _word_rule([*FAILED_WORDS, "completed", "not_found"], "failed"),  # "success" may mean the success of the cancel
    {"if": {"status": "2xx"}, "then": "canceled"},
    _status_rule(_ANY_STATUS, "failed"),
    _connection_rule(["connect", "timeout", "reset"], "failed"),
]

_HEALTH = [
    _status_rule("2xx", "up"),
    _status_rule([408, 409, 429, 503], "busy"),  # a server that loads its weights returns 503: it is not down
    _status_rule([502, 504], "down"),
    _status_rule("5xx", "garbage"),
    _status_rule(_ANY_STATUS, "foreign"),
    _connection_rule("timeout", "busy"),  # some servers respond only after their current generation
    _connection_rule(["connect", "reset"], "down"),
]


_END_WORDS_RULE = {
    "if": {"pointer": "/status", "value": [*DONE_WORDS, *FAILED_WORDS, *CANCELED_WORDS]},
    "then": "end",
}
_STREAM = [{"if": {"pointer": "/error"}, "then": "retry", "code": "job_failed"}]


@cache
def event_rules(is_read_whole: bool) -> tuple[EventRule, ...]:
    """Return the rules that follow a stream's own.  `is_read_whole`: an event with a final status is the response."""
    return tuple(EventRule.model_validate(rule) for rule in ([_END_WORDS_RULE] if is_read_whole else []) + _STREAM)


@cache
def submit_rules(id_pointer: str, is_async: bool) -> tuple[Rule, ...]:
    """Return the rules that follow a submit step's own."""
    if not is_async:
        return _rules([*_SUBMIT, *_SUBMIT_END])
    # A server in the mode async need not return "processing": an id without a status word is enough.
    unnamed = [
        {"if": {"status": "2xx", "pointer": "/status"}, "then": "retry", "code": "bad_answer"},
        {"if": {"status": "2xx", "pointer": id_pointer}, "then": "pending"},
    ]
    return _rules([*_SUBMIT, *unnamed, *_SUBMIT_END])


@cache
def poll_rules() -> tuple[Rule, ...]:
    """Return the rules that follow those of a status step or of a push."""
    return _rules(_POLL)


@cache
def result_rules() -> tuple[Rule, ...]:
    """Return the rules that follow a result step's own."""
    return _rules(_RESULT)


@cache
def cancel_rules() -> tuple[Rule, ...]:
    """Return the rules that follow a cancel step's own."""
    return _rules(_CANCEL)


@cache
def health_rules() -> tuple[HealthRule, ...]:
    """Return the rules that follow a health step's own."""
    return tuple(HealthRule.model_validate(rule) for rule in _HEALTH)


def _rules(data: list[dict[str, Any]]) -> tuple[Rule, ...]:
    return tuple(Rule.model_validate(rule) for rule in data)
