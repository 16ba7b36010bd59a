"""Reads a streamed response: splits it into events, passes their pieces on, and joins the pieces to a result.

A StreamReader reads one response.  The HTTP exchange feeds it bytes (`feed`), and the server adapter then gets the
`outcome`.  A stream that does not end as its description says has no result: half a text must not look like a whole
one.
"""

import math
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Any, NamedTuple

from routing.dispatch.outcome import BAD_ANSWER, STREAM_UNENDED, Outcome, OutcomeKind
from tasks.servers.default_rules import event_rules
from tasks.servers.description import EventCondition, EventRule, Stream
from tasks.servers.pointers import MISSING, Pointer, parse, resolve
from tasks.servers.responses import (
    NOT_JSON,
    FailureReason,
    NoResponse,
    Response,
    has_explicit_length,
    is_too_deep,
    redact,
)
from tasks.servers.rules import TOO_DEEP, CompiledRule, Judge, ResponseContext, compile_event_rule

MAX_PIECES = 100_000
"""Limit of the pieces of a list: each takes far more memory than its bytes."""
_END_KINDS = frozenset(
    {OutcomeKind.DONE, OutcomeKind.FAILED, OutcomeKind.RETRY, OutcomeKind.BUSY, OutcomeKind.CANCELED}
)
_ENDS = frozenset({"last", "end"})
_SHOWN_VALUES = 3  # of a condition, in a message
_SHOWN_CHARS = 100  # of the last event, in a message
# The client closed the connection, so the server may still run the job.
_CLOSED_BY_CLIENT = frozenset({FailureReason.TOO_LARGE, FailureReason.TOO_MANY_PIECES, FailureReason.DAMAGED})
# FAILED, not RETRY: the same request has the same result, and each try is a whole run on a GPU.
_TOO_MANY_PIECES = Outcome(
    OutcomeKind.FAILED,
    code="answer_too_large",
    message=f"The server's stream has more than {MAX_PIECES} pieces: have the server send fewer, larger ones.",
    server_still_running=True,
)


class Piece(NamedTuple):
    """A part of the response that is passed on during the run: a text, a value, or the progress.

    offset: the characters or values before this piece; 0: the first piece, of this run or of a repeated one.
    """

    text: str | None = None
    value: Any = MISSING
    offset: int = 0
    progress: Any = None


OnPiece = Callable[[Piece], None]


def ignore_piece(_: Piece) -> None:
    """Ignore a piece, if no client watches the run."""


@dataclass(frozen=True, slots=True)
class _Event:
    """One event of a stream.  `name`: of a server-sent event; its default is "message"."""

    data: bytes
    name: str = "message"


@dataclass(frozen=True, slots=True)
class _CompiledEventRule:
    """An EventRule, compiled."""

    rule: CompiledRule
    events: frozenset[str]  # names; empty: events of any name
    condition: str  # for messages

    def holds_for(self, event: _Event, response: Response) -> bool:
        """Return whether this rule matches the event; `response`: the event's data as a response."""
        return (not self.events or event.name in self.events) and self.rule.holds_for(response, None)


def _compile_rule(rule: EventRule) -> _CompiledEventRule:
    return _CompiledEventRule(compile_event_rule(rule), frozenset(rule.when.event), _describe_condition(rule.when))


def _describe_condition(condition: EventCondition) -> str:
    """Return a condition as words for messages: `text ^\\[DONE\\]`, `pointer /status, value success/ok/…`."""
    parts = []
    for name, field in condition.model_dump(exclude_defaults=True).items():
        values = [str(value) for value in (field if isinstance(field, tuple) else (field,))]
        parts.append(f"{name} {'/'.join(values[:_SHOWN_VALUES])}{'/…' if len(values) > _SHOWN_VALUES else ''}")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """A Stream, compiled."""

    stream: Stream
    rules: tuple[_CompiledEventRule, ...]
    piece: Pointer
    progress: Pointer | None
    keep: tuple[tuple[str, Pointer], ...]
    ends: frozenset[OutcomeKind]
    """What the last event of a stream can mean, if it is the whole response."""

    @property
    def end_conditions(self) -> str:
        """Return the conditions of the events that end the stream, as words for messages."""
        return " or ".join(compiled.condition for compiled in self.rules if compiled.rule.then in _ENDS)

    @property
    def may_end_without_mark(self) -> bool:
        """Return whether an event can mark the last piece, after which no end mark needs to follow."""
        return any(compiled.rule.then == "last" for compiled in self.rules)


def compile_stream(stream: Stream, *, may_stay_pending: bool = False) -> StreamPlan:
    """Compile a validated stream; the default rules of events follow its own.

    may_stay_pending: the run may go on after the end of the stream, and is then polled.
    """
    rules = (*stream.rules, *(event_rules(stream.join == "last") if stream.frames != "raw" else ()))
    return StreamPlan(
        stream,
        tuple(map(_compile_rule, rules)),
        parse(stream.piece),
        None if stream.progress is None else parse(stream.progress),
        tuple((name, parse(pointer)) for name, pointer in stream.keep.items()),
        _END_KINDS | {OutcomeKind.PENDING} if may_stay_pending else _END_KINDS,
    )


class StreamReader:
    """Reads one response that may be a stream.  `on_piece` is called with each piece as it is received."""

    def __init__(
        self, plan: StreamPlan, judge: Judge, make_context: Callable[[], ResponseContext], on_piece: OnPiece
    ) -> None:
        self._plan, self._stream = plan, plan.stream
        self._judge, self._make_context, self._on_piece = judge, make_context, on_piece
        self._headers: Mapping[str, str] = {}
        self._split: Callable[[bytes], Iterator[_Event]] = (
            _SseSplitter() if self._stream.frames == "sse" else _JsonLineSplitter()
        )
        self._decode = getincrementaldecoder("utf-8")("replace")
        self._text = StringIO()  # A list of short pieces would take fifty times their size.
        self._values: list[Any] = []
        self._offset = 0
        self._kept_values: dict[str, Any] = {}
        self._last: Response | None = None
        self._last_event = b""
        self._event_count = 0
        self._is_empty = True
        self._may_end = False
        self._verdict: Outcome | None = None
        self._last_content_s = 0.0
        self.is_stream = False

    def accepts(self, status: int, headers: Mapping[str, str]) -> bool:
        """Return whether a response with this head is a stream; if not, it is read when it is complete."""
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        self.is_stream = 200 <= status < 300 and media_type == self._stream.media_type
        self._headers, self._last_content_s = headers, time.monotonic()
        return self.is_stream

    @property
    def is_finished(self) -> bool:
        """Return whether the outcome is certain, whatever the server may still send."""
        return self._verdict is not None

    @property
    def is_aborted(self) -> bool:
        """Return whether the exchange must be ended although the server may still run the job."""
        return self._verdict is not None and self._verdict.server_still_running

    @property
    def silence_ends_s(self) -> float:
        """Return the monotonic time until which the server may send nothing but heartbeats; infinite: without limit."""
        if self._stream.silent_s is None or not self.is_stream or self.is_finished:
            return math.inf
        return self._last_content_s + self._stream.silent_s

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the body."""
        self._is_empty = self._is_empty and not data.strip()
        if self._stream.frames == "raw":
            self._add_text(self._decode.decode(data))
            return
        for event in self._split(data):
            if self._verdict is not None:
                return
            self._handle_event(event)

    def outcome(self, reply: Response | NoResponse) -> Outcome | None:
        """Return the outcome of the stream, whose exchange ended with `reply`."""
        if self._verdict is not None:
            return self._verdict
        if isinstance(reply, NoResponse):
            judged = self._judge.outcome(reply, self._make_context())
            return (
                judged._replace(server_still_running=True) if judged and reply.reason in _CLOSED_BY_CLIENT else judged
            )
        if has_length := has_explicit_length(reply.headers):
            self._flush()
        if self._verdict is None and (self._may_end or (has_length and self._stream.ends_by == "length")):
            return self._join_pieces()
        return self._verdict or self._unended(has_length)

    def _unended(self, has_length: bool) -> Outcome:
        """Return the outcome of a stream that the server ended without an end mark.

        It was cut if it has no length, it was empty, or the server usually marks its last piece: another try may be
        complete.  Otherwise the server does not send the end mark that its description names.
        """
        is_cut = not has_length or self._is_empty or self._plan.may_end_without_mark
        parts = ["The server ended its stream"]
        if not has_length:
            parts.append("it had announced no length, so that it may be cut")
        if self._plan.end_conditions:
            parts.append(f"no event matched the rule for its end ({self._plan.end_conditions})")
        if self._stream.frames != "raw":
            last = self._last_event.decode("utf-8", "replace")
            last = last if len(last) <= _SHOWN_CHARS else last[:_SHOWN_CHARS] + "…"
            parts.append(f"the last of {self._event_count} events was {last}" if self._event_count else "no event came")
        message = redact("; ".join(parts), self._make_context().secrets)
        return Outcome(OutcomeKind.RETRY, code="stream_cut" if is_cut else STREAM_UNENDED, message=message)

    def _flush(self) -> None:
        """Read the last event although no line end follows it: the response is complete, so the event is, too."""
        if self._stream.frames == "raw":
            self._add_text(self._decode.decode(b"", final=True))
        else:
            self.feed(b"\n\n")

    def _handle_event(self, event: _Event) -> None:
        response = Response(200, self._headers, event.data)
        self._last_event, self._event_count = event.data or event.name.encode(), self._event_count + 1
        rule = next((one.rule for one in self._plan.rules if one.holds_for(event, response)), None)
        match rule.then if rule else "piece" if event.data else "skip":
            case "skip":
                return
            case "piece":
                self._add_piece(response, requires_json=True)
            case "last":
                self._add_piece(response, requires_json=True)
                self._may_end = True
            case "end":
                self._add_piece(response, requires_json=False)
                self._last = response if event.data else self._last
                self._verdict = self._verdict or self._join_pieces()
            case _ if rule is not None:
                self._verdict = self._judge.apply(rule, response, self._make_context())

    def _add_piece(self, response: Response, *, requires_json: bool) -> None:
        if response.json is NOT_JSON:
            if requires_json:
                message = f"an event of the server's stream is not JSON: {response.fault}"
                self._verdict = self._bad_answer(redact(message, self._make_context().secrets))
            return
        self._last_content_s, self._last = time.monotonic(), response
        for name, pointer in self._plan.keep:
            if (value := resolve(response.json, pointer)) is not MISSING and value is not None:
                self._kept_values[name] = value
        self._report_progress(response.json)
        value = resolve(response.json, self._plan.piece)
        if value is MISSING or value is None:
            return
        if isinstance(value, str) and self._stream.join != "list":
            self._add_text(value)
        elif self._stream.join == "text":
            self._verdict = self._bad_answer("a piece of its text is no text")
        else:
            self._add_value(value)

    def _report_progress(self, event: Any) -> None:
        progress = MISSING if self._plan.progress is None else resolve(event, self._plan.progress)
        if progress is not MISSING and progress is not None and not is_too_deep(progress):
            self._on_piece(Piece(progress=progress))

    def _add_text(self, text: str) -> None:
        self._last_content_s = time.monotonic()
        if not text:
            return
        if self._stream.join == "text":
            self._text.write(text)
        elif self._stream.join == "list":
            self._add_value(text)
            return
        self._on_piece(Piece(text=text, offset=self._offset))
        self._offset += len(text)

    def _add_value(self, value: Any) -> None:
        if is_too_deep(value):
            self._verdict = TOO_DEEP._replace(server_still_running=True)
            return
        if self._stream.join == "list":
            self._values.append(value)
            if len(self._values) > MAX_PIECES:
                self._verdict = _TOO_MANY_PIECES
                return
        self._on_piece(Piece(value=value, offset=self._offset))
        self._offset += 1

    def _join_pieces(self) -> Outcome:
        """Return the outcome of a complete stream."""
        if self._stream.join == "last":
            judged = None if self._last is None else self._judge.outcome(self._last, self._make_context())
            return (
                judged if judged and judged.kind in self._plan.ends else self._bad_answer("its last event is no answer")
            )
        joined: Any = self._text.getvalue() if self._stream.join == "text" else self._values
        whole = {"output": joined, **self._kept_values} if self._stream.keep else joined
        return TOO_DEEP if is_too_deep(whole) else Outcome(OutcomeKind.DONE, result=whole)

    def _bad_answer(self, message: str) -> Outcome:
        return Outcome(OutcomeKind.RETRY, code=BAD_ANSWER, message=message, server_still_running=True)


class _LineSplitter:
    """Splits a stream into complete lines, which end with LF, CR or both.  It looks at each byte once."""

    def __init__(self) -> None:
        self._unfinished = bytearray()
        self._after_cr = False

    def lines(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, and keep the rest."""
        if self._after_cr and data:
            data = data.removeprefix(b"\n")
            self._after_cr = False
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end:
            self._unfinished += data
            return []
        self._after_cr = data.endswith(b"\r")
        complete = bytes(self._unfinished) + data[:end]
        self._unfinished = bytearray(data[end:])
        return complete.splitlines()


class _JsonLineSplitter(_LineSplitter):
    """Splits a stream whose events are lines, each with a JSON value."""

    def __call__(self, data: bytes) -> Iterator[_Event]:
        return (_Event(line) for line in self.lines(data) if line.strip())


class _SseSplitter(_LineSplitter):
    """Splits a stream of server-sent events, as browsers do.

    Unlike in browsers, an event may have a name and no data: some servers end a stream with such an event.
    """

    def __init__(self) -> None:
        super().__init__()
        self._data: bytearray | None = None  # None: no line of data was received
        self._name = ""

    def __call__(self, data: bytes) -> Iterator[_Event]:
        for line in self.lines(data):
            if line:
                self._read(line)
                continue
            if self._data is not None or self._name:
                yield _Event(bytes(self._data or b""), self._name or "message")
            self._data, self._name = None, ""

    def _read(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field.removeprefix(b"\xef\xbb\xbf") == b"data":
            if self._data is None:
                self._data = bytearray(value)
            else:
                self._data += b"\n" + value
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
