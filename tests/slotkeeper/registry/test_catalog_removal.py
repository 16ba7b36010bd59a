"""The rules of the database for models and servers that are removed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from routing.queries import job_list
from slotkeeper.db import Database
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.jobs import ledger, quarantine
from slotkeeper.jobs.closed_models import ClosingReason, ModelClosed
from slotkeeper.jobs.states import ACTIVE_STATES, FINAL_STATES, Reason, State
from slotkeeper.jobs.values import Quarantine
from slotkeeper.registry import catalog_removal
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.server_descriptions import Secret
from tests.support.builders import (
    T0,
    a_delayed_job,
    a_job,
    a_job_in,
    a_queued_job,
    a_running_job,
    an_ended_job,
    eventually,
)
from tests.support.ends import store_end
from tools.cluster.direct_starts import store_start

URL = "http://10.0.0.1:8000/generate"


@pytest.fixture
def catalog(database: Database) -> Catalog:
    made = Catalog(database)
    made.register("zimg", "gpu1", URL, 4, T0)
    return made


# -- removing a model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(ACTIVE_STATES))
def test_a_model_is_not_removed_while_a_job_of_it_has_not_ended(database, catalog, store, state):
    job, before = a_job_in(store, state), catalog.read()
    with pytest.raises(Conflict, match=rf"1 {state}.*drain=true") as refusal:
        catalog_removal.remove_model(database, "zimg", T0, "ops")
    assert refusal.value.facts == {"model": "zimg", state.value: 1}
    assert catalog.read().models == before.models and not catalog.read().closed
    assert store.get(job.id).state is state


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_the_removal_of_a_model_deletes_its_endpoints_and_grants_and_keeps_its_ended_jobs(
    database, catalog, store, state
):
    catalog.register("zimg", "gpu1", URL, 4, T0, {"gpu": "A100"}, of_model={"model_version": "2.1"})
    catalog.register("flux", "gpu1", URL, 4, T0, of_model={"model_version": "1.0"})
    catalog.set_secret(Secret("KEY", frozenset({"zimg", "flux"}), "sealed", None, T0))
    job = an_ended_job(store, state)
    found = catalog_removal.remove_model(database, "zimg", T0, "ops")
    now = catalog.read()
    assert (found.is_over, found.fleet, found.idle, list(now.models)) == (True, "zimg", (), ["flux"])
    assert now.servers["gpu1"].endpoints == {"flux": URL}
    assert now.servers["gpu1"].attributes == {"gpu": "A100", "flux:model_version": "1.0"}
    assert now.secrets["KEY"].models == {"flux"}, "a later model of this name must not get the secret"
    assert store.get(job.id) == job and job_list.find_jobs(store.database, model="zimg")[0].id == job.id
    assert ledger.read(database).balanced


def test_servers_that_a_removal_leaves_without_a_model_are_named(database, catalog):
    assert catalog_removal.remove_model(database, "zimg", T0, "ops").idle == ("gpu1",)
    assert catalog.register("zimg", "gpu1", URL, 4, T0).endpoints == {"zimg": URL}


def test_the_removal_of_an_unknown_object_raises_not_found(database, catalog):
    for act in (
        lambda: catalog_removal.remove_model(database, "flux", T0, ""),
        lambda: catalog_removal.cancel_model_removal(database, "zimg"),
        lambda: catalog_removal.remove_server(database, "gpu9", T0, ""),
        lambda: catalog_removal.cancel_server_removal(database, "gpu1"),
    ):
        with pytest.raises(NotFound):
            act()


def test_a_model_that_drains_takes_no_new_jobs_and_goes_when_the_last_has_ended(database, catalog, store):
    job, later = a_running_job(store), a_delayed_job(store)
    found = catalog_removal.remove_model(database, "zimg", T0, "ops", drain=True)
    assert (found.is_over, found.remaining) == (False, {"running": 1, "delayed": 1})
    assert catalog.read().is_being_removed("zimg") and catalog.read().closed["zimg"].changed_by == "ops"
    with pytest.raises(ModelClosed):
        store.submit([a_job()], T0)
    assert store_end(store, job.job.id, job.attempt, Reason.FINISHED, T0, result="{}")
    assert catalog_removal.finish_model_removal(database, "zimg", T0) is None and "zimg" in catalog.read().models
    assert catalog_removal.count_active_jobs(database, "zimg") == {"delayed": 1}
    assert store.cancel_waiting(later.id, T0)
    assert catalog_removal.finish_model_removal(database, "zimg", T0).is_over
    assert catalog.read().closed["zimg"].because is ClosingReason.REMOVED
    assert catalog_removal.finish_model_removal(database, "zimg", T0) is None, "once"


def test_a_canceled_removal_is_not_finished_when_no_job_is_left(database, catalog, store):
    job = a_queued_job(store)
    catalog_removal.remove_model(database, "zimg", T0, "ops", drain=True)
    catalog_removal.cancel_model_removal(database, "zimg")
    store.cancel_waiting(job.id, T0)
    assert catalog_removal.finish_model_removal(database, "zimg", T0) is None
    a_queued_job(store)
    assert "zimg" in catalog.read().models


def test_job_3_under_a_closed_name_nothing_is_stored_and_no_number_is_missing(database, catalog, store):
    catalog_removal.remove_model(database, "zimg", T0, "ops")
    ids = [a_job(id="a", model="flux"), a_job(id="b"), a_job(id="c", idempotency_key="k", fingerprint="f")]
    for new in (ids[1:2], ids[2:], ids):
        with pytest.raises(ModelClosed):
            store.submit(new, T0)
    assert [store.get(job.id) for job in ids] == [None, None, None]
    assert store.submit([a_job(id="c", model="flux", idempotency_key="k", fingerprint="g")], T0)[0].id == "c"
    assert ledger.read(database).balanced


def test_a_removed_model_accepts_no_new_job_and_its_ended_jobs_stay(database, catalog, store):
    new = a_job()
    store.submit([new], T0)
    run = store_start(store, new.id, "gpu1", "gpu1-slot0", "lease", T0)
    store_end(store, new.id, run.attempt, Reason.FINISHED, T0, result="{}")
    catalog_removal.remove_model(database, "zimg", T0, "ops")
    with pytest.raises(ModelClosed):
        store.submit([a_job()], T0)
    assert store.get(new.id).state is State.COMPLETED


@pytest.mark.postgres
def test_the_removal_of_a_model_waits_for_a_submit_that_is_not_committed(postgres_url):
    """The transaction of the submit begins before the removal reads the jobs, and commits after that."""
    database = Database(postgres_url)
    Catalog(database).register("zimg", "gpu1", URL, 4, T0)
    row = "INSERT INTO jobs (id, model, state, why, priority, tenant, created_ms, source, payload) "
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'jobs'::regclass")
    with database.engine.connect() as slow, ThreadPoolExecutor(1) as pool:
        slow.execute(text(f"{row} VALUES ('j', 'zimg', 'queued', 'submitted', 5, 't', 1, 'rest', '{{}}')"))
        removing = pool.submit(catalog_removal.remove_model, database, "zimg", T0, "ops")

        def waits() -> bool:
            with database.engine.connect() as looking:
                return removing.done() or looking.execute(waiting).scalar_one() > 0

        eventually(waits)
        slow.commit()
        with pytest.raises(Conflict, match="1 queued"):
            removing.result(10)
    assert "zimg" in Catalog(database).read().models
    database.close()


def test_a_dead_job_of_a_removed_model_is_not_revived_until_the_model_is_registered_again(database, catalog, store):
    job = an_ended_job(store, State.DEAD)
    catalog_removal.remove_model(database, "zimg", T0, "ops")
    with pytest.raises(ModelClosed, match=r"was removed.*stays dead"):
        store.revive(job.id, T0)
    assert store.get(job.id) == job
    assert len(store.list_events(job.id)) == 3
    catalog.register("zimg", "gpu1", URL, 4, T0)
    assert store.revive(job.id, T0).model == "zimg"


def test_a_new_model_does_not_join_the_fleet_that_a_removed_one_left_to_others(database, catalog):
    catalog.register("flux", "gpu1", URL, 1, T0)
    catalog_removal.remove_model(database, "zimg", T0, "")
    assert catalog.register("zimg", "gpu3", URL, 1, T0).fleet == "zimg.2", "the first is flux' still"


# -- servers ---------------------------------------------------------------------------------------------------


def test_a_server_that_runs_something_is_not_removed(database, catalog, store):
    a_running_job(store)
    with pytest.raises(Conflict, match=r"runs 1 jobs.*drain=true.*force=true"):
        catalog_removal.remove_server(database, "gpu1", T0, "ops")
    assert catalog.read().servers["gpu1"].takes_jobs


def test_a_server_with_quarantined_slots_is_not_removed(database, catalog, store):
    run = a_running_job(store)
    store_end(store, run.job.id, run.attempt, Reason.FINISHED, T0, result="{}", quarantine=Quarantine("x", T0))
    with pytest.raises(Conflict, match="1 of its slots are quarantined"):
        catalog_removal.remove_server(database, "gpu1", T0, "ops")
    catalog_removal.remove_server(database, "gpu1", T0, "ops", drain=True)
    assert catalog_removal.finish_server_removal(database, "gpu1") is None
    quarantine.release(database, run.job.id, run.attempt)
    assert catalog_removal.finish_server_removal(database, "gpu1").is_over


def test_a_server_that_drains_takes_nothing_new_and_goes_when_its_runs_have_ended(database, catalog, store):
    run = a_running_job(store)
    found = catalog_removal.remove_server(database, "gpu1", T0, "ops", drain=True)
    assert (found.is_over, found.remaining) == (False, {"running": 1})
    leaving = catalog.read().servers["gpu1"]
    assert (leaving.takes_jobs, leaving.leaving_by) == (False, "ops")
    assert not catalog.read().servers_for("zimg")
    assert catalog_removal.finish_server_removal(database, "gpu1") is None
    store_end(store, run.job.id, run.attempt, Reason.FINISHED, T0, result="{}")
    assert catalog_removal.finish_server_removal(database, "gpu1").is_over
    assert (catalog.read().servers, list(catalog.read().models)) == ({}, ["zimg"])


def test_a_server_that_stays_after_all_takes_jobs_again(database, catalog, store):
    a_running_job(store)
    catalog_removal.remove_server(database, "gpu1", T0, "ops", drain=True)
    catalog_removal.cancel_server_removal(database, "gpu1")
    assert catalog.read().servers["gpu1"].takes_jobs
    assert catalog_removal.finish_server_removal(database, "gpu1") is None


def test_a_forced_removal_of_a_server_returns_the_lost_runs(database, catalog, store):
    run = a_running_job(store)
    found = catalog_removal.remove_server(database, "gpu1", T0, "ops", force=True)
    assert (found.is_over, found.lost, catalog.read().servers) == (True, (run.job.id,), {})
