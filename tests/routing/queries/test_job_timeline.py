"""The timeline of a job: its phases, and the sentence that explains why it took as long as it did."""

from typing import Any

import pytest

from routing.queries import job_timeline
from routing.queries.job_timeline import PhaseKind, Timeline
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import Job, JobError
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import Server
from tests.support.builders import SECOND, T0, a_queued_job, a_start
from tests.support.ends import store_end


def _catalog(slots: int = 2, **config: Any) -> CatalogSnapshot:
    servers = {"gpu1": Server("gpu1", "zimg", slots, "online", {"zimg": "http://x"}, 0)}
    return CatalogSnapshot(1, {"zimg": Model("zimg", "zimg", config, ModelConfig(**config))}, servers)


def _ended_job(store: JobStore, begins: int, ends: int, *, server: str = "gpu1", **changes: Any) -> Job:
    """Return a job that was accepted at T0 and ran from `begins` to `ends`, in seconds after T0."""
    job = a_queued_job(store, now_ms=T0, **changes)
    _run(store, job.id, begins, ends, server)
    return job


def _run(
    store: JobStore, job_id: str, begins: float, ends: float, server: str = "gpu1", why: Reason = Reason.FINISHED
) -> None:
    run = a_start(store, job_id, now_ms=T0 + round(begins * SECOND), server=server)
    now = T0 + round(ends * SECOND)
    error, due = (None, None) if why is Reason.FINISHED else (JobError("oom", "out of memory"), now + SECOND)
    result = "{}" if why is Reason.FINISHED else None
    assert store_end(store, job_id, run.attempt, why, now, result=result, error=error, due_ms=due)


def _timeline(store: JobStore, job: Job, catalog: CatalogSnapshot) -> Timeline:
    stored = store.get(job.id)
    assert stored is not None
    return job_timeline.build_timeline(store, catalog, stored, store.list_events(job.id), T0 + 1000 * SECOND)


def test_a_wait_for_a_tenants_limit_is_explained(store: JobStore) -> None:
    _ended_job(store, 0, 10, tenant="acme")
    job = _ended_job(store, 10, 11, tenant="acme")
    sentence = _timeline(store, job, _catalog(tenant_slots=1)).sentence
    assert "it waited for 10 s, because its tenant 'acme' held the one slot that it may hold at once" in sentence


def test_a_wait_for_slots_of_other_jobs_is_explained(store: JobStore) -> None:
    _ended_job(store, 0, 10, tenant="other")
    _ended_job(store, 0, 12, tenant="third")
    job = _ended_job(store, 10, 11)
    sentence = _timeline(store, job, _catalog()).sentence
    assert "because all 2 slots that could run it were taken by other jobs" in sentence


def test_a_limit_that_was_not_reached_is_not_named(store: JobStore) -> None:
    _ended_job(store, 0, 2, tenant="acme")
    job = _ended_job(store, 10, 11, tenant="acme")
    assert "tenant" not in _timeline(store, job, _catalog(tenant_slots=1)).sentence


def test_retries_are_explained_with_the_time_that_they_cost(store: JobStore) -> None:
    job = a_queued_job(store, now_ms=T0)
    for attempt in range(2):
        _run(store, job.id, 4 * attempt, 4 * attempt + 2, why=Reason.SERVER_ERROR)
        store.promote_due(T0 + (4 * attempt + 4) * SECOND)
    _run(store, job.id, 8, 9)
    timeline = _timeline(store, job, _catalog())
    assert "it was retried twice, which cost 8.0 s (oom on gpu1)" in timeline.sentence
    assert [phase.kind for phase in timeline.phases] == [PhaseKind.WAITED, PhaseKind.RAN, PhaseKind.DELAYED] * 2 + [
        PhaseKind.WAITED,
        PhaseKind.RAN,
    ]
    assert timeline.took_ms == 9 * SECOND


@pytest.mark.parametrize(("lasts", "is_slow"), [(9, True), (2, False)])
def test_a_run_is_slow_if_runs_on_other_servers_took_half_as_long(store: JobStore, lasts: int, is_slow: bool) -> None:
    for _ in range(3):
        _ended_job(store, 0, 2, server="gpu2")
    job = _ended_job(store, 0, lasts)
    sentence = _timeline(store, job, _catalog()).sentence
    assert ("which was slow: such a run took 2.0 s on other servers" in sentence) is is_slow


def test_the_sentence_about_an_unfinished_job_starts_with_so_far(store: JobStore) -> None:
    job = a_queued_job(store, now_ms=T0)
    timeline = _timeline(store, job, _catalog())
    assert timeline.sentence.startswith("So far it has taken 16 min 40 s: it waited for")
    assert timeline.phases[-1].to_ms is None


def test_a_neighbour_that_has_not_started_has_no_run(store: JobStore) -> None:
    job = _ended_job(store, 0, 1)
    a_queued_job(store, now_ms=T0)
    _ended_job(store, 1, 2)
    (run,) = job_timeline.load_neighbours(store.database, job, T0)
    assert (run.from_ms, run.to_ms, run.completed) == (T0 + SECOND, T0 + 2 * SECOND, True)
