"""A run that another worker takes over: its server may still run the first request and must not receive a second."""

from collections.abc import Callable, Iterable

import pytest

from routing.dispatch import earlier_requests
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.queue.worker_capacity import is_stopping
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.states import Reason, State
from tasks.servers import Description, Health, HealthKind
from tasks.servers.description import Submit
from tasks.worker import executor, run_health, server_call
from tasks.worker.worker import Worker
from tests.support import passes
from tests.support.builders import eventually
from tests.support.ends import free, hand_back
from tests.support.harness import SECOND, Harness
from tests.tasks.worker.one_run import FakeServer, run
from tools.cluster.direct_starts import begin_run

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

DONE = Outcome(OutcomeKind.DONE, result={"url": "x"})
PENDING = Outcome(OutcomeKind.PENDING, remote_id="r-1")
SILENT = Health(HealthKind.UP)


@pytest.fixture
def job_id(harness: Harness, worker: Worker, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a job whose first worker has sent its request and stopped; its server does not join repeated requests."""
    monkeypatch.setattr(server_call, "_HEALTH_PERIOD_S", 0.001)
    monkeypatch.setattr(run_health, "_REPORT_DELAY_S", 0.0)
    harness.register()
    submitted = harness.submit()
    assert hand_back(harness.dispatcher, harness.start("w0"))
    harness.later(1)
    server.idempotent = False
    server.answers = [DONE]
    return submitted


def _set_reports(server: FakeServer, reports: Iterable[Health], before_last: Callable[[], None] = lambda: None) -> None:
    """Let the server return these reports in order, and call `before_last` before each return of the last one."""
    remaining = list(reports)

    async def health() -> Health:
        server.asked.append("health")
        if len(remaining) == 1:
            before_last()
            return remaining[0]
        return remaining.pop(0)

    server.health = health  # type: ignore[method-assign]


def test_a_request_is_not_sent_again_while_its_servers_health_names_the_job(harness, server, job_id) -> None:
    named, gone = Health(HealthKind.UP, job_ids=frozenset({job_id})), Health(HealthKind.UP, job_ids=frozenset())
    _set_reports(server, [named, named, gone])
    assert run(harness).state is State.COMPLETED
    assert server.asked == ["health", "health", "health", "submit"]


def test_a_request_is_not_sent_again_while_its_server_counts_a_run(harness, server, job_id) -> None:
    counts = [Health(HealthKind.UP, active_jobs=count, running_count=True) for count in (2, 1, 0)]
    _set_reports(server, counts)
    assert run(harness).state is State.COMPLETED
    assert server.asked == ["health", "health", "health", "submit"]


def test_a_report_is_ignored_until_the_server_can_have_counted_the_request(
    harness, server, job_id, monkeypatch
) -> None:
    monkeypatch.setattr(run_health, "_REPORT_DELAY_S", 3600.0)

    def end_the_delay_at_the_third_report() -> None:
        if server.asked.count("health") == 3:
            monkeypatch.setattr(run_health, "_REPORT_DELAY_S", 0.0)

    _set_reports(server, [Health(HealthKind.UP, job_ids=frozenset())], before_last=end_the_delay_at_the_third_report)
    assert run(harness).state is State.COMPLETED
    assert server.asked == ["health", "health", "health", "submit"]


@pytest.mark.parametrize("source", ["description", "health"])
def test_a_server_that_joins_repeated_requests_receives_one_at_once(harness, server, job_id, source: str) -> None:
    if source == "health":
        server.idempotent, server.runs = True, frozenset({job_id})
    else:
        server.description = Description(submit=Submit(idempotent=True))
    assert run(harness).state is State.COMPLETED
    assert server.asked == (["health", "submit"] if source == "health" else ["submit"])


def test_without_reports_of_runs_a_takeover_waits_for_the_maximum_run_time_since_the_request(
    harness, server, job_id
) -> None:
    """The usual duration of its runs does not shorten the wait, because this run may be an exception."""
    harness.later(400 * SECOND)
    reported_at: list[int] = []

    def note_report() -> None:
        reported_at.append(harness.now)
        harness.later(50 * SECOND)

    _set_reports(server, [SILENT], before_last=note_report)
    job = run(harness)
    assert (job.state, job.crashes, job.failures) == (State.COMPLETED, 0, 0)
    assert len(reported_at) == 4 and server.asked.count("submit") == 1


def test_another_stop_of_a_worker_does_not_restart_the_wait(harness, server, job_id) -> None:
    harness.later(500 * SECOND)
    offer = harness.notifications.offers[0]
    assert hand_back(harness.dispatcher, harness.start("w1"))
    assert harness.notifications.offers[0].slot == offer.slot
    harness.later(101 * SECOND)
    _set_reports(server, [SILENT])
    assert run(harness).state is State.COMPLETED
    assert server.asked == ["health", "submit"]


def test_a_run_that_was_sent_again_counts_its_time_from_then(harness, server, worker, job_id) -> None:
    harness.later(601 * SECOND)
    _set_reports(server, [SILENT])
    run(harness)
    assert harness.job(job_id).sent_ms == harness.now


@pytest.mark.parametrize("slot", [None, "gpu-slot0"])
def test_an_operator_ends_the_wait(harness, server, job_id, slot) -> None:
    """The wait ends even if the server's health still shows the job, because the operator may know more."""
    named = Health(HealthKind.UP, job_ids=frozenset({job_id}))
    _set_reports(server, [named, named], before_last=lambda: earlier_requests.release(harness.database, "gpu", slot))
    assert run(harness).state is State.COMPLETED
    assert server.asked == ["health", "health", "submit"]


def test_a_cancel_before_the_request_prevents_the_request(harness, server, worker, job_id) -> None:
    named, gone = Health(HealthKind.UP, job_ids=frozenset({job_id})), Health(HealthKind.UP, job_ids=frozenset())
    _set_reports(server, [named, gone], before_last=lambda: worker.heartbeat.watches()[0].request_cancel())
    assert run(harness).state is State.CANCELED
    assert "submit" not in server.asked


def _two_runs(harness: Harness) -> list[str]:
    """Return two jobs of a server with two slots whose workers have sent their requests and stopped in turn."""
    harness.register(2, server="pair", model="flux")
    jobs = [harness.submit("flux"), harness.submit("flux")]
    harness.notifications.offers[:] = [offer for offer in harness.notifications.offers if offer.model == "flux"]
    for n in range(2):
        assert hand_back(harness.dispatcher, harness.start(f"w{n}"))
        harness.later(10)
    return jobs


def test_a_count_that_shows_the_end_of_one_request_does_not_end_two(harness, job_id) -> None:
    first, second = _two_runs(harness)
    offers = [offer for offer in harness.notifications.offers if offer.model == "flux"]
    assert all(begin_run(harness.dispatcher, offer, "w9") for offer in offers)

    def is_over(job: str, active: int) -> bool:
        request = earlier_requests.find(harness.database, "pair", job)
        return request is not None and request.is_over_by_count(active)

    assert [is_over(job, 2) for job in (first, second)] == [False, False]
    assert [is_over(job, 1) for job in (first, second)] == [True, False]
    assert [is_over(job, 0) for job in (first, second)] == [True, True]
    harness.later(1)
    assert harness.database.commit(harness.store.sent_write(first, harness.job(first).attempt, harness.now))
    assert [is_over(job, 2) for job in (first, second)] == [False, False], "the first was sent again"
    assert is_over(second, 1)


def test_reports_of_too_few_runs_for_a_while_end_the_wait(harness, server, job_id, monkeypatch) -> None:
    monkeypatch.setattr(run_health, "_FEW_RUNS_S", 0.05)
    harness.register(2, poll_interval=0.001)
    harness.submit()
    assert begin_run(harness.dispatcher, harness.notifications.offers.pop(), "w9") is not None
    one, two = (Health(HealthKind.UP, active_jobs=count, running_count=True) for count in (1, 2))
    _set_reports(server, [two, one, two, one])
    assert run(harness).state is State.COMPLETED
    assert server.asked.count("health") > 4 and server.asked.count("submit") == 1


@pytest.mark.parametrize("ends, payload", [(True, {}), ("stream", {"stream": True})])
def test_a_server_that_ends_runs_on_disconnect_has_ended_it_with_its_worker(harness, server, job_id, ends, payload):
    server.description = Description(submit=Submit(ends_on_disconnect=ends))
    assert server.description.ends_on_disconnect(payload)
    assert not Description(submit=Submit(ends_on_disconnect="stream")).ends_on_disconnect({"stream": False})
    if ends is True:
        _set_reports(server, [SILENT])
        assert run(harness).state is State.COMPLETED
        assert server.asked == ["health", "submit"]


def test_the_wait_for_an_earlier_request_does_not_count_as_run_time(harness, server, job_id) -> None:
    harness.register(model_type="async", max_poll_time=1, poll_interval=0.01)
    _set_reports(server, [SILENT], before_last=lambda: "submit" in server.asked or harness.later(2 * SECOND))
    server.answers = [PENDING, PENDING, DONE]
    job = run(harness)
    assert (job.state, job.failures, job.crashes) == (State.COMPLETED, 0, 0)
    assert server.asked.count("submit") == 1


def test_a_request_is_sent_again_when_the_process_of_the_earlier_one_has_ended(harness, server, job_id) -> None:
    server.has_ended = True
    _set_reports(server, [Health(HealthKind.DOWN)])
    assert run(harness).state is State.COMPLETED
    assert server.asked == ["health", "submit"]


@pytest.mark.parametrize("names_job", [False, True])
def test_a_worker_reports_what_a_resumed_run_waits_for(harness, server, worker, job_id, names_job: bool) -> None:
    health = Health(HealthKind.UP, job_ids=frozenset({job_id})) if names_job else SILENT
    sentences: list[str] = []

    def note_sentence() -> None:
        if worker.awaits:
            ((slot, (job, sentence)),) = worker.awaits.items()
            assert (slot, job) == ("gpu-slot0", job_id)
            sentences.append(sentence)
            worker.heartbeat.stop_all()

    _set_reports(server, [health, health], before_last=note_sentence)
    run(harness)
    assert "sent again when the server's health no longer shows the job" in sentences[0]
    assert ("or in 600 s." in sentences[0]) is not names_job
    assert worker.awaits == {}


def test_a_worker_that_stops_while_it_waits_hands_the_job_over_and_sends_no_request(
    harness, server, worker, job_id
) -> None:
    _set_reports(server, [SILENT, SILENT], before_last=worker.heartbeat.stop_all)
    job = run(harness)
    assert (job.state, job.why, job.crashes) == (State.QUEUED, Reason.HANDED_BACK, 0)
    assert "submit" not in server.asked and len(harness.notifications.offers) == 1


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_resumed_job_whose_slot_is_another_jobs_waits_in_its_lane(
    harness, server, worker, job_id, is_joined, monkeypatch
) -> None:
    """If it were offered in the same slot, it would be claimed and handed back again without end."""
    named, gone = Health(HealthKind.UP, job_ids=frozenset({job_id})), Health(HealthKind.UP, job_ids=frozenset())
    server.description = Description(submit=Submit(idempotent=is_joined))
    _set_reports(server, [named, gone])

    def lose_the_slot(point: str) -> None:
        if point == "start_committed" and not harness.queue.waiting():
            (watch,) = worker.heartbeat.watches()
            free(harness.dispatcher, watch.lease, return_to_lane=False)
            harness.submit()
            harness.start("w2")
            assert passes.restore_missing(harness) == 1

    monkeypatch.setattr(executor, "crash_at", lose_the_slot)
    job = run(harness)
    assert (job.state, job.why, job.crashes) == (State.QUEUED, Reason.HANDED_BACK, 0)
    assert server.asked == ["health", "health"]
    assert list(harness.queue.waiting()) == [job_id] and harness.notifications.offers == []


def test_a_job_that_is_canceled_while_it_waits_ends_and_its_slot_is_quarantined(
    harness, server, worker, job_id
) -> None:
    def cancel() -> None:
        harness.dispatcher.cancel(job_id)
        for watch in worker.heartbeat.watches():
            watch.request_cancel()

    _set_reports(server, [SILENT, SILENT], before_last=cancel)
    assert run(harness).state is State.CANCELED
    assert "submit" not in server.asked
    assert [row.job_id for row in quarantine.list_all(harness.database)] == [job_id]


# -- a worker that has received the signal to stop -----------------------------------------------------------------


def test_a_run_with_an_id_at_its_server_is_handed_over_at_once(harness, server, worker, monkeypatch) -> None:
    harness.register(model_type="async", poll_interval=0.001)
    harness.submit()
    server.answers = [PENDING, *[PENDING] * 1000]
    server.during = worker.drain
    job = run(harness)
    assert (job.state, job.why, job.crashes, job.remote_id) == (State.QUEUED, Reason.HANDED_BACK, 0, "r-1")


def test_a_stopping_worker_does_not_resume_a_job_that_it_has_handed_over(harness, server, worker) -> None:
    harness.register()
    job_id = harness.submit()
    worker.drain()
    assert run(harness).state is State.QUEUED
    assert (server.asked, harness.job(job_id).attempt) == ([], 0)


def test_a_run_that_cannot_be_resumed_has_the_grace_time(harness, server, worker) -> None:
    harness.register()
    harness.submit()
    server.answers = [DONE]
    server.during = worker.drain
    assert run(harness).state is State.COMPLETED


def test_redis_lists_a_stopping_worker_until_it_has_ended(harness, server, worker) -> None:
    scripts = harness.dispatcher.leases.scripts
    assert not is_stopping(scripts, worker.owner)
    worker.drain()
    assert is_stopping(scripts, worker.owner)
    worker.drain_and_close()
    eventually(lambda: not is_stopping(scripts, worker.owner))
