"""A load read from the record."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from app.simulate import SimulationError, recorded_load, summarize
from app.simulate.scenario import Scenario
from slotkeeper.db import Database
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.registry.catalog import Catalog
from tests.support.builders import T0, a_job, a_job_in, a_queued_job, a_start
from tests.support.ends import store_end

HOUR_MS = 3_600_000


@pytest.fixture
def database(sqlite_url):
    record = Database(sqlite_url)
    yield record
    record.close()


@pytest.fixture
def store(database):
    Catalog(database).register("zimg", "gpu1", "http://127.0.0.1:9/", 1, T0)
    return JobStore(database)


def ran(store: JobStore, created: int, started: int, seconds: int, **fields) -> None:
    """A job that went its way, in seconds after T0."""
    job = a_queued_job(store, now_ms=T0 + created * 1000, **fields)
    run = a_start(store, job.id, now_ms=T0 + started * 1000)
    assert store_end(store, job.id, run.attempt, Reason.FINISHED, T0 + (started + seconds) * 1000, result="{}")


def read(database: Database, **window: int):
    return recorded_load.read_recorded_load(
        database, window.get("since", T0), window.get("until", T0 + HOUR_MS), seed=1
    )


def test_what_the_record_knows_comes_back_as_arrivals(database, store):
    ran(store, 0, 0, 10, tenant="a", priority=1)
    ran(store, 5, 20, 30, tenant="b", priority=9)
    found = read(database)
    assert [(it.at_ms - T0, it.run_ms, it.tenant, it.priority, it.model) for it in found.arrivals] == [
        (0, 10_000, "a", 1, "zimg"),
        (5000, 30_000, "b", 9, "zimg"),
    ]
    assert (found.drawn, found.unknown) == (0, 0)


def test_a_day_played_again_as_it_was_waits_as_it_did(database, store, play):
    """One slot, first come first served, in the record and in the simulation."""
    free, waits = 0, []
    for n, (created, seconds) in enumerate([(0, 30), (10, 20), (12, 5), (100, 7), (101, 3), (101, 40), (150, 2)]):
        start = max(created, free)
        ran(store, created, start, seconds, tenant=f"t{n % 2}")
        free = start + seconds
        waits.append(start - created)
    found = read(database)
    outcome = play(Scenario(found.arrivals, found.catalog, T0, T0 + HOUR_MS))
    assert [job.wait_ms / 1000 for job in outcome.jobs] == waits
    assert summarize(outcome).use == pytest.approx(107 / 3600)


def test_only_what_arrived_in_the_window_counts(database, store):
    for created in (0, 10, 20):
        ran(store, created, created + 100, 1)
    assert [it.at_ms - T0 for it in read(database, since=T0 + 1, until=T0 + 20_000).arrivals] == [10_000]


def test_a_job_that_runs_still_runs_as_long_as_one_that_has_ended(database, store):
    ran(store, 0, 0, 42)
    a_job_in(store, State.RUNNING, now_ms=T0 + 1000)
    found = read(database)
    assert [it.run_ms for it in found.arrivals] == [42_000, 42_000]
    assert found.drawn == 1


def test_a_job_that_never_ran_is_left_out(database, store):
    ran(store, 0, 0, 1)
    waits = a_queued_job(store, now_ms=T0 + 1000)
    assert store.cancel_waiting(waits.id, T0 + 2000)
    assert len(read(database).arrivals) == 1


def test_a_model_that_is_gone_is_left_out_and_counted(database, store):
    ran(store, 0, 0, 1)
    ran(store, 1, 2, 1, model="gone")
    found = read(database)
    assert (len(found.arrivals), found.unknown) == (1, 1)


def test_what_is_paused_now_takes_part(database, store):
    ran(store, 0, 0, 1)
    catalog = Catalog(database)
    catalog.set_server_state("gpu1", "paused")
    catalog.set_model_state("zimg", "frozen")
    catalog.set_tenant_state("default", "paused")
    found = read(database).catalog
    assert {it.state for it in (*found.servers.values(), *found.models.values())} == {"online"}
    assert found.tenants == {}


def test_constraints_come_along(database, store):
    job = replace(a_job(), constraints='gpu="A100"')
    store.submit([job], T0)
    a_start(store, job.id)
    assert [it.constraints for it in read(database).arrivals] == ['gpu="A100"']


def test_a_window_without_jobs_is_refused_with_a_way_out(database, store):
    with pytest.raises(SimulationError, match="no jobs of that time"):
        read(database)


# -- windows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        ("yesterday", "2026-03-01", "2026-03-02"),
        ("today", "2026-03-02", "2026-03-03"),
        ("2026-01-05", "2026-01-05", "2026-01-06"),
        ("2026-01-05..2026-01-07", "2026-01-05", "2026-01-08"),
        ("2026-01-05T06:00..2026-01-05T12:30", "2026-01-05T06:00", "2026-01-05T12:30"),
        ("2026-01-05T06:00+02:00..yesterday", "2026-01-05T04:00", "2026-03-02"),
    ],
)
def test_a_window_is_a_day_or_two_moments(text, begin, end):
    today = datetime(2026, 3, 2, 15, tzinfo=UTC)
    assert recorded_load.parse_window(text, today) == tuple(
        int(datetime.fromisoformat(it).replace(tzinfo=UTC).timestamp() * 1000) for it in (begin, end)
    )


@pytest.mark.parametrize("text", ["tomorrow", "", "..", "2026-13-01", "2026-01-05..2026-01-04", "2026-01-05T06:00"])
def test_a_window_that_is_none_is_refused(text):
    with pytest.raises(SimulationError, match="--from-record"):
        recorded_load.parse_window(text, datetime(2026, 3, 2, tzinfo=UTC))
