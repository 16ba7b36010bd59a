"""A load that is read from the database."""

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
    database = Database(sqlite_url)
    yield database
    database.close()


@pytest.fixture
def store(database):
    Catalog(database).register("zimg", "gpu1", "http://127.0.0.1:9/", 1, T0)
    return JobStore(database)


def store_finished_job(store: JobStore, created: int, started: int, seconds: int, **fields) -> None:
    """Store a job that has finished.  `created`, `started`: in seconds after T0."""
    job = a_queued_job(store, now_ms=T0 + created * 1000, **fields)
    run = a_start(store, job.id, now_ms=T0 + started * 1000)
    assert store_end(store, job.id, run.attempt, Reason.FINISHED, T0 + (started + seconds) * 1000, result="{}")


def read(database: Database, **window: int):
    return recorded_load.read_recorded_load(
        database, window.get("since", T0), window.get("until", T0 + HOUR_MS), seed=1
    )


def test_recorded_jobs_become_arrivals(database, store):
    store_finished_job(store, 0, 0, 10, tenant="a", priority=1)
    store_finished_job(store, 5, 20, 30, tenant="b", priority=9)
    load = read(database)
    assert [
        (arrival.at_ms - T0, arrival.run_ms, arrival.tenant, arrival.priority, arrival.model)
        for arrival in load.arrivals
    ] == [
        (0, 10_000, "a", 1, "zimg"),
        (5000, 30_000, "b", 9, "zimg"),
    ]
    assert (load.drawn, load.unknown) == (0, 0)


def test_a_simulated_recorded_day_has_the_recorded_waits(database, store, play):
    """One slot and first come, first served, in the database and in the simulation."""
    free, waits = 0, []
    for n, (created, seconds) in enumerate([(0, 30), (10, 20), (12, 5), (100, 7), (101, 3), (101, 40), (150, 2)]):
        start = max(created, free)
        store_finished_job(store, created, start, seconds, tenant=f"t{n % 2}")
        free = start + seconds
        waits.append(start - created)
    load = read(database)
    outcome = play(Scenario(load.arrivals, load.catalog, T0, T0 + HOUR_MS))
    assert [job.wait_ms / 1000 for job in outcome.jobs] == waits
    assert summarize(outcome).use == pytest.approx(107 / 3600)


def test_only_jobs_that_arrived_in_the_window_are_read(database, store):
    for created in (0, 10, 20):
        store_finished_job(store, created, created + 100, 1)
    assert [arrival.at_ms - T0 for arrival in read(database, since=T0 + 1, until=T0 + 20_000).arrivals] == [10_000]


def test_a_running_job_gets_the_run_time_of_an_ended_job(database, store):
    store_finished_job(store, 0, 0, 42)
    a_job_in(store, State.RUNNING, now_ms=T0 + 1000)
    load = read(database)
    assert [arrival.run_ms for arrival in load.arrivals] == [42_000, 42_000]
    assert load.drawn == 1


def test_a_job_that_never_ran_is_left_out(database, store):
    store_finished_job(store, 0, 0, 1)
    waits = a_queued_job(store, now_ms=T0 + 1000)
    assert store.cancel_waiting(waits.id, T0 + 2000)
    assert len(read(database).arrivals) == 1


def test_jobs_of_a_removed_model_are_left_out_and_counted(database, store):
    store_finished_job(store, 0, 0, 1)
    store_finished_job(store, 1, 2, 1, model="gone")
    load = read(database)
    assert (len(load.arrivals), load.unknown) == (1, 1)


def test_paused_models_and_servers_are_simulated_as_online(database, store):
    store_finished_job(store, 0, 0, 1)
    catalog = Catalog(database)
    catalog.set_server_state("gpu1", "paused")
    catalog.set_model_state("zimg", "frozen")
    catalog.set_tenant_state("default", "paused")
    catalog_read = read(database).catalog
    assert {entity.state for entity in (*catalog_read.servers.values(), *catalog_read.models.values())} == {"online"}
    assert catalog_read.tenants == {}


def test_arrivals_keep_their_constraints(database, store):
    job = replace(a_job(), constraints='gpu="A100"')
    store.submit([job], T0)
    a_start(store, job.id)
    assert [arrival.constraints for arrival in read(database).arrivals] == ['gpu="A100"']


def test_a_window_without_jobs_is_refused(database, store):
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
def test_a_window_is_a_day_or_two_times(text, begin, end):
    today = datetime(2026, 3, 2, 15, tzinfo=UTC)
    assert recorded_load.parse_window(text, today) == tuple(
        int(datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp() * 1000) for moment in (begin, end)
    )


@pytest.mark.parametrize("text", ["tomorrow", "", "..", "2026-13-01", "2026-01-05..2026-01-04", "2026-01-05T06:00"])
def test_an_invalid_window_is_refused(text):
    with pytest.raises(SimulationError, match="--from-record"):
        recorded_load.parse_window(text, datetime(2026, 3, 2, tzinfo=UTC))
