"""One job's trace is whole, by an exporter in memory and by a receiver of OTLP, whatever befell the job."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import update

from app.up.ports import free_port
from routing.queries import trace_spans
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.tables import events
from slotkeeper.jobs.values import Job, JobError
from slotkeeper.outbox import timelines
from slotkeeper.outbox.event_reader import EventReader
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

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{SPAN}-01"
SAID = ("attempt", "attempts", "job_id", "model", "server", "state", "tenant", "tries", "why")
"""All that spans may say."""


@pytest.fixture
def receiver() -> Iterator[Any]:
    with Collector() as found:
        yield found


def a_tried_job(store: Any, traceparent: str | None = GIVEN, **more: Any) -> Job:
    """Its first worker dies, its second run fails and is postponed, its third ends well."""
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
    relay.relay_batch()  # Who begins has nothing to tell yet.
    return relay


def told_by(memory: Any) -> dict[str, Any]:
    """Its spans, by their ids."""
    found = memory.get_finished_spans()
    by_id = {format(it.context.span_id, "016x"): it for it in found}
    assert len(by_id) == len(found), "told once"
    return by_id


def is_whole(by_id: dict[str, Any]) -> None:
    """All hang together, below the span of the client."""
    assert {format(it.context.trace_id, "032x") for it in by_id.values()} == {TRACE}
    tops = [it for it in by_id.values() if format(it.parent.span_id, "016x") not in by_id]
    assert [(it.name, format(it.parent.span_id, "016x")) for it in tops] == [("job", SPAN)]


def test_the_trace_of_a_job_that_was_tried_thrice_is_whole(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = a_tried_job(store, callback_url=CALLBACK)
    (owed,) = due_ids(database, T0 + 99 * SECOND)
    delivered(database, claim(database, owed, T0 + 15 * SECOND, T0 + 99 * SECOND), T0 + 16 * SECOND)
    relay.relay_batch()
    by_id = told_by(memory)
    is_whole(by_id)
    named = sorted(it.name for it in by_id.values())
    assert named == sorted(["job", "submit", "webhook", *["wait", "attempt", "exchange", "settle"] * 3])
    whole = by_id[make_span_id(job.id, "job")]
    assert (whole.start_time, whole.end_time) == (T0 * 10**6, (T0 + 14 * SECOND) * 10**6)
    waited = [by_id[make_span_id(job.id, "wait", n)] for n in range(3)]
    assert [(it.end_time - it.start_time) // 10**9 for it in waited] == [1, 1, 6]
    tried = [by_id[make_span_id(job.id, "attempt", n)] for n in (1, 2, 3)]
    assert [it.attributes["slotkeeper.why"] for it in tried] == [
        Reason.LEASE_EXPIRED,
        Reason.SERVER_ERROR,
        Reason.FINISHED,
    ]
    assert [it.status.is_ok or it.status.status_code.name for it in tried] == ["ERROR", "ERROR", True]
    assert {name for it in by_id.values() for name in it.attributes} == {f"slotkeeper.{name}" for name in SAID}


def test_a_job_that_came_in_no_trace_has_one_of_its_own_and_ends_while_it_waits(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = a_queued_job(store)
    store.cancel_waiting(job.id, T0 + SECOND)
    relay.relay_batch()
    found = memory.get_finished_spans()
    assert sorted(it.name for it in found) == ["job", "submit", "wait"]
    assert {format(it.context.trace_id, "032x") for it in found} == {find_trace(job.id, None).id}


def test_a_trace_that_its_client_does_not_want_sampled_is_not_told(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    a_tried_job(store, f"00-{TRACE}-{SPAN}-00")
    relay.relay_batch()
    assert memory.get_finished_spans() == ()


def test_a_receiver_that_refuses_delays_the_traces_alone_and_gets_all_afterwards(database, store, receiver):
    relay = a_relay(database, otlp.OtlpExporter(receiver.url))
    job = a_tried_job(store)
    receiver.status = 403
    with pytest.raises(otlp.SinkUnavailable):
        relay.relay_batch()
    receiver.status = 200
    relay.relay_batch()
    assert len(receiver.spans) == 14
    assert {it.trace_id.hex() for it in receiver.spans} == {TRACE}
    assert {it.span_id.hex() for it in receiver.spans} >= {
        make_span_id(job.id, trace_spans.ATTEMPT, n) for n in (1, 2, 3)
    }
    assert relay.relay_batch() == 0


def test_a_trace_that_is_told_again_has_the_same_spans(database, store):
    memory = InMemorySpanExporter()
    a_tried_job(store)
    for _ in range(2):
        relay = Relay("otlp", database, otlp.OtlpSink(database, memory))
        relay._sink.retention = None  # From the oldest event on.
        relay.relay_batch()
        SinkCursors(database).advance("otlp", relay._holder, relay._position, 0, 0)
        SinkCursors(database).release("otlp", relay._holder)
    found = memory.get_finished_spans()
    assert len(found) == 28 and len({it.context.span_id for it in found}) == 14


def test_a_job_that_was_revived_is_told_as_it_went_on_and_what_was_told_before_stays_as_it_was(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = an_ended_job(store, State.DEAD, traceparent=GIVEN)
    store.revive(job.id, T0 + SECOND)
    a_start(store, job.id, now_ms=T0 + 3 * SECOND)
    relay.relay_batch()
    before = told_by(memory)
    assert sorted(it.name for it in before.values()) == ["attempt", "exchange", "job", "settle", "submit", "wait"]
    memory.clear()
    store_end(store, job.id, 2, Reason.FINISHED, T0 + 4 * SECOND, result="{}")
    relay.relay_batch()
    after = told_by(memory)
    is_whole(after)
    assert {id_: it.to_json() for id_, it in after.items() if id_ in before} == {
        id_: it.to_json() for id_, it in before.items()
    }
    again = after[make_span_id(job.id, "job", 1)]
    assert format(again.parent.span_id, "016x") == make_span_id(job.id, "job")
    assert (again.start_time, again.end_time) == ((T0 + SECOND) * 10**6, (T0 + 4 * SECOND) * 10**6)
    assert format(after[make_span_id(job.id, "attempt", 2)].parent.span_id, "016x") == make_span_id(job.id, "job", 1)


def test_each_end_of_a_job_has_a_webhook_of_its_own(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = an_ended_job(store, State.DEAD, traceparent=GIVEN, callback_url=CALLBACK)
    store.revive(job.id, T0 + SECOND)
    a_start(store, job.id, now_ms=T0 + SECOND)
    store_end(store, job.id, 2, Reason.FINISHED, T0 + 2 * SECOND, result="{}")
    for owed in sorted(due_ids(database, T0 + 99 * SECOND)):  # the first end comes first
        delivered(database, claim(database, owed, T0 + 9 * SECOND, T0 + 99 * SECOND), T0 + 10 * SECOND)
    relay.relay_batch()
    told = [it for it in memory.get_finished_spans() if it.name == "webhook"]
    assert len({it.context.span_id for it in told}) == 2


def test_a_job_that_was_tried_without_end_has_a_trace_that_ends(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = a_queued_job(store, traceparent=GIVEN)
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
    by_id = told_by(memory)
    is_whole(by_id)
    assert len(by_id) <= 2 * 200 + 2
    assert {make_span_id(job.id, "attempt", n) for n in (1, 2, 149, 150)} <= set(by_id)
    assert by_id[make_span_id(job.id, "job")].attributes["slotkeeper.attempts"] == 150


def test_a_job_whose_spans_are_refused_for_good_is_left_out_and_no_other(database, store, receiver):
    relay = a_relay(database, otlp.OtlpExporter(receiver.url))
    jobs = [an_ended_job(store) for _ in range(9)]
    traces = [find_trace(job.id, None).id for job in jobs]
    receiver.poison = traces[4]
    relay.relay_batch()
    assert {it.trace_id.hex() for it in receiver.spans} == {*traces} - {traces[4]}
    assert relay.relay_batch() == 0


def test_a_job_of_which_the_record_is_spoiled_is_left_out_and_no_other(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    jobs = [an_ended_job(store) for _ in range(3)]
    broken = update(events).where(events.c.job_id == jobs[1].id, events.c.type == "job.started").values(data="[]")
    database.write(lambda tx: tx.connection.execute(broken))
    relay._sink.publish([PublishedEvent(n + 1, job.id, "job.completed", {}) for n, job in enumerate(jobs)])
    told = {format(it.context.trace_id, "032x") for it in memory.get_finished_spans()}
    assert told == {find_trace(job.id, None).id for job in (jobs[0], jobs[2])}


def test_spans_that_cannot_be_sent_are_left_out_and_no_others(database, store, receiver):
    relay = a_relay(database, otlp.OtlpExporter(receiver.url))
    sink: Any = relay._sink
    sink._exporter._exporter._max_request_size = 1200
    for model in ("m", "n" * 600, "o"):
        an_ended_job(store, model=model)
    relay.relay_batch()
    said = {it.string_value for span in receiver.spans for it in (a.value for a in span.attributes)}
    assert {"m", "o"} <= said and "n" * 600 not in said


def test_a_trace_is_known_to_whoever_runs_the_job_and_to_who_tells_of_it(database, store):
    job = a_queued_job(store, traceparent=GIVEN)
    run = a_start(store, job.id)
    moved = store_end(store, job.id, 1, Reason.LEASE_EXPIRED, T0)
    assert (run.traceparent, store.get(job.id).traceparent, moved.job.id) == (GIVEN, GIVEN, job.id)
    assert [it.traceparent for it in EventReader(database).read()] == [GIVEN] * 3
    assert timelines.read_timelines(database, [job.id, "none"])[job.id].traceparent == GIVEN


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://", "collector"])
def test_an_endpoint_that_is_none_is_refused_at_the_start(endpoint):
    with pytest.raises(ValueError, match="http://host:4318"):
        otlp.OtlpExporter(endpoint)


def test_a_receiver_that_is_away_is_not_told_and_is_told_when_it_is_back(database, store, receiver):
    relay = a_relay(database, otlp.OtlpExporter(f"http://127.0.0.1:{free_port()}"))
    an_ended_job(store)
    with pytest.raises(otlp.SinkUnavailable, match="does not answer"):
        relay.relay_batch()
    sink: Any = relay._sink
    sink._exporter = otlp.OtlpExporter(f"{receiver.url}/v1/traces")
    relay.relay_batch()
    assert len(receiver.spans) == 6


def test_an_answer_that_comes_drop_by_drop_is_not_waited_for(database, store, receiver):
    receiver.goes_on = threading.Event()
    relay = a_relay(database, otlp.OtlpExporter(receiver.url))
    an_ended_job(store)
    relay.relay_batch()
    assert len(receiver.spans) == 6 and not receiver.goes_on.is_set()
    receiver.goes_on.set()


@pytest.mark.parametrize("status", [302, 401, 404, 500])
def test_what_a_person_can_mend_loses_no_trace(database, store, receiver, status):
    relay = a_relay(database, otlp.OtlpExporter(receiver.url))
    an_ended_job(store)
    receiver.status = status
    with pytest.raises(otlp.SinkUnavailable):
        relay.relay_batch()
    receiver.status = 200
    relay.relay_batch()
    assert sorted(it.name for it in receiver.spans) == sorted(
        ["job", "submit", "wait", "attempt", "exchange", "settle"]
    )


def test_a_slow_receiver_gets_some_and_the_others_at_the_next_turn(database, store, monkeypatch):
    """What a turn takes is bounded, so that the cursor is not lost meanwhile; and nothing is told all over again."""
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    for _ in range(4):
        an_ended_job(store)
    monkeypatch.setattr(otlp, "_MAX_JOBS", 1)
    monkeypatch.setattr(otlp, "_BATCH_LIMIT_S", -1.0)
    for n in (1, 2, 3):
        with pytest.raises(otlp.SinkUnavailable):
            relay.relay_batch()
        assert len(told_by(memory)) == 6 * n
    relay.relay_batch()
    assert len(told_by(memory)) == 6 * 4


def test_events_that_traces_were_not_told_of_stay_no_longer_for_them():
    settings = EventSettings(to="redis,otlp,kafka")
    assert settings.durable_sinks == ["redis", "kafka"]


def test_neither_payload_nor_result_nor_error_is_in_a_trace(database, store):
    memory = InMemorySpanExporter()
    relay = a_relay(database, memory)
    job = a_queued_job(store, payload='{"prompt": "PLANTED"}', traceparent=GIVEN, callback_url=f"{CALLBACK}?PLANTED")
    a_start(store, job.id)
    store_end(store, job.id, 1, Reason.SERVER_ERROR, T0, error=JobError("x", "PLANTED"), due_ms=T0)
    store.promote_due(T0)
    a_start(store, job.id)
    store_end(store, job.id, 2, Reason.FINISHED, T0, result='"PLANTED"')
    relay.relay_batch()
    assert told_by(memory) and not [it for it in memory.get_finished_spans() if "PLANTED" in it.to_json()]
