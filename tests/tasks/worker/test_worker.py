"""A worker while the database or Redis is down: it loses no job, and it pauses before each retry."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from celery.exceptions import Reject
from redis.exceptions import RedisError
from structlog.testing import capture_logs

from routing.dispatch.dispatcher import ActiveRun, Dispatcher
from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from routing.maintenance import deadlines
from routing.progress import ProgressCommands
from routing.queue.leases import Lease, Leases, Renewal
from routing.queue.queues import Offer
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.clock import boottime_s
from slotkeeper.db import Write
from slotkeeper.errors import CommitUnknown, DatabaseUnavailable
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.states import Reason, State
from slotkeeper.process_locks import ProcessLocks
from tasks import inference
from tasks.inference import infer
from tasks.threads import BackgroundTask
from tasks.worker import worker_run
from tasks.worker.concurrency import TakenOffer
from tasks.worker.heartbeat import LeaseWatch
from tasks.worker.server_calls import AbandonedCalls
from tasks.worker.worker import Worker
from tasks.worker.worker_run import RetryingIo, WorkerRun
from tests.support import passes
from tests.support.builders import eventually
from tests.support.ends import decided, end_in_order, hand_back
from tests.support.stage import LEASE_MS, SECOND, Stage
from tools.cluster.direct_starts import begin_run, claim_offer

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


# -- a message from a plain Celery client ----------------------------------------------------------------------


class Pauses:
    """A replacement for the heartbeat that counts calls of `wait` and returns from them at once."""

    def __init__(self) -> None:
        self.count = 0
        self.on_wait: Callable[[], None] = lambda: None

    def wait(self, seconds: float) -> None:
        assert seconds >= 1, "retries without a pause would overload the database"
        self.count += 1
        self.on_wait()


@pytest.fixture
def pauses(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Pauses:
    pauses = Pauses()
    monkeypatch.setattr(inference, "dispatcher", lambda: stage.dispatcher)
    monkeypatch.setattr(inference, "this_worker", lambda: type("Worker", (), {"heartbeat": pauses}))
    return pauses


@contextmanager
def _a_bare_message(job_id: str) -> Iterator[None]:
    infer.push_request(id=job_id, headers={}, delivery_info={"priority": 5}, called_directly=False)
    try:
        yield
    finally:
        infer.pop_request()


def _raise_unavailable(*_: Any, **__: Any) -> Any:
    raise DatabaseUnavailable("down")


def _unavailable_write(*_: Any, **__: Any) -> Write[Any]:
    return Write(_raise_unavailable)


def _raise(error: Exception) -> Callable[[Any], Any]:
    def unit(_: Any) -> Any:
        raise error

    return unit


@sqlite
def test_a_bare_message_goes_back_to_the_broker_when_the_database_stays_away(
    stage: Stage, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is the only copy of the job."""
    stage.register()
    monkeypatch.setattr(stage.store, "submit", _raise_unavailable)
    with _a_bare_message("bare"), pytest.raises(Reject) as rejected:
        infer.run("zimg", {"prompt": "a cat"})
    assert rejected.value.requeue is True  # type: ignore[attr-defined]
    assert pauses.count >= 20, "the worker waits for the database first"


@sqlite
def test_a_bare_message_waits_for_the_database_and_is_recorded_once(
    stage: Stage, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    submit = stage.store.submit
    monkeypatch.setattr(stage.store, "submit", _raise_unavailable)

    def restore_after_three_pauses() -> None:
        if pauses.count == 3:
            monkeypatch.setattr(stage.store, "submit", submit)

    pauses.on_wait = restore_after_three_pauses
    with _a_bare_message("bare"), pytest.raises(inference.Ignore):
        infer.run("zimg", {"prompt": "a cat"})
    assert (pauses.count, stage.state("bare")) == (3, State.QUEUED)
    assert stage.run_all() == ["bare"]


# -- a start that fails ----------------------------------------------------------------------------------------


class StartOnlyWorker(Worker):
    """A worker that starts runs and makes no server call; heartbeat and poller run only when a test calls them."""

    def __init__(self, dispatcher: Dispatcher, *args: Any, **kwargs: Any) -> None:
        super().__init__(dispatcher, *args, **kwargs)
        self.dispatcher = dispatcher
        self.heartbeat.end()
        self.consumer = object()
        self.executor._call_and_end = self._note_start  # type: ignore[method-assign]
        self.active_runs: dict[str, ActiveRun] = {}  # the started runs by lease, in order
        self.started: list[WorkerRun] = []

    async def _note_start(self, run: WorkerRun) -> None:
        self.active_runs[run.active.lease.name] = run.active
        self.started.append(run)
        self.heartbeat.remove(run.watch)

    @property
    def started_jobs(self) -> list[str]:
        """Wait until the worker is idle, and return the ids of the jobs that it has started."""
        assert self.worker_loop.wait_until_idle(60)
        return [active.run.job.id for active in self.active_runs.values()]

    def start(self, offer: Offer) -> ActiveRun | None:
        """Deliver a wake-up, and return the run that it starts, or None."""
        before = set(self.active_runs)
        self.executor.run_open_offer(offer)
        assert self.worker_loop.wait_until_idle(60)
        return None if offer.lease in before else self.active_runs.get(offer.lease)

    def start_newest(self, stage: Stage) -> ActiveRun:
        """Start the run of the wake-up that was published last."""
        active = self.start(stage.told.offers.pop())
        assert active is not None
        return active

    def start_claimed(self, offer: Offer) -> None:
        """Claim an offer, and deliver it as one that this worker has claimed already."""
        self.executor.run_claimed_offer(replace(offer, owner=self.owner) if self._claim(offer) else offer)
        assert self.worker_loop.wait_until_idle(60)

    def _claim(self, offer: Offer) -> bool:
        return claim_offer(self.dispatcher.leases, offer, self.owner) is not None

    def poll(self) -> int:
        """Poll once, and return the number of offers that the poller has claimed."""
        claimed = self.poller.poll_once()
        assert self.worker_loop.wait_until_idle(60)
        return claimed


class CompletingWorker(StartOnlyWorker):
    """A worker whose runs end at once, with a result and without a server call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.called_jobs: list[str] = []
        del self.executor._call_and_end
        self.server_calls.call = self._complete  # type: ignore[method-assign]

    async def _complete(self, run: WorkerRun) -> Outcome:
        self.called_jobs.append(run.active.run.job.id)
        return Outcome(OutcomeKind.DONE, result={"url": "x"})


def _make_worker(kind: type[StartOnlyWorker], stage: Stage, capacity: int = 3) -> Iterator[Any]:
    scripts = stage.dispatcher.leases.scripts
    worker = kind(stage.dispatcher, WorkerCapacity(scripts), ProgressCommands(scripts), max_runs=capacity)
    stage.postponed = worker.background_tasks.retry_release
    yield worker
    worker.close()  # Otherwise its threads would run on during later tests, which have other databases.


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run background tasks at once, and retry with almost no delay."""
    monkeypatch.setattr(BackgroundTask, "request", lambda task: task._function())
    monkeypatch.setattr(worker_run, "_RETRY_S", 0.001)


@pytest.fixture
def worker(stage: Stage) -> Iterator[StartOnlyWorker]:
    yield from _make_worker(StartOnlyWorker, stage)


@pytest.fixture
def completing_worker(stage: Stage) -> Iterator[CompletingWorker]:
    yield from _make_worker(CompletingWorker, stage, capacity=1)


@pytest.mark.parametrize("deliver", ["start", "start_claimed"])
@sqlite
def test_a_job_that_cannot_be_started_goes_back_to_its_place_and_is_not_offered_at_once(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, deliver: str
) -> None:
    """The database is down: without a pause the slot would be offered and released in an endless loop."""
    stage.register()
    first, second = stage.submit(), stage.submit()
    offer = stage.told.offers.pop()
    assert offer.job_id == first

    with monkeypatch.context() as outage:
        outage.setattr(stage.store, "start_write", _unavailable_write)
        assert getattr(worker, deliver)(offer) is None

    assert stage.room.taken() == {}, "the worker releases the lease and does not leave it to expire"
    assert stage.offered() == [], "the slot is not offered again at once"
    stage.later(SECOND)
    passes.sweep(stage.dispatcher)
    assert stage.run_all() == [first, second]
    assert (stage.job(first).attempt, stage.job(first).crashes) == (1, 0)


@pytest.mark.parametrize("deliver", ["start", "start_claimed"])
@sqlite
def test_a_job_whose_start_may_have_been_stored_keeps_its_lease_until_the_reaper_has_looked(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, deliver: str
) -> None:
    """The stopping worker cannot read the state.  A requeued job would be queued and running, and its slot free."""
    stage.register()
    job_id = stage.submit()
    offer = stage.told.offers.pop()

    with _commit_unknown_at_start(stage, monkeypatch, worker.heartbeat.stop_all):
        assert getattr(worker, deliver)(offer) is None
    assert list(stage.room.taken().values()) == [job_id]
    assert stage.room.waiting() == []
    assert stage.job(job_id).state is State.RUNNING


@contextmanager
def _commit_unknown_at_start(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, on_start: Callable[[], None] = lambda: None, *, stored: bool = True
) -> Iterator[None]:
    """Let each write of a start end with CommitUnknown; `stored`: whether the database has committed the write."""
    start = stage.store.start_write

    def start_with_unknown_commit(*args: Any, **kwargs: Any) -> Write[Any]:
        if stored:
            stage.database.commit(start(*args, **kwargs))
        on_start()
        return Write(_raise(CommitUnknown("the commit was not answered")))

    with monkeypatch.context() as outage:
        outage.setattr(stage.store, "start_write", start_with_unknown_commit)
        yield


@sqlite
def test_a_job_whose_start_was_stored_and_not_heard_of_runs_and_costs_nothing(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker keeps the lease, and reads the job until the database responds."""
    stage.register()
    job_id = stage.submit()
    get, failures, watch_states = stage.store.get, iter(range(3)), []

    def get_after_three_failures(read_id: str) -> Any:
        watch_states.extend((watch.starting, watch.is_removed) for watch in worker.heartbeat.watches())
        return _raise_unavailable() if next(failures, None) is not None else get(read_id)

    with _commit_unknown_at_start(stage, monkeypatch):
        monkeypatch.setattr(stage.store, "get", get_after_three_failures)
        active = worker.start(stage.told.offers.pop())

    assert active is not None and watch_states == [(True, False)] * 4
    assert stage.renewal(active) is Renewal.RENEWED
    assert stage.settle(active).moved is not None
    assert (stage.job(job_id).attempt, stage.job(job_id).crashes) == (1, 0)


@sqlite
def test_a_job_whose_start_was_neither_stored_nor_heard_of_goes_back_to_its_place(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()
    with _commit_unknown_at_start(stage, monkeypatch, stored=False):
        assert worker.start(stage.told.offers.pop()) is None
    assert stage.room.taken() == {} and stage.room.waiting() == [job_id] and worker.concurrency.free_places == 3


@sqlite
def test_a_job_whose_start_was_not_heard_of_and_that_another_has_by_now_is_left_to_him(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register(2)
    job_id = stage.submit()
    (offer,) = stage.told.offers

    def start_elsewhere() -> None:
        stage.database.commit(start_write(job_id, "gpu", "gpu-slot1", "1.another w2", stage.now, 1, fleet="zimg"))

    start_write = stage.store.start_write
    with _commit_unknown_at_start(stage, monkeypatch, start_elsewhere, stored=False):
        assert worker.start(offer) is None
    assert stage.room.taken() == {} and stage.room.waiting() == [] and stage.job(job_id).lease == "1.another w2"


@pytest.mark.parametrize("failing_step", ["claim", "write"])
@sqlite
def test_an_error_that_nobody_foresaw_costs_neither_the_job_nor_its_place_in_the_worker(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, failing_step: str
) -> None:
    """Example: a migration changes the tables while the worker uses them."""
    stage.register()
    job_id = stage.submit()
    (offer,) = stage.told.offers

    def fail(*_: object) -> Any:
        raise LookupError("no such table: jobs")

    with monkeypatch.context() as changing:
        if failing_step == "write":
            changing.setattr(stage.store, "start_write", lambda *_, **__: Write(fail))
        else:
            changing.setattr(stage.dispatcher.leases, "claim_command", fail)
        worker.executor.run_open_offer(offer)
        assert worker.worker_loop.wait_until_idle(60)
    assert worker.concurrency.free_places == 3
    if failing_step == "write":
        assert stage.room.taken() == {} and stage.room.waiting() == [job_id]
    assert stage.told.offers == [offer]


@sqlite
def test_a_worker_accepts_no_more_offers_than_it_has_free_places(stage: Stage, worker: StartOnlyWorker) -> None:
    """A broker may deliver more wake-ups than the prefetch limit, and delivers all of them again after an outage."""
    stage.register(slots=5)
    job_ids = [stage.submit() for _ in range(5)]
    offers = list(stage.told.offers)
    assert len(offers) == 5
    for offer in offers:
        worker.executor.run_open_offer(offer)
        worker.executor.run_open_offer(offer)
    assert sorted(worker.started_jobs) == sorted(job_ids[:3])


@sqlite
def test_a_run_whose_end_fails_as_nobody_foresaw_gives_its_place_back(
    stage: Stage, completing_worker: CompletingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    stage.submit()
    monkeypatch.setattr(stage.store, "settle_write", lambda *_, **__: Write(_raise(LookupError("no such table"))))
    completing_worker.executor.run_open_offer(stage.told.offers.pop())
    assert completing_worker.worker_loop.wait_until_idle(60)
    assert completing_worker.concurrency.free_places == 1 and completing_worker.heartbeat.watches() == []


@sqlite
def test_an_error_of_ours_at_a_runs_end_costs_the_job_nothing_and_is_told(
    stage: Stage, completing_worker: CompletingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()
    settle_write = stage.store.settle_write

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if args[2] is Reason.FINISHED:
            return Write(_raise(TypeError("str is not valid UTF-8")))
        return settle_write(*args, **kwargs)

    monkeypatch.setattr(stage.store, "settle_write", fail_once)
    completing_worker.executor.run_open_offer(stage.told.offers.pop())
    assert completing_worker.worker_loop.wait_until_idle(60)
    job = stage.job(job_id)
    assert (job.state, job.failures, job.crashes) == (State.QUEUED, 0, 0)
    assert job.error_code == "internal_error" and "TypeError" in (job.error_message or "")


@pytest.mark.parametrize("deliver", ["start", "start_claimed"])
@sqlite
def test_a_job_that_another_server_may_be_at_is_not_put_back_for_all_servers(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, deliver: str
) -> None:
    """Otherwise two servers would run the job at the same time."""
    stage.register()
    job_id = stage.submit()
    active = stage.start("w1")
    stage.remote(active)
    assert hand_back(stage.dispatcher, active)
    stage.register(server="other")
    (offer,) = stage.told.offers
    stage.told.offers.clear()

    with monkeypatch.context() as outage:
        outage.setattr(stage.store, "start_write", _unavailable_write)
        assert getattr(worker, deliver)(offer) is None

    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    passes.sweep(stage.dispatcher)
    again = stage.start("w2")
    assert (again.run.job.id, again.lease.server, again.run.remote_id) == (job_id, "gpu", "r-1")


@pytest.mark.parametrize(
    "outcome", [StopReason.UNSENT, Outcome(OutcomeKind.CANCELED), Outcome(OutcomeKind.RETRY)], ids=str
)
@sqlite
def test_a_run_whose_first_call_another_worker_made_keeps_its_slot_where_it_is_not_sent_again(
    stage: Stage, completing_worker: CompletingWorker, monkeypatch: pytest.MonkeyPatch, outcome: Outcome | StopReason
) -> None:
    """The server may still run the first request, and has returned no id for it."""

    async def end_without_request(_: WorkerRun) -> Outcome | StopReason:
        completing_worker.consumer = None  # The worker claims no further job.
        return outcome

    monkeypatch.setattr(completing_worker.server_calls, "call", end_without_request)
    stage.register()
    job_id = stage.submit()
    assert hand_back(stage.dispatcher, stage.start("w1"))
    stage.register(server="other")
    (offer,) = stage.told.offers
    stage.told.offers.clear()
    completing_worker.executor.run_open_offer(offer)
    assert completing_worker.worker_loop.wait_until_idle(60)
    if outcome is StopReason.UNSENT:
        assert (stage.state(job_id), stage.job(job_id).slot) == (State.QUEUED, offer.slot)
        assert [(again.job_id, again.slot) for again in stage.told.offers] == [(job_id, offer.slot)]
    else:
        assert [(row.job_id, row.slot) for row in quarantine.list_all(stage.database)] == [(job_id, offer.slot)]
        assert stage.free() == 1


@sqlite
def test_a_lease_is_kept_while_its_start_is_being_stored_however_long_that_takes(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a slow disk would cause a crash of each delayed job, and a second run."""
    stage.register()
    job_id = stage.submit()
    offer = stage.told.offers.pop()
    start = stage.store.start_write

    def start_slowly(*args: Any, **kwargs: Any) -> Write[Any]:
        stage.later(LEASE_MS - SECOND)
        worker.heartbeat.beat()
        stage.later(2 * SECOND)
        return start(*args, **kwargs)

    monkeypatch.setattr(stage.store, "start_write", start_slowly)
    active = worker.start(offer)
    assert active is not None
    assert passes.reap(stage.dispatcher) == 0
    assert (stage.job(job_id).state, stage.job(job_id).crashes) == (State.RUNNING, 0)


@sqlite
def test_the_database_check_skips_a_run_whose_start_is_being_stored(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database does not contain the run yet, so the check would count its lease as lost."""
    stage.register()
    stage.submit()
    offer = stage.told.offers.pop()
    start, watches = stage.store.start_write, []

    def check_and_start(*args: Any, **kwargs: Any) -> Write[Any]:
        watches.extend(worker.heartbeat.watches())
        worker.database_check.request(worker.heartbeat.watches(), unknown_to_redis=True)
        return start(*args, **kwargs)

    monkeypatch.setattr(stage.store, "start_write", check_and_start)
    assert worker.start(offer) is not None
    assert [watch.lost for watch in watches] == [False]


# -- duplicate, late and lost messages -------------------------------------------------------------------------


@pytest.mark.parametrize("started_by", ["message", "claimed offer"])
@sqlite
def test_a_duplicate_wake_up_starts_no_job_and_frees_no_slot(
    stage: Stage, worker: StartOnlyWorker, started_by: str
) -> None:
    """This also applies to the process that runs the job and owns its lease."""
    stage.register()
    first, second = stage.submit(), stage.submit()
    (offer,) = stage.told.offers
    if started_by == "message":
        assert worker.start(offer) is not None
    else:
        (claimed,) = stage.dispatcher.queues.offer("zimg", 1, claimant=worker.owner)
        worker.executor.run_claimed_offer(claimed)
        assert worker.started_jobs == [first]
    assert worker.start(offer) is None
    assert stage.room.taken() == {"gpu-slot0": first}
    assert stage.state(first) is State.RUNNING and stage.state(second) is State.QUEUED


@sqlite
def test_a_duplicate_wake_up_frees_no_slot_while_redis_is_down(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()
    (offer,) = stage.told.offers
    assert worker.start(offer) is not None
    monkeypatch.setattr(stage.dispatcher.leases, "claim_command", _raise_redis_error)
    assert worker.start(offer) is None
    assert stage.room.taken() == {"gpu-slot0": job_id}


@sqlite
def test_a_wake_up_whose_job_another_worker_has_already_claimed_changes_nothing(
    stage: Stage, worker: StartOnlyWorker
) -> None:
    stage.register()
    job_id = stage.submit()
    (late,) = stage.told.offers
    (claimed,) = stage.dispatcher.queues.offer("zimg", 1, claimant="w2")
    assert begin_run(stage.dispatcher, claimed, "w2") is not None
    assert worker.start(late) is None
    assert stage.room.taken() == {"gpu-slot0": job_id} and stage.state(job_id) is State.RUNNING


@sqlite
def test_a_job_whose_wake_up_is_lost_is_started_by_the_second_poll(stage: Stage, worker: StartOnlyWorker) -> None:
    """At the first poll the message may still be in the broker."""
    stage.register()
    job_id = stage.submit()
    assert worker.poll() == 0
    assert worker.poll() == 1
    assert worker.started_jobs == [job_id] and stage.state(job_id) is State.RUNNING


@sqlite
def test_the_first_poll_claims_jobs_that_are_not_offered_yet(stage: Stage, worker: StartOnlyWorker) -> None:
    """Jobs are not offered while no worker has capacity, for example before the first worker starts."""
    capacity = WorkerCapacity(stage.dispatcher.queues.scripts)
    stage.dispatcher.queues._capacity = capacity.total
    stage.register(2)
    waiting = [stage.submit() for _ in range(3)]
    assert stage.offered() == []
    assert worker.poll() == 2
    assert worker.started_jobs == waiting[:2] and stage.room.waiting() == waiting[2:]


@sqlite
def test_a_worker_takes_no_more_than_it_has_room_for_and_the_oldest_of_it(
    stage: Stage, worker: StartOnlyWorker
) -> None:
    stage.register(5)
    jobs = [stage.submit() for _ in range(6)]
    worker.poll()
    assert worker.poll() == 3
    assert worker.started_jobs == jobs[:3] and worker.concurrency.free_places == 0
    assert worker.poll() == 0


@sqlite
def test_a_full_worker_shares_its_runs_between_models(stage: Stage, worker: StartOnlyWorker) -> None:
    """A full worker reads no messages, so without sharing it would run only the models that it already runs."""
    stage.register(3)
    stage.register(1, server="other", model="flux")
    busy = [stage.submit() for _ in range(6)]
    active_runs = [worker.start(offer) for offer in stage.told.offers[:3]]
    waiting = stage.submit("flux")
    worker.poll()
    worker.poll()
    assert worker.concurrency.free_places == 0

    for active in active_runs[:2]:
        assert active is not None
        settled = stage.settle(active, claimant=worker.concurrency.claimant)
        worker.worker_loop.spawn(worker.executor._start_next(active.lease, None, settled.next, boottime_s()))
        assert worker.worker_loop.wait_until_idle(60)
        worker.concurrency.remove(worker.concurrency._taken[active.lease.name])

    assert sorted(worker.started_jobs[3:]) == sorted([busy[3], waiting])


@sqlite
def test_a_worker_that_cannot_store_ends_accepts_at_most_one_more_job_until_it_can(
    stage: Stage, completing_worker: CompletingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is free, but more results would fill the memory of the worker."""
    stage.register()
    stored, waiting = Event(), [stage.submit() for _ in range(8)]
    settle_write = stage.store.settle_write

    def settle_once_available(*args: Any, **kwargs: Any) -> Write[Any]:
        write = settle_write(*args, **kwargs)
        return Write(lambda tx: write.unit(tx) if stored.is_set() else _raise_unavailable())

    monkeypatch.setattr(stage.store, "settle_write", settle_once_available)
    completing_worker.executor.run_open_offer(stage.told.offers.pop(0))
    eventually(lambda: len(completing_worker.called_jobs) == 2 and completing_worker.concurrency._unfilled)
    assert completing_worker.concurrency.free_places == 0

    stored.set()

    assert completing_worker.worker_loop.wait_until_idle(20)
    assert completing_worker.called_jobs == waiting and completing_worker.concurrency.free_places == 1


@pytest.mark.parametrize("redis_answers", [True, False])
@sqlite
def test_a_run_that_the_poller_starts_before_its_message_is_handled_takes_a_place_until_it_ends(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, redis_answers: bool
) -> None:
    """The poller claims the offer of a message whose own claim is in progress; the failed claim frees no place."""
    stage.register()
    job_id = stage.submit()
    (offer,) = stage.told.offers
    (claimed,) = stage.dispatcher.queues.offer("zimg", 1, claimant=worker.owner)
    claim_command = stage.dispatcher.leases.claim_command

    def claim_after_the_poller(*args: Any) -> Any:
        worker.executor.run_claimed_offer(claimed)
        return claim_command(*args) if redis_answers else _raise_redis_error()

    monkeypatch.setattr(stage.dispatcher.leases, "claim_command", claim_after_the_poller)
    worker.executor.run_open_offer(offer)
    assert worker.started_jobs == [job_id] and worker.concurrency.free_places == 2
    assert stage.room.taken() == {"gpu-slot0": job_id}


@sqlite
def test_the_background_tasks_of_a_draining_worker_read_the_capacity_of_the_other_workers(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its poller, which reads the capacity otherwise, has ended; released slots are offered up to that capacity."""
    reads: list[str] = []
    monkeypatch.setattr(worker.background_tasks._workers, "read_total", lambda: reads.append("read"))
    worker.background_tasks.run()
    assert reads == []
    worker.drain()
    worker.background_tasks.run()
    assert reads == ["read"]


@sqlite
def test_runs_that_wait_for_the_database_retry_at_different_times(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retried together, their writes would form one batch again, which may be too large."""
    monkeypatch.setattr(worker_run, "_RETRY_S", 1.0)
    waits: list[float] = []

    async def note_wait(watch: LeaseWatch, seconds: float) -> None:
        waits.append(seconds)
        watch.lost = len(waits) % 20 == 0

    monkeypatch.setattr(LeaseWatch, "sleep", note_wait)
    with pytest.raises(DatabaseUnavailable):
        asyncio.run(
            RetryingIo(worker.worker_loop, LeaseWatch(Lease("zimg", "one", "l", "w", "gpu-slot0")))._repeat_while_away(
                _raise_unavailable
            )
        )
    assert len(set(waits)) > 10 and all(0.5 <= seconds <= 1.5 for seconds in waits)


# -- a worker that stops ---------------------------------------------------------------------------------------


@sqlite
def test_a_worker_that_is_told_to_stop_begins_nothing_it_was_just_offered(
    stage: Stage, worker: StartOnlyWorker
) -> None:
    stage.register()
    second = [stage.submit() for _ in range(2)][1]
    active = worker.start_newest(stage)
    following = stage.settle(active, claimant=worker.concurrency.claimant).next
    assert following is not None and following.job_id == second
    worker.consumer = None

    worker.executor.run_claimed_offer(following)
    assert worker.worker_loop.wait_until_idle(60)

    assert (stage.state(second), stage.job(second).attempt) == (State.QUEUED, 0)
    assert stage.offered() == [second], "the job is offered to another worker"


@sqlite
def test_a_worker_whose_pool_stops_for_any_reason_claims_no_further_job(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery reports a stop by signal, but not a stop by remote control nor a consumer that gives up."""
    monkeypatch.setenv("SLOTKEEPER_GRACE_S", "0")
    stage.register()
    stage.submit()
    watch = worker.heartbeat.add(Lease("zimg", "one", "lease", worker.owner, "gpu-slot0"))
    worker.poll()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "close", lambda: None)  # The test still polls below.
        worker.drain_and_close()

    assert worker.poll() == 0 and worker.concurrency.free_places == 0 and worker.concurrency.claimant == ""
    eventually(lambda: watch.stop)


@sqlite
def test_a_consumer_that_starts_when_draining_has_begun_gets_no_jobs(stage: Stage, worker: StartOnlyWorker) -> None:
    """The consumer was still connecting when the worker received the signal to stop."""
    worker.drain()
    worker.start_consuming(SimpleNamespace(hostname="worker@host"))
    assert worker.concurrency.free_places == 0 and worker.concurrency.claimant == ""


@sqlite
def test_a_second_stop_signal_does_not_start_the_grace_time_again(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    monkeypatch.setattr(worker.poller, "end", lambda: ends.append("ended"))
    worker.drain()
    worker.drain()
    assert ends == ["ended"]


@sqlite
def test_a_run_that_begins_after_the_grace_time_is_handed_back_too(stage: Stage, worker: StartOnlyWorker) -> None:
    """The worker had read its message before it stopped its other runs."""
    stage.register()
    stage.submit()
    worker.stop_runs()
    assert worker.start(stage.told.offers.pop()) is not None
    assert [run.watch.stop for run in worker.started] == [True]


@sqlite
def test_a_worker_that_stops_has_no_capacity(stage: Stage, worker: StartOnlyWorker) -> None:
    worker.poll()
    assert WorkerCapacity(stage.dispatcher.queues.scripts).total() == 3
    worker.drain()
    assert WorkerCapacity(stage.dispatcher.queues.scripts).total() == 0 and worker.concurrency.claimant == ""


# -- a release while Redis is down -----------------------------------------------------------------------------


@contextmanager
def _failing_releases(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Lease]]:
    """Let each release fail, and return a list of the leases whose release was tried."""
    tried: list[Lease] = []

    def refuse(_: Leases, lease: Lease, **__: Any) -> Any:
        tried.append(lease)
        raise RedisError("down")

    with monkeypatch.context() as outage:
        outage.setattr(Leases, "release_command", refuse)
        yield tried


@sqlite
def test_slot_2_a_slot_whose_release_failed_is_freed_by_the_first_heartbeat_that_reaches_redis(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    first, second = stage.submit(), stage.submit()
    active = worker.start_newest(stage)
    with _failing_releases(monkeypatch):
        assert stage.settle(active).moved is not None
        worker.heartbeat.beat()
    assert list(stage.room.taken().values()) == [first]

    worker.heartbeat.beat()

    assert list(stage.room.taken().values()) == [second]
    assert stage.run_all() == [second]
    worker.heartbeat.beat()
    assert stage.room.taken() == {}


@sqlite
def test_a_job_whose_requeue_failed_is_requeued_by_the_first_heartbeat_that_reaches_redis(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    first, second = stage.submit(), stage.submit()
    active = worker.start_newest(stage)
    with _failing_releases(monkeypatch):
        stage.settle(active, OutcomeKind.BUSY, retry_after_s=0)
    worker.heartbeat.beat()
    assert stage.run_all() == [first, second], "the job keeps its place in the lane"


@sqlite
def test_lease_4_a_late_release_does_not_change_the_lease_of_the_next_run(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    stage.submit()
    active = worker.start_newest(stage)
    with _failing_releases(monkeypatch):
        stage.settle(active, OutcomeKind.BUSY, retry_after_s=0)
    stage.later(LEASE_MS)
    assert passes.reap(stage.dispatcher) == 1
    again = stage.start("w2")

    worker.heartbeat.beat()

    assert list(stage.room.taken().values()) == [again.run.job.id]
    assert stage.renewal(again) is Renewal.RENEWED


@sqlite
def test_each_heartbeat_tries_only_one_release_while_redis_is_down(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt takes as long as its timeout, and no lease is renewed meanwhile."""
    stage.register(3)
    for _ in range(3):
        stage.submit()
    active_runs = [worker.start(offer) for offer in stage.told.offers]
    with _failing_releases(monkeypatch) as tried:
        for active in active_runs:
            assert active is not None
            stage.settle(active)
        tried.clear()
        worker.heartbeat.beat()
        assert len(tried) == 1


@sqlite
def test_a_restored_lease_of_a_removed_run_is_freed_by_the_first_heartbeat_that_reaches_redis(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    stage.submit()
    active = worker.start_newest(stage)
    watch = LeaseWatch(active.lease)
    watch.sent = watch.is_removed = True
    with _failing_releases(monkeypatch) as tried:
        worker.database_check.check({watch: True})
        assert tried == [active.lease]
    worker.heartbeat.beat()
    assert stage.room.taken() == {}


@sqlite
def test_a_slot_whose_run_ends_while_redis_is_down_is_freed_by_the_first_heartbeat_that_reaches_redis(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    stage.submit()
    active = worker.start_newest(stage)
    silent = Outcome(OutcomeKind.RETRY, code="timed_out", server_still_running=True)
    assert end_in_order(stage.dispatcher, active, decided(stage.dispatcher, active, silent)).moved is not None
    assert list(stage.room.taken()) == [active.lease.slot]
    abandoned = AbandonedCalls(worker.worker_loop, stage.dispatcher, worker.background_tasks.retry_release)
    with _failing_releases(monkeypatch) as tried:
        session, calls = SimpleNamespace(abandoned=True, is_run_over=_is_over), SimpleNamespace(poll_call=None)
        abandoned.note(active.lease.name, session, calls)  # type: ignore[arg-type]
        worker.worker_loop.call_soon(abandoned.observe, active)
        eventually(lambda: tried)
    eventually(lambda: worker.heartbeat.beat() or stage.room.taken() == {})


async def _is_over(_: object) -> bool:
    return True


# -- a cancellation while Redis is down ------------------------------------------------------------------------


def _raise_redis_error(*_: Any) -> Any:
    raise RedisError("down")


def _cancel_job(stage: Stage, job_id: str) -> None:
    with pytest.MonkeyPatch.context() as outage:
        outage.setattr(stage.dispatcher.queues, "withdraw", _raise_redis_error)
        assert stage.dispatcher.cancel(job_id) is State.RUNNING


def _expire_job(stage: Stage, job_id: str) -> None:
    with pytest.MonkeyPatch.context() as outage:
        outage.setattr(stage.dispatcher.queues, "withdraw", _raise_redis_error)
        stage.later(5 * SECOND)
        assert deadlines.expire_deadlines(stage.dispatcher) == 1


@pytest.mark.parametrize("end_job", [_cancel_job, _expire_job])
@sqlite
def test_a_worker_reads_a_cancellation_that_redis_could_not_deliver_from_the_database(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, end_job: Callable[[Stage, str], None]
) -> None:
    stage.register(2)
    stage.submit(ttl_s=5)
    stage.submit()
    active_runs = [worker.start(offer) for offer in stage.told.offers]
    watches = [worker.heartbeat.add(active.lease) for active in active_runs if active is not None]
    notified = Event()
    watches[0].on_change(notified.set)
    with monkeypatch.context() as outage:
        outage.setattr(stage.dispatcher.leases, "renew", _raise_redis_error)
        worker.heartbeat.beat()
        end_job(stage, watches[0].lease.job_id)

    worker.heartbeat.beat()

    assert notified.wait(30)
    assert [watch.cancel for watch in watches] == [True, False]


@sqlite
def test_the_heartbeat_does_not_read_the_database_while_redis_responds(
    stage: Stage, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    stage.submit()
    active = worker.start_newest(stage)
    watch = worker.heartbeat.add(active.lease)
    monkeypatch.setattr(stage.store, "get_statuses", _raise_unavailable)
    worker.heartbeat.beat()
    assert not (watch.cancel or watch.lost)


# -- deadlines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OutcomeKind.BUSY, OutcomeKind.UNREACHABLE, OutcomeKind.RETRY, OutcomeKind.LOST])
@pytest.mark.parametrize(("late_ms", "state"), [(-1, None), (0, State.EXPIRED)])
@sqlite
def test_a_run_that_went_wrong_after_its_deadline_is_not_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, kind: OutcomeKind, late_ms: int, state: State | None
) -> None:
    stage.register()
    job_id = stage.submit(ttl_s=60)
    active = stage.start()
    stage.later(60 * SECOND + late_ms)
    settled = stage.settle(active, kind)
    assert settled.moved is not None
    if state is None:
        assert stage.state(job_id) in (State.QUEUED, State.DELAYED)
    else:
        assert (stage.state(job_id), stage.job(job_id).why) == (state, Reason.DEADLINE_PASSED)


@sqlite
def test_a_result_that_arrives_after_the_deadline_completes_the_job(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit(ttl_s=60)
    active = stage.start()
    stage.later(61 * SECOND)
    stage.settle(active)
    assert stage.state(job_id) is State.COMPLETED


# -- process locks ---------------------------------------------------------------------------------------------


def _worker_with_process_lock(stage: Stage, folder: Path) -> Worker:
    (folder / "record.db").touch()
    scripts, locks = stage.dispatcher.leases.scripts, ProcessLocks(folder / "workers")
    return Worker(stage.dispatcher, WorkerCapacity(scripts), ProgressCommands(scripts), 1, process_locks=locks)


@sqlite
def test_a_worker_that_ends_in_order_removes_its_process_lock(
    stage: Stage, worker: StartOnlyWorker, tmp_path: Path
) -> None:
    other = _worker_with_process_lock(stage, tmp_path)
    assert [unquote(file.name) for file in (tmp_path / "workers").iterdir()] == [other.owner]
    other.close()
    assert list((tmp_path / "workers").iterdir()) == []


@sqlite
def test_a_worker_that_ends_during_a_run_counts_as_dead_after_its_process_has_ended(
    stage: Stage, worker: StartOnlyWorker, tmp_path: Path
) -> None:
    other = _worker_with_process_lock(stage, tmp_path)
    other.concurrency.add(TakenOffer(Offer("zimg", "job", "lease", "gpu-slot0", "gpu", "zimg", 1)))
    other.close()
    locks = ProcessLocks(tmp_path / "workers")
    assert locks.find_dead() == [], "the threads of the worker may still write"
    own_locks = other.background_tasks._process_locks
    assert own_locks is not None
    os.close(own_locks._held.pop(other.owner))  # The kernel closes it when the process ends.
    assert locks.find_dead() == [other.owner]


@sqlite
def test_a_worker_that_cannot_create_its_process_lock_logs_that_and_starts(
    stage: Stage, worker: StartOnlyWorker, tmp_path: Path
) -> None:
    scripts, locks = stage.dispatcher.leases.scripts, ProcessLocks(tmp_path / "none" / "workers")
    with capture_logs() as lines:
        other = Worker(stage.dispatcher, WorkerCapacity(scripts), ProgressCommands(scripts), 1, process_locks=locks)
    assert [line["event"] for line in lines] == ["end_not_provable"]
    other.close()
