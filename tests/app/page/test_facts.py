"""What the page says: where a job's time went and why, and what was done in the last hour."""

from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import text

from routing.queries import job_timeline, model_overview
from routing.queries.job_timeline import PhaseKind
from routing.queries.model_overview import MINUTE_MS, MINUTES, LastHourUsage
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import Job, JobError
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import Server
from tests.support.builders import SECOND, T0, a_queued_job, a_start
from tests.support.ends import store_end

MINUTE = MINUTE_MS
FIRST = T0 - T0 % MINUTE


def _catalog(slots: int = 2, **config: Any) -> CatalogSnapshot:
    servers = {name: Server(name, "zimg", slots, "online", {"zimg": "http://x"}, 0) for name in ("gpu1",)}
    return CatalogSnapshot(1, {"zimg": Model("zimg", "zimg", config, ModelConfig(**config))}, servers)


def _ran(store: JobStore, begins: int, ends: int, *, at: int = T0, server: str = "gpu1", **changes: Any) -> Job:
    """A job that was accepted at `at` and ran from `begins` to `ends`, seconds after T0."""
    job = a_queued_job(store, now_ms=at, **changes)
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


def _told(store: JobStore, job: Job, catalog: CatalogSnapshot) -> job_timeline.Timeline:
    found = store.get(job.id)
    assert found is not None
    return job_timeline.build_timeline(store, catalog, found, store.list_events(job.id), T0 + 1000 * SECOND)


def test_a_wait_for_a_tenants_limit_is_told(store: JobStore) -> None:
    _ran(store, 0, 10, tenant="acme")
    job = _ran(store, 10, 11, tenant="acme")
    said = _told(store, job, _catalog(tenant_slots=1)).sentence
    assert "it waited for 10 s, because its tenant 'acme' held the one slot that it may hold at once" in said


def test_a_wait_for_slots_that_others_hold_is_told(store: JobStore) -> None:
    _ran(store, 0, 10, tenant="other")
    _ran(store, 0, 12, tenant="third")
    job = _ran(store, 10, 11)
    assert "because all 2 slots that could run it were taken by other jobs" in _told(store, job, _catalog()).sentence


def test_a_limit_that_was_not_reached_is_not_blamed(store: JobStore) -> None:
    _ran(store, 0, 2, tenant="acme")
    job = _ran(store, 10, 11, tenant="acme")
    assert "tenant" not in _told(store, job, _catalog(tenant_slots=1)).sentence


def test_retries_are_told_with_what_they_cost(store: JobStore) -> None:
    job = a_queued_job(store, now_ms=T0)
    for attempt in range(2):
        _run(store, job.id, 4 * attempt, 4 * attempt + 2, why=Reason.SERVER_ERROR)
        store.promote_due(T0 + (4 * attempt + 4) * SECOND)
    _run(store, job.id, 8, 9)
    told = _told(store, job, _catalog())
    assert "it was retried twice, which cost 8.0 s (oom on gpu1)" in told.sentence
    assert [phase.kind for phase in told.phases] == [PhaseKind.WAITED, PhaseKind.RAN, PhaseKind.DELAYED] * 2 + [
        PhaseKind.WAITED,
        PhaseKind.RAN,
    ]
    assert told.took_ms == 9 * SECOND


@pytest.mark.parametrize(("lasts", "is_slow"), [(9, True), (2, False)])
def test_a_run_is_slow_where_others_take_half_as_long_elsewhere(store: JobStore, lasts: int, is_slow: bool) -> None:
    for _ in range(3):
        _ran(store, 0, 2, server="gpu2")
    job = _ran(store, 0, lasts)
    assert (
        "which was slow: such a run took 2.0 s on other servers" in _told(store, job, _catalog()).sentence
    ) is is_slow


def test_a_job_that_has_not_ended_is_told_so_far(store: JobStore) -> None:
    job = a_queued_job(store, now_ms=T0)
    told = _told(store, job, _catalog())
    assert told.sentence.startswith("So far it has taken 16 min 40 s: it waited for")
    assert told.phases[-1].to_ms is None


# -- the last hour -----------------------------------------------------------------------------------------------


def _minutes(hour: LastHourUsage, now_ms: int) -> Mapping[int, tuple[int, int]]:
    """Minute, counted from FIRST, -> (jobs that ended, slot time in seconds), of those with anything."""
    begins = [now_ms - now_ms % MINUTE - n * MINUTE for n in range(MINUTES, 0, -1)]
    found = zip(begins, hour.of("zimg", now_ms), strict=True)
    return {(at - FIRST) // MINUTE: (it.ended, it.busy_ms // 1000) for at, it in found if it.ended or it.busy_ms}


def test_slot_time_falls_to_the_minutes_in_which_it_was_used(store: JobStore) -> None:
    offset = (T0 - FIRST) // SECOND
    _ran(store, 30 - offset, 30 - offset + 90)
    _ran(store, 70 - offset, 75 - offset)
    hour = LastHourUsage(store.database)
    hour.read_missing(FIRST + 10 * MINUTE)
    assert _minutes(hour, FIRST + 10 * MINUTE) == {0: (0, 30), 1: (1, 65), 2: (1, 0)}


def test_a_minute_is_read_once_and_forgotten_after_an_hour(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = model_overview._read_minute
    monkeypatch.setattr(model_overview, "_read_minute", lambda database, at: (asked.append(at), real(database, at))[1])
    hour = LastHourUsage(store.database, lambda: 0.0)
    hour.read_missing(FIRST)
    hour.read_missing(FIRST + 1)
    assert len(asked) == len(set(asked)) == 60 and hour.is_complete(FIRST)
    hour.read_missing(FIRST + MINUTE)
    assert asked[60:] == [FIRST]


def test_reading_leaves_off_after_a_while_and_goes_on_when_asked_again(store: JobStore) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.1
        return now[0]

    hour = LastHourUsage(store.database, clock)
    hour.read_missing(FIRST)
    assert not hour.is_complete(FIRST)
    for _ in range(60):
        hour.read_missing(FIRST)
    assert hour.is_complete(FIRST)


def test_a_minute_is_read_by_the_index_of_ends(store: JobStore) -> None:
    if store.database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL reads a table this small without its index")
    with store.database.read() as connection:
        query = model_overview._ENDED.compile(connection.engine)
        plan = connection.execute(text(f"EXPLAIN QUERY PLAN {query}".replace("?", "1")), {}).all()
    assert any("ix_jobs_finished" in str(row) for row in plan), plan


def test_the_oldest_queued_job_of_each_model_is_found(store: JobStore) -> None:
    a_queued_job(store, now_ms=T0)
    a_queued_job(store, now_ms=T0 + 1)
    a_queued_job(store, now_ms=T0 + 2, model="flux")
    oldest = model_overview._read_oldest_queued(store.database, ["zimg", "flux", "idle"])
    assert oldest == {"zimg": T0, "flux": T0 + 2}


def test_a_neighbour_that_has_not_started_has_no_run(store: JobStore) -> None:
    job = _ran(store, 0, 1)
    a_queued_job(store, now_ms=T0)
    other = _ran(store, 1, 2)
    (run,) = job_timeline.load_neighbours(store.database, job, T0)
    assert (run.from_ms, run.to_ms) == (T0 + SECOND, T0 + 2 * SECOND) and other.id != job.id
