"""The description of a server as data: which requests it takes, and what its responses mean.

A description adds a server without code.  The default of each field is the slot protocol's value, and default rules
(default_rules.py) follow the rules of the description, so most servers need two or three rules.  A description is
checked completely when it is stored; a call checks nothing again.
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

MAX_BODY_BYTES = 64 * 1024  # bytes of a body template as JSON
MAX_RULES = 50  # per step

# The sources of template values in each kind of request.
SUBMIT_SOURCES = frozenset({"payload", "job", "run", "callback_url", "callback_token", "secret"})
JOB_SOURCES = frozenset({"payload", "job", "id", "secret"})
HEALTH_SOURCES = frozenset({"secret"})

# The dispatcher or the HTTP client sets these.  A description that set them could break the framing of the request,
# hide the caller, or remove the protection against running a job twice.
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


def _check_pointer(text: str) -> str:
    parse(text)
    return text


def _check_pattern(text: str) -> str:
    Pattern(text)
    return text


def _check_patterns_together(rules: Any) -> Any:
    check_together(rule.when.text for rule in rules if rule.when.text)
    return rules


def _as_tuple(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


def _one_or_more(kind: Any) -> BeforeValidator:
    """Return a validator that also accepts a single element in place of a list."""
    return BeforeValidator(_as_tuple, json_schema_input_type=kind | list[kind])


def _check_status(value: Any) -> int | str:
    if isinstance(value, str) and _STATUSES.fullmatch(value):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599:
        return value
    raise ValueError("a status is a number from 100 to 599, '5xx', or a range such as '500-504'")


def _fault_at(at: Iterable[str | int], message: str) -> PydanticCustomError:
    """Return the error of one place within a field."""
    return PydanticCustomError("placed", "{message}", {"message": message, "at": format_pointer(at)})


PointerText = Annotated[str, BeforeValidator(lambda v: _check_pointer(v) if isinstance(v, str) else v)]
PatternText = Annotated[str, BeforeValidator(lambda v: _check_pattern(v) if isinstance(v, str) else v)]
Scalar = bool | int | float | str | None
Status = Annotated[int | str, BeforeValidator(_check_status)]
Connection = Literal["connect", "timeout", "reset"]
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$")]
MetricName = Annotated[str, Field(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]{0,199}$")]
HeaderText = Annotated[str, Field(pattern=r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$", max_length=2000)]
Method = Literal["GET", "POST", "PUT", "DELETE"]
EventName = Annotated[str, Field(min_length=1, max_length=100)]
MediaType = Annotated[str, Field(pattern=r"^[a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,60}$")]
_MEDIA_TYPES = {"sse": "text/event-stream", "lines": "application/x-ndjson", "raw": "text/plain"}
_STEP_RULES = (Field(max_length=MAX_RULES), AfterValidator(_check_patterns_together))
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class _Data(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
    )


class Condition(_Data):
    """When a rule applies: all given conditions must hold.  A connection error cannot be combined with the others."""

    status: Annotated[tuple[Status, ...], _one_or_more(int | str)] = ()  # 503, "5xx", "500-599"
    pointer: PointerText | None = None  # into the response's JSON; without `value`, any value matches
    value: Annotated[tuple[Scalar, ...], _one_or_more(Scalar)] = ()  # the value at the pointer is one of these
    text: PatternText | None = None  # a regular expression that matches in the response's first 2,048 characters
    mentions_id: bool = False  # the response contains the id that was requested
    connection: Annotated[tuple[Connection, ...], _one_or_more(Connection)] = ()

    @model_validator(mode="after")
    def _check_subject(self) -> Self:
        about_response = bool(self.status or self.text or self.mentions_id or self.pointer is not None)
        if about_response == bool(self.connection):
            raise ValueError("a condition is about an answer or about a connection error")
        if self.value and self.pointer is None:
            raise ValueError("a value needs a pointer that tells where it stands")
        return self

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        if any(isinstance(s, str) and "-" in s and s[:3] > s[4:] for s in self.status):
            raise ValueError("a range of statuses goes from the lower to the higher")
        return self


class _Rule(_Data):
    when: Condition = Field(alias="if")
    code: Word | None = None  # a stable word for programs; the default depends on the outcome
    message: str | None = Field(default=None, max_length=200)


class Rule(_Rule):
    """If `when` holds, the exchange means `then`.  "next": send the next status step."""

    then: Literal["done", "pending", "failed", "retry", "busy", "canceled", "lost", "unknown", "unreachable", "next"]
    only_when_up: bool = False  # if the health check reports busy or down, the rule means "busy" instead

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.when.connection and self.then in ("done", "next"):
            raise ValueError(f"a connection error cannot mean {self.then!r}")
        if self.only_when_up and self.then != "failed":
            raise ValueError("only_when_up belongs to a rule whose `then` is 'failed'")
        return self


class HealthRule(_Rule):
    """If `when` holds, the server is in the state `then`."""

    then: Literal["up", "idle", "busy", "down", "foreign", "garbage"]  # idle: up, with a free place


Rules = Annotated[tuple[Rule, ...], *_STEP_RULES]


class _ResponseReading(_Data):
    """How the response of a step is read."""

    meanings: ClassVar[frozenset[str]]  # values of `then` that are allowed here
    rules: Rules = ()
    result: PointerText = "/result"  # "": the whole response
    # text: the whole body as a string.  raw: JSON whose text is stored byte by byte as the server sent it.
    result_as: Literal["json", "text", "raw"] = "json"
    # Place of a signed envelope of the result.  Left out of the stored form: a process of the release before reads it.
    envelope: Annotated[PointerText | None, Field(exclude_if=lambda place: place is None)] = None
    error: PointerText | None = None  # None: /error, /detail and /message
    echo: bool = True  # if the response names a job, it must be this job

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for number, rule in enumerate(self.rules):
            if rule.then not in self.meanings:
                known = ", ".join(sorted(self.meanings))
                raise _fault_at(["rules", number, "then"], f"{rule.then!r} means nothing here; there is: {known}")
            if rule.only_when_up and "busy" not in self.meanings:
                raise _fault_at(["rules", number, "only_when_up"], "a rule of submit alone can ask the health check")
        return self


class _RequestStep(_Data):
    """The request of a step.  In a path, values are percent-encoded; secrets are allowed in headers and bodies only."""

    sources: ClassVar[frozenset[str]]
    method: Method = "GET"
    path: str | None = None
    headers: dict[HeaderName, HeaderText] = Field(default_factory=dict, max_length=30)
    body: JsonValue = None
    connect_s: Annotated[float, Field(gt=0, le=60)] = 3.0
    read_s: Seconds | None = 10.0  # between two pieces of a response; None: only the call's deadline applies

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str | None) -> str | None:
        if path is not None:
            PathTemplate(path, cls.sources - {"secret", "callback_token"})  # URLs are logged
        return path

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, text in headers.items():
            if name.lower() in RESERVED_HEADERS:
                raise _fault_at([name], "this header cannot be set: it is the dispatcher's own; leave it out")
            _check_template(text, cls.sources, [name])
        return headers

    @field_validator("body")
    @classmethod
    def _check_body(cls, body: JsonValue) -> JsonValue:
        for at, text in iter_texts(body):
            _check_template(text, cls.sources, at)
        BodyTemplate(body, cls.sources)
        if len(to_json(body)) > MAX_BODY_BYTES:
            raise ValueError(f"a body template has at most {MAX_BODY_BYTES} bytes")
        return body


def _check_template(text: str, sources: frozenset[str], at: Iterable[str | int]) -> None:
    """Check the template at this place.  Raises PydanticCustomError if it names a value that does not exist here."""
    try:
        parse_text(text, sources)
    except ValueError as error:
        raise _fault_at(at, str(error)) from None


class EventCondition(_Data):
    """When a rule applies to an event of a stream: all given conditions must hold.  A null counts as absent."""

    event: Annotated[tuple[EventName, ...], _one_or_more(EventName)] = ()  # of an SSE event; its default is "message"
    text: PatternText | None = None  # a regular expression that matches in the event's data
    pointer: PointerText | None = None
    value: Annotated[tuple[Scalar, ...], _one_or_more(Scalar)] = ()

    @model_validator(mode="after")
    def _check_subject(self) -> Self:
        if not self.event and self.text is None and self.pointer is None:
            raise ValueError("a condition is about an event's name, its text, or what stands at a pointer")
        if self.value and self.pointer is None:
            raise ValueError("a value needs a pointer that tells where it stands")
        return self


class EventRule(_Data):
    """If `when` holds, the event means `then`.

    last: a piece after which the server may end its stream without an `end` event.
    """

    when: EventCondition = Field(alias="if")
    then: Literal["piece", "last", "end", "skip", "failed", "retry", "busy", "canceled"]
    code: Word | None = None
    message: str | None = Field(default=None, max_length=200)


class Stream(_Data):
    """How a streamed response is read.  Stream() is the stream of the slot protocol."""

    frames: Literal["sse", "lines", "raw"] = "sse"  # server-sent events; one JSON value per line; plain text
    type: MediaType | None = None  # of a streamed response; another type is read whole.  None: by `frames`
    piece: PointerText = "/piece"  # place of the piece in an event
    progress: PointerText | None = "/progress"  # place of the run's progress in an event
    rules: Annotated[tuple[EventRule, ...], *_STEP_RULES] = ()
    # text: the pieces are concatenated.  list: they become a list.  last: the event that ends the stream is the whole
    # response, and is read like a response that is not streamed.
    join: Literal["text", "list", "last"] = "last"
    ends_by: Literal["mark", "length"] = "mark"  # mark: an event ends it; length: the end of the response does
    keep: dict[Word, PointerText] = Field(default_factory=dict, max_length=20)  # further values to keep
    ask: dict[str, JsonValue] = Field(default_factory=dict, max_length=20)  # added to a payload without these fields
    silent_s: Seconds | None = 300.0  # between two pieces, without heartbeats; None: only the call's deadline applies

    @model_validator(mode="after")
    def _check_raw(self) -> Self:
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
    def _check_event_names(self) -> Self:
        named = (number for number, rule in enumerate(self.rules) if rule.when.event)
        if self.frames != "sse" and (number := next(named, None)) is not None:
            raise _fault_at(["rules", number, "if", "event"], "only server-sent events have names")
        return self

    @model_validator(mode="after")
    def _check_end(self) -> Self:
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
    """The step that sends the job.  Its path defaults to the registered endpoint, its body to the payload."""

    sources = SUBMIT_SOURCES
    meanings = frozenset(["done", "pending", "failed", "retry", "busy", "canceled", "lost", "unknown", "unreachable"])
    method: Method = "POST"
    read_s: Seconds | None = None
    id: PointerText = "/job_id"  # place of the server's id of the job
    # The server ends a run whose client closes the connection; "stream": only for a payload with `"stream": true`.
    ends_on_disconnect: bool | Literal["stream"] = False
    idempotent: bool = False  # A request with the key of a run joins the run, or gets its result: no second run begins.
    stream: Stream | None = None  # None: the response is read when it is complete

    @model_validator(mode="after")
    def _check_stream_ask(self) -> Self:
        if self.stream is not None and self.stream.ask and self.body is not None:
            raise _fault_at(["stream", "ask"], "the body stands in submit.body: say it there")
        return self


class StatusStep(_RequestStep, _ResponseReading):
    """The step that polls a run.  `next` sends the next step of the list."""

    sources = JOB_SOURCES
    meanings = frozenset(["done", "pending", "failed", "retry", "canceled", "lost", "unreachable", "next"])
    path: str | None = "/status/{{id}}"
    progress: PointerText | None = "/progress"  # place of a pending run's progress


class Result(_RequestStep, _ResponseReading):
    """The step that fetches the result, for a server whose response to a poll does not contain it."""

    sources = JOB_SOURCES
    meanings = frozenset(["done", "pending", "failed", "retry", "canceled", "lost"])
    path: str | None = "/result/{{id}}"


FreesSlot = Literal["immediate", "eventual", "no"]


class Cancel(_RequestStep, _ResponseReading):
    """The step that requests a cancel.  `canceled`: the server agrees; `failed`: it refuses."""

    sources = JOB_SOURCES
    meanings = frozenset({"canceled", "failed"})
    method: Method = "POST"
    path: str | None = "/cancel/{{id}}"
    echo: bool = False  # the id may be unknown at this time, and a wrong response does little harm
    # Whether a positive response frees the slot.  It can be wrong: "eventual" waits until status or health confirms it.
    frees_slot: FreesSlot = "eventual"


class Callback(_ResponseReading):
    """How a push of the server is read."""

    meanings = frozenset(["done", "pending", "failed", "retry", "canceled", "lost"])
    # A run is lost if its server is healthy, does not name the run, and pushes nothing for so long.
    silent_s: Seconds | None = None


class CountSource(_Data):
    """Places of the number of active jobs, all of one kind.  Their values are summed."""

    pointer: Annotated[tuple[PointerText, ...], Field(max_length=5), _one_or_more(PointerText)] = ()  # a whole number
    count: Annotated[tuple[PointerText, ...], Field(max_length=5), _one_or_more(PointerText)] = ()  # a list: its length
    metric: Annotated[tuple[MetricName, ...], Field(max_length=5), _one_or_more(MetricName)] = ()  # Prometheus text

    @model_validator(mode="after")
    def _check_one_kind(self) -> Self:
        if sum(bool(places) for places in (self.pointer, self.count, self.metric)) != 1:
            raise ValueError("active is a pointer, a count or a metric")
        return self


class StartSource(_Data):
    """The place of a value that differs for each process of the server: exactly one of these."""

    pointer: PointerText | None = None
    metric: MetricName | None = None  # Prometheus text

    @model_validator(mode="after")
    def _check_one_place(self) -> Self:
        if (self.pointer is None) == (self.metric is None):
            raise ValueError("started is a pointer or a metric")
        return self


class HealthStep(_RequestStep):
    """The step that requests the health of the server."""

    sources = HEALTH_SOURCES
    path: str | None = "/health"
    connect_s: Annotated[float, Field(gt=0, le=60)] = 2.0
    read_s: Seconds | None = 5.0
    active: CountSource | None = CountSource(pointer=("/active_jobs",))
    job_ids: Annotated[tuple[PointerText, ...], Field(max_length=5), _one_or_more(PointerText)] | None = (
        "/job_ids",
    )  # lists
    job_ids_item: PointerText = ""  # place of the id in an element of such a list
    running: bool = True  # active includes all running jobs; a count without some of them frees no slot
    started: StartSource | None = None
    idempotent: PointerText | None = "/idempotent"  # a true at this place means the same as submit.idempotent
    only_when_used: bool = False  # True: health is requested only while a job runs there, or may still run there
    error: PointerText | None = None  # what is wrong with the server; None: /error, /detail and /message
    rules: Annotated[tuple[HealthRule, ...], *_STEP_RULES] = ()


class OutputSize(_Data):
    """The expected output of a run, in the unit that its payload uses: tokens, images, seconds."""

    # Places in a payload; the first one with a whole number applies.
    pointer: Annotated[tuple[PointerText, ...], Field(min_length=1, max_length=10), _one_or_more(PointerText)]
    default: Annotated[int, Field(ge=0, le=2**53, strict=True)]  # for a payload without this number


class Description(_Data):
    """How one kind of inference server is called.  Description() is the slot protocol."""

    mode: Literal["sync", "async", "auto", "callback"] = "auto"
    submit: Submit = Submit()
    status: Annotated[tuple[StatusStep, ...], Field(min_length=1, max_length=5), _one_or_more(StatusStep)] = (
        StatusStep(),
    )
    result: Result | None = None
    cancel: Annotated[tuple[Cancel, ...], Field(min_length=1, max_length=5), _one_or_more(Cancel)] | None = (Cancel(),)
    callback: Callback = Callback()
    health: HealthStep | None = HealthStep()
    # The id of the run at the server, if the dispatcher chooses it: the run can be found although the response to its
    # submit was lost.  Some servers run the same id twice.
    given_id: Literal["{{job/id}}", "{{job/attempt_id}}"] | None = None

    output_size: OutputSize | None = None  # the value of {{run/output_size}}

    @model_validator(mode="after")
    def _check_output_size(self) -> Self:
        if self.output_size is None and (at := self._find_template("run", "output_size")) is not None:
            raise _fault_at(at, "for {{run/output_size}} add output_size, which says where a payload tells it")
        return self

    @model_validator(mode="after")
    def _check_next(self) -> Self:
        for number, rule in enumerate(self.status[-1].rules):
            if rule.then == "next":
                at: list[str | int] = ["status", len(self.status) - 1, "rules", number, "then"]
                raise _fault_at(at, "there is no step after the last status step")
        return self

    # False: reading a result deletes it at the server.  The worker stores it at once, and no other process reads it.
    keeps_results: bool = True

    @property
    def is_found_by_given_id(self) -> bool:
        """Return whether a run can be polled, or can end by a push, although the response to its submit was lost."""
        return self.given_id is not None and self.mode in ("async", "callback")

    @property
    def cancel_frees_slot(self) -> FreesSlot:
        """Return whether a positive response to a cancel frees the slot; of several requests, the weakest value."""
        found = {step.frees_slot for step in self.cancel or ()}
        return "no" if not found or "no" in found else "eventual" if "eventual" in found else "immediate"

    @cached_property
    def asks_by_payload(self) -> bool:
        """Return whether a request that polls or cancels a run contains a value of the payload."""
        steps = (*self.status, self.result, *(self.cancel or ()))
        texts = (text for step in steps if step for _, text in iter_texts(step.model_dump()))
        return any(source == "payload" for text in texts for source, _ in sources_in(text))

    @cached_property
    def sends_payload_alone(self) -> bool:
        """Return whether the submit's body is the unchanged payload, and no other part of the request depends on it."""
        submit = self.submit
        texts = [text for _, text in iter_texts({"path": submit.path, "headers": submit.headers})]
        uses_payload = any(source in ("payload", "run") for text in texts for source, _ in sources_in(text))
        reads_payload = bool(submit.stream and submit.stream.ask) or submit.ends_on_disconnect == "stream"
        return submit.body is None and not reads_payload and not uses_payload

    def ends_on_disconnect(self, payload: Any) -> bool:
        """Return whether the server ends the run of this payload when the connection closes."""
        submit = self.submit
        if submit.ends_on_disconnect != "stream":
            return submit.ends_on_disconnect
        fields = {**(submit.stream.ask if submit.stream else {}), **(payload if isinstance(payload, dict) else {})}
        return fields.get("stream") is True

    @cached_property
    def asks_for_swap(self) -> bool:
        """Return whether the submit contains {{run/swap}}."""
        return self._find_template("run", "swap") is not None

    def _find_template(self, source: str, name: str) -> tuple[str | int, ...] | None:
        """Return the place of this template in the submit; None: the submit does not contain it."""
        parts = {"path": self.submit.path, "headers": self.submit.headers, "body": self.submit.body}
        places = (at for at, text in iter_texts(parts) if (source, name) in sources_in(text))
        return next((("submit", *at) for at in places), None)

    @cached_property
    def secrets(self) -> frozenset[str]:
        """Return the names of the secrets in its templates."""
        texts = (text for _, text in iter_texts(self.model_dump()))
        return frozenset(name for text in texts for name in secrets_in(text))


DEFAULT = Description()


def from_shorthand(
    model_type: Literal["sync", "async"] = "sync",
    poll_endpoint_template: str | None = None,
    id_field: str | None = None,
) -> Description:
    """Return the slot protocol with a model's own fields.

    poll_endpoint_template: a path with {id}; None: '/status/{id}'.  id_field: the field of the response to the submit
    that holds the id, or a JSON pointer to it; None: 'job_id'.
    Raises ValueError, which names the field.  Every returned description can be compiled.
    """
    before, placeholder, after = (poll_endpoint_template or "/status/{id}").partition("{id}")
    if not placeholder or set("{}") & set(before + after):
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
