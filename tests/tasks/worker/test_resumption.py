"""A run that another worker takes over: its request may be at its server, which must not get it a second time."""

from collections.abc import Callable, Iterable

import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.queue.worker_capacity import is_stopping
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.states import Reason, State
from tasks.servers import Description, Health, HealthKind
from tasks.servers.description import Submit
from tasks.worker import server_call
from tasks.worker.worker import Worker
from tests.support.builders import eventually
from tests.support.ends import hand_back
from tests.support.stage import Stage
from tests.tasks.worker.one_run import FakeServer, run

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

DONE = Outcome(OutcomeKind.DONE, result={"url": "x"})
PENDING = Outcome(OutcomeKind.PENDING, remote_id="r-1")
SILENT = Health(HealthKind.UP)
HOURS_MS = 36_000_000


@pytest.fixture
def job_id(stage: Stage, worker: Worker, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job whose first worker has sent its request and stopped; its server does not join repeated requests."""
    monkeypatch.setattr(server_call, "_HEALTH_PERIOD_S", 0.001)
    monkeypatch.setattr(server_call, "_REPORT_DELAY_S", 0.0)
    monkeypatch.setattr(stage.dispatcher, "longest_usual_ms", lambda model: HOURS_MS)
    stage.register()
    submitted = stage.submit()
    assert hand_back(stage.dispatcher, stage.start("w0"))
    server.idempotent = False
    server.answers = [DONE]
    return submitted


def _reports(server: FakeServer, reports: Iterable[Health], then: Callable[[], None] = lambda: None) -> None:
    """Let the server report these one after another; `then` is called before the last, which is repeated."""
    remaining = list(reports)

    async def health() -> Health:
        server.asked.append("health")
        if len(remaining) == 1:
            then()
            return remaining[0]
        return remaining.pop(0)

    server.health = health  # type: ignore[method-assign]


def test_a_request_is_not_sent_again_while_its_servers_health_names_the_job(stage, server, job_id) -> None:
    named, gone = Health(HealthKind.UP, job_ids=frozenset({job_id})), Health(HealthKind.UP, job_ids=frozenset())
    _reports(server, [named, named, gone])
    assert run(stage).state is State.COMPLETED
    assert server.asked == ["health", "health", "health", "submit"]


def test_a_request_is_not_sent_again_while_its_server_counts_a_run(stage, server, job_id) -> None:
    counts = [Health(HealthKind.UP, active_jobs=count, running_count=True) for count in (2, 1, 0)]
    _reports(server, counts)
    assert run(stage).state is State.COMPLETED
    assert server.asked == ["health", "health", "health", "submit"]


def test_a_report_is_not_believed_before_the_server_can_have_counted_the_request(
    stage, server, job_id, monkeypatch
) -> None:
    monkeypatch.setattr(server_call, "_REPORT_DELAY_S", 0.02)
    _reports(server, [Health(HealthKind.UP, job_ids=frozenset())])
    assert run(stage).state is State.COMPLETED
    assert server.asked.count("health") > 2 and server.asked[-1] == "submit"


@pytest.mark.parametrize("said_by", ["description", "health"])
def test_a_server_that_joins_repeated_requests_gets_one_at_once(stage, server, job_id, said_by: str) -> None:
    if said_by == "health":
        server.idempotent, server.runs = True, frozenset({job_id})
    else:
        server.description = Description(submit=Submit(idempotent=True))
    assert run(stage).state is State.COMPLETED
    assert server.asked == (["health", "submit"] if said_by == "health" else ["submit"])


def test_where_nothing_shows_what_a_server_runs_the_usual_time_of_its_runs_is_waited_for(
    stage, server, job_id, monkeypatch
) -> None:
    monkeypatch.setattr(stage.dispatcher, "longest_usual_ms", lambda model: 20)
    _reports(server, [SILENT])
    job = run(stage)
    assert (job.state, job.crashes, job.failures) == (State.COMPLETED, 0, 0)
    assert server.asked.count("health") > 2 and server.asked.count("submit") == 1


def test_the_time_in_which_a_run_waits_for_an_earlier_request_is_not_of_its_own(stage, server, job_id) -> None:
    stage.register(model_type="async", max_poll_time=1, poll_interval=0.01)
    _reports(server, [SILENT])
    server.answers = [PENDING, PENDING, DONE]
    job = run(stage)
    assert (job.state, job.failures, job.crashes) == (State.COMPLETED, 0, 0)
    assert server.asked.count("submit") == 1


def test_a_process_that_has_ended_holds_no_request(stage, server, job_id) -> None:
    server.has_ended = True
    _reports(server, [Health(HealthKind.DOWN)])
    assert run(stage).state is State.COMPLETED
    assert server.asked == ["health", "submit"]


@pytest.mark.parametrize("names_job", [False, True])
def test_a_worker_says_what_a_run_that_it_took_over_awaits(stage, server, worker, job_id, names_job: bool) -> None:
    health = Health(HealthKind.UP, job_ids=frozenset({job_id})) if names_job else SILENT
    said: list[str] = []

    def look() -> None:
        if worker.awaits:
            ((slot, (job, sentence)),) = worker.awaits.items()
            assert (slot, job) == ("gpu-slot0", job_id)
            said.append(sentence)
            worker.heartbeat.stop_all()

    _reports(server, [health, health], then=look)
    run(stage)
    assert "sent again when the server's health no longer shows the job" in said[0]
    assert ("or in 600 s." in said[0]) is not names_job
    assert worker.awaits == {}


def test_a_worker_that_stops_while_it_waits_hands_the_job_over_and_has_sent_nothing(
    stage, server, worker, job_id
) -> None:
    _reports(server, [SILENT, SILENT], then=worker.heartbeat.stop_all)
    job = run(stage)
    assert (job.state, job.why, job.crashes) == (State.QUEUED, Reason.HANDED_BACK, 0)
    assert "submit" not in server.asked and len(stage.told.offers) == 1


def test_a_job_that_is_canceled_while_it_waits_ends_and_its_slot_is_quarantined(stage, server, worker, job_id) -> None:
    def cancel() -> None:
        stage.dispatcher.cancel(job_id)
        for watch in worker.heartbeat.watches():
            watch.request_cancel()

    _reports(server, [SILENT, SILENT], then=cancel)
    assert run(stage).state is State.CANCELED
    assert "submit" not in server.asked
    assert [row.job_id for row in quarantine.list_all(stage.database)] == [job_id]


# -- a worker that was told to stop --------------------------------------------------------------------------------


def test_a_run_with_an_id_at_its_server_is_handed_over_at_once(stage, server, worker, monkeypatch) -> None:
    stage.register(model_type="async", poll_interval=0.001)
    stage.submit()
    server.answers = [PENDING, *[PENDING] * 1000]
    server.during = worker.drain
    job = run(stage)
    assert (job.state, job.why, job.crashes, job.remote_id) == (State.QUEUED, Reason.HANDED_BACK, 0, "r-1")


def test_a_worker_that_was_told_to_stop_does_not_take_back_what_it_has_handed_over(stage, server, worker) -> None:
    stage.register()
    job_id = stage.submit()
    worker.drain()
    assert run(stage).state is State.QUEUED
    assert (server.asked, stage.job(job_id).attempt) == ([], 0)


def test_a_run_that_cannot_be_resumed_has_the_grace_time(stage, server, worker) -> None:
    stage.register()
    stage.submit()
    server.answers = [DONE]
    server.during = worker.drain
    assert run(stage).state is State.COMPLETED


def test_a_worker_tells_redis_that_it_was_told_to_stop_until_it_has_ended(stage, server, worker) -> None:
    scripts = stage.dispatcher.leases.scripts
    assert not is_stopping(scripts, worker.owner)
    worker.drain()
    assert is_stopping(scripts, worker.owner)
    worker.drain_and_close()
    eventually(lambda: not is_stopping(scripts, worker.owner))
