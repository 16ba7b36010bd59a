"""Rules: they judge a response, or a failed exchange, and return an Outcome.  The first rule that matches applies.

The rules have no side effects.  They are compiled once per description: statuses to a set, pointers to tuples, patterns
to regular expressions.  A call then costs some set look-ups, and parses JSON at most once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeGuard

from routing.dispatch.outcome import BAD_ANSWER, Outcome, OutcomeKind
from slotkeeper.json_text import RawJson
from tasks.servers.description import (
    Condition,
    CountSource,
    EventRule,
    HealthRule,
    HealthStep,
    Rule,
    Scalar,
    StartSource,
)
from tasks.servers.patterns import Pattern
from tasks.servers.pointers import MISSING, Pointer, parse, resolve
from tasks.servers.responses import (
    MAX_DEPTH,
    NOT_JSON,
    FailureReason,
    NoResponse,
    Response,
    id_text,
    is_too_deep,
    redact,
    retry_after_s,
)
from tasks.servers.templates import to_json
from tasks.servers.values import Health, HealthKind

_CODES = {
    OutcomeKind.DONE: "",
    OutcomeKind.PENDING: "",
    OutcomeKind.FAILED: "job_failed",
    OutcomeKind.RETRY: "server_error",
    OutcomeKind.BUSY: "busy",
    OutcomeKind.CANCELED: "canceled",
    OutcomeKind.LOST: "not_found",
    OutcomeKind.UNKNOWN: "no_answer",
    OutcomeKind.UNREACHABLE: "unreachable",
}
# FAILED, not RETRY: the same request has the same result, and each try is a whole run on a GPU.
_TOO_LARGE = frozenset({FailureReason.TOO_LARGE, FailureReason.TOO_MANY_PIECES})
TOO_DEEP = Outcome(
    OutcomeKind.FAILED,
    code="answer_too_deep",
    message=f"The server's result is nested more than {MAX_DEPTH} levels deep: have the model return flatter lists and "
    "objects, or its result as one text.",
)
# Kinds of outcome of a response that no specific rule describes.
_UNDECIDED = frozenset({OutcomeKind.RETRY, OutcomeKind.PENDING})
_ERROR_POINTERS = (("error",), ("detail",), ("message",))
_MENTION_SEARCH_BYTES = 1 << 20  # bytes of a response
_ECHO_HEADER = "x-job-id"


class ResponseContext(NamedTuple):
    """The job that a response must be about, and the secrets that must not be quoted from it."""

    job_id: str
    remote_id: str | None = None  # the server's id of the job, if it is known
    secrets: tuple[str, ...] = ()
    now_s: float = 0.0  # Unix time, for a Retry-After that is a date


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """A rule, compiled."""

    then: str
    code: str | None
    message: str | None
    pointer: Pointer | None
    values: frozenset[tuple[bool, Any]] | None  # None: any value matches
    pattern: Pattern | None
    statuses: frozenset[int] | None = None
    mentions_id: bool = False
    failures: frozenset[str] = frozenset()  # of the exchange
    only_when_up: bool = False
    null_is_absent: bool = False  # A null at the pointer matches no value.

    def holds_for(self, reply: Response | NoResponse, remote_id: str | None) -> bool:
        """Return whether this rule matches the reply."""
        if isinstance(reply, NoResponse):
            return reply.reason in self.failures
        if self.failures or (self.statuses is not None and reply.status not in self.statuses):
            return False
        if self.pointer is not None and not self._value_fits(reply.json, self.pointer, remote_id):
            return False
        if self.pattern is not None and not self.pattern.is_in(reply.beginning):
            return False
        return not self.mentions_id or _mentions(reply.body, remote_id)

    def _value_fits(self, document: Any, pointer: Pointer, remote_id: str | None) -> bool:
        value = MISSING if document is NOT_JSON else resolve(document, _with_id(pointer, remote_id))
        if value is None and self.null_is_absent:
            value = MISSING
        if value is MISSING or self.values is None:
            return value is not MISSING
        return not isinstance(value, dict | list) and (isinstance(value, bool), value) in self.values


def _with_id(pointer: Pointer, remote_id: str | None) -> Pointer:
    if "{{id}}" not in pointer:
        return pointer
    return tuple(str(remote_id) if token == "{{id}}" else token for token in pointer)


def _mentions(body: bytes, remote_id: str | None) -> bool:
    if not remote_id:
        return False
    return _mention_pattern(remote_id).search(body[:_MENTION_SEARCH_BYTES]) is not None


def _mention_pattern(remote_id: str) -> re.Pattern[bytes]:
    """Return the pattern of an id as a whole word: "12" is not in "123"."""
    return re.compile(rb"(?<![\w-])" + re.escape(remote_id.encode()) + rb"(?![\w-])")


def compile_rule(rule: Rule | HealthRule) -> CompiledRule:
    """Compile a validated rule."""
    when = rule.when
    return replace(
        _compile_common(rule),
        statuses=frozenset(_expand_statuses(when)) or None,
        mentions_id=when.mentions_id,
        failures=frozenset(when.connection),
        only_when_up=isinstance(rule, Rule) and rule.only_when_up,
    )


def compile_event_rule(rule: EventRule) -> CompiledRule:
    """Compile a validated rule of a stream, without its names of events.  It judges an event's data as a response."""
    # Some servers send all fields in each event.
    return replace(_compile_common(rule), null_is_absent=True)


def _compile_common(rule: Rule | HealthRule | EventRule) -> CompiledRule:
    """Compile what all kinds of rules have."""
    when = rule.when
    return CompiledRule(
        then=rule.then,
        code=rule.code,
        message=rule.message,
        pointer=None if when.pointer is None else parse(when.pointer),
        values=_compile_values(when.value),
        pattern=Pattern(when.text) if when.text else None,
    )


def _compile_values(values: Iterable[Scalar]) -> frozenset[tuple[bool, Any]] | None:
    # True == 1 in Python, not in JSON
    return frozenset((isinstance(value, bool), value) for value in values) or None


def _expand_statuses(when: Condition) -> Iterable[int]:
    for status in when.status:
        if isinstance(status, int):
            yield status
        elif status.endswith("xx"):
            yield from range(int(status[0]) * 100, int(status[0]) * 100 + 100)
        else:
            yield from range(int(status[:3]), int(status[4:]) + 1)


def find_rule(rules: Sequence[CompiledRule], reply: Response | NoResponse, remote_id: str | None) -> int | None:
    """Return the number of the first rule that matches the reply, from 0; None: no rule does."""
    return next((number for number, rule in enumerate(rules) if rule.holds_for(reply, remote_id)), None)


class OutcomeRule(Protocol):
    """The part of a rule that determines the outcome of a matching response."""

    @property
    def then(self) -> str: ...
    @property
    def code(self) -> str | None: ...
    @property
    def message(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges the responses to one step."""

    rules: tuple[CompiledRule, ...]
    is_poll: bool  # an unreadable response to a poll means "still pending"; to a submit, it costs a retry
    result: Pointer
    as_text: bool
    as_raw: bool
    envelope: Pointer | None
    errors: tuple[Pointer, ...]
    id: Pointer  # submit: place of the server's id
    requires_id: bool  # without an id, the run cannot be polled
    echo: Pointer | None  # poll: place of the id of the job, which must be the requested one
    echo_header: bool
    progress: Pointer | None = None  # poll: place of the run's progress

    @property
    def pointers(self) -> frozenset[Pointer]:
        """Return the places that the judge reads in a response's JSON, without those that contain an id."""
        of_rules = (rule.pointer for rule in self.rules)
        found = (*of_rules, self.result, *self.errors, self.id, self.echo, self.progress)
        return frozenset(pointer for pointer in found if pointer is not None and "{{id}}" not in pointer)

    def outcome(self, reply: Response | NoResponse, context: ResponseContext) -> Outcome | None:
        """Return what the reply means for the job; None: send the next step."""
        found = self._first_outcome(reply, context)
        if found is None or found.code != BAD_ANSWER or not isinstance(reply, Response):
            return found
        return TOO_DEEP if reply.is_too_deep_to_read else found._replace(is_faulty_json=reply.is_faulty_json)

    def _first_outcome(self, reply: Response | NoResponse, context: ResponseContext) -> Outcome | None:
        if isinstance(reply, NoResponse) and reply.reason in _TOO_LARGE:
            return Outcome(OutcomeKind.FAILED, code="answer_too_large", message=reply.message)
        if isinstance(reply, NoResponse) and reply.reason is FailureReason.UNSENDABLE:
            return self._bad_answer(reply.message, context, code="misconfigured")
        if isinstance(reply, NoResponse) and reply.reason is FailureReason.DAMAGED:
            return self._bad_answer(reply.message, context)
        if isinstance(reply, Response) and (other := self._find_other_job(reply, context)) is not None:
            return self._bad_answer(redact(f"the answer is about another job: {other}", context.secrets), context)
        number = find_rule(self.rules, reply, context.remote_id)
        if number is None:
            return self._bad_answer("nothing describes such an answer", context)
        rule = self.rules[number]
        return None if rule.then == "next" else self.apply(rule, reply, context)

    def depends_on_health(self, reply: Response | NoResponse, remote_id: str | None) -> bool:
        """Return whether the rule that matches the reply applies only to a server that is up."""
        number = find_rule(self.rules, reply, remote_id)
        return number is not None and self.rules[number].only_when_up

    def apply(self, rule: OutcomeRule, reply: Response | NoResponse, context: ResponseContext) -> Outcome:
        """Return the outcome of a reply by a rule that matches it."""
        kind = OutcomeKind(rule.then)
        if kind is OutcomeKind.DONE and isinstance(reply, Response):
            return self._done(reply, context)
        remote_id = self._remote_id(reply, context) if kind is OutcomeKind.PENDING else None
        if kind is OutcomeKind.PENDING and remote_id is None and self.requires_id:
            return self._bad_answer("the server has taken the job but gave no usable id", context)
        code = rule.code if rule.code is not None else _CODES[kind]
        may_ask_to_wait = kind in (OutcomeKind.BUSY, OutcomeKind.RETRY) and isinstance(reply, Response)
        wait_s = retry_after_s(reply.headers.get("retry-after"), context.now_s) if may_ask_to_wait else None  # type: ignore[union-attr]
        message = rule.message or (self._message(reply, context, kind) if code else "")
        if code == BAD_ANSWER and not rule.message and is_success(reply) and reply.json is not NOT_JSON:
            message += f"; no rule of the description matches it: {self._hint}"
        progress = self._progress(reply) if kind is OutcomeKind.PENDING else None
        return Outcome(kind, code=code, message=message, remote_id=remote_id, retry_after_s=wait_s, progress=progress)

    @property
    def _hint(self) -> str:
        if self.is_poll:
            return "add one to the rules of `status`"
        return 'if it is a result, add {"if": {"status": "2xx"}, "then": "done"} to `submit.rules`'

    def _progress(self, reply: Response | NoResponse) -> Any:
        if self.progress is None or isinstance(reply, NoResponse) or reply.json is NOT_JSON:
            return None
        value = resolve(reply.json, self.progress)
        is_kept = value is not MISSING and not isinstance(value, RawJson) and not is_too_deep(value)
        return value if is_kept else None

    def _done(self, response: Response, context: ResponseContext) -> Outcome:
        if self.as_text:
            return Outcome(OutcomeKind.DONE, result=response.text)
        document = response.json
        if document is NOT_JSON:
            return self._bad_answer(redact(describe_unreadable(response), context.secrets), context)
        value = resolve(document, _with_id(self.result, context.remote_id))
        envelope = None if self.envelope is None else resolve(document, self.envelope)
        if value is MISSING:
            return Outcome(OutcomeKind.DONE, envelope=envelope)
        if not response.cannot_be_too_deep and is_too_deep(value):
            return TOO_DEEP
        if self.as_raw:
            value = response.raw_value(self.result)
        return Outcome(OutcomeKind.DONE, result=value, envelope=envelope)

    def _remote_id(self, reply: Response | NoResponse, context: ResponseContext) -> str | None:
        if self.is_poll or isinstance(reply, NoResponse) or reply.json is NOT_JSON:
            return context.remote_id
        value = resolve(reply.json, self.id)
        return context.remote_id if value is MISSING else id_text(value)

    def _bad_answer(self, message: str, context: ResponseContext, code: str = BAD_ANSWER) -> Outcome:
        kind = OutcomeKind.PENDING if self.is_poll else OutcomeKind.RETRY
        return Outcome(kind, code=code, message=message, remote_id=context.remote_id if self.is_poll else None)

    def _find_other_job(self, response: Response, context: ResponseContext) -> str | None:
        """Return the id of another job that the response names; None: it names this job, or none."""
        if not is_success(response):
            return None
        own_ids = (context.job_id, context.remote_id)
        named = response.headers.get(_ECHO_HEADER) if self.echo_header else None
        if named and named.strip() not in own_ids:
            return named.strip()
        if self.echo is None or context.remote_id is None or response.json is NOT_JSON:
            return None
        value = resolve(response.json, self.echo)
        if value is MISSING or value is None or id_text(value) in own_ids:
            return None
        return _as_text(value) or "something that is not an id"

    def _message(self, reply: Response | NoResponse, context: ResponseContext, kind: OutcomeKind) -> str:
        if isinstance(reply, NoResponse):
            return reply.message
        if kind in _UNDECIDED and (is_redirect(reply) or (is_success(reply) and reply.json is NOT_JSON)):
            return redact(describe_unreadable(reply), context.secrets)
        text = _error_text(reply, self.errors)
        if not text and reply.json is not NOT_JSON and not _is_empty(reply.json):
            text = _as_text(reply.json)
        if kind is OutcomeKind.CANCELED:
            return redact(f"the server canceled the run: {text}", context.secrets)
        return redact(f"the server answered {reply.status}" + (f": {text}" if text else ""), context.secrets)


def _error_text(response: Response, pointers: Sequence[Pointer]) -> str:
    """Return the error text of a response; "": there is none.  It quotes the response: redact it."""
    if response.json is NOT_JSON:
        head = response.beginning.lstrip()
        return "" if head.startswith("<") else head  # the source of a web page explains nothing
    found = (resolve(response.json, pointer) for pointer in pointers)
    texts = [_as_text(value) for value in found if value is not MISSING and value not in (None, "")]
    return ": ".join(dict.fromkeys(text for text in texts if text))


def is_success(reply: Response | NoResponse) -> TypeGuard[Response]:
    """Return whether the server answered with a status of success."""
    return isinstance(reply, Response) and 200 <= reply.status < 300


def is_redirect(response: Response) -> bool:
    """Return whether the response redirects to another address."""
    return 300 <= response.status < 400 and bool(response.headers.get("location"))


def describe_unreadable(response: Response) -> str:
    """Return a clause that says why a response of status 2xx or 3xx is not the expected JSON.

    It quotes the response: redact it.
    """
    if is_redirect(response):
        target = response.headers["location"].partition("?")[0]
        return f"the server answered {response.status}, a redirect to {target}: register that address"
    clause = f"the server's answer is not JSON: {response.fault}"
    head = response.beginning.strip()
    return clause if response.is_faulty_json or not head or head.startswith("<") else f"{clause}: {head}"


def _is_empty(document: Any) -> bool:
    """Return whether a JSON value has nothing to quote: it is empty, or an object with only empty values."""
    values = document.values() if isinstance(document, dict) else [document]
    return all(value is None or value in ("", [], {}) for value in values)


def _as_text(value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        value = value["message"]
    if isinstance(value, str):
        return value
    return "" if isinstance(value, RawJson) or is_too_deep(value) else to_json(value).decode()


def error_pointers(own: str | None) -> tuple[Pointer, ...]:
    """Return the places of error texts: the description's own pointer, or the usual ones."""
    return _ERROR_POINTERS if own is None else (parse(own),)


_IDLE = "idle"
_MAX_QUOTED_CHARS = 300
_MAX_START_CHARS = 100  # characters
_MAX_ACTIVE = 1_000_000  # a larger number is not a count of jobs


class _NotAsDescribed(Exception):
    """The response has another value at the place of the number or of the ids."""


@dataclass(frozen=True, slots=True)
class HealthJudge:
    """Judges the responses to a server's health check."""

    rules: tuple[CompiledRule, ...]
    active: tuple[Pointer, ...]  # places of numbers, which are summed
    is_count: bool  # the pointers lead to lists, whose lengths are summed
    metrics: tuple[re.Pattern[str], ...]
    job_ids: tuple[Pointer, ...]
    job_ids_item: Pointer
    running: bool
    errors: tuple[Pointer, ...]
    started: Pointer | re.Pattern[str] | None = None
    idempotent: Pointer | None = None

    def read(self, reply: Response | NoResponse, secrets: Iterable[str] = ()) -> Health:
        """Return the server's report.  Its message quotes the response, without these `secrets`."""
        number = find_rule(self.rules, reply, None)
        rule = None if number is None else self.rules[number]
        state = rule.then if rule else HealthKind.GARBAGE.value
        kind = HealthKind.UP if state == _IDLE else HealthKind(state)
        answered = isinstance(reply, Response)
        message = "" if kind is HealthKind.UP else redact(self._message(rule, reply), secrets)
        # A rule can judge a server busy although its report is complete, as for Cog.
        if not is_success(reply):
            return Health(kind, running_count=self.running, message=message, answered=answered)
        try:
            active, ids = self._active(reply), self._job_ids(reply)
        except _NotAsDescribed as error:
            if kind is not HealthKind.UP:  # A rule has judged the response, which then may lack the counts.
                return Health(kind, running_count=self.running, message=message)
            return Health(HealthKind.GARBAGE, running_count=self.running, message=redact(str(error), secrets))
        if active is None and ids is not None:
            active = len(ids)
        return Health(
            kind,
            active,
            ids,
            running_count=self.running,
            message=message,
            is_idle=state == _IDLE,
            started=self._started(reply),
            idempotent=self._is_idempotent(reply),
        )

    def _message(self, rule: CompiledRule | None, reply: Response | NoResponse) -> str:
        """Return what is wrong with the server: the rule's own message, or the value that the rule matched."""
        if isinstance(reply, NoResponse):
            return reply.message
        if is_redirect(reply):
            return describe_unreadable(reply)
        text = f"the server answered {reply.status}"
        if rule is not None and rule.message is not None:
            text = rule.message
        elif rule is not None and rule.pointer is not None:
            text = f"/{'/'.join(rule.pointer)} is {_as_text(resolve(reply.json, rule.pointer))}"
        error = _shorten(_error_text(reply, self.errors).strip())
        return f"{text}: {error}" if error else text

    def _started(self, response: Response) -> str | None:
        if isinstance(self.started, re.Pattern):
            found = self.started.search(response.text)
            return found[1] if found else None
        value = None if self.started is None or response.json is NOT_JSON else resolve(response.json, self.started)
        return str(value)[:_MAX_START_CHARS] if isinstance(value, str | int | float) else None

    def _is_idempotent(self, response: Response) -> bool:
        if self.idempotent is None or response.json is NOT_JSON:
            return False
        return resolve(response.json, self.idempotent) is True

    def _active(self, response: Response) -> int | None:
        """Return the number of jobs at the server; None: a number is missing."""
        numbers = [_whole_number(_sum_of_metric(metric, response.text)) for metric in self.metrics]
        for pointer in self.active:
            value = self._value_at(response, pointer)
            numbers.append(_length(value) if self.is_count and value is not None else _whole_number(value))
        known = [number for number in numbers if number is not None]
        return sum(known) if known and len(known) == len(numbers) else None

    def _job_ids(self, response: Response) -> frozenset[str] | None:
        """Return the ids of all jobs at the server; None: a list is missing."""
        found: set[str] = set()
        for pointer in self.job_ids:
            value = self._value_at(response, pointer)
            if value is None:
                return None
            ids = [id_text(resolve(item, self.job_ids_item)) for item in value] if isinstance(value, list) else [None]
            if None in ids:
                raise _NotAsDescribed("the job ids are not a list of ids")
            found.update(job_id for job_id in ids if job_id is not None)
        return frozenset(found) if self.job_ids else None

    def _value_at(self, response: Response, pointer: Pointer) -> Any:
        if self.metrics and response.json is NOT_JSON:
            return None  # a page of Prometheus metrics has no ids
        if response.json is NOT_JSON:
            raise _NotAsDescribed(describe_unreadable(response))
        value = resolve(response.json, pointer)
        return None if value is MISSING else value


def _shorten(text: str) -> str:
    """Return a long text without its middle: the end of a log contains the error."""
    if len(text) <= _MAX_QUOTED_CHARS:
        return text
    return f"{text[: _MAX_QUOTED_CHARS // 4]} … {text[-3 * _MAX_QUOTED_CHARS // 4 :]}"


def compile_health(step: HealthStep, rules: Iterable[HealthRule]) -> HealthJudge:
    """Compile a validated health step, which is judged by these rules."""
    active = step.active or CountSource.model_construct()
    return HealthJudge(
        rules=tuple(map(compile_rule, rules)),
        active=tuple(map(parse, active.pointer or active.count)),
        is_count=bool(active.count),
        metrics=tuple(map(_metric_pattern, active.metric)),
        job_ids=tuple(map(parse, step.job_ids or ())),
        job_ids_item=parse(step.job_ids_item),
        running=step.running,
        errors=error_pointers(step.error),
        started=_compile_start(step.started),
        idempotent=None if step.idempotent is None else parse(step.idempotent),
    )


def _compile_start(source: StartSource | None) -> Pointer | re.Pattern[str] | None:
    if source is None:
        return None
    return _metric_pattern(source.metric) if source.metric else parse(source.pointer or "")


def _metric_pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of a line of Prometheus text: name, optional labels, value."""
    return re.compile(rf"^{re.escape(name)}(?:\{{[^\n]*\}})?[ \t]+([0-9.eE+-]+)(?:[ \t]|\r?$)", re.MULTILINE)


def _sum_of_metric(sample: re.Pattern[str], text: str) -> float | None:
    found = sample.findall(text)
    try:
        return sum(map(float, found)) if found else None
    except ValueError:
        raise _NotAsDescribed("the metric is not a number") from None


def _length(value: Any) -> int:
    if not isinstance(value, list):
        raise _NotAsDescribed("what should be counted is not a list")
    return len(value)


def _whole_number(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _NotAsDescribed("the number of active jobs is not a number")
    if not 0 <= value <= _MAX_ACTIVE or value != int(value):
        raise _NotAsDescribed("the number of active jobs is not a count")
    return int(value)
