"""Measure the cost of traces: python -m tools.benchmarks.traces [JOBS].

Prints, in microseconds for each job, the additional time of its submit and of its run, with the export of spans on and
off, and with and without a trace of the client.  Also prints the time that the relay, which no job waits for, spends on
the spans of a job.  Each figure is the minimum of seven measurements.
"""

import sys
import timeit
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from routing.queries import trace_spans
from routing.queries.trace_spans import ATTEMPT
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import State
from slotkeeper.jobs.values import Event, new_job_id
from slotkeeper.outbox.timelines import JobTimeline
from slotkeeper.trace_context import parse_traceparent
from tasks import tracing
from tasks.relay.sinks import otlp

_TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
_RESOURCE = Resource({"service.name": "slotkeeper"})
_STATES = ((State.QUEUED, 0), (State.RUNNING, 1), (State.COMPLETED, 1))


def main(jobs: int = 10_000) -> None:
    ids = [new_job_id() for _ in range(jobs)]
    for exported in (False, True):
        tracing.exports_spans = lambda exported=exported: exported  # type: ignore[assignment]
        for traceparent in (None, _TRACEPARENT):
            submit = _time_us([(traceparent,)] * jobs, parse_traceparent)
            run = _time_us([(job_id, traceparent, ATTEMPT, 1) for job_id in ids], tracing.outgoing_traceparent)
            case = f"traces {'on' if exported else 'off'}, a client in {'a trace' if traceparent else 'none'}"
            sys.stdout.write(f"{case:32} submit {submit:5.2f}  run {run:5.2f} µs\n")
    timelines = [(_timeline(job_id),) for job_id in ids[:1000]]
    sys.stdout.write(
        f"the relay: {_time_us(timelines, _encode):.0f} µs and {len(_encode(*timelines[0]))} bytes for a job\n"
    )


def _time_us(calls: Sequence[tuple[Any, ...]], function: Callable[..., Any]) -> float:
    """Return the microseconds of one call of `function`, which is called with each of `calls`."""

    def call_all() -> None:
        for arguments in calls:
            function(*arguments)

    return min(timeit.repeat(call_all, number=1, repeat=7)) / len(calls) * 1e6


def _encode(timeline: JobTimeline) -> bytes:
    spans = [otlp.to_otel_span(span, _RESOURCE) for span in trace_spans.job_spans(timeline)]
    return encode_spans(spans).SerializeToString()


def _timeline(job_id: str) -> JobTimeline:
    events = [
        Event(n, job_id, EVENT_TYPES[state], n, attempt, {"server": "gpu1"})
        for n, (state, attempt) in enumerate(_STATES)
    ]
    return JobTimeline(job_id, "zimg", "default", _TRACEPARENT, events)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
