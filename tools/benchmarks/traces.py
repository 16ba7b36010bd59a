"""What traces cost: python -m tools.benchmarks.traces [JOBS].

In microseconds for each job: what its submit and its run do more, by whether traces are told and whether its client is
in one; and what the relay, which no job waits for, spends on the spans of a job.  The least of seven times.
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

_GIVEN = f"00-{'a' * 32}-{'b' * 16}-01"
_RESOURCE = Resource({"service.name": "slotkeeper"})
_WAY = ((State.QUEUED, 0), (State.RUNNING, 1), (State.COMPLETED, 1))


def main(jobs: int = 10_000) -> None:
    ids = [new_job_id() for _ in range(jobs)]
    for exported in (False, True):
        tracing.exports_spans = lambda told=exported: told  # type: ignore[assignment]
        for given in (None, _GIVEN):
            submit = _each([(given,)] * jobs, parse_traceparent)
            run = _each([(it, given, ATTEMPT, 1) for it in ids], tracing.outgoing_traceparent)
            whose = f"traces {'on' if exported else 'off'}, a client in {'a trace' if given else 'none'}"
            sys.stdout.write(f"{whose:32} submit {submit:5.2f}  run {run:5.2f} µs\n")
    trails = [(_trail(it),) for it in ids[:1000]]
    sys.stdout.write(f"the relay: {_each(trails, _told):.0f} µs and {len(_told(*trails[0]))} bytes for a job\n")


def _each(calls: Sequence[tuple[Any, ...]], act: Callable[..., Any]) -> float:
    """Microseconds of an act, which is called with each of these."""

    def all_of_them() -> None:
        for arguments in calls:
            act(*arguments)

    return min(timeit.repeat(all_of_them, number=1, repeat=7)) / len(calls) * 1e6


def _told(trail: JobTimeline) -> bytes:
    found = [otlp.to_otel_span(span, _RESOURCE) for span in trace_spans.job_spans(trail)]
    return encode_spans(found).SerializeToString()


def _trail(job_id: str) -> JobTimeline:
    events = [
        Event(n, job_id, EVENT_TYPES[state], n, attempt, {"server": "gpu1"}) for n, (state, attempt) in enumerate(_WAY)
    ]
    return JobTimeline(job_id, "zimg", "default", _GIVEN, events)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
