"""A server's description: how to speak to it, and how to read its answers, as data.

To add a foreign server: write a description, no code.  Every field has the slot protocol's value as
its default, and default rules (defaults.py) follow the description's own, so that most servers need
two or three rules.  Everything is checked here, when a description is stored; nothing is at a call.
"""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tasks.servers.patterns import Pattern, check_together
from tasks.servers.pointers import format_pointer, iter_texts, parse
from tasks.servers.templates import BodyTemplate, PathTemplate, parse_text, secrets_in, sources_in, to_json

MAX_BODY_BYTES = 64 * 1024  # of a body template
MAX_RULES = 50  # per step

# What each kind of request can be filled from.
SUBMIT_SOURCES = frozenset({"payload", "job", "run", "callback_url", "callback_token", "secret"})
JOB_SOURCES = frozenset({"payload", "job", "id", "secret"})
HEALTH_SOURCES = frozenset({"secret"})

# Ours, or of the connection: a description that set these could break the framing of the request,
# hide who is calling, or undo the protection against running a job twice.
RESERVED_HEADERS = frozenset(
    {
        *("x-source", "x-job-id", "x-attempt", "idempotency-key", "traceparent"),
        *("x-callback-url", "x-callback-token", "x-model", "x-deadline-ms"),
        *("host", "content-length", "content-encoding"),
        *("transfer-encoding", "connection", "keep-alive", "te", "trailer", "upgrade", "expect"),
        *("proxy-connection", "proxy-authorization", "accept-encoding", "cookie"),
    }
)


_STATUSES = re.compile(r"[1-5]xx|[1-5][0-9][0-9]-[1-5][0-9][0-9]")


def _pointer(text: str) -> str:
    parse(text)
    return text


def _pattern(text: str) -> str:
    Pattern(text)
    return text


def _patterns_fit(rules: Any) -> Any:
    check_together(rule.when.text for rule in rules if rule.when.text)
    return rules


def _as_tuple(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


def _one_or_more(kind: Any) -> BeforeValidator:
    """A list, or one without its brackets."""
    return BeforeValidator(_as_tuple, json_schema_input_type=kind | list[kind])


def _status(value: Any) -> int | str:
    if isinstance(value, str) and _STATUSES.fullmatch(value):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599:
        return value
    raise ValueError("a status is a number from 100 to 599, '5xx', or a range such as '500-504'")


def _fault_at(at: Iterable[str | int], message: str) -> PydanticCustomError:
    """What is wrong at one place within a field."""
    return PydanticCustomError("placed", "{message}", {"message": message, "at": format_pointer(at)})


PointerText = Annotated[str, BeforeValidator(lambda v: _pointer(v) if isinstance(v, str) else v)]
PatternText = Annotated[str, BeforeValidator(lambda v: _pattern(v) if isinstance(v, str) else v)]
Scalar = bool | int | float | str | None
Status = Annotated[int | str, BeforeValidator(_status)]
Connection = Literal["connect", "timeout", "reset"]
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$")]
MetricName = Annotated[str, Field(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]{0,199}$")]
HeaderText = Annotated[str, Field(pattern=r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$", max_length=2000)]
Method = Literal["GET", "POST", "PUT", "DELETE"]
EventName = Annotated[str, Field(min_length=1, max_length=100)]
MediaType = Annotated[str, Field(pattern=r"^[a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,60}$")]
_MEDIA_TYPES = {"sse": "text/event-stream", "lines": "application/x-ndjson", "raw": "text/plain"}
_STEP_RULES = (Field(max_length=MAX_RULES), AfterValidator(_patterns_fit))
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class _Data(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
    )


class Condition(_Data):
    """When a rule applies: all that is given must hold.  Connection errors stand alone."""

    status: Annotated[tuple[Status, ...], _one_or_more(int | str)] = ()  # 503, "5xx", "500-599"
    pointer: PointerText | None = None  # into the answer's JSON; alone: "is there"
    value: Annotated[tuple[Scalar, ...], _one_or_more(Scalar)] = ()  # at the pointer: one of these
    text: PatternText | None = None  # a regular expression found in the first 2,048 characters of the answer
    mentions_id: bool = False  # the answer's text contains the id that was asked for
    connection: Annotated[tuple[Connection, ...], _one_or_more(Connection)] = ()

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        about_answer = bool(self.status or self.text or self.mentions_id or self.pointer is not None)
        if about_answer == bool(self.connection):
            raise ValueError("a condition is about an answer or about a connection error")
        if self.value and self.pointer is None:
            raise ValueError("a value needs a pointer that tells where it stands")
        return self

    @model_validator(mode="after")
    def _ranges_go_upwards(self) -> Self:
        if any(isinstance(s, str) and "-" in s and s[:3] > s[4:] for s in self.status):
            raise ValueError("a range of statuses goes from the lower to the higher")
        return self


class _Rule(_Data):
    when: Condition = Field(alias="if")
    code: Word | None = None  # a stable word for programs; the default depends on the outcome
    message: str | None = Field(default=None, max_length=200)


class Rule(_Rule):
    """If `when` holds, then the exchange means this.  "next": ask the next status step."""

    then: Literal["done", "pending", "failed", "retry", "busy", "canceled", "lost", "unknown", "unreachable", "next"]
    only_when_up: bool = False  # believed unless the health check says busy or down; then it means "busy"

    @model_validator(mode="after")
    def _results_come_in_answers(self) -> Self:
        if self.when.connection and self.then in ("done", "next"):
            raise ValueError(f"a connection error cannot mean {self.then!r}")
        if self.only_when_up and self.then != "failed":
            raise ValueError("only_when_up belongs to a rule whose `then` is 'failed'")
        return self


class HealthRule(_Rule):
    """If `when` holds, then the server is in this state."""

    then: Literal["up", "idle", "busy", "down", "foreign", "garbage"]  # idle: it is up, and a place is free


Rules = Annotated[tuple[Rule, ...], *_STEP_RULES]


class _ResponseReading(_Data):
    """How to read an answer."""

    meanings: ClassVar[frozenset[str]]  # what `then` may say here
    rules: Rules = ()
    result: PointerText = "/result"  # "" takes the whole answer
    result_as: Literal["json", "text"] = "json"  # text: the whole body as a string
    error: PointerText | None = None  # None: /error, /detail and /message
    echo: bool = True  # where the answer names a job, it must be ours

    @model_validator(mode="after")
    def _rules_fit(self) -> Self:
        for number, rule in enumerate(self.rules):
            if rule.then not in self.meanings:
                known = ", ".join(sorted(self.meanings))
                raise _fault_at(["rules", number, "then"], f"{rule.then!r} means nothing here; there is: {known}")
            if rule.only_when_up and "busy" not in self.meanings:
                raise _fault_at(["rules", number, "only_when_up"], "a rule of submit alone can ask the health check")
        return self


class _RequestStep(_Data):
    """How to ask.  A template in a path is percent-encoded; secrets stand in headers and bodies only."""

    sources: ClassVar[frozenset[str]]
    method: Method = "GET"
    path: str | None = None
    headers: dict[HeaderName, HeaderText] = Field(default_factory=dict, max_length=30)
    body: JsonValue = None
    connect_s: Annotated[float, Field(gt=0, le=60)] = 3.0
    read_s: Seconds | None = 10.0  # between two pieces of an answer; None: only the call's deadline counts

    @field_validator("path")
    @classmethod
    def _path_fits(cls, path: str | None) -> str | None:
        if path is not None:
            PathTemplate(path, cls.sources - {"secret", "callback_token"})  # addresses end up in logs
        return path

    @field_validator("headers")
    @classmethod
    def _headers_fit(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, text in headers.items():
            if name.lower() in RESERVED_HEADERS:
                raise _fault_at([name], "this header cannot be set: it is the dispatcher's own; leave it out")
            _check_template(text, cls.sources, [name])
        return headers

    @field_validator("body")
    @classmethod
    def _body_fits(cls, body: JsonValue) -> JsonValue:
        for at, text in iter_texts(body):
            _check_template(text, cls.sources, at)
        BodyTemplate(body, cls.sources)
        if len(to_json(body)) > MAX_BODY_BYTES:
            raise ValueError(f"a body template has at most {MAX_BODY_BYTES} bytes")
        return body


def _check_template(text: str, sources: frozenset[str], at: Iterable[str | int]) -> None:
    """Raises, with the place, for a template that names what there is not."""
    try:
        parse_text(text, sources)
    except ValueError as error:
        raise _fault_at(at, str(error)) from None


class EventCondition(_Data):
    """When a rule applies to an event of a stream: all that is given must hold.  A null counts as nothing there."""

    event: Annotated[tuple[EventName, ...], _one_or_more(EventName)] = ()  # of an SSE event; without one, "message"
    text: PatternText | None = None  # a regular expression found in the event's data
    pointer: PointerText | None = None
    value: Annotated[tuple[Scalar, ...], _one_or_more(Scalar)] = ()

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.event and self.text is None and self.pointer is None:
            raise ValueError("a condition is about an event's name, its text, or what stands at a pointer")
        if self.value and self.pointer is None:
            raise ValueError("a value needs a pointer that tells where it stands")
        return self


class EventRule(_Data):
    """If `when` holds, then the event is this.

    last: a piece after which the server may end its stream without an event that is the `end`.
    """

    when: EventCondition = Field(alias="if")
    then: Literal["piece", "last", "end", "skip", "failed", "retry", "busy", "canceled"]
    code: Word | None = None
    message: str | None = Field(default=None, max_length=200)


class Stream(_Data):
    """Reading an answer that comes in pieces.  Stream() is the slot protocol's."""

    frames: Literal["sse", "lines", "raw"] = "sse"  # events; a JSON value in each line; text as it comes
    type: MediaType | None = None  # of such an answer; another is read whole.  None: what is usual for `frames`
    piece: PointerText = "/piece"  # where in an event its piece stands
    progress: PointerText | None = "/progress"  # where in an event it stands how far the run is
    rules: Annotated[tuple[EventRule, ...], *_STEP_RULES] = ()
    # text: the pieces one after another.  list: a list of them.  last: the event that ends it is the whole answer, and
    # is read as an answer that does not stream.
    join: Literal["text", "list", "last"] = "last"
    ends_by: Literal["mark", "length"] = "mark"  # mark: an event that is its end; length: the end of a whole answer
    keep: dict[Word, PointerText] = Field(default_factory=dict, max_length=20)  # what stands beside the pieces
    ask: dict[str, JsonValue] = Field(default_factory=dict, max_length=20)  # what is added to a payload without it
    silent_s: Seconds | None = 300.0  # between two pieces, whatever else comes; None: only the call's deadline counts

    @model_validator(mode="after")
    def _raw_text_has_no_events(self) -> Self:
        if self.frames != "raw":
            return self
        if self.rules or self.keep:
            raise _fault_at(["rules" if self.rules else "keep"], "raw text has no events: leave it out")
        if self.ends_by != "length":
            raise _fault_at(["ends_by"], "raw text has no mark: it ends by length")
        if self.join == "last":
            raise _fault_at(["join"], "raw text has no last event: join it as text")
        return self

    @model_validator(mode="after")
    def _only_sse_has_names(self) -> Self:
        named = (number for number, rule in enumerate(self.rules) if rule.when.event)
        if self.frames != "sse" and (number := next(named, None)) is not None:
            raise _fault_at(["rules", number, "if", "event"], "only server-sent events have names")
        return self

    @model_validator(mode="after")
    def _ends_somehow(self) -> Self:
        ends = any(rule.then in ("last", "end") for rule in self.rules)
        if self.ends_by == "mark" and self.join != "last" and not ends:
            raise _fault_at(["ends_by"], "a stream that ends by a mark needs a rule whose `then` is 'end' or 'last'")
        if self.join == "last" and self.keep:
            raise _fault_at(["keep"], "the last event is the whole answer: nothing is kept beside it")
        return self

    @property
    def media_type(self) -> str:
        return self.type or _MEDIA_TYPES[self.frames]


class Submit(_RequestStep, _ResponseReading):
    """Handing the job over.  No path: the registered endpoint.  No body: the payload itself."""

    sources = SUBMIT_SOURCES
    meanings = frozenset(["done", "pending", "failed", "retry", "busy", "canceled", "lost", "unknown", "unreachable"])
    method: Method = "POST"
    read_s: Seconds | None = None
    id: PointerText = "/job_id"  # where the server says how it calls the job
    # The server ends a run whose client closes the connection; "stream": only if it answers with a stream.
    ends_on_disconnect: bool | Literal["stream"] = False
    idempotent: bool = False  # A request with the key of a run joins it, or gets its result: no second run begins.
    stream: Stream | None = None  # None: an answer is read when it is whole

    @model_validator(mode="after")
    def _asks_where_a_payload_is_sent(self) -> Self:
        if self.stream is not None and self.stream.ask and self.body is not None:
            raise _fault_at(["stream", "ask"], "the body stands in submit.body: say it there")
        return self


class StatusStep(_RequestStep, _ResponseReading):
    """Asking how the job is.  `next` goes on to the next step of the list."""

    sources = JOB_SOURCES
    meanings = frozenset(["done", "pending", "failed", "retry", "canceled", "lost", "next"])
    path: str | None = "/status/{{id}}"
    progress: PointerText | None = "/progress"  # where it stands how far a run is that is pending


class Result(_RequestStep, _ResponseReading):
    """Fetching the result, on a server whose status answer does not hold it."""

    sources = JOB_SOURCES
    meanings = frozenset(["done", "pending", "failed", "retry", "canceled", "lost"])
    path: str | None = "/result/{{id}}"


FreesSlot = Literal["immediate", "eventual", "no"]


class Cancel(_RequestStep, _ResponseReading):
    """Asking to give the job up.  `canceled` means it said yes, `failed` that it said no."""

    sources = JOB_SOURCES
    meanings = frozenset({"canceled", "failed"})
    method: Method = "POST"
    path: str | None = "/cancel/{{id}}"
    echo: bool = False  # the id may not be known yet, and a yes or no is all there is to lose
    # Whether a yes frees the slot.  A cancel can lie: "eventual" waits for status or health to agree.
    frees_slot: FreesSlot = "eventual"


class Callback(_ResponseReading):
    """Reading what the server pushes to us."""

    meanings = frozenset(["done", "pending", "failed", "retry", "canceled", "lost"])
    silent_s: Seconds | None = None  # healthy, but silent for so long: the job is lost


class CountSource(_Data):
    """Where the number of active jobs stands: one kind of place, the sum of all of that kind."""

    pointer: Annotated[tuple[PointerText, ...], Field(max_length=5), _one_or_more(PointerText)] = ()  # a whole number
    count: Annotated[tuple[PointerText, ...], Field(max_length=5), _one_or_more(PointerText)] = ()  # a list: its length
    metric: Annotated[tuple[MetricName, ...], Field(max_length=5), _one_or_more(MetricName)] = ()  # Prometheus text

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if sum(bool(places) for places in (self.pointer, self.count, self.metric)) != 1:
            raise ValueError("active is a pointer, a count or a metric")
        return self


class StartSource(_Data):
    """Where a value stands that another process at this address would have: exactly one of these."""

    pointer: PointerText | None = None
    metric: MetricName | None = None  # Prometheus text

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.pointer is None) == (self.metric is None):
            raise ValueError("started is a pointer or a metric")
        return self


class HealthStep(_RequestStep):
    """Asking how the server is."""

    sources = HEALTH_SOURCES
    path: str | None = "/health"
    connect_s: Annotated[float, Field(gt=0, le=60)] = 2.0
    read_s: Seconds | None = 5.0
    active: CountSource | None = CountSource(pointer=("/active_jobs",))
    job_ids: Annotated[tuple[PointerText, ...], Field(max_length=5), _one_or_more(PointerText)] | None = (
        "/job_ids",
    )  # lists
    job_ids_item: PointerText = ""  # where in an element of that list the id stands
    running: bool = True  # active counts running jobs; False: waiting ones too
    started: StartSource | None = None
    idempotent: PointerText | None = "/idempotent"  # true there: as submit.idempotent
    only_when_used: bool = False  # True: it is asked only while a job runs there, or may still run there
    error: PointerText | None = None  # what is wrong with it; None: /error, /detail and /message
    rules: Annotated[tuple[HealthRule, ...], *_STEP_RULES] = ()


class OutputSize(_Data):
    """How much a run is expected to put out, counted as its payload counts it: tokens, images, seconds."""

    # Where a payload says it: the first place at which a whole number stands.
    pointer: Annotated[tuple[PointerText, ...], Field(min_length=1, max_length=10), _one_or_more(PointerText)]
    default: Annotated[int, Field(ge=0, le=2**53, strict=True)]  # of a payload that does not say it


class Description(_Data):
    """How to speak to one kind of inference server.  Description() is the slot protocol."""

    mode: Literal["sync", "async", "auto", "callback"] = "auto"
    submit: Submit = Submit()
    status: Annotated[tuple[StatusStep, ...], Field(min_length=1, max_length=5), _one_or_more(StatusStep)] = (
        StatusStep(),
    )
    result: Result | None = None
    cancel: Annotated[tuple[Cancel, ...], Field(min_length=1, max_length=5), _one_or_more(Cancel)] | None = (Cancel(),)
    callback: Callback = Callback()
    health: HealthStep | None = HealthStep()
    # The id under which the server will know the job, if it is us who give it, so that the job can be
    # found again although no answer to the submit ever came.  Some servers run the same id twice.
    given_id: Literal["{{job/id}}", "{{job/attempt_id}}"] | None = None

    output_size: OutputSize | None = None  # what {{run/output_size}} is

    @model_validator(mode="after")
    def _says_what_output_is_expected(self) -> Self:
        if self.output_size is None and (at := self._find_template("run", "output_size")) is not None:
            raise _fault_at(at, "for {{run/output_size}} add output_size, which says where a payload tells it")
        return self

    @model_validator(mode="after")
    def _next_has_a_next(self) -> Self:
        for number, rule in enumerate(self.status[-1].rules):
            if rule.then == "next":
                at: list[str | int] = ["status", len(self.status) - 1, "rules", number, "then"]
                raise _fault_at(at, "there is no step after the last status step")
        return self

    # False: whoever reads a result destroys it.  It is stored before anything else is done, and read by nobody else.
    keeps_results: bool = True

    @property
    def is_found_by_given_id(self) -> bool:
        """Whether a run can be asked for, or told of, although no answer to its submit ever came."""
        return self.given_id is not None and self.mode in ("async", "callback")

    @property
    def cancel_frees_slot(self) -> FreesSlot:
        """Whether a cancel to which a server says yes frees the slot: what is true of each of its requests."""
        found = {step.frees_slot for step in self.cancel or ()}
        return "no" if not found or "no" in found else "eventual" if "eventual" in found else "immediate"

    @cached_property
    def asks_by_payload(self) -> bool:
        """Whether something of the payload is needed to ask for a run, or to cancel it."""
        steps = (*self.status, self.result, *(self.cancel or ()))
        texts = (text for step in steps if step for _, text in iter_texts(step.model_dump()))
        return any(source == "payload" for text in texts for source, _ in sources_in(text))

    @cached_property
    def sends_payload_alone(self) -> bool:
        """Whether a submit's body is the payload as it is, of which nothing is needed elsewhere."""
        submit = self.submit
        texts = [text for _, text in iter_texts({"path": submit.path, "headers": submit.headers})]
        uses_payload = any(source in ("payload", "run") for text in texts for source, _ in sources_in(text))
        asks_payload = bool(submit.stream and submit.stream.ask) or submit.ends_on_disconnect == "stream"
        return submit.body is None and not asks_payload and not uses_payload

    def ends_on_disconnect(self, payload: Any) -> bool:
        """Return whether the server ends the run of this payload when the connection closes."""
        submit = self.submit
        if submit.ends_on_disconnect != "stream":
            return submit.ends_on_disconnect
        asked = {**(submit.stream.ask if submit.stream else {}), **(payload if isinstance(payload, dict) else {})}
        return asked.get("stream") is True

    @cached_property
    def asks_for_swap(self) -> bool:
        """Whether the server is told that its model changes."""
        return self._find_template("run", "swap") is not None

    def _find_template(self, source: str, name: str) -> tuple[str | int, ...] | None:
        """Where, if anywhere, the submit puts this in."""
        parts = {"path": self.submit.path, "headers": self.submit.headers, "body": self.submit.body}
        places = (at for at, text in iter_texts(parts) if (source, name) in sources_in(text))
        return next((("submit", *at) for at in places), None)

    @cached_property
    def secrets(self) -> frozenset[str]:
        """The names of the secrets that its templates put in."""
        texts = (text for _, text in iter_texts(self.model_dump()))
        return frozenset(name for text in texts for name in secrets_in(text))


DEFAULT = Description()


def from_shorthand(
    model_type: Literal["sync", "async"] = "sync",
    poll_endpoint_template: str | None = None,
    id_field: str | None = None,
) -> Description:
    """The slot protocol with a model's own fields.

    poll_endpoint_template: a path with {id}, None for '/status/{id}'.  id_field: the field of the
    submit's answer that holds the id, or a JSON pointer to it; None for 'job_id'.
    Raises ValueError, which names the field: whatever passes here can be compiled.
    """
    before, here, after = (poll_endpoint_template or "/status/{id}").partition("{id}")
    if not here or set("{}") & set(before + after):
        raise ValueError("poll_endpoint_template is a path with {id} in it, once, and no other braces")
    path = before + "{{id}}" + after
    try:
        return Description.model_validate(
            {"mode": model_type, "submit": {"id": _field_pointer(id_field or "job_id")}, "status": {"path": path}}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "id_field" if first["loc"][0] == "submit" else "poll_endpoint_template"
        raise ValueError(f"{field}: {first['msg'].removeprefix('Value error, ')}") from None


def _field_pointer(name: str) -> str:
    return name if name.startswith("/") else "/" + name.replace("~", "~0").replace("/", "~1")
