"""The trace of a job is complete, in an in-memory exporter and in an OTLP collector, also after failed attempts."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import update

from app.up.ports import free_port
from routing.queries import trace_spans
from slotkeeper.errors import InvalidSetting
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.tables import events
from slotkeeper.jobs.values import Event, Job, JobError
from slotkeeper.outbox import timelines
from slotkeeper.outbox.event_reader import EventReader, OutboxEvent
from slotkeeper.outbox.sink_cursors import SinkCursors
from slotkeeper.trace_context import find_trace, make_span_id
from tasks.config import EventSettings
from tasks.relay.relay import Relay
from tasks.relay.sinks.sink import PublishedEvent
from tests.support.builders import CALLBACK, SECOND, T0, a_queued_job, a_start, an_ended_job
from tests.support.callbacks import claim, delivered, due_ids

otlp = pytest.importorskip("tasks.relay.sinks.otlp", reason="the extra otel is not installed")
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from tests.support.collector import Collector  # noqa: E402
from tests.support.ends import store_end  # noqa: E402

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
ATTRIBUTES = ("attempt", "attempts", "job_id", "model", "server", "state", "tenant", "tries", "why")
"""All attributes that spans may have."""


@pytest.fixture
def collector() -> Iterator[Any]:
    with Collector() as collector:
        yield collector


def a_job_with_three_attempts(store: Any, traceparent: str | None = TRACEPARENT, **more: Any) -> Job:
    """Return a job whose first lease expired, whose second run failed and was delayed, and whose third run finished."""
    job = a_queued_job(store, traceparent=traceparent, **more)
    a_start(store, job.id, now_ms=T0 + SECOND)
    store_end(store, job.id, 1, Reason.LEASE_EXPIRED, T0 + 2 * SECOND)
    a_start(store, job.id, now_ms=T0 + 3 * SECOND)
    store_end(store, job.id, 2, Reason.SERVER_ERROR, T0 + 4 * SECOND, error=JobError("x", "y"), due_ms=T0 + 9 * SECOND)
    store.promote_due(T0 + 9 * SECOND)
    a_start(store, job.id, now_ms=T0 + 10 * SECOND)
    store_end(store, job.id, 3, Reason.FINISHED, T0 + 14 * SECOND, result="{}")
    found: Job = store.get(job.id)
    return found


def a_relay(database: Any, exporter: Any) -> Relay:
    relay = Relay("otlp", database, otlp.OtlpSink(database, exporter))
    relay.relay_batch()  # The first call only sets the cursor: a new sink exports no earlier events.
    return relay


def spans_by_id(memory: Any) -> dict[str, Any]:
    """Return the spans in a memory exporter by their ids."""
    spans = memory.get_finished_spans()
    by_id = {format(span.context.span_id, "016x"): span for span in spans}
    assert len(by_id) == len(spans), "each span is exported once"
    return by_id


def check_trace(by_id: dict[str, Any]) -> None:
    """Check that all spans are descendants of one job span, whose parent is the client's span."""
    assert {format(span.context.trace_id, "032x") for span in by_id.values()} == {TRACE_ID}
    roots = [span for span in by_id.values() if format(span.parent.span_id, "016x") not in by_id]
    assert [(span.name, format(span.parent.span_id, "016x")) for span in roots] == [("job", SPAN_ID)]


def test_the_trace_of_a_job_with_three_attempts_is_complete(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = a_job_with_three_attempts(store, callback_url=CALLBACK)
    (webhook_id,) = due_ids(database, T0 + 99 * SECOND)
    delivered(database, claim(database, webhook_id, T0 + 15 * SECOND, T0 + 99 * SECOND), T0 + 16 * SECOND)
    relay.relay_batch()
    by_id = spans_by_id(memory)
    check_trace(by_id)
    names = sorted(span.name for span in by_id.values())
    assert names == sorted(["job", "submit", "webhook", *["wait", "attempt", "exchange", "settle"] * 3])
    job_span = by_id[make_span_id(job.id, "job")]
    assert (job_span.start_time, job_span.end_time) == (T0 * 10**6, (T0 + 14 * SECOND) * 10**6)
    waits = [by_id[make_span_id(job.id, "wait", n)] for n in range(3)]
    assert [(span.end_time - span.start_time) // 10**9 for span in waits] == [1, 1, 6]
    attempts = [by_id[make_span_id(job.id, "attempt", n)] for n in (1, 2, 3)]
    assert [span.attributes["slotkeeper.why"] for span in attempts] == [
        Reason.LEASE_EXPIRED,
        Reason.SERVER_ERROR,
        Reason.FINISHED,
    ]
    assert [span.status.is_ok or span.status.status_code.name for span in attempts] == ["ERROR", "ERROR", True]
    found = {name for span in by_id.values() for name in span.attributes}
    assert found == {f"slotkeeper.{name}" for name in ATTRIBUTES}


def test_a_queued_job_that_was_canceled_without_a_traceparent_has_a_new_trace(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = a_queued_job(store)
    store.cancel_waiting(job.id, T0 + SECOND)
    relay.relay_batch()
    spans = memory.get_finished_spans()
    assert sorted(span.name for span in spans) == ["job", "submit", "wait"]
    assert {format(span.context.trace_id, "032x") for span in spans} == {find_trace(job.id, None).id}


def test_a_trace_that_the_client_does_not_sample_is_not_exported(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    a_job_with_three_attempts(store, f"00-{TRACE_ID}-{SPAN_ID}-00")
    relay.relay_batch()
    assert memory.get_finished_spans() == ()


def test_a_collector_that_refuses_receives_all_spans_when_it_accepts_again(database, store, collector):
    relay = a_relay(database, otlp.OtlpExporter(collector.url))
    job = a_job_with_three_attempts(store)
    collector.status = 403
    with pytest.raises(otlp.SinkUnavailable):
        relay.relay_batch()
    collector.status = 200
    relay.relay_batch()
    assert len(collector.spans) == 14
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert {span.span_id.hex() for span in collector.spans} >= {
        make_span_id(job.id, trace_spans.ATTEMPT, n) for n in (1, 2, 3)
    }
    assert relay.relay_batch() == 0


def test_a_trace_that_is_exported_again_has_the_same_spans(database, store):
    memory = InMemorySpanExporter()
    a_job_with_three_attempts(store)
    for _ in range(2):
        relay = Relay("otlp", database, otlp.OtlpSink(database, memory))
        relay._sink.retention = None  # It exports from the oldest event on.
        relay.relay_batch()
        SinkCursors(database).advance("otlp", relay._holder, relay._position, 0, 0)
        SinkCursors(database).release("otlp", relay._holder)
    spans = memory.get_finished_spans()
    assert len(spans) == 28 and len({span.context.span_id for span in spans}) == 14


def test_a_revived_job_adds_spans_and_changes_none_of_the_exported_spans(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = an_ended_job(store, State.DEAD, traceparent=TRACEPARENT)
    store.revive(job.id, T0 + SECOND)
    a_start(store, job.id, now_ms=T0 + 3 * SECOND)
    relay.relay_batch()
    before = spans_by_id(memory)
    assert sorted(span.name for span in before.values()) == ["attempt", "exchange", "job", "settle", "submit", "wait"]
    memory.clear()
    store_end(store, job.id, 2, Reason.FINISHED, T0 + 4 * SECOND, result="{}")
    relay.relay_batch()
    after = spans_by_id(memory)
    check_trace(after)
    assert {id_: span.to_json() for id_, span in after.items() if id_ in before} == {
        id_: span.to_json() for id_, span in before.items()
    }
    revived = after[make_span_id(job.id, "job", 1)]
    assert format(revived.parent.span_id, "016x") == make_span_id(job.id, "job")
    assert (revived.start_time, revived.end_time) == ((T0 + SECOND) * 10**6, (T0 + 4 * SECOND) * 10**6)
    assert format(after[make_span_id(job.id, "attempt", 2)].parent.span_id, "016x") == make_span_id(job.id, "job", 1)


def test_each_end_of_a_job_has_its_webhook_span(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = an_ended_job(store, State.DEAD, traceparent=TRACEPARENT, callback_url=CALLBACK)
    store.revive(job.id, T0 + SECOND)
    a_start(store, job.id, now_ms=T0 + SECOND)
    store_end(store, job.id, 2, Reason.FINISHED, T0 + 2 * SECOND, result="{}")
    for webhook_id in sorted(due_ids(database, T0 + 99 * SECOND)):  # the first end comes first
        delivered(database, claim(database, webhook_id, T0 + 9 * SECOND, T0 + 99 * SECOND), T0 + 10 * SECOND)
    relay.relay_batch()
    spans = [span for span in memory.get_finished_spans() if span.name == "webhook"]
    assert len({span.context.span_id for span in spans}) == 2


def test_the_number_of_spans_of_a_job_with_many_attempts_is_bounded(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = a_queued_job(store, traceparent=TRACEPARENT)
    for n in range(1, 151):
        a_start(store, job.id, now_ms=T0 + n)
        store_end(
            store,
            job.id,
            n,
            Reason.SERVER_BUSY if n < 150 else Reason.FINISHED,
            T0 + n,
            result="{}" if n == 150 else None,
        )
    while relay.relay_batch():
        pass
    by_id = spans_by_id(memory)
    check_trace(by_id)
    assert len(by_id) <= 2 * 200 + 2
    assert {make_span_id(job.id, "attempt", n) for n in (1, 2, 149, 150)} <= set(by_id)
    assert by_id[make_span_id(job.id, "job")].attributes["slotkeeper.attempts"] == 150


def test_only_the_job_whose_spans_are_refused_is_skipped(database, store, collector):
    relay = a_relay(database, otlp.OtlpExporter(collector.url))
    jobs = [an_ended_job(store) for _ in range(9)]
    traces = [find_trace(job.id, None).id for job in jobs]
    collector.poison = traces[4]
    relay.relay_batch()
    assert {span.trace_id.hex() for span in collector.spans} == {*traces} - {traces[4]}
    assert relay.relay_batch() == 0


def test_only_the_job_with_invalid_events_is_skipped(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    jobs = [an_ended_job(store) for _ in range(3)]
    corruption = update(events).where(events.c.job_id == jobs[1].id, events.c.type == "job.started").values(data="[]")
    database.write(lambda tx: tx.connection.execute(corruption))
    ends = [Event(n, job.id, "job.completed", T0, 1, {"why": "finished"}) for n, job in enumerate(jobs, 1)]
    relay._sink.publish([PublishedEvent(OutboxEvent(end, "m", "acme", 5, "gpu1"), "") for end in ends])
    traces = {format(span.context.trace_id, "032x") for span in memory.get_finished_spans()}
    assert traces == {find_trace(job.id, None).id for job in (jobs[0], jobs[2])}


def test_only_the_spans_that_cannot_be_sent_are_skipped(database, store, collector):
    relay = a_relay(database, otlp.OtlpExporter(collector.url))
    sink: Any = relay._sink
    sink._exporter._exporter._max_request_size = 1200
    for model in ("m", "n" * 600, "o"):
        an_ended_job(store, model=model)
    relay.relay_batch()
    values = {attribute.value.string_value for span in collector.spans for attribute in span.attributes}
    assert {"m", "o"} <= values and "n" * 600 not in values


def test_the_traceparent_is_in_the_run_the_job_the_events_and_the_timeline(database, store):
    job = a_queued_job(store, traceparent=TRACEPARENT)
    run = a_start(store, job.id)
    moved = store_end(store, job.id, 1, Reason.LEASE_EXPIRED, T0)
    assert (run.traceparent, store.get(job.id).traceparent, moved.job.id) == (TRACEPARENT, TRACEPARENT, job.id)
    assert [entry.traceparent for entry in EventReader(database).read()] == [TRACEPARENT] * 3
    assert timelines.read_timelines(database, [job.id, "none"])[job.id].traceparent == TRACEPARENT


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://", "collector"])
def test_an_invalid_endpoint_is_refused(endpoint):
    with pytest.raises(InvalidSetting, match="http://host:4318"):
        otlp.OtlpExporter(endpoint)


def test_an_unavailable_collector_receives_the_spans_when_it_is_back(database, store, collector):
    relay = a_relay(database, otlp.OtlpExporter(f"http://127.0.0.1:{free_port()}"))
    an_ended_job(store)
    with pytest.raises(otlp.SinkUnavailable, match="does not answer"):
        relay.relay_batch()
    sink: Any = relay._sink
    sink._exporter = otlp.OtlpExporter(f"{collector.url}/v1/traces")
    relay.relay_batch()
    assert len(collector.spans) == 6


def test_the_exporter_does_not_wait_for_a_slow_response_body(database, store, collector):
    collector.goes_on = threading.Event()
    relay = a_relay(database, otlp.OtlpExporter(collector.url))
    an_ended_job(store)
    relay.relay_batch()
    assert len(collector.spans) == 6 and not collector.goes_on.is_set()
    collector.goes_on.set()


@pytest.mark.parametrize("status", [302, 401, 404, 500])
def test_an_error_that_an_operator_can_fix_loses_no_trace(database, store, collector, status):
    relay = a_relay(database, otlp.OtlpExporter(collector.url))
    an_ended_job(store)
    collector.status = status
    with pytest.raises(otlp.SinkUnavailable):
        relay.relay_batch()
    collector.status = 200
    relay.relay_batch()
    assert sorted(span.name for span in collector.spans) == sorted(
        ["job", "submit", "wait", "attempt", "exchange", "settle"]
    )


def test_the_export_to_a_slow_collector_continues_in_the_next_call(database, store, monkeypatch):
    """The time of a call is bounded, so that the hold of the cursor does not expire.  No span is exported twice."""
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    for _ in range(4):
        an_ended_job(store)
    monkeypatch.setattr(otlp, "_MAX_JOBS", 1)
    monkeypatch.setattr(otlp, "_BATCH_LIMIT_S", -1.0)
    for n in (1, 2, 3):
        with pytest.raises(otlp.SinkUnavailable):
            relay.relay_batch()
        assert len(spans_by_id(memory)) == 6 * n
    relay.relay_batch()
    assert len(spans_by_id(memory)) == 6 * 4


def test_the_sink_of_traces_does_not_delay_the_removal_of_events():
    settings = EventSettings(to="redis,otlp,kafka")
    assert settings.durable_sinks == ["redis", "kafka"]


def test_neither_payload_nor_result_nor_error_is_in_a_trace(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = a_queued_job(
        store, payload='{"prompt": "PLANTED"}', traceparent=TRACEPARENT, callback_url=f"{CALLBACK}?PLANTED"
    )
    a_start(store, job.id)
    store_end(store, job.id, 1, Reason.SERVER_ERROR, T0, error=JobError("x", "PLANTED"), due_ms=T0)
    store.promote_due(T0)
    a_start(store, job.id)
    store_end(store, job.id, 2, Reason.FINISHED, T0, result='"PLANTED"')
    relay.relay_batch()
    assert spans_by_id(memory) and not [span for span in memory.get_finished_spans() if "PLANTED" in span.to_json()]
