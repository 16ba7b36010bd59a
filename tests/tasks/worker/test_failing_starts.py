"""Starts that fail: the job returns to its position, or keeps its lease until it is known whether it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from routing.queue.leases import Renewal
from slotkeeper.db import Write
from slotkeeper.errors import CommitUnknown
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.states import Reason, State
from tasks.worker.worker_run import WorkerRun
from tests.support import passes
from tests.support.ends import hand_back
from tests.support.harness import LEASE_MS, SECOND, Harness
from tests.tasks.worker.start_only import (
    CompletingWorker,
    StartOnlyWorker,
    make_worker,
    raise_unavailable,
    raising,
    run_background_tasks_at_once,
    unavailable_write,
)

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    run_background_tasks_at_once(monkeypatch)


@pytest.fixture
def worker(harness: Harness) -> Iterator[StartOnlyWorker]:
    yield from make_worker(StartOnlyWorker, harness)


@pytest.fixture
def completing_worker(harness: Harness) -> Iterator[CompletingWorker]:
    yield from make_worker(CompletingWorker, harness, capacity=1)


@pytest.mark.parametrize("deliver", ["start", "start_claimed"])
@sqlite
def test_a_job_that_cannot_be_started_returns_to_its_position_and_is_not_offered_at_once(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, deliver: str
) -> None:
    """The database is down: without a pause the slot would be offered and released in an endless loop."""
    harness.register()
    first, second = harness.submit(), harness.submit()
    offer = harness.notifications.offers.pop()
    assert offer.job_id == first

    with monkeypatch.context() as outage:
        outage.setattr(harness.store, "start_write", unavailable_write)
        assert getattr(worker, deliver)(offer) is None

    assert harness.queue.taken() == {}, "the worker releases the lease and does not leave it to expire"
    assert harness.offered() == [], "the slot is not offered again at once"
    harness.later(SECOND)
    passes.sweep(harness.dispatcher)
    assert harness.run_all() == [first, second]
    assert (harness.job(first).attempt, harness.job(first).crashes) == (1, 0)


@pytest.mark.parametrize("deliver", ["start", "start_claimed"])
@sqlite
def test_a_job_whose_start_may_have_been_stored_keeps_its_lease_until_the_reaper_checks_it(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, deliver: str
) -> None:
    """The stopping worker cannot read the state.  A requeued job would be queued and running, and its slot free."""
    harness.register()
    job_id = harness.submit()
    offer = harness.notifications.offers.pop()

    with _commit_unknown_at_start(harness, monkeypatch, worker.heartbeat.stop_all):
        assert getattr(worker, deliver)(offer) is None
    assert list(harness.queue.taken().values()) == [job_id]
    assert harness.queue.waiting() == []
    assert harness.job(job_id).state is State.RUNNING


@contextmanager
def _commit_unknown_at_start(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    on_start: Callable[[], None] = lambda: None,
    *,
    stored: bool = True,
) -> Iterator[None]:
    """Let each write of a start end with CommitUnknown; `stored`: whether the database has committed the write."""
    start = harness.store.start_write

    def start_with_unknown_commit(*args: Any, **kwargs: Any) -> Write[Any]:
        if stored:
            harness.database.commit(start(*args, **kwargs))
        on_start()
        return Write(raising(CommitUnknown("the commit was not answered")))

    with monkeypatch.context() as outage:
        outage.setattr(harness.store, "start_write", start_with_unknown_commit)
        yield


@sqlite
def test_a_job_whose_stored_start_was_reported_as_unknown_runs_and_spends_no_retry(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker keeps the lease, and reads the job until the database responds."""
    harness.register()
    job_id = harness.submit()
    get, failures, watch_states = harness.store.get, iter(range(3)), []

    def get_after_three_failures(read_id: str) -> Any:
        watch_states.extend((watch.starting, watch.is_removed) for watch in worker.heartbeat.watches())
        return raise_unavailable() if next(failures, None) is not None else get(read_id)

    with _commit_unknown_at_start(harness, monkeypatch):
        monkeypatch.setattr(harness.store, "get", get_after_three_failures)
        active = worker.start(harness.notifications.offers.pop())

    assert active is not None and watch_states == [(True, False)] * 4
    assert harness.renewal(active) is Renewal.RENEWED
    assert harness.settle(active).moved is not None
    assert (harness.job(job_id).attempt, harness.job(job_id).crashes) == (1, 0)


@sqlite
def test_a_job_whose_start_was_not_stored_returns_to_its_place_in_the_queue(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    job_id = harness.submit()
    with _commit_unknown_at_start(harness, monkeypatch, stored=False):
        assert worker.start(harness.notifications.offers.pop()) is None
    assert harness.queue.taken() == {} and harness.queue.waiting() == [job_id] and worker.concurrency.free_places == 3


@sqlite
def test_a_worker_releases_a_job_that_another_worker_started_while_its_own_start_was_unknown(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register(2)
    job_id = harness.submit()
    (offer,) = harness.notifications.offers

    def start_elsewhere() -> None:
        harness.database.commit(start_write(job_id, "gpu", "gpu-slot1", "1.another w2", harness.now, 1, fleet="zimg"))

    start_write = harness.store.start_write
    with _commit_unknown_at_start(harness, monkeypatch, start_elsewhere, stored=False):
        assert worker.start(offer) is None
    assert harness.queue.taken() == {} and harness.queue.waiting() == [] and harness.job(job_id).lease == "1.another w2"


@pytest.mark.parametrize("failing_step", ["claim", "write"])
@sqlite
def test_an_unexpected_error_at_a_start_loses_neither_the_job_nor_capacity_of_the_worker(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, failing_step: str
) -> None:
    """Example: a migration changes the tables while the worker uses them."""
    harness.register()
    job_id = harness.submit()
    (offer,) = harness.notifications.offers

    def fail(*_: object) -> Any:
        raise LookupError("no such table: jobs")

    with monkeypatch.context() as changing:
        if failing_step == "write":
            changing.setattr(harness.store, "start_write", lambda *_, **__: Write(fail))
        else:
            changing.setattr(harness.dispatcher.leases, "claim_command", fail)
        worker.executor.run_open_offer(offer)
        assert worker.worker_loop.wait_until_idle(60)
    assert worker.concurrency.free_places == 3
    if failing_step == "write":
        assert harness.queue.taken() == {} and harness.queue.waiting() == [job_id]
    assert harness.notifications.offers == [offer]


@sqlite
def test_a_worker_accepts_no_more_offers_than_it_has_free_places(harness: Harness, worker: StartOnlyWorker) -> None:
    """A broker may deliver more wake-ups than the prefetch limit, and delivers all of them again after an outage."""
    harness.register(slots=5)
    job_ids = [harness.submit() for _ in range(5)]
    offers = list(harness.notifications.offers)
    assert len(offers) == 5
    for offer in offers:
        worker.executor.run_open_offer(offer)
        worker.executor.run_open_offer(offer)
    assert sorted(worker.started_jobs) == sorted(job_ids[:3])


@sqlite
def test_an_unexpected_error_at_the_end_of_a_run_frees_its_capacity_in_the_worker(
    harness: Harness, completing_worker: CompletingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    harness.submit()
    monkeypatch.setattr(harness.store, "settle_write", lambda *_, **__: Write(raising(LookupError("no such table"))))
    completing_worker.executor.run_open_offer(harness.notifications.offers.pop())
    assert completing_worker.worker_loop.wait_until_idle(60)
    assert completing_worker.concurrency.free_places == 1 and completing_worker.heartbeat.watches() == []


@sqlite
def test_an_internal_error_at_the_end_of_a_run_spends_no_retry_and_is_stored_with_the_job(
    harness: Harness, completing_worker: CompletingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    job_id = harness.submit()
    settle_write = harness.store.settle_write

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if args[2] is Reason.FINISHED:
            return Write(raising(TypeError("str is not valid UTF-8")))
        return settle_write(*args, **kwargs)

    monkeypatch.setattr(harness.store, "settle_write", fail_once)
    completing_worker.executor.run_open_offer(harness.notifications.offers.pop())
    assert completing_worker.worker_loop.wait_until_idle(60)
    job = harness.job(job_id)
    assert (job.state, job.failures, job.crashes) == (State.QUEUED, 0, 0)
    assert job.error_code == "internal_error" and "TypeError" in (job.error_message or "")


@pytest.mark.parametrize("deliver", ["start", "start_claimed"])
@sqlite
def test_a_job_that_another_server_may_be_at_is_not_put_back_for_all_servers(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, deliver: str
) -> None:
    """Otherwise two servers would run the job at the same time."""
    harness.register()
    job_id = harness.submit()
    active = harness.start("w1")
    harness.remote(active)
    assert hand_back(harness.dispatcher, active)
    harness.register(server="other")
    (offer,) = harness.notifications.offers
    harness.notifications.offers.clear()

    with monkeypatch.context() as outage:
        outage.setattr(harness.store, "start_write", unavailable_write)
        assert getattr(worker, deliver)(offer) is None

    harness.later(LEASE_MS)
    passes.reap(harness.dispatcher)
    passes.sweep(harness.dispatcher)
    again = harness.start("w2")
    assert (again.run.job.id, again.lease.server, again.run.remote_id) == (job_id, "gpu", "r-1")


@pytest.mark.parametrize(
    "outcome", [StopReason.UNSENT, Outcome(OutcomeKind.CANCELED), Outcome(OutcomeKind.RETRY)], ids=str
)
@sqlite
def test_a_run_whose_first_call_another_worker_made_keeps_its_slot_where_it_is_not_sent_again(
    harness: Harness,
    completing_worker: CompletingWorker,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Outcome | StopReason,
) -> None:
    """The server may still run the first request, and has returned no id for it."""

    async def end_without_request(_: WorkerRun) -> Outcome | StopReason:
        completing_worker.consumer = None  # The worker claims no further job.
        return outcome

    monkeypatch.setattr(completing_worker.server_calls, "call", end_without_request)
    harness.register()
    job_id = harness.submit()
    assert hand_back(harness.dispatcher, harness.start("w1"))
    harness.register(server="other")
    (offer,) = harness.notifications.offers
    harness.notifications.offers.clear()
    completing_worker.executor.run_open_offer(offer)
    assert completing_worker.worker_loop.wait_until_idle(60)
    if outcome is StopReason.UNSENT:
        assert (harness.state(job_id), harness.job(job_id).slot) == (State.QUEUED, offer.slot)
        assert [(again.job_id, again.slot) for again in harness.notifications.offers] == [(job_id, offer.slot)]
    else:
        assert [(row.job_id, row.slot) for row in quarantine.list_all(harness.database)] == [(job_id, offer.slot)]
        assert harness.free() == 1


@sqlite
def test_a_lease_is_kept_while_its_start_is_stored_slowly(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a slow disk would cause a crash of each delayed job, and a second run."""
    harness.register()
    job_id = harness.submit()
    offer = harness.notifications.offers.pop()
    start = harness.store.start_write

    def start_slowly(*args: Any, **kwargs: Any) -> Write[Any]:
        harness.later(LEASE_MS - SECOND)
        worker.heartbeat.beat()
        harness.later(2 * SECOND)
        return start(*args, **kwargs)

    monkeypatch.setattr(harness.store, "start_write", start_slowly)
    active = worker.start(offer)
    assert active is not None
    assert passes.reap(harness.dispatcher) == 0
    assert (harness.job(job_id).state, harness.job(job_id).crashes) == (State.RUNNING, 0)


@sqlite
def test_the_database_check_skips_a_run_whose_start_is_being_stored(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database does not contain the run yet, so the check would count its lease as lost."""
    harness.register()
    harness.submit()
    offer = harness.notifications.offers.pop()
    start, watches = harness.store.start_write, []

    def check_and_start(*args: Any, **kwargs: Any) -> Write[Any]:
        watches.extend(worker.heartbeat.watches())
        worker.database_check.request(worker.heartbeat.watches(), renewal_lost=True)
        return start(*args, **kwargs)

    monkeypatch.setattr(harness.store, "start_write", check_and_start)
    assert worker.start(offer) is not None
    assert [watch.lost for watch in watches] == [False]
