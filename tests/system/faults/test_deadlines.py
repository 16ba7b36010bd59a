"""Deadlines and cancels: a job in any state ends within a second and exactly once, and its server is notified."""

from collections.abc import Callable
from typing import Any

import pytest

from routing.dispatch.dispatcher import ActiveRun
from routing.maintenance import deadlines
from routing.queue.leases import Renewal
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import State
from slotkeeper.jobs.values import Job
from tests.support import passes
from tests.support.builders import at_once
from tests.support.cluster import Cluster
from tests.support.ends import hand_back
from tests.support.harness import OFFER_MS, SECOND, YEAR, Harness
from tools.cluster.stack import eventually

_FINAL_EVENTS = {"job.completed", "job.failed", "job.expired", "job.canceled", "job.dlq"}


def _ends(events: list[Any]) -> list[str]:
    return [event.type for event in events if event.type in _FINAL_EVENTS]


# -- the functions, with the clock set -------------------------------------------------------------------------


def _waiting(harness: Harness, **changes: Any) -> tuple[str, ActiveRun | None]:
    harness.submit(id="before")
    harness.start()
    return harness.submit(**changes), None


def _delayed(harness: Harness, **changes: Any) -> tuple[str, ActiveRun | None]:
    return harness.submit(delay_s=5, **changes), None


def _offered(harness: Harness, **changes: Any) -> tuple[str, ActiveRun | None]:
    job_id = harness.submit(**changes)
    assert [offer.job_id for offer in harness.notifications.offers] == [job_id]
    return job_id, None


def _running(harness: Harness, **changes: Any) -> tuple[str, ActiveRun | None]:
    return harness.submit(**changes), harness.start()


def _polled(harness: Harness, **changes: Any) -> tuple[str, ActiveRun | None]:
    job_id, task = harness.submit(**changes), harness.start()
    harness.remote(task)
    return job_id, task


def _resumable(harness: Harness, **changes: Any) -> tuple[str, ActiveRun | None]:
    """A job that its worker handed back, that its server still runs, and that no worker has resumed."""
    job_id, task = _polled(harness, **changes)
    assert task is not None and hand_back(harness.dispatcher, task)
    return job_id, None


STATES = [_waiting, _delayed, _offered, _running, _polled, _resumable]
in_every_state = pytest.mark.parametrize("begun", [pytest.param(state, id=state.__name__[1:]) for state in STATES])
Begun = Callable[..., tuple[str, ActiveRun | None]]


def _is_over(harness: Harness, job_id: str, task: ActiveRun | None, state: State) -> None:
    """Check that the job has ended once, and that its worker and maintenance cannot change it any more."""
    if task is not None:
        assert harness.renewal(task) is Renewal.CANCEL, "the worker gets the cancel and passes it to the server"
        assert harness.settle(task).moved is None
    harness.later(OFFER_MS)
    passes.reap(harness.dispatcher)
    assert harness.state(job_id) is state
    assert _ends(harness.store.list_events(job_id)) == [f"job.{state}"]
    assert [end for end in harness.notifications.ends if end[0] == job_id] == [(job_id, state)]
    assert job_id not in harness.queue.waiting() and job_id not in harness.queue.taken().values()


@in_every_state
def test_a_deadline_ends_a_job_once_whatever_it_is_doing(harness: Harness, begun: Begun) -> None:
    harness.register()
    job_id, task = begun(harness, ttl_s=9)
    harness.later(9 * SECOND - 1)
    assert deadlines.expire_deadlines(harness.dispatcher) == 0
    harness.later(1)
    assert sum(at_once(*[lambda: deadlines.expire_deadlines(harness.dispatcher)] * 3)) == 1
    _is_over(harness, job_id, task, State.EXPIRED)


@in_every_state
def test_a_cancel_ends_a_job_once_whatever_it_is_doing(harness: Harness, begun: Begun) -> None:
    harness.register()
    job_id, task = begun(harness)
    answers = at_once(*[lambda: harness.dispatcher.cancel(job_id)] * 3)
    if task is None:
        assert answers == [State.CANCELED] * 3, "to whoever asks again it is canceled, and it has ended once"
        return _is_over(harness, job_id, task, State.CANCELED)
    assert answers == [State.RUNNING] * 3
    assert harness.renewal(task) is Renewal.CANCEL
    harness.later(harness.dispatcher.settings.lease_ms)
    passes.reap(harness.dispatcher)  # even if its worker dies of it
    assert harness.state(job_id) is State.CANCELED
    assert _ends(harness.store.list_events(job_id)) == ["job.canceled"]
    assert harness.settle(task).moved is None and harness.free() == 1
    return None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_after_a_long_pause_of_beat_no_deadline_is_missed(harness: Harness) -> None:
    harness.register()
    asked = [harness.a(id=f"many{n}", ttl_s=1 + n % 50) for n in range(1_100)]
    harness.submit_all(asked)
    kept = harness.submit(ttl_s=366 * 86_400)
    harness.later(YEAR - SECOND)

    assert deadlines.expire_deadlines(harness.dispatcher) == 1_100, "all of them, by the first look"

    assert ledger.read(harness.store.database).by_state[State.EXPIRED] == 1_100
    assert harness.state(kept) is State.QUEUED


# -- real processes --------------------------------------------------------------------------------------------

# Beat looks once a second; the rest is for a machine that has much else to do.
_ENDED_WITHIN_S = 5


def _late_s(job: Job) -> float:
    assert job.deadline_ms is not None and job.finished_ms is not None
    return (job.finished_ms - job.deadline_ms) / 1000


def _outcomes(cluster: Cluster, model: str) -> dict[str, str]:
    return {run["job_id"]: run["outcome"] for run in cluster.runs(model)}


@pytest.mark.e2e
def test_deadlines_and_cancels_reach_the_servers_of_running_jobs(cluster: Cluster) -> None:
    cluster.ensure_workers(1)
    models, never = [cluster.model(2), cluster.polled_model(2)], cluster.gate()
    canceled = {model: cluster.submit(model, never) for model in models}
    for model in models:
        cluster.sent(model)  # its queue is served by now, so the next starts long before its deadline
    expiring = {model: cluster.submit(model, never, ttl=5) for model in models}
    in_line = [cluster.submit(model, 0.02, ttl=2) for model in models]
    for model in models:
        cluster.sent(model, 2)

    for job_id in canceled.values():
        assert cluster.api.call("POST", f"/queue/jobs/{job_id}/cancel").status_code == 202
    for model, job_id in (*canceled.items(), *expiring.items()):
        eventually(
            lambda model=model, job_id=job_id: _outcomes(cluster, model).get(job_id) == "canceled", "its server lets go"
        )
    ended = [cluster.until(job_id, "canceled") for job_id in canceled.values()]
    ended += [cluster.until(job_id, "expired") for job_id in expiring.values()]

    assert max(map(_late_s, ended[2:])) < _ENDED_WITHIN_S
    for job in ended:
        assert _ends(cluster.store.list_events(job.id)) == [f"job.{job.state}"]
    for job_id in in_line:
        eventually(lambda job_id=job_id: cluster.row(job_id).state in ("completed", "expired"), "it ends too")
