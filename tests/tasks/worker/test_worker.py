"""What a worker does when something is away just then: nothing is dropped, nothing is tried at once again."""

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


# -- a message from a client that has nothing but Celery -------------------------------------------------------


class Pauses:
    """In place of a heartbeat: counts how often somebody waits on it, and does not let him wait."""

    def __init__(self) -> None:
        self.count = 0
        self.then: Callable[[], None] = lambda: None

    def wait(self, seconds: float) -> None:
        assert seconds >= 1, "the database is not to be stormed"
        self.count += 1
        self.then()


@pytest.fixture
def pauses(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Pauses:
    found = Pauses()
    monkeypatch.setattr(inference, "dispatcher", lambda: stage.dispatcher)
    monkeypatch.setattr(inference, "this_worker", lambda: type("Worker", (), {"heartbeat": found}))
    return found


@contextmanager
def _a_bare_message(job_id: str) -> Iterator[None]:
    infer.push_request(id=job_id, headers={}, delivery_info={"priority": 5}, called_directly=False)
    try:
        yield
    finally:
        infer.pop_request()


def _is_unavailable(*_: Any, **__: Any) -> Any:
    raise DatabaseUnavailable("away")


def _write_away(*_: Any, **__: Any) -> Write[Any]:
    return Write(_is_unavailable)


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
    monkeypatch.setattr(stage.store, "submit", _is_unavailable)
    with _a_bare_message("bare"), pytest.raises(Reject) as rejected:
        infer.run("zimg", {"prompt": "a cat"})
    assert rejected.value.requeue is True  # type: ignore[attr-defined]
    assert pauses.count >= 20, "and not before it has been waited for"


@sqlite
def test_a_bare_message_waits_for_the_database_and_is_recorded_once(
    stage: Stage, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    submit = stage.store.submit
    monkeypatch.setattr(stage.store, "submit", _is_unavailable)

    def back_at_last() -> None:
        if pauses.count == 3:
            monkeypatch.setattr(stage.store, "submit", submit)

    pauses.then = back_at_last
    with _a_bare_message("bare"), pytest.raises(inference.Ignore):
        infer.run("zimg", {"prompt": "a cat"})
    assert (pauses.count, stage.state("bare")) == (3, State.QUEUED)
    assert stage.run_all() == ["bare"]


# -- a start that fails ----------------------------------------------------------------------------------------


class Beginner(Worker):
    """A worker that begins runs and does not go on with them; it beats and looks when a test says so."""

    def __init__(self, dispatcher: Dispatcher, *args: Any, **more: Any) -> None:
        super().__init__(dispatcher, *args, **more)
        self.dispatcher = dispatcher
        self.heartbeat.end()
        self.consumer = object()
        self.executor._call_and_end = self._only_begin  # type: ignore[method-assign]
        self.tasks: dict[str, ActiveRun] = {}  # that it began, by lease, in order
        self.begun: list[WorkerRun] = []

    async def _only_begin(self, run: WorkerRun) -> None:
        self.tasks[run.active.lease.name] = run.active
        self.begun.append(run)
        self.heartbeat.remove(run.watch)

    @property
    def handed_on(self) -> list[str]:
        """Jobs that it began."""
        assert self.worker_loop.wait_until_idle(60)
        return [task.run.job.id for task in self.tasks.values()]

    def start(self, offer: Offer) -> ActiveRun | None:
        """Have a wake-up come to it; answers what it began now."""
        before = set(self.tasks)
        self.executor.run_open_offer(offer)
        assert self.worker_loop.wait_until_idle(60)
        return None if offer.lease in before else self.tasks.get(offer.lease)

    def begin_newest(self, stage: Stage) -> ActiveRun:
        """Begin the run of the wake-up that was published last."""
        task = self.start(stage.told.offers.pop())
        assert task is not None
        return task

    def go_on_with(self, offer: Offer) -> None:
        """Have an offer come to it that it holds already."""
        self.executor.run_claimed_offer(replace(offer, owner=self.owner) if self._claimed(offer) else offer)
        assert self.worker_loop.wait_until_idle(60)

    def _claimed(self, offer: Offer) -> bool:
        return claim_offer(self.dispatcher.leases, offer, self.owner) is not None

    def look(self) -> int:
        found = self.poller.poll_once()
        assert self.worker_loop.wait_until_idle(60)
        return found


class Finisher(Beginner):
    """One that ends what it begins: each server answers at once, once a test lets it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.answered: list[str] = []  # jobs
        del self.executor._call_and_end
        self.server_calls.call = self._outcome  # type: ignore[method-assign]

    async def _outcome(self, run: WorkerRun) -> Outcome:
        self.answered.append(run.active.run.job.id)
        return Outcome(OutcomeKind.DONE, result={"url": "x"})


def _of(kind: type[Beginner], stage: Stage, capacity: int = 3) -> Iterator[Any]:
    scripts = stage.dispatcher.leases.scripts
    found = kind(stage.dispatcher, WorkerCapacity(scripts), ProgressCommands(scripts), max_runs=capacity)
    stage.postponed = found.background_tasks.retry_release
    yield found
    found.close()  # It would go on in the tests after this one, whose record is another.


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits here."""
    monkeypatch.setattr(BackgroundTask, "request", lambda task: task._function())
    monkeypatch.setattr(worker_run, "_RETRY_S", 0.001)


@pytest.fixture
def worker(stage: Stage) -> Iterator[Beginner]:
    yield from _of(Beginner, stage)


@pytest.fixture
def finisher(stage: Stage) -> Iterator[Finisher]:
    yield from _of(Finisher, stage, capacity=1)


@pytest.mark.parametrize("begin", ["start", "go_on_with"])
@sqlite
def test_a_job_that_cannot_be_started_goes_back_to_its_place_and_is_not_offered_at_once(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    """The database is away: without a pause the slot would be offered and given back in a circle."""
    stage.register()
    first, second = stage.submit(), stage.submit()
    offer = stage.told.offers.pop()
    assert offer.job_id == first

    with monkeypatch.context() as away:
        away.setattr(stage.store, "start_write", _write_away)
        assert getattr(worker, begin)(offer) is None

    assert stage.room.taken() == {}, "its lease is not left to expire"
    assert stage.offered() == [], "and not at once again"
    stage.later(SECOND)
    passes.sweep(stage.dispatcher)
    assert stage.run_all() == [first, second]
    assert (stage.job(first).attempt, stage.job(first).crashes) == (1, 0)


@pytest.mark.parametrize("begin", ["start", "go_on_with"])
@sqlite
def test_a_job_whose_start_may_have_been_stored_keeps_its_lease_until_the_reaper_has_looked(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    """Its worker stops and cannot ask.  Put back, it would wait and run at once, and nobody would hold its slot."""
    stage.register()
    job_id = stage.submit()
    offer = stage.told.offers.pop()

    with _starts_unheard(stage, monkeypatch, worker.heartbeat.stop_all):
        assert getattr(worker, begin)(offer) is None
    assert list(stage.room.taken().values()) == [job_id]
    assert stage.room.waiting() == []
    assert stage.job(job_id).state is State.RUNNING


@contextmanager
def _starts_unheard(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, also: Callable[[], None] = lambda: None, *, stored: bool = True
) -> Iterator[None]:
    start = stage.store.start_write

    def unheard(*told: Any, **more: Any) -> Write[Any]:
        if stored:
            stage.database.commit(start(*told, **more))
        also()
        return Write(_raise(CommitUnknown("the commit was not answered")))

    with monkeypatch.context() as away:
        away.setattr(stage.store, "start_write", unheard)
        yield


@sqlite
def test_a_job_whose_start_was_stored_and_not_heard_of_runs_and_costs_nothing(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker keeps the lease, and asks the record until that answers."""
    stage.register()
    job_id = stage.submit()
    get, left, kept = stage.store.get, iter(range(3)), []

    def at_last(asked: str) -> Any:
        kept.extend((hold.starting, hold.is_removed) for hold in worker.heartbeat.watches())
        return _is_unavailable() if next(left, None) is not None else get(asked)

    with _starts_unheard(stage, monkeypatch):
        monkeypatch.setattr(stage.store, "get", at_last)
        task = worker.start(stage.told.offers.pop())

    assert task is not None and kept == [(True, False)] * 4
    assert stage.renewal(task) is Renewal.RENEWED
    assert stage.settle(task).moved is not None
    assert (stage.job(job_id).attempt, stage.job(job_id).crashes) == (1, 0)


@sqlite
def test_a_job_whose_start_was_neither_stored_nor_heard_of_goes_back_to_its_place(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()
    with _starts_unheard(stage, monkeypatch, stored=False):
        assert worker.start(stage.told.offers.pop()) is None
    assert stage.room.taken() == {} and stage.room.waiting() == [job_id] and worker.concurrency.free_places == 3


@sqlite
def test_a_job_whose_start_was_not_heard_of_and_that_another_has_by_now_is_left_to_him(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register(2)
    job_id = stage.submit()
    (offer,) = stage.told.offers

    def is_taken() -> None:
        stage.database.commit(starting(job_id, "gpu", "gpu-slot1", "1.another w2", stage.now, 1, fleet="zimg"))

    starting = stage.store.start_write
    with _starts_unheard(stage, monkeypatch, is_taken, stored=False):
        assert worker.start(offer) is None
    assert stage.room.taken() == {} and stage.room.waiting() == [] and stage.job(job_id).lease == "1.another w2"


@pytest.mark.parametrize("what", ["claimed", "stored"])
@sqlite
def test_an_error_that_nobody_foresaw_costs_neither_the_job_nor_its_place_in_the_worker(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As when a worker meets tables that a migration is changing."""
    stage.register()
    job_id = stage.submit()
    (offer,) = stage.told.offers

    def broken(*_: object) -> Any:
        raise LookupError("no such table: jobs")

    with monkeypatch.context() as changing:
        if what == "stored":
            changing.setattr(stage.store, "start_write", lambda *_, **__: Write(broken))
        else:
            changing.setattr(stage.dispatcher.leases, "claim_command", broken)
        worker.executor.run_open_offer(offer)
        assert worker.worker_loop.wait_until_idle(60)
    assert worker.concurrency.free_places == 3
    if what == "stored":
        assert stage.room.taken() == {} and stage.room.waiting() == [job_id]
    assert stage.told.offers == [offer]


@sqlite
def test_a_worker_takes_up_no_more_offers_than_it_has_room_for(stage: Stage, worker: Beginner) -> None:
    """A broker may send it more wake-ups than it asked for, and sends them all again after an outage."""
    stage.register(slots=5)
    job_ids = [stage.submit() for _ in range(5)]
    offers = list(stage.told.offers)
    assert len(offers) == 5
    for offer in offers:
        worker.executor.run_open_offer(offer)
        worker.executor.run_open_offer(offer)
    assert sorted(worker.handed_on) == sorted(job_ids[:3])


@sqlite
def test_a_run_whose_end_fails_as_nobody_foresaw_gives_its_place_back(
    stage: Stage, finisher: Finisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    stage.submit()
    monkeypatch.setattr(stage.store, "settle_write", lambda *_, **__: Write(_raise(LookupError("no such table"))))
    finisher.executor.run_open_offer(stage.told.offers.pop())
    assert finisher.worker_loop.wait_until_idle(60)
    assert finisher.concurrency.free_places == 1 and finisher.heartbeat.watches() == []


@sqlite
def test_an_error_of_ours_at_a_runs_end_costs_the_job_nothing_and_is_told(
    stage: Stage, finisher: Finisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()
    settling = stage.store.settle_write

    def fail_once(*args: Any, **ends: Any) -> Any:
        if args[2] is Reason.FINISHED:
            return Write(_raise(TypeError("str is not valid UTF-8")))
        return settling(*args, **ends)

    monkeypatch.setattr(stage.store, "settle_write", fail_once)
    finisher.executor.run_open_offer(stage.told.offers.pop())
    assert finisher.worker_loop.wait_until_idle(60)
    job = stage.job(job_id)
    assert (job.state, job.failures, job.crashes) == (State.QUEUED, 0, 0)
    assert job.error_code == "internal_error" and "TypeError" in (job.error_message or "")


@pytest.mark.parametrize("begin", ["start", "go_on_with"])
@sqlite
def test_a_job_that_another_server_may_be_at_is_not_put_back_for_all_servers(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    """It would run twice at once."""
    stage.register()
    job_id = stage.submit()
    task = stage.start("w1")
    stage.remote(task)
    assert hand_back(stage.dispatcher, task)
    stage.register(server="other")
    (offer,) = stage.told.offers
    stage.told.offers.clear()

    with monkeypatch.context() as away:
        away.setattr(stage.store, "start_write", _write_away)
        assert getattr(worker, begin)(offer) is None

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
    stage: Stage, finisher: Finisher, monkeypatch: pytest.MonkeyPatch, outcome: Outcome | StopReason
) -> None:
    """The server may be at that call, and has given no id for it."""

    async def unsent(_: WorkerRun) -> Outcome | StopReason:
        finisher.consumer = None  # It takes nothing more.
        return outcome

    monkeypatch.setattr(finisher.server_calls, "call", unsent)
    stage.register()
    job_id = stage.submit()
    assert hand_back(stage.dispatcher, stage.start("w1"))
    stage.register(server="other")
    (offer,) = stage.told.offers
    stage.told.offers.clear()
    finisher.executor.run_open_offer(offer)
    assert finisher.worker_loop.wait_until_idle(60)
    if outcome is StopReason.UNSENT:
        assert (stage.state(job_id), stage.job(job_id).slot) == (State.QUEUED, offer.slot)
        assert [(made.job_id, made.slot) for made in stage.told.offers] == [(job_id, offer.slot)]
    else:
        assert [(row.job_id, row.slot) for row in quarantine.list_all(stage.database)] == [(job_id, offer.slot)]
        assert stage.free() == 1


@sqlite
def test_a_lease_is_kept_while_its_start_is_being_stored_however_long_that_takes(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a slow disk would count as a crash of each job that it delays, and the job would run twice."""
    stage.register()
    job_id = stage.submit()
    offer = stage.told.offers.pop()
    start = stage.store.start_write

    def slow(*told: Any, **more: Any) -> Write[Any]:
        stage.later(LEASE_MS - SECOND)
        worker.heartbeat.beat()
        stage.later(2 * SECOND)
        return start(*told, **more)

    monkeypatch.setattr(stage.store, "start_write", slow)
    task = worker.start(offer)
    assert task is not None
    assert passes.reap(stage.dispatcher) == 0
    assert (stage.job(job_id).state, stage.job(job_id).crashes) == (State.RUNNING, 0)


@sqlite
def test_the_record_is_not_asked_for_a_run_whose_start_is_being_stored(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows of none yet, and what it says would be taken for a no."""
    stage.register()
    stage.submit()
    offer = stage.told.offers.pop()
    start, holds = stage.store.start_write, []

    def asked_for(*told: Any, **more: Any) -> Write[Any]:
        holds.extend(worker.heartbeat.watches())
        worker.database_check.request(worker.heartbeat.watches(), unknown_to_redis=True)
        return start(*told, **more)

    monkeypatch.setattr(stage.store, "start_write", asked_for)
    assert worker.start(offer) is not None
    assert [hold.lost for hold in holds] == [False]


# -- messages that come twice, late or never -------------------------------------------------------------------


@pytest.mark.parametrize("begun", ["by its message", "handed on"])
@sqlite
def test_a_doubled_wake_up_starts_nothing_and_frees_nothing(stage: Stage, worker: Beginner, begun: str) -> None:
    """Not even where the message comes to the very process that runs the job, which owns the lease."""
    stage.register()
    first, second = stage.submit(), stage.submit()
    (offer,) = stage.told.offers
    if begun == "by its message":
        assert worker.start(offer) is not None
    else:
        (mine,) = stage.dispatcher.queues.offer("zimg", 1, claimant=worker.owner)
        worker.executor.run_claimed_offer(mine)
        assert worker.handed_on == [first]
    assert worker.start(offer) is None
    assert stage.room.taken() == {"gpu-slot0": first}
    assert stage.state(first) is State.RUNNING and stage.state(second) is State.QUEUED


@sqlite
def test_a_doubled_wake_up_frees_nothing_while_redis_does_not_answer(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()
    (offer,) = stage.told.offers
    assert worker.start(offer) is not None
    monkeypatch.setattr(stage.dispatcher.leases, "claim_command", _renewals_fail)
    assert worker.start(offer) is None
    assert stage.room.taken() == {"gpu-slot0": job_id}


@sqlite
def test_a_wake_up_that_comes_after_its_job_was_found_another_way_changes_nothing(
    stage: Stage, worker: Beginner
) -> None:
    stage.register()
    job_id = stage.submit()
    (late,) = stage.told.offers
    (mine,) = stage.dispatcher.queues.offer("zimg", 1, claimant="w2")
    assert begin_run(stage.dispatcher, mine, "w2") is not None
    assert worker.start(late) is None
    assert stage.room.taken() == {"gpu-slot0": job_id} and stage.state(job_id) is State.RUNNING


@sqlite
def test_a_job_whose_wake_up_is_lost_is_begun_at_the_second_look(stage: Stage, worker: Beginner) -> None:
    """At the first it may be on its way."""
    stage.register()
    job_id = stage.submit()
    assert worker.look() == 0
    assert worker.look() == 1
    assert worker.handed_on == [job_id] and stage.state(job_id) is State.RUNNING


@sqlite
def test_what_nobody_offers_a_worker_takes_at_its_first_look(stage: Stage, worker: Beginner) -> None:
    """As when it is the first worker for days: nothing is offered where nobody has room."""
    workers = WorkerCapacity(stage.dispatcher.queues.scripts)
    stage.dispatcher.queues._capacity = workers.total
    stage.register(2)
    waiting = [stage.submit() for _ in range(3)]
    assert stage.offered() == []
    assert worker.look() == 2
    assert worker.handed_on == waiting[:2] and stage.room.waiting() == waiting[2:]


@sqlite
def test_a_worker_takes_no_more_than_it_has_room_for_and_the_oldest_of_it(stage: Stage, worker: Beginner) -> None:
    stage.register(5)
    jobs = [stage.submit() for _ in range(6)]
    worker.look()
    assert worker.look() == 3
    assert worker.handed_on == jobs[:3] and worker.concurrency.free_places == 0
    assert worker.look() == 0


@sqlite
def test_a_full_worker_shares_its_runs_between_models(stage: Stage, worker: Beginner) -> None:
    """It reads no messages, so without that the model whose runs it has would keep it for ever."""
    stage.register(3)
    stage.register(1, server="other", model="flux")
    busy = [stage.submit() for _ in range(6)]
    tasks = [worker.start(offer) for offer in stage.told.offers[:3]]
    waiting = stage.submit("flux")
    worker.look()
    worker.look()
    assert worker.concurrency.free_places == 0

    for task in tasks[:2]:
        assert task is not None
        settled = stage.settle(task, claimant=worker.concurrency.claimant)
        worker.worker_loop.spawn(worker.executor._start_next(task.lease, None, settled.next, boottime_s()))
        assert worker.worker_loop.wait_until_idle(60)
        worker.concurrency.remove(worker.concurrency._taken[task.lease.name])

    assert sorted(worker.handed_on[3:]) == sorted([busy[3], waiting])


@sqlite
def test_a_worker_whose_ends_are_not_stored_takes_one_more_at_most_and_is_full_again_when_they_are(
    stage: Stage, finisher: Finisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is free, but its memory would fill with results."""
    stage.register()
    stored, waiting = Event(), [stage.submit() for _ in range(8)]
    settling = stage.store.settle_write

    def late(*args: Any, **more: Any) -> Write[Any]:
        write = settling(*args, **more)
        return Write(lambda tx: write.unit(tx) if stored.is_set() else _is_unavailable())

    monkeypatch.setattr(stage.store, "settle_write", late)
    finisher.executor.run_open_offer(stage.told.offers.pop(0))
    eventually(lambda: len(finisher.answered) == 2 and finisher.concurrency._unfilled)
    assert finisher.concurrency.free_places == 0

    stored.set()

    assert finisher.worker_loop.wait_until_idle(20)
    assert finisher.answered == waiting and finisher.concurrency.free_places == 1


@pytest.mark.parametrize("redis_answers", [True, False])
@sqlite
def test_a_run_that_was_found_before_its_message_was_read_counts_until_it_ends(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch, redis_answers: bool
) -> None:
    """The message waits for its claim, while the poller takes the same offer: the loser forgets nothing."""
    stage.register()
    job_id = stage.submit()
    (offer,) = stage.told.offers
    (mine,) = stage.dispatcher.queues.offer("zimg", 1, claimant=worker.owner)
    claiming = stage.dispatcher.leases.claim_command

    def found_first(*args: Any) -> Any:
        worker.executor.run_claimed_offer(mine)
        return claiming(*args) if redis_answers else _renewals_fail()

    monkeypatch.setattr(stage.dispatcher.leases, "claim_command", found_first)
    worker.executor.run_open_offer(offer)
    assert worker.handed_on == [job_id] and worker.concurrency.free_places == 2
    assert stage.room.taken() == {"gpu-slot0": job_id}


@sqlite
def test_a_draining_worker_goes_on_hearing_how_much_room_the_others_have(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its poller has ended, and what becomes free here is offered to as many as there is room for."""
    heard: list[str] = []
    monkeypatch.setattr(worker.background_tasks._workers, "read_total", lambda: heard.append("looked"))
    worker.background_tasks.run()
    assert heard == []
    worker.drain()
    worker.background_tasks.run()
    assert heard == ["looked"]


@sqlite
def test_runs_that_wait_for_the_record_do_not_come_back_at_the_same_moment(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be one batch again, and it may be what is too large."""
    monkeypatch.setattr(worker_run, "_RETRY_S", 1.0)
    waits: list[float] = []

    async def wait(hold: LeaseWatch, seconds: float) -> None:
        waits.append(seconds)
        hold.lost = len(waits) % 20 == 0

    monkeypatch.setattr(LeaseWatch, "sleep", wait)
    with pytest.raises(DatabaseUnavailable):
        asyncio.run(
            RetryingIo(worker.worker_loop, LeaseWatch(Lease("zimg", "one", "l", "w", "gpu-slot0")))._repeat_while_away(
                _is_unavailable
            )
        )
    assert len(set(waits)) > 10 and all(0.5 <= it <= 1.5 for it in waits)


# -- a worker that stops ---------------------------------------------------------------------------------------


@sqlite
def test_a_worker_that_is_told_to_stop_begins_nothing_it_was_just_offered(stage: Stage, worker: Beginner) -> None:
    stage.register()
    second = [stage.submit() for _ in range(2)][1]
    task = worker.begin_newest(stage)
    following = stage.settle(task, claimant=worker.concurrency.claimant).next
    assert following is not None and following.job_id == second
    worker.consumer = None

    worker.executor.run_claimed_offer(following)
    assert worker.worker_loop.wait_until_idle(60)

    assert (stage.state(second), stage.job(second).attempt) == (State.QUEUED, 0)
    assert stage.offered() == [second], "another worker is told"


@sqlite
def test_a_pool_that_stops_takes_nothing_more_whoever_stops_it(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery tells of a signal alone, and not of a remote control's wish, nor of a consumer that gives up."""
    monkeypatch.setenv("SLOTKEEPER_GRACE_S", "0")
    stage.register()
    stage.submit()
    hold = worker.heartbeat.add(Lease("zimg", "one", "lease", worker.owner, "gpu-slot0"))
    worker.look()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "close", lambda: None)  # So that it can still be asked below.
        worker.drain_and_close()

    assert worker.look() == 0 and worker.concurrency.free_places == 0 and worker.concurrency.claimant == ""
    eventually(lambda: hold.stop)


@sqlite
def test_a_consumer_that_starts_when_draining_has_begun_gets_no_jobs(stage: Stage, worker: Beginner) -> None:
    """It was still connecting when its worker was told to stop."""
    worker.drain()
    worker.start_consuming(SimpleNamespace(hostname="worker@host"))
    assert worker.concurrency.free_places == 0 and worker.concurrency.claimant == ""


@sqlite
def test_a_worker_that_is_told_to_stop_twice_has_its_grace_time_once(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    monkeypatch.setattr(worker.poller, "end", lambda: ends.append("ended"))
    worker.drain()
    worker.drain()
    assert ends == ["ended"]


@sqlite
def test_a_run_that_begins_after_the_grace_time_is_handed_back_too(stage: Stage, worker: Beginner) -> None:
    """Its message was read before the worker was told to stop; the others have been told."""
    stage.register()
    stage.submit()
    worker.stop_runs()
    assert worker.start(stage.told.offers.pop()) is not None
    assert [run.watch.stop for run in worker.begun] == [True]


@sqlite
def test_a_worker_that_stops_has_no_room(stage: Stage, worker: Beginner) -> None:
    worker.look()
    assert WorkerCapacity(stage.dispatcher.queues.scripts).total() == 3
    worker.drain()
    assert WorkerCapacity(stage.dispatcher.queues.scripts).total() == 0 and worker.concurrency.claimant == ""


# -- a release that Redis did not answer -----------------------------------------------------------------------


@contextmanager
def _redis_away(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Lease]]:
    """Nothing can be released; answers what was tried."""
    tried: list[Lease] = []

    def refuse(_: Leases, held: Lease, **__: Any) -> Any:
        tried.append(held)
        raise RedisError("away")

    with monkeypatch.context() as away:
        away.setattr(Leases, "release_command", refuse)
        yield tried


@sqlite
def test_slot_2_a_slot_that_could_not_be_freed_is_freed_by_the_first_beat_that_can(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    first, second = stage.submit(), stage.submit()
    task = worker.begin_newest(stage)
    with _redis_away(monkeypatch):
        assert stage.settle(task).moved is not None
        worker.heartbeat.beat()
    assert list(stage.room.taken().values()) == [first]

    worker.heartbeat.beat()

    assert list(stage.room.taken().values()) == [second]
    assert stage.run_all() == [second]
    worker.heartbeat.beat()
    assert stage.room.taken() == {}


@sqlite
def test_a_job_that_could_not_be_put_back_is_put_back_by_the_first_beat_that_can(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    first, second = stage.submit(), stage.submit()
    task = worker.begin_newest(stage)
    with _redis_away(monkeypatch):
        stage.settle(task, OutcomeKind.BUSY, retry_after_s=0)
    worker.heartbeat.beat()
    assert stage.run_all() == [first, second], "in its own place"


@sqlite
def test_lease_4_a_late_release_does_not_disturb_who_has_the_lease_by_now(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    stage.submit()
    task = worker.begin_newest(stage)
    with _redis_away(monkeypatch):
        stage.settle(task, OutcomeKind.BUSY, retry_after_s=0)
    stage.later(LEASE_MS)
    assert passes.reap(stage.dispatcher) == 1
    again = stage.start("w2")

    worker.heartbeat.beat()

    assert list(stage.room.taken().values()) == [again.run.job.id]
    assert stage.renewal(again) is Renewal.RENEWED


@sqlite
def test_while_redis_stays_away_one_release_is_tried_at_a_beat(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs its time-out, and meanwhile nothing is renewed."""
    stage.register(3)
    for _ in range(3):
        stage.submit()
    tasks = [worker.start(offer) for offer in stage.told.offers]
    with _redis_away(monkeypatch) as tried:
        for task in tasks:
            assert task is not None
            stage.settle(task)
        tried.clear()
        worker.heartbeat.beat()
        assert len(tried) == 1


@sqlite
def test_a_lease_that_was_written_again_for_nothing_is_freed_by_the_first_beat_that_can(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    stage.submit()
    task = worker.begin_newest(stage)
    watch = LeaseWatch(task.lease)
    watch.sent = watch.is_removed = True
    with _redis_away(monkeypatch) as tried:
        worker.database_check.check({watch: True})
        assert tried == [task.lease]
    worker.heartbeat.beat()
    assert stage.room.taken() == {}


@sqlite
def test_a_slot_that_a_server_let_go_of_while_redis_was_away_is_freed_by_the_first_beat_that_can(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    stage.submit()
    task = worker.begin_newest(stage)
    silent = Outcome(OutcomeKind.RETRY, code="timed_out", server_still_running=True)
    assert end_in_order(stage.dispatcher, task, decided(stage.dispatcher, task, silent)).moved is not None
    assert list(stage.room.taken()) == [task.lease.slot]
    abandoned = AbandonedCalls(worker.worker_loop, stage.dispatcher, worker.background_tasks.retry_release)
    with _redis_away(monkeypatch) as tried:
        session, calls = SimpleNamespace(abandoned=True, is_run_over=_at_once), SimpleNamespace(poll_call=None)
        abandoned.note(task.lease.name, session, calls)  # type: ignore[arg-type]
        worker.worker_loop.call_soon(abandoned.observe, task)
        eventually(lambda: tried)
    eventually(lambda: worker.heartbeat.beat() or stage.room.taken() == {})


async def _at_once(_: object) -> bool:
    return True


# -- a wish that Redis could not pass on -----------------------------------------------------------------------


def _renewals_fail(*_: Any) -> Any:
    raise RedisError("away")


def _canceled(stage: Stage, job_id: str) -> None:
    with pytest.MonkeyPatch.context() as away:
        away.setattr(stage.dispatcher.queues, "withdraw", _renewals_fail)
        assert stage.dispatcher.cancel(job_id) is State.RUNNING


def _expired(stage: Stage, job_id: str) -> None:
    with pytest.MonkeyPatch.context() as away:
        away.setattr(stage.dispatcher.queues, "withdraw", _renewals_fail)
        stage.later(5 * SECOND)
        assert deadlines.expire_deadlines(stage.dispatcher) == 1


@pytest.mark.parametrize("missed", [_canceled, _expired])
@sqlite
def test_what_a_worker_could_not_be_told_while_redis_was_away_it_reads_in_the_record(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch, missed: Callable[[Stage, str], None]
) -> None:
    stage.register(2)
    stage.submit(ttl_s=5)
    stage.submit()
    tasks = [worker.start(offer) for offer in stage.told.offers]
    holds = [worker.heartbeat.add(task.lease) for task in tasks if task is not None]
    told = Event()
    holds[0].on_change(told.set)
    with monkeypatch.context() as away:
        away.setattr(stage.dispatcher.leases, "renew", _renewals_fail)
        worker.heartbeat.beat()
        missed(stage, holds[0].lease.job_id)

    worker.heartbeat.beat()

    assert told.wait(30)
    assert [hold.cancel for hold in holds] == [True, False]


@sqlite
def test_while_redis_answers_the_record_is_not_asked(
    stage: Stage, worker: Beginner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    stage.submit()
    task = worker.begin_newest(stage)
    hold = worker.heartbeat.add(task.lease)
    monkeypatch.setattr(stage.store, "get_statuses", _is_unavailable)
    worker.heartbeat.beat()
    assert not (hold.cancel or hold.lost)


# -- no time left ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OutcomeKind.BUSY, OutcomeKind.UNREACHABLE, OutcomeKind.RETRY, OutcomeKind.LOST])
@pytest.mark.parametrize(("late_ms", "state"), [(-1, None), (0, State.EXPIRED)])
@sqlite
def test_a_run_that_went_wrong_after_its_deadline_is_not_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, kind: OutcomeKind, late_ms: int, state: State | None
) -> None:
    stage.register()
    job_id = stage.submit(ttl_s=60)
    task = stage.start()
    stage.later(60 * SECOND + late_ms)
    settled = stage.settle(task, kind)
    assert settled.moved is not None
    if state is None:
        assert stage.state(job_id) in (State.QUEUED, State.DELAYED)
    else:
        assert (stage.state(job_id), stage.job(job_id).why) == (state, Reason.DEADLINE_PASSED)


@sqlite
def test_a_result_that_came_after_its_deadline_is_a_result(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.register()
    job_id = stage.submit(ttl_s=60)
    task = stage.start()
    stage.later(61 * SECOND)
    stage.settle(task)
    assert stage.state(job_id) is State.COMPLETED


# -- its own end -----------------------------------------------------------------------------------------------


def _one_that_can_be_proved_dead(stage: Stage, worker: Beginner, folder: Path) -> Worker:
    (folder / "record.db").touch()
    scripts, lives = stage.dispatcher.leases.scripts, ProcessLocks(folder / "workers")
    return Worker(stage.dispatcher, WorkerCapacity(scripts), ProgressCommands(scripts), 1, process_locks=lives)


@sqlite
def test_a_worker_that_ends_in_order_leaves_nothing_to_prove(stage: Stage, worker: Beginner, tmp_path: Path) -> None:
    other = _one_that_can_be_proved_dead(stage, worker, tmp_path)
    assert [unquote(file.name) for file in (tmp_path / "workers").iterdir()] == [other.owner]
    other.close()
    assert list((tmp_path / "workers").iterdir()) == []


@sqlite
def test_a_worker_that_ends_under_a_run_is_proved_dead_when_its_process_has_ended(
    stage: Stage, worker: Beginner, tmp_path: Path
) -> None:
    other = _one_that_can_be_proved_dead(stage, worker, tmp_path)
    other.concurrency.add(TakenOffer(Offer("zimg", "job", "lease", "gpu-slot0", "gpu", "zimg", 1)))
    other.close()
    lives = ProcessLocks(tmp_path / "workers")
    assert lives.find_dead() == [], "its threads may still do something"
    held = other.background_tasks._process_locks
    assert held is not None
    os.close(held._held.pop(other.owner))  # as the kernel does it
    assert lives.find_dead() == [other.owner]


@sqlite
def test_a_worker_whose_end_nobody_could_prove_works_all_the_same(
    stage: Stage, worker: Beginner, tmp_path: Path
) -> None:
    scripts, nowhere = stage.dispatcher.leases.scripts, ProcessLocks(tmp_path / "none" / "workers")
    with capture_logs() as said:
        other = Worker(stage.dispatcher, WorkerCapacity(scripts), ProgressCommands(scripts), 1, process_locks=nowhere)
    assert [line["event"] for line in said] == ["end_not_provable"]
    other.close()
