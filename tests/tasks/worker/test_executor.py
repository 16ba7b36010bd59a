"""A run in its worker from start to end, also during outages, after lost leases and after takeovers."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from routing.maintenance import restore_leases
from slotkeeper import json_text, large_json
from slotkeeper.clock import clock
from slotkeeper.db import Write
from slotkeeper.errors import ClockWasSet, DatabaseUnavailable
from slotkeeper.jobs.states import Reason, State
from tasks import offer_messages
from tasks.inference import infer
from tasks.servers import SPOOL_AFTER_BYTES
from tasks.servers.description import Description
from tasks.servers.values import RunDetails
from tasks.worker import run_requests, server_call, worker_run
from tasks.worker.heartbeat import LeaseWatch
from tasks.worker.worker_run import RetryingIo
from tests.support import passes
from tests.support.builders import eventually
from tests.support.ends import release, store_end
from tests.support.harness import LEASE_MS, SECOND, Harness
from tests.tasks.worker.one_run import FakeServer, make_server_call, run

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

DONE = Outcome(OutcomeKind.DONE, result={"url": "x"})
PENDING = Outcome(OutcomeKind.PENDING, remote_id="r-1")
UNKNOWN = Outcome(OutcomeKind.UNKNOWN)
FAULT = Outcome(OutcomeKind.RETRY, code="server_error", message="500")


def _raise_unavailable(*_: object, **__: object) -> Any:
    raise DatabaseUnavailable("down")


def _failing_first(times: int, make_write: Callable[..., Write[Any]]) -> Callable[..., Write[Any]]:
    """Return a copy of a function that builds a write; its writes fail `times` times before they succeed."""
    failures = iter(range(times))

    def make_failing_write(*args: Any, **kwargs: Any) -> Write[Any]:
        write = make_write(*args, **kwargs)
        return Write(lambda tx: _raise_unavailable() if next(failures, None) is not None else write.unit(tx))

    return make_failing_write


# -- the database is down --------------------------------------------------------------------------------------


def test_a_database_that_is_down_when_a_server_accepts_the_job_costs_no_attempt(harness, worker, server, monkeypatch):
    harness.register(model_type="async", poll_interval=0.001)
    job_id = harness.submit()
    server.answers = [PENDING, DONE]
    monkeypatch.setattr(harness.store, "remote_id_write", _failing_first(3, harness.store.remote_id_write))
    assert run(harness).state is State.COMPLETED
    job = harness.job(job_id)
    assert (job.state, job.crashes, job.failures, job.attempt) == (State.COMPLETED, 0, 0, 1)
    assert server.asked == ["submit", "status"]


@pytest.mark.parametrize("method", ["settle_write", "remote_id_write"])
def test_a_long_database_outage_ends_no_run_and_counts_no_crash(harness, worker, server, monkeypatch, method):
    """The worker stops at last: the lease expires, and another worker resumes the job."""
    monkeypatch.setattr(worker_run, "_STOP_LIMIT_S", 0.0)
    harness.register(model_type="async", poll_interval=0.001)
    job_id = harness.submit()
    server.answers = [PENDING, DONE]
    with monkeypatch.context() as outage:
        outage.setattr(
            harness.store, method, lambda *_, **__: (worker.heartbeat.stop_all(), Write(_raise_unavailable))[1]
        )
        run(harness)
    assert (harness.state(job_id), harness.job(job_id).crashes) == (State.RUNNING, 0)
    if method == "settle_write":  # The worker has released the slot, so maintenance restores the lease.
        assert passes.restore_missing(harness) == 1
    else:
        assert harness.redis.hgetall(harness.queue.key("stats:server:gpu")).keys() <= {b"taken", b"loaded"}
    assert list(harness.queue.taken().values()) == [job_id]


@pytest.mark.parametrize("method", ["settle_write", "remote_id_write"])
def test_a_write_that_is_refused_because_the_clock_was_set_is_built_again(harness, worker, server, monkeypatch, method):
    harness.register(model_type="async", poll_interval=0.001)
    job_id = harness.submit()
    server.answers, make_write = [PENDING, DONE], getattr(harness.store, method)
    refused: list[Write[Any]] = []

    def make_refused_write_first(*args: Any, **kwargs: Any) -> Write[Any]:
        if refused:
            return make_write(*args, **kwargs)
        refused.append(Write(_clock_was_set))
        return refused[0]

    monkeypatch.setattr(harness.store, method, make_refused_write_first)
    assert run(harness).state is State.COMPLETED
    job = harness.job(job_id)
    assert (len(refused), job.attempt, job.crashes) == (1, 1, 0)


def test_a_retry_keeps_its_delay_if_the_clock_is_set_while_its_end_is_stored(harness, worker, server, monkeypatch):
    harness.register(max_retries=3)
    job_id = harness.submit()
    server.answers, settle_write = [FAULT], harness.store.settle_write
    due: list[int] = []

    def note_due_time(*args: Any, **kwargs: Any) -> Write[Any]:
        due.append(kwargs["due_ms"])
        if len(due) > 1:
            return settle_write(*args, **kwargs)
        monkeypatch.setattr(clock, "moved_since", lambda _: 7_200_000)
        return Write(_clock_was_set)

    monkeypatch.setattr(harness.store, "settle_write", note_due_time)
    run(harness)
    assert due[1] == due[0] + 7_200_000 == harness.job(job_id).due_ms


def _clock_was_set(*_: object) -> Any:
    raise ClockWasSet("The clock was set.")


# -- the slot does not wait for the database --------------------------------------------------------------------


def test_a_slot_is_released_after_the_servers_response_without_a_wait_for_the_database(
    harness, worker, server, monkeypatch
):
    harness.register()
    first, second = harness.submit(), harness.submit()
    server.answers, commit = [DONE, DONE], RetryingIo.commit
    delayed_commits: list[str] = []
    worker.consumer = object()

    async def commit_after_the_second_request(io: RetryingIo, write: Any) -> Any:
        delayed_commits.append(io._watch.lease.job_id)
        while len(server.asked) < 2:
            await asyncio.sleep(0.001)
        return await commit(io, write)

    monkeypatch.setattr(RetryingIo, "commit", commit_after_the_second_request)
    run(harness)
    assert delayed_commits == [first, second] and server.asked == ["submit", "submit"]
    assert [harness.state(job_id) for job_id in (first, second)] == [State.COMPLETED] * 2


def test_a_large_result_is_read_and_written_outside_the_loop(harness, worker, server):
    reading_threads: list[str] = []

    def read(size: int) -> bytes:
        reading_threads.append(threading.current_thread().name)
        return b'"' + b"x" * (size - 2) + b'"'

    harness.register()
    job_id = harness.submit()
    server.answers = [
        Outcome(
            OutcomeKind.DONE,
            result=json_text.RawJson(json_text.FilePart(SPOOL_AFTER_BYTES + 1, read), large_json.get_member),
        )
    ]
    run(harness)
    assert len(harness.job(job_id).result or "") == SPOOL_AFTER_BYTES + 1
    assert reading_threads and "event-loop" not in reading_threads


@pytest.mark.parametrize(
    "outcome",
    [FAULT, Outcome(OutcomeKind.BUSY), Outcome(OutcomeKind.RETRY, code="timed_out", server_still_running=True)],
)
def test_a_slot_of_a_requeued_job_or_a_busy_server_is_released_after_the_database_commit(
    harness, worker, server, monkeypatch, outcome
):
    harness.register()
    first = harness.submit()
    server.answers = [outcome]
    states: list[State] = []
    release_command = harness.dispatcher.leases.release_command

    def note_state(*args: Any, **kwargs: Any) -> Any:
        states.append(harness.state(first))
        return release_command(*args, **kwargs)

    monkeypatch.setattr(harness.dispatcher.leases, "release_command", note_state)
    run(harness)
    assert states and State.RUNNING not in states


def test_a_full_worker_stores_an_end_while_it_searches_for_the_next_job(harness, worker, server, monkeypatch):
    """The search sends Redis a request for each other fleet, in a thread."""
    harness.register()
    job_id = harness.submit()
    worker.concurrency.limit, worker.consumer = 1, SimpleNamespace()
    server.answers = [DONE]
    searched, may_end = threading.Event(), threading.Event()

    def search(_: str) -> None:
        searched.set()
        may_end.wait(60)

    monkeypatch.setattr(worker.poller, "claim_in_turn", search)
    worker.executor.run_open_offer(harness.notifications.offers.pop(0))
    try:
        eventually(lambda: harness.state(job_id) is State.COMPLETED)
        assert searched.wait(10)
    finally:
        may_end.set()


def test_an_ended_run_is_freed_without_the_garbage_collector(harness, worker, server, monkeypatch):
    """The cyclic garbage collector runs rarely, and payloads may be large."""
    calls: list[weakref.ref[server_call.ServerCall]] = []
    run_call = server_call.ServerCall.run

    def note_call(call: server_call.ServerCall) -> Any:
        calls.append(weakref.ref(call))
        return run_call(call)

    monkeypatch.setattr(server_call.ServerCall, "run", note_call)
    server.answers = [DONE]
    harness.register()
    harness.submit()
    gc.disable()
    try:
        run(harness)
        eventually(lambda: calls[0]() is None)
    finally:
        gc.enable()


def test_a_run_whose_end_is_being_stored_does_not_count_as_a_run_without_a_lease(harness, worker, server):
    harness.register()
    job_id = harness.submit()
    active = harness.start("w1")
    release(harness.dispatcher.leases, active.lease, return_to_lane=False)
    assert passes.restore_missed(harness.dispatcher) == 0
    harness.later(restore_leases._GRACE_MS - 1)
    assert passes.restore_missed(harness.dispatcher) == 0
    assert store_end(harness.store, job_id, 1, Reason.FINISHED, harness.now, result="{}") is not None
    harness.later(1)
    assert passes.restore_missed(harness.dispatcher) == 0 and harness.queue.taken() == {}


def test_a_lease_that_was_written_again_while_its_end_was_stored_is_freed(harness, worker, server, monkeypatch):
    harness.register()
    first = harness.submit()
    server.answers, commit = [DONE], RetryingIo.commit

    async def commit_after_a_heartbeat(io: RetryingIo, write: Any) -> Any:
        watch = io._watch
        watch.slot_released_at_s = None
        worker.heartbeat.beat()
        assert watch.restored and harness.queue.taken() == {"gpu-slot0": first}
        return await commit(io, write)

    monkeypatch.setattr(RetryingIo, "commit", commit_after_a_heartbeat)
    run(harness)
    assert harness.state(first) is State.COMPLETED and harness.queue.taken() == {} and harness.free() == 1


# -- a call whose response was lost -----------------------------------------------------------------------------


def test_a_call_that_only_lost_its_connection_is_sent_again_and_costs_nothing(harness, worker, server, monkeypatch):
    """The server returns a recent result or runs the job; no process has crashed, so no crash is counted."""
    monkeypatch.setattr(server_call, "_HEALTH_PERIOD_S", 0.001)
    harness.register()
    job_id = harness.submit()
    server.answers, server.runs = [UNKNOWN, DONE], frozenset()
    run(harness)
    assert server.asked == ["submit", "health", "submit"]
    assert (harness.state(job_id), harness.job(job_id).crashes, harness.job(job_id).attempt) == (State.COMPLETED, 0, 1)


def test_a_call_that_is_lost_again_is_a_crash(harness, worker, server, monkeypatch):
    monkeypatch.setattr(server_call, "_HEALTH_PERIOD_S", 0.001)
    harness.register()
    job_id = harness.submit()
    server.answers, server.runs = [UNKNOWN, UNKNOWN], frozenset()
    run(harness)
    assert server.asked == ["submit", "health", "submit", "health"]
    assert (harness.job(job_id).why, harness.job(job_id).crashes) == (Reason.SERVER_LOST, 1)


def test_a_call_whose_server_was_down_meanwhile_is_not_sent_again(harness, worker, server, monkeypatch):
    """The job may have crashed the server."""
    monkeypatch.setattr(server_call, "_HEALTH_PERIOD_S", 0.001)
    harness.register()
    job_id = harness.submit()
    server.answers, server.runs, server.down = [UNKNOWN], frozenset(), 2
    run(harness)
    assert server.asked == ["submit", "health", "health", "health"]
    assert (harness.job(job_id).why, harness.job(job_id).crashes) == (Reason.SERVER_LOST, 1)


# -- a resumed run ---------------------------------------------------------------------------------------------


def _resumed(harness: Harness, **changes: Any) -> str:
    """Submit a polled job whose worker has died, let two minutes pass without a worker, and return the job's id."""
    harness.register(model_type="async", poll_interval=0.001, max_poll_time=60.0)
    job_id = harness.submit(**changes)
    harness.remote(harness.start("w1"))
    harness.later(LEASE_MS)
    passes.reap(harness.dispatcher)
    harness.later(120 * SECOND)
    return job_id


def test_a_resumed_run_is_polled_once_before_it_times_out(harness, worker, server):
    job_id = _resumed(harness)
    server.answers = [DONE]
    assert run(harness).state is State.COMPLETED
    assert (harness.state(job_id), server.asked) == (State.COMPLETED, ["status"])


def test_a_resumed_run_that_has_not_ended_in_its_time_times_out(harness, worker, server):
    job_id = _resumed(harness)
    server.answers = [PENDING]
    run(harness)
    job = harness.job(job_id)
    assert (job.state, job.error_code, server.asked) == (State.DELAYED, "timed_out", ["status", "cancel"])


# -- a polled run ----------------------------------------------------------------------------------------------


def test_a_status_request_has_its_own_timeout_that_does_not_depend_on_the_time_of_the_run(harness, worker, server):
    harness.register(model_type="async", poll_interval=0.001, max_poll_time=7200.0)
    harness.submit()
    server.answers = [PENDING, DONE]
    assert run(harness).state is State.COMPLETED and server.asked == ["submit", "status"]


def test_runs_that_began_at_the_same_time_are_polled_at_different_times(harness, worker, server, monkeypatch):
    waits: list[float] = []

    async def note_wait(_: LeaseWatch, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(LeaseWatch, "sleep", note_wait)
    harness.register(model_type="async", poll_interval=10.0)
    for _ in range(3):
        harness.submit()
        server.answers = [PENDING, PENDING, DONE]
        assert run(harness).state is State.COMPLETED
    firsts, others = waits[::2], waits[1::2]
    assert len(set(firsts)) == 3 and all(0 <= seconds <= 10 for seconds in firsts)
    assert others == [10.0] * 3


def test_a_run_that_is_polled_does_not_keep_its_payload(harness, worker, server, monkeypatch):
    class Payload(dict[str, Any]):
        """A dict to which weak references are possible."""

    payloads: list[weakref.ref[Payload]] = []
    kept: list[Payload | None] = []

    def loads(text: str) -> Payload:
        payload = Payload(json_text.loads(text))
        payloads.append(weakref.ref(payload))
        return payload

    async def status(*_: Any) -> Outcome:
        kept.extend(reference() for reference in payloads)
        return DONE

    monkeypatch.setattr(run_requests, "json_text", SimpleNamespace(loads=loads))
    monkeypatch.setattr(run_requests, "orjson", SimpleNamespace(Fragment=loads))
    monkeypatch.setattr(server, "status", status)
    harness.register(model_type="async", poll_interval=0.001)
    harness.submit()
    server.answers = [PENDING]
    run(harness)
    assert kept == [None]


@pytest.mark.parametrize("late_s", [0, 7200], ids=["in its time", "beyond its time"])
def test_a_cancellation_during_a_request_does_not_wait_for_the_polling_interval(
    harness, worker, server, monkeypatch, late_s
):
    waits: list[float] = []

    async def note_wait(_: LeaseWatch, seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(0)

    def cancel_during_requests(watch: LeaseWatch) -> None:
        server.during = watch.request_cancel
        harness.later(late_s * SECOND)

    monkeypatch.setattr(LeaseWatch, "sleep", note_wait)
    monkeypatch.setattr(server_call, "_CANCEL_WAIT_S", 0.0)
    server.answers = [PENDING] * 3
    outcome = _call_server(
        harness, server, cancel_during_requests, model_type="async", poll_interval=3600.0, max_poll_time=7200.0
    )
    assert outcome.kind is OutcomeKind.CANCELED
    assert set(waits) == {server_call._HEALTH_PERIOD_S}


# -- a stale worker --------------------------------------------------------------------------------------------


@contextmanager
def _celery_notifications(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Return a list of the notifications to Celery's clients, as (method of the result backend, job id)."""
    sent: list[tuple[str, str]] = []
    for method in ("mark_as_failure", "mark_as_done", "mark_as_revoked", "mark_as_retry"):
        monkeypatch.setattr(
            infer.backend, method, lambda job, *_, method=method, **__: sent.append((method, job)), raising=False
        )
    yield sent


@pytest.mark.parametrize("outcome", [FAULT, DONE, Outcome(OutcomeKind.BUSY), Outcome(OutcomeKind.FAILED, code="bad")])
def test_a_stale_worker_notifies_no_client(harness, worker, server, monkeypatch, outcome):
    """The worker was suspended during the call: its lease expired, and another worker has claimed the job."""
    harness.register(2)
    job_id = harness.submit(envelope="{}", source="task")
    newer_runs: list[ActiveRun] = []

    def lose_the_job() -> None:
        harness.later(LEASE_MS + SECOND)
        assert passes.reap(harness.dispatcher) == 1
        newer_runs.append(harness.start("w2"))

    server.during, server.answers = lose_the_job, [outcome]
    with _celery_notifications(monkeypatch) as sent:
        run(harness)
    assert sent == []
    assert (harness.state(job_id), harness.job(job_id).attempt) == (State.RUNNING, 2)
    assert harness.queue.taken() == {newer_runs[0].lease.slot: job_id} and harness.notifications.ends == []


def test_a_pushed_result_is_kept_although_the_worker_receives_an_error(harness, worker, server):
    harness.register()
    job_id = harness.submit()
    server.during = lambda: store_end(harness.store, job_id, 1, Reason.FINISHED, harness.now, result='{"by":"push"}')
    server.answers = [FAULT]
    assert run(harness).result == '{"by":"push"}'


@pytest.mark.parametrize(
    ("outcome", "retries", "state"),
    [
        (FAULT, 1, State.DELAYED),
        (FAULT, 0, State.DEAD),
        (Outcome(OutcomeKind.BUSY), 1, State.QUEUED),
        (Outcome(OutcomeKind.FAILED), 1, State.FAILED),
    ],
)
def test_each_outcome_leads_to_its_state(harness, worker, server, outcome, retries, state):
    harness.register(max_retries=retries)
    harness.submit()
    server.answers = [outcome]
    assert run(harness).state is state


@pytest.mark.parametrize(
    "outcome", [FAULT, Outcome(OutcomeKind.BUSY), Outcome(OutcomeKind.UNREACHABLE), Outcome(OutcomeKind.CANCELED)]
)
def test_a_failed_run_with_a_requested_cancellation_is_canceled(harness, worker, server, outcome):
    harness.register()
    job_id = harness.submit()
    server.during = lambda: harness.dispatcher.cancel(job_id)
    server.answers = [outcome]
    if outcome.kind is OutcomeKind.CANCELED:
        server.during = lambda: (harness.dispatcher.cancel(job_id), worker.heartbeat.beat())
    assert run(harness).state is State.CANCELED
    assert [end[:2] for end in harness.notifications.ends] == [(job_id, State.CANCELED)]


# -- a run that is over before its request is sent --------------------------------------------------------------


def _call_server(harness: Harness, server: FakeServer, prepare: Callable[[LeaseWatch], None], **config: Any) -> Any:
    """Run a server call and return its outcome; `prepare` may change the lease watch before the request is sent."""
    harness.register(**config)
    harness.submit()
    active = harness.start("w1")
    watch = LeaseWatch(active.lease)
    prepare(watch)

    async def call() -> Any:
        config = harness.dispatcher.catalog.resolve("zimg").config
        return await make_server_call(active, watch, config, server).run()

    return asyncio.run(call())


@pytest.mark.parametrize(("why", "expected"), [("lost", StopReason.UNSENT), ("stop", StopReason.STOPPED)])
def test_a_run_that_ended_before_its_request_was_sent_sends_no_request(harness, server, why, expected):
    assert _call_server(harness, server, lambda watch: watch.end(why)) is expected
    assert server.asked == ["cut"]


def test_a_run_that_is_canceled_before_its_request_was_sent_does_not_send_it(harness, server):
    assert _call_server(harness, server, lambda watch: watch.request_cancel()).kind is OutcomeKind.CANCELED
    assert "submit" not in server.asked


def test_a_job_whose_deadline_passes_before_it_is_sent_never_reaches_a_server(harness, worker, server) -> None:
    harness.register()
    job_id = harness.submit(ttl_s=1)
    harness.later(SECOND)
    job = run(harness)
    assert (job.state, job.why, job.error_code) == (State.EXPIRED, Reason.DEADLINE_PASSED, "deadline_passed")
    assert server.asked == [] and "before it was sent" in (harness.job(job_id).error_message or "")


def test_a_run_that_its_deadline_ends_costs_no_retry_though_the_clock_lags(harness, worker, server) -> None:
    harness.register(model_type="async", poll_interval=0.01)
    harness.submit(ttl_s=0.2)
    server.answers = [Outcome(OutcomeKind.PENDING, remote_id="r")] * 1000
    job = run(harness)  # The test's clock does not move.
    assert (job.state, job.why, job.error_code) == (State.EXPIRED, Reason.DEADLINE_PASSED, "deadline_passed")
    assert job.failures == 0 and server.asked[-1] == "cancel"


def test_a_run_that_exceeds_max_poll_time_before_its_deadline_costs_a_retry(harness, worker, server) -> None:
    harness.register(model_type="async", poll_interval=0.01, max_poll_time=0.2)
    harness.submit(ttl_s=60)
    server.answers = [Outcome(OutcomeKind.PENDING, remote_id="r")] * 1000
    job = run(harness)
    assert (job.state, job.error_code, job.failures) == (State.DELAYED, "timed_out", 1)


def test_a_passed_deadline_is_the_stored_reason_even_if_the_last_request_failed(harness, worker, server) -> None:
    harness.register()
    harness.submit(ttl_s=1)
    server.answers = [Outcome(OutcomeKind.UNREACHABLE, code="connect_failed", message="no connection")]
    server.during = lambda: harness.later(SECOND)
    job = run(harness)
    assert (job.state, job.error_code) == (State.EXPIRED, "deadline_passed")
    assert "no connection" in (job.error_message or "")


def test_a_request_for_an_offer_from_a_message_states_whether_the_model_changes(harness, worker, server, monkeypatch):
    harness.register()
    server.description = Description.model_validate({"submit": {"path": "/run?swap={{run/swap}}"}})
    swaps = []

    async def submit(call: RunDetails) -> Outcome:
        swaps.append(call.swap)
        return DONE

    monkeypatch.setattr(server, "submit", submit)
    for _ in range(2):
        harness.submit()
        offer = harness.notifications.offers.pop(0)
        message = offer_messages.build_message(offer, 0)
        worker.executor.run_open_offer(offer_messages.read_offer(offer.job_id, [offer.model], message.headers))
        assert worker.worker_loop.wait_until_idle(20)
    assert swaps == [True, False]


@pytest.mark.parametrize(("most", "state"), [(20, State.FAILED), (21, State.COMPLETED)])
def test_a_result_that_is_larger_than_its_tenant_may_have_fails_the_job(harness, worker, server, most, state):
    harness.register()
    harness.limited("acme", max_result_bytes=most)
    job_id = harness.submit(tenant="acme")
    server.answers = [Outcome(OutcomeKind.DONE, result={"text": "x" * 10})]
    run(harness)
    job = harness.job(job_id)
    assert job.state is state
    if state is State.FAILED:
        assert (job.error_code, job.result) == ("result_too_large", None)
        assert "The result has 21 bytes, and its tenant may have 20." in job.error_message
