"""A job's life as spans of its trace, told after the fact from its events.

    job                  from its acceptance to its end, below what its client named
      submit             the moment of its acceptance
      wait               until each start, however often it was postponed meanwhile
      attempt            from a start to what came of it
        exchange         what its server was asked and answered
        settle           the moment of its end
      webhook            from its end until its callback URL was told
      job                a dead job that is revived: from there to its next end

Their ids follow from job, kind and number (slotkeeper/trace_context.py): told twice, or by another process, they are
the same. What has not ended is not told yet, so none is ever told otherwise than before.
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
_WAITS = frozenset({State.QUEUED, State.DELAYED})
_GOOD = frozenset({State.COMPLETED, State.CANCELED})
_MOST = 200
"""Transitions of which a job's spans are told; of more the first and the last, so that no job's trace is endless."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Times in ms since the epoch.  `parent`: "": none."""

    trace: str
    id: str
    parent: str
    name: str
    start_ms: int
    end_ms: int
    failed: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def job_spans(trail: JobTimeline) -> list[TraceSpan]:
    """All of each of its lives that has ended, but for webhooks; none, if the client's trace is not wanted."""
    if not _is_wanted(trail):
        return []
    return [span for n, life in enumerate(_lives(trail.transitions)) for span in _of_life(trail, n, life)]


def webhook_spans(trail: JobTimeline) -> list[TraceSpan]:
    """That its callback URL was told, once for each end."""
    if not _is_wanted(trail):
        return []
    return [_of_webhook(trail, delivery) for delivery in trail.deliveries]


def webhook(message_id: str) -> str:
    """The kind of a webhook's span: a job that was revived has several."""
    return f"{WEBHOOK}/{message_id}"


def _is_wanted(trail: JobTimeline) -> bool:
    return find_trace(trail.job_id, trail.traceparent).sampled


def _lives(transitions: Sequence[Event]) -> Iterator[list[Event]]:
    """From its acceptance, or from where it was revived, to an end."""
    life: list[Event] = []
    for event in transitions:
        life.append(event)
        if _STATES[event.type] in FINAL_STATES:
            yield life
            life = []


def _of_life(trail: JobTimeline, n: int, life: list[Event]) -> Iterator[TraceSpan]:
    trace, first, last = find_trace(trail.job_id, trail.traceparent), life[0], life[-1]
    id_, root = make_span_id(trail.job_id, JOB, n), make_span_id(trail.job_id, JOB)
    state = _STATES[last.type]
    facts = {
        "job_id": trail.job_id,
        "tenant": trail.tenant,
        "model": trail.model,
        "state": state.value,
        "why": last.data.get("why"),
        "attempts": last.attempt,
    }
    yield TraceSpan(
        trace.id, id_, root if n else trace.parent, JOB, first.at_ms, last.at_ms, failed=state not in _GOOD, facts=facts
    )
    if n == 0:
        yield _below(trail, id_, SUBMIT, 0, first.at_ms, first.at_ms)
    halves = (life,) if len(life) <= _MOST else (life[: _MOST // 2], life[-_MOST // 2 :])
    for half in halves:
        yield from _parts(trail, id_, half)


def _parts(trail: JobTimeline, above: str, transitions: Sequence[Event]) -> Iterator[TraceSpan]:
    """Waits and attempts in turn."""
    waits: Event | None = None
    runs: Event | None = None
    for event in transitions:
        state = _STATES[event.type]
        if runs is not None:
            yield from _attempt(trail, above, runs, event)
        if waits is not None and state not in _WAITS:
            yield _below(trail, above, WAIT, waits.attempt, waits.at_ms, event.at_ms)
            waits = None
        runs = event if state is State.RUNNING else None
        if state in _WAITS and waits is None:
            waits = event


def _attempt(trail: JobTimeline, above: str, began: Event, ended: Event) -> Iterator[TraceSpan]:
    n, start, end = began.attempt, began.at_ms, ended.at_ms
    failed = _STATES[ended.type] not in _GOOD
    server, id_ = {"server": began.data.get("server")}, make_span_id(trail.job_id, ATTEMPT, n)
    yield _below(trail, above, ATTEMPT, n, start, end, failed=failed, **server, why=ended.data.get("why"))
    yield _below(trail, id_, EXCHANGE, n, start, end, failed=failed, **server)
    yield _below(trail, id_, SETTLE, n, end, end)


def _of_webhook(trail: JobTimeline, it: CallbackDelivery) -> TraceSpan:
    trace, above = find_trace(trail.job_id, trail.traceparent), make_span_id(trail.job_id, JOB)
    id_ = make_span_id(trail.job_id, webhook(it.id))
    return TraceSpan(
        trace.id, id_, above, WEBHOOK, it.ended_ms, max(it.ended_ms, it.delivered_ms), facts={"tries": it.tries}
    )


def _below(
    trail: JobTimeline, above: str, name: str, n: int, start_ms: int, end_ms: int, *, failed: bool = False, **facts: Any
) -> TraceSpan:
    trace, id_ = find_trace(trail.job_id, trail.traceparent).id, make_span_id(trail.job_id, name, n)
    told = {"attempt": n} | facts if n else facts
    return TraceSpan(trace, id_, above, name, start_ms, max(start_ms, end_ms), failed, told)
