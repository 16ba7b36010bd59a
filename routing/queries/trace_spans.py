"""Build the spans of a job's trace from its events, after its end.

    job                  from acceptance to the end; its parent is the span that the client names
      submit             the moment of acceptance
      wait               until a start, including all delays before it
      attempt            from a start to the end of the run
        exchange         the request to the server and its response
        settle           the moment at which the end was stored
      webhook            from the end to the delivery to the callback URL
      job                of a dead job that was revived: from then to the next end

The ids of spans are computed from the job, the kind and the number (slotkeeper/trace_context.py), so a span that is
sent twice, or by two processes, is the same.  A span is built only after its end, so it never changes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.values import Event
from slotkeeper.outbox.timelines import CallbackDelivery, JobTimeline
from slotkeeper.trace_context import find_trace, make_span_id

JOB, SUBMIT, WAIT, ATTEMPT, EXCHANGE, SETTLE, WEBHOOK = (
    *("job", "submit", "wait", "attempt", "exchange", "settle", "webhook"),
)
_STATES = {name: state for state, name in EVENT_TYPES.items()}
_WAITING_STATES = frozenset({State.QUEUED, State.DELAYED})
_GOOD_STATES = frozenset({State.COMPLETED, State.CANCELED})
# Of more transitions the first and the last are used, so that no trace grows without limit.
_MAX_TRANSITIONS = 200


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A span.  `parent` "": it has none.  Times in ms since the epoch."""

    trace: str
    id: str
    parent: str
    name: str
    start_ms: int
    end_ms: int
    failed: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def job_spans(timeline: JobTimeline) -> list[TraceSpan]:
    """Return the spans of a job up to its last end, without webhooks; nothing if the client's trace is not sampled."""
    if not _is_sampled(timeline):
        return []
    return [
        span
        for number, life in enumerate(_split_into_lives(timeline.transitions))
        for span in _life_spans(timeline, number, life)
    ]


def webhook_spans(timeline: JobTimeline) -> list[TraceSpan]:
    """Return a span for each delivery to the callback URL; nothing if the client's trace is not sampled."""
    if not _is_sampled(timeline):
        return []
    return [_webhook_span(timeline, delivery) for delivery in timeline.deliveries]


def webhook_span_kind(message_id: str) -> str:
    """Return the kind from which the id of a webhook's span is computed: a job that was revived has several."""
    return f"{WEBHOOK}/{message_id}"


def _is_sampled(timeline: JobTimeline) -> bool:
    return find_trace(timeline.job_id, timeline.traceparent).sampled


def _split_into_lives(transitions: Sequence[Event]) -> Iterator[list[Event]]:
    """Yield the transitions up to each end; those after the last end are left out."""
    life: list[Event] = []
    for event in transitions:
        life.append(event)
        if _STATES[event.type] in FINAL_STATES:
            yield life
            life = []


def _life_spans(timeline: JobTimeline, number: int, life: list[Event]) -> Iterator[TraceSpan]:
    trace, first, last = find_trace(timeline.job_id, timeline.traceparent), life[0], life[-1]
    id_, first_id = make_span_id(timeline.job_id, JOB, number), make_span_id(timeline.job_id, JOB)
    state = _STATES[last.type]
    facts = {
        "job_id": timeline.job_id,
        "tenant": timeline.tenant,
        "model": timeline.model,
        "state": state.value,
        "why": last.data.get("why"),
        "attempts": last.attempt,
    }
    parent, failed = first_id if number else trace.parent, state not in _GOOD_STATES
    yield TraceSpan(trace.id, id_, parent, JOB, first.at_ms, last.at_ms, failed, facts)
    if number == 0:
        yield _child_span(timeline, id_, SUBMIT, 0, first.at_ms, first.at_ms)
    if len(life) <= _MAX_TRANSITIONS:
        yield from _waits_and_attempts(timeline, id_, life)
    else:
        yield from _waits_and_attempts(timeline, id_, life[: _MAX_TRANSITIONS // 2])
        yield from _waits_and_attempts(timeline, id_, life[-_MAX_TRANSITIONS // 2 :])


def _waits_and_attempts(timeline: JobTimeline, parent: str, transitions: Sequence[Event]) -> Iterator[TraceSpan]:
    wait: Event | None = None
    run: Event | None = None
    for event in transitions:
        state = _STATES[event.type]
        if run is not None:
            yield from _attempt_spans(timeline, parent, run, event)
        if wait is not None and state not in _WAITING_STATES:
            yield _child_span(timeline, parent, WAIT, wait.attempt, wait.at_ms, event.at_ms)
            wait = None
        run = event if state is State.RUNNING else None
        if state in _WAITING_STATES and wait is None:
            wait = event


def _attempt_spans(timeline: JobTimeline, parent: str, began: Event, ended: Event) -> Iterator[TraceSpan]:
    number, start, end = began.attempt, began.at_ms, ended.at_ms
    failed = _STATES[ended.type] not in _GOOD_STATES
    server, id_ = {"server": began.data.get("server")}, make_span_id(timeline.job_id, ATTEMPT, number)
    why = ended.data.get("why")
    yield _child_span(timeline, parent, ATTEMPT, number, start, end, failed=failed, **server, why=why)
    yield _child_span(timeline, id_, EXCHANGE, number, start, end, failed=failed, **server)
    yield _child_span(timeline, id_, SETTLE, number, end, end)


def _webhook_span(timeline: JobTimeline, delivery: CallbackDelivery) -> TraceSpan:
    trace, parent = find_trace(timeline.job_id, timeline.traceparent), make_span_id(timeline.job_id, JOB)
    id_ = make_span_id(timeline.job_id, webhook_span_kind(delivery.id))
    end_ms = max(delivery.ended_ms, delivery.delivered_ms)
    return TraceSpan(trace.id, id_, parent, WEBHOOK, delivery.ended_ms, end_ms, facts={"tries": delivery.tries})


def _child_span(
    timeline: JobTimeline,
    parent: str,
    name: str,
    number: int,
    start_ms: int,
    end_ms: int,
    *,
    failed: bool = False,
    **facts: Any,
) -> TraceSpan:
    """Return a span below `parent`.  `number`: of the attempt; 0: it belongs to none."""
    trace = find_trace(timeline.job_id, timeline.traceparent).id
    id_ = make_span_id(timeline.job_id, name, number)
    all_facts = {"attempt": number} | facts if number else facts
    return TraceSpan(trace, id_, parent, name, start_ms, max(start_ms, end_ms), failed, all_facts)
