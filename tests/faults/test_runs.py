"""The life and end of one run in its worker, whatever is away, late or taken over meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Retry

from jobs.errors import RecordUnavailable
from jobs.states import State, Why
from routing import reconcile
from routing.dispatcher import Task
from routing.keys import Keys
from routing.outcome import Kind, Outcome
from routing.scripts import Scripts
from tasks import inference, runner, settlement
from tasks.heartbeat import Hold
from tasks.inference import infer
from tasks.releases import PatientLeases
from tasks.servers import Call, Health, HealthKind
from tasks.worker import Worker
from tests.lua.room import FRAGMENTS
from tests.lua.stage import LEASE_MS, SECOND, SETTINGS, Stage, client, stage, valkey

__all__ = ["client", "stage", "valkey"]
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

DONE = Outcome(Kind.DONE, result={"url": "x"})
PENDING = Outcome(Kind.PENDING, remote_id="r-1")
UNKNOWN = Outcome(Kind.UNKNOWN)
FAULT = Outcome(Kind.RETRY, code="server_error", message="500")


class FakeServer:
    """Gives its answers one after another; notes what it is asked.  `during`: what happens while it runs a job."""

    def __init__(self) -> None:
        self.answers: list[Outcome] = []
        self.asked: list[str] = []
        self.during: Callable[[], None] = lambda: None
        self.runs: frozenset[str] | None = None

    def submit(self, call: Call) -> Outcome:
        self.asked.append("submit")
        self.during()
        return self.answers.pop(0)

    def status(self, call: Call, remote_id: str) -> Outcome:
        assert call.deadline_s >= 10, "a question has its time, whatever is left of the run's"
        self.asked.append("status")
        return self.answers.pop(0)

    def cancel(self, call: Call, remote_id: str | None = None) -> bool:
        assert call.deadline_s >= 10
        self.asked.append("cancel")
        return True

    def health(self) -> Health:
        self.asked.append("health")
        return Health(HealthKind.UP, job_ids=self.runs)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def worker(stage: Stage, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Worker:
    leases = PatientLeases(Scripts(stage.redis, Keys("test"), FRAGMENTS), SETTINGS)
    stage.dispatcher.leases = leases
    found = Worker(stage.dispatcher, leases)
    found.heartbeat.end()  # The tests beat.
    for module in (inference, settlement):
        monkeypatch.setattr(module, "dispatcher", lambda: stage.dispatcher)
    monkeypatch.setattr(inference, "this_worker", lambda: found)
    monkeypatch.setattr(infer, "send_event", _has_no_broker)
    monkeypatch.setattr(runner, "_find_server", lambda *_: server)
    monkeypatch.setattr(runner, "_STORE_AGAIN_S", 0.001)
    for module in (runner, settlement):
        monkeypatch.setattr(module, "now_ms", lambda: stage.now)
    return found


def run(stage: Stage) -> Any:
    """Do what the oldest wake-up asks for, as a task of Celery would; answers its result, or what it raised."""
    offer = stage.told.offers.pop(0)
    names = ("fleet", "lease", "slot", "server", "number", "owner")
    infer.push_request(
        id=offer.job_id, headers={"slotkeeper": {it: getattr(offer, it) for it in names}}, delivery_info={}
    )
    try:
        return infer.run(offer.model)
    except Exception as raised:
        return raised
    finally:
        infer.pop_request()


def _has_no_broker(*_: object, **__: object) -> Any:
    raise OSError("nobody there")


def _away(*_: object, **__: object) -> Any:
    raise RecordUnavailable("away")


def _away_for(times: int, act: Callable[..., Any]) -> Callable[..., Any]:
    left = iter(range(times))
    return lambda *args, **more: _away() if next(left, None) is not None else act(*args, **more)


# -- the record is away ----------------------------------------------------------------------------------------


def test_a_record_that_is_away_when_a_server_takes_the_job_up_costs_nothing(stage, worker, server, monkeypatch):
    stage.register(model_type="async", poll_interval=0.001)
    job_id = stage.submit()
    server.answers = [PENDING, DONE]
    monkeypatch.setattr(stage.store, "note_remote", _away_for(3, stage.store.note_remote))
    assert run(stage) == DONE.result
    job = stage.job(job_id)
    assert (job.state, job.crashes, job.failures, job.attempt) == (State.COMPLETED, 0, 0, 1)
    assert server.asked == ["submit", "status"]


@pytest.mark.parametrize("what", ["settle", "note_remote"])
def test_a_record_that_stays_away_ends_nothing_and_is_held_against_nobody(stage, worker, server, monkeypatch, what):
    """The worker stops at last: the lease is left to expire, and the job to whoever takes it up then."""
    monkeypatch.setattr(runner, "_LAST_TRIES_S", 0.0)
    stage.register(model_type="async", poll_interval=0.001)
    job_id = stage.submit()
    server.answers = [PENDING, DONE]
    monkeypatch.setattr(stage.store, what, lambda *_, **__: (worker.heartbeat.stop_all(), _away()))
    assert isinstance(run(stage), Ignore)
    assert (stage.state(job_id), stage.job(job_id).crashes) == (State.RUNNING, 0)
    assert list(stage.room.taken().values()) == [job_id]
    assert stage.redis.hgetall(stage.room.key("stats:server:gpu")).keys() <= {b"taken", b"loaded"}


# -- a resumed run ---------------------------------------------------------------------------------------------


def _resumed(stage: Stage, **changes: Any) -> str:
    """A polled job whose worker has died, and nobody has looked after it for two minutes."""
    stage.register(model_type="async", poll_interval=0.001, max_poll_time=60.0)
    job_id = stage.submit(**changes)
    stage.remote(stage.start("w1"))
    stage.later(LEASE_MS)
    reconcile.reap(stage.dispatcher)
    stage.later(120 * SECOND)
    return job_id


def test_a_resumed_run_is_asked_for_once_before_it_is_given_up(stage, worker, server):
    job_id = _resumed(stage)
    server.answers = [DONE]
    assert run(stage) == DONE.result
    assert (stage.state(job_id), server.asked) == (State.COMPLETED, ["status"])


def test_a_resumed_run_that_has_not_ended_in_its_time_is_given_up(stage, worker, server):
    job_id = _resumed(stage)
    server.answers = [PENDING]
    assert isinstance(run(stage), Retry)
    job = stage.job(job_id)
    assert (job.state, job.error_code, server.asked) == (State.DELAYED, "timed_out", ["status", "cancel"])


# -- a stale worker --------------------------------------------------------------------------------------------


@contextmanager
def _told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """What Celery's clients are told, as (how, job)."""
    told: list[tuple[str, str]] = []
    for how in ("mark_as_failure", "mark_as_done", "mark_as_revoked", "mark_as_retry"):
        monkeypatch.setattr(infer.backend, how, lambda job, *_, how=how, **__: told.append((how, job)), raising=False)
    yield told


@pytest.mark.parametrize("outcome", [FAULT, DONE, Outcome(Kind.BUSY), Outcome(Kind.FAILED, code="bad")])
def test_a_stale_worker_says_nothing_to_anybody(stage, worker, server, monkeypatch, outcome):
    """It stood still under the call: the lease expired, and another worker has the job now."""
    stage.register(2)
    job_id = stage.submit(envelope="{}", source="task")
    taken: list[Task] = []

    def stand_still() -> None:
        stage.later(LEASE_MS + SECOND)
        assert reconcile.reap(stage.dispatcher) == 1
        taken.append(stage.start("w2"))

    server.during, server.answers = stand_still, [outcome]
    offer = stage.told.offers.pop(0)
    header = {it: getattr(offer, it) for it in ("fleet", "lease", "slot", "server", "number", "owner")}
    request = {"id": job_id, "task": "infer", "slotkeeper": header, "headers": {"slotkeeper": header}}
    request |= {"ignore_result": False, "delivery_info": {}, "args": ["zimg"], "kwargs": {}, "retries": 0}
    with _told(monkeypatch) as told:
        build_tracer(infer.name, infer, app=infer.app)(job_id, ["zimg"], {}, request)
    assert told == []
    assert (stage.state(job_id), stage.job(job_id).attempt) == (State.RUNNING, 2)
    assert stage.room.taken() == {taken[0].held.slot: job_id} and stage.told.ends == []


def test_a_run_that_the_server_pushed_to_its_end_gives_its_result_all_the_same(stage, worker, server):
    stage.register()
    job_id = stage.submit()
    server.during = lambda: stage.store.settle(job_id, 1, Why.FINISHED, stage.now, result='{"by":"push"}')
    server.answers = [FAULT]
    assert run(stage) == {"by": "push"}


# -- what Celery is told ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "retries", "raised", "state"),
    [
        (FAULT, 1, Retry, State.DELAYED),
        (FAULT, 0, inference.JobFailed, State.DEAD),
        (Outcome(Kind.BUSY), 1, Retry, State.QUEUED),
        (Outcome(Kind.FAILED), 1, inference.JobFailed, State.FAILED),
    ],
)
def test_each_end_is_told_in_celerys_words(stage, worker, server, outcome, retries, raised, state):
    stage.register(max_retries=retries)
    job_id = stage.submit()
    server.answers = [outcome]
    assert isinstance(run(stage), raised)
    assert stage.state(job_id) is state


@pytest.mark.parametrize("outcome", [FAULT, Outcome(Kind.BUSY), Outcome(Kind.UNREACHABLE), Outcome(Kind.CANCELED)])
def test_a_run_that_shall_be_canceled_and_goes_wrong_is_canceled(stage, worker, server, outcome):
    stage.register()
    job_id = stage.submit()
    server.during = lambda: stage.dispatcher.cancel(job_id)
    server.answers = [outcome]
    if outcome.kind is Kind.CANCELED:
        server.during = lambda: (stage.dispatcher.cancel(job_id), worker.heartbeat.beat())
    assert isinstance(run(stage), Ignore), "whoever waits at the backend is told that it was revoked"
    assert stage.state(job_id) is State.CANCELED
    assert [told[:2] for told in stage.told.ends if not told[2]] == [(job_id, State.CANCELED)]


# -- nothing is sent that nobody wants -------------------------------------------------------------------------


def _watch(stage: Stage) -> tuple[runner.Watch, Hold]:
    stage.register()
    stage.submit()
    task = stage.start("w1")
    hold = Hold(task.held)
    return runner.Watch(task, hold, stage.store, stage.dispatcher.fleet), hold


@pytest.mark.parametrize(("why", "raised"), [("lost", runner.LeaseLost), ("stop", runner.HandBack)])
def test_a_run_that_is_over_before_its_request_was_sent_does_not_send_it(stage, worker, server, why, raised):
    watch, hold = _watch(stage)
    hold.end(why)
    with pytest.raises(raised):
        watch.outcome()
    assert server.asked == []


def test_a_run_that_is_canceled_before_its_request_was_sent_does_not_send_it(stage, worker, server):
    watch, hold = _watch(stage)
    hold.ask_to_cancel()
    assert watch.outcome().kind is Kind.CANCELED
    assert "submit" not in server.asked
