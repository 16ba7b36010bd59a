"""What the record promises about models and servers that are removed or renamed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from database.db import Database
from foundation.errors import Conflict, NotFound
from insight import listing
from jobs import withheld
from jobs.names import Because, NameClosed
from jobs.states import ACTIVE, FINAL, State, Why
from jobs.store import Error
from jobs.withheld import Withholding
from registry import departures
from registry.catalog import Catalog
from registry.secrets import Secret
from tests.support.builders import (
    SECOND,
    T0,
    a_delayed_job,
    a_job,
    a_job_in,
    a_queued_job,
    a_running_job,
    an_ended_job,
    eventually,
)
from tests.support.starts import store_remote_id, store_start
from upkeep import ledger

URL = "http://10.0.0.1:8000/generate"


@pytest.fixture
def catalog(database: Database) -> Catalog:
    made = Catalog(database)
    made.register("zimg", "gpu1", URL, 4, T0)
    return made


# -- removing a model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(ACTIVE))
def test_a_model_is_not_removed_while_a_job_of_it_has_not_ended(database, catalog, store, state):
    job, before = a_job_in(store, state), catalog.snapshot()
    with pytest.raises(Conflict, match=rf"1 {state}.*drain=true") as refusal:
        departures.remove_model(database, "zimg", T0, "ops")
    assert refusal.value.facts == {"model": "zimg", state.value: 1}
    assert catalog.snapshot().models == before.models and not catalog.snapshot().closed
    assert store.get(job.id).state is state


@pytest.mark.parametrize("state", sorted(FINAL))
def test_a_removed_model_is_gone_with_what_hangs_on_it_and_its_ended_jobs_stay(database, catalog, store, state):
    catalog.register("zimg", "gpu1", URL, 4, T0, {"gpu": "A100"}, of_model={"model_version": "2.1"})
    catalog.register("flux", "gpu1", URL, 4, T0, of_model={"model_version": "1.0"})
    catalog.set_secret(Secret("KEY", frozenset({"zimg", "flux"}), "sealed", None, T0))
    job = an_ended_job(store, state)
    found = departures.remove_model(database, "zimg", T0, "ops")
    now = catalog.snapshot()
    assert (found.is_over, found.fleet, found.idle, list(now.models)) == (True, "zimg", (), ["flux"])
    assert now.servers["gpu1"].endpoints == {"flux": URL}
    assert now.servers["gpu1"].attributes == {"gpu": "A100", "flux:model_version": "1.0"}
    assert now.secrets["KEY"].models == {"flux"}, "whoever gets the name one day shall not have it"
    assert store.get(job.id) == job and listing.find(store.database, model="zimg")[0].id == job.id
    assert ledger.read(database).balanced


def test_servers_that_a_removal_leaves_without_a_model_are_named(database, catalog):
    assert departures.remove_model(database, "zimg", T0, "ops").idle == ("gpu1",)
    assert catalog.register("zimg", "gpu1", URL, 4, T0).endpoints == {"zimg": URL}


def test_what_is_not_there_is_not_removed(database, catalog):
    for act in (
        lambda: departures.remove_model(database, "flux", T0, ""),
        lambda: departures.rename_model(database, "flux", "x", T0, ""),
        lambda: departures.keep_model(database, "zimg"),
        lambda: departures.end_former_name(database, "zimg", "x", T0),
        lambda: departures.remove_server(database, "gpu9", T0, ""),
        lambda: departures.rename_server(database, "gpu9", "x", T0, ""),
        lambda: departures.keep_server(database, "gpu1"),
    ):
        with pytest.raises(NotFound):
            act()


def test_a_model_that_drains_takes_no_new_jobs_and_goes_when_the_last_has_ended(database, catalog, store):
    job, later = a_running_job(store), a_delayed_job(store)
    found = departures.remove_model(database, "zimg", T0, "ops", drain=True)
    assert (found.is_over, found.left) == (False, {"running": 1, "delayed": 1})
    assert catalog.snapshot().is_leaving("zimg") and catalog.snapshot().closed["zimg"].changed_by == "ops"
    with pytest.raises(NameClosed):
        store.submit([a_job()], T0)
    assert store.settle(job.job.id, job.attempt, Why.FINISHED, T0, result="{}")
    assert departures.end_removal(database, "zimg", T0) is None and "zimg" in catalog.snapshot().models
    assert departures.left_of(database, "zimg") == {"delayed": 1}
    assert store.end_waiting(later.id, Why.CANCEL_REQUESTED, T0)
    assert departures.end_removal(database, "zimg", T0).is_over
    assert catalog.snapshot().closed["zimg"].because is Because.REMOVED
    assert departures.end_removal(database, "zimg", T0) is None, "once"


def test_a_removal_that_is_called_off_is_not_ended_though_nothing_is_in_its_way(database, catalog, store):
    job = a_queued_job(store)
    departures.remove_model(database, "zimg", T0, "ops", drain=True)
    departures.keep_model(database, "zimg")
    store.end_waiting(job.id, Why.CANCEL_REQUESTED, T0)
    assert departures.end_removal(database, "zimg", T0) is None
    a_queued_job(store)
    assert "zimg" in catalog.snapshot().models


def test_job_3_under_a_closed_name_nothing_is_stored_and_no_number_is_missing(database, catalog, store):
    departures.remove_model(database, "zimg", T0, "ops")
    ids = [a_job(id="a", model="flux"), a_job(id="b"), a_job(id="c", idempotency_key="k", fingerprint="f")]
    for new in (ids[1:2], ids[2:], ids):
        with pytest.raises(NameClosed):
            store.submit(new, T0)
    assert [store.get(job.id) for job in ids] == [None, None, None]
    assert store.submit([a_job(id="c", model="flux", idempotency_key="k", fingerprint="g")], T0)[0].id == "c"
    assert ledger.read(database).balanced


def test_a_doubled_message_of_a_job_whose_model_is_gone_is_still_the_same_job(database, catalog, store):
    new = a_job()
    store.submit([new], T0)
    run = store_start(store, new.id, "gpu1", "gpu1-slot0", "lease", T0)
    store.settle(new.id, run.attempt, Why.FINISHED, T0, result="{}")
    departures.remove_model(database, "zimg", T0, "ops")
    with pytest.raises(NameClosed):
        store.submit([a_job()], T0)
    assert store.get(new.id).state is State.COMPLETED


@pytest.mark.postgres
def test_no_job_is_written_behind_the_back_of_who_removes_its_model(postgres_url):
    """Its transaction has begun before the removal looks, and commits after it."""
    database = Database(postgres_url)
    Catalog(database).register("zimg", "gpu1", URL, 4, T0)
    row = "INSERT INTO jobs (id, model, state, why, tier, tenant, created_ms, source, payload) "
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'jobs'::regclass")
    with database.engine.connect() as slow, ThreadPoolExecutor(1) as pool:
        slow.execute(text(f"{row} VALUES ('j', 'zimg', 'queued', 'submitted', 5, 't', 1, 'rest', '{{}}')"))
        removal = pool.submit(departures.remove_model, database, "zimg", T0, "ops")

        def waits() -> bool:
            with database.engine.connect() as looking:
                return removal.done() or looking.execute(waiting).scalar_one() > 0

        eventually(waits)
        slow.commit()
        with pytest.raises(Conflict, match="1 queued"):
            removal.result(10)
    assert "zimg" in Catalog(database).snapshot().models
    database.close()


def test_a_dead_job_of_a_removed_model_stays_dead_and_is_told_what_to_do(database, catalog, store):
    job = an_ended_job(store, State.DEAD)
    departures.remove_model(database, "zimg", T0, "ops")
    with pytest.raises(NameClosed, match=r"was removed.*stays dead"):
        store.revive(job.id, T0)
    assert store.get(job.id) == job
    assert len(store.events_of(job.id)) == 3
    catalog.register("zimg", "gpu1", URL, 4, T0)
    assert store.revive(job.id, T0).model == "zimg"


# -- renaming a model ------------------------------------------------------------------------------------------


def test_order_1_a_renamed_models_jobs_keep_their_numbers_and_what_has_ended_its_name(database, catalog, store):
    catalog.configure("zimg", {"max_retries": 7}, T0)
    catalog.register("zimg", "gpu1", URL, 4, T0, {"gpu": "A100"}, of_model={"model_version": "2.1"})
    catalog.set_secret(Secret("KEY", frozenset({"zimg"}), "sealed", None, T0))
    jobs = {state: a_job_in(store, state) for state in State}
    lingering = a_running_job(store)
    ends = {"withhold": Withholding("timed_out", T0 + SECOND), "error": Error("timed_out", "")}
    store.settle(lingering.job.id, lingering.attempt, Why.RETRIES_EXHAUSTED, T0, **ends)
    found = departures.rename_model(database, "zimg", "flux", T0, "ops")
    now = catalog.snapshot()
    assert (found.name, found.fleet, list(now.models)) == ("flux", "zimg", ["flux"])
    assert now.models["flux"].config.max_retries == 7
    assert now.servers["gpu1"].endpoints == {"flux": URL}
    assert now.servers["gpu1"].attributes == {"gpu": "A100", "flux:model_version": "2.1"}
    assert now.secrets["KEY"].models == {"flux"}
    assert [row.model for row in withheld.read(database)] == ["flux"]
    for state, before in jobs.items():
        after = store.get(before.id)
        assert (after.seq, after.state, after.lease) == (before.seq, state, before.lease)
        assert after.model == ("flux" if state in ACTIVE else "zimg")
    assert ledger.read(database).balanced


def test_what_was_read_by_the_former_name_is_found_by_it(database, catalog, store):
    departures.rename_model(database, "zimg", "flux", T0, "")
    departures.rename_model(database, "flux", "trellis", T0 + 1, "")
    now = catalog.snapshot()
    assert [now.current(name) for name in ("zimg", "flux", "trellis", "other")] == ["trellis"] * 3 + ["other"]
    assert now.model("zimg") is now.models["trellis"]
    assert [it.name for it in now.former_names("trellis")] == ["zimg", "flux"]


def test_a_model_gets_its_first_name_back(database, catalog, store):
    job = a_queued_job(store)
    departures.rename_model(database, "zimg", "flux", T0, "")
    departures.rename_model(database, "flux", "zimg", T0, "")
    now = catalog.snapshot()
    assert (list(now.models), list(now.closed), store.get(job.id).model) == (["zimg"], ["flux"], "zimg")
    a_queued_job(store)


@pytest.mark.parametrize(
    "until_ms, now, stands", [(None, T0 + SECOND, "flux"), (T0 + SECOND, T0 + SECOND - 1, "flux"), (T0, T0, None)]
)
def test_a_former_name_stands_for_the_model_for_as_long_as_was_said(database, catalog, until_ms, now, stands):
    departures.rename_model(database, "zimg", "flux", T0, "", former_until_ms=until_ms)
    assert catalog.snapshot().closed["zimg"].stands_for(now) == stands


def test_a_name_that_means_a_model_is_no_other_models(database, catalog, store):
    catalog.register("flux", "gpu2", URL, 1, T0)
    departures.rename_model(database, "zimg", "trellis", T0, "")
    before = catalog.snapshot()
    for act in (
        lambda: departures.rename_model(database, "flux", "trellis", T0, ""),
        lambda: departures.rename_model(database, "flux", "zimg", T0, ""),
        lambda: catalog.register("zimg", "gpu3", URL, 1, T0),
        lambda: catalog.configure("zimg", {}, T0),
    ):
        with pytest.raises(Conflict):
            act()
    assert (catalog.snapshot().models, catalog.snapshot().closed) == (before.models, before.closed)
    departures.end_former_name(database, "trellis", "zimg", T0)
    assert catalog.register("zimg", "gpu3", URL, 1, T0).fleet == "zimg.2", "the fleet of the first is trellis' still"
    a_queued_job(store)


def test_a_model_that_is_being_removed_is_not_renamed(database, catalog, store):
    a_queued_job(store)
    departures.remove_model(database, "zimg", T0, "", drain=True)
    with pytest.raises(Conflict, match="being removed"):
        departures.rename_model(database, "zimg", "flux", T0, "")


def test_more_jobs_than_one_transaction_moves_are_not_renamed(database, catalog, store, monkeypatch):
    monkeypatch.setattr("registry.departures.MOST_RENAMED", 1)
    for _ in range(2):
        a_queued_job(store)
    with pytest.raises(Conflict, match="2 jobs that have not ended; at most 1"):
        departures.rename_model(database, "zimg", "flux", T0, "")
    assert list(catalog.snapshot().models) == ["zimg"]


def test_a_dead_job_of_a_renamed_model_goes_on_under_the_name_of_today(database, catalog, store):
    job = an_ended_job(store, State.DEAD)
    departures.rename_model(database, "zimg", "flux", T0, "", former_until_ms=T0)
    assert store.revive(job.id, T0).model == "flux"
    assert (store.get(job.id).model, store.get(job.id).seq) == ("flux", job.seq)


def test_former_names_of_a_model_go_with_it(database, catalog):
    departures.rename_model(database, "zimg", "flux", T0, "")
    departures.remove_model(database, "flux", T0, "")
    now = catalog.snapshot()
    assert {name: it.because for name, it in now.closed.items()} == {"zimg": Because.REMOVED, "flux": Because.REMOVED}
    catalog.register("zimg", "gpu2", URL, 1, T0)


# -- servers ---------------------------------------------------------------------------------------------------


def test_a_server_that_runs_something_is_not_removed(database, catalog, store):
    a_running_job(store)
    with pytest.raises(Conflict, match=r"runs 1 jobs.*drain=true.*force=true"):
        departures.remove_server(database, "gpu1", T0, "ops")
    assert catalog.snapshot().servers["gpu1"].takes_jobs


def test_a_server_whose_slots_are_withheld_is_not_removed(database, catalog, store):
    run = a_running_job(store)
    store.settle(run.job.id, run.attempt, Why.FINISHED, T0, result="{}", withhold=Withholding("x", T0))
    with pytest.raises(Conflict, match="1 of its slots are withheld"):
        departures.remove_server(database, "gpu1", T0, "ops")
    departures.remove_server(database, "gpu1", T0, "ops", drain=True)
    assert departures.end_leaving(database, "gpu1") is None
    withheld.forget(database, run.job.id, run.attempt)
    assert departures.end_leaving(database, "gpu1").is_over


def test_a_server_that_drains_takes_nothing_new_and_goes_when_its_runs_have_ended(database, catalog, store):
    run = a_running_job(store)
    found = departures.remove_server(database, "gpu1", T0, "ops", drain=True)
    assert (found.is_over, found.left) == (False, {"running": 1})
    leaving = catalog.snapshot().servers["gpu1"]
    assert (leaving.takes_jobs, leaving.leaving_by, leaving.becomes) == (False, "ops", None)
    assert catalog.snapshot().slots_of("zimg") == 0
    assert departures.end_leaving(database, "gpu1") is None
    store.settle(run.job.id, run.attempt, Why.FINISHED, T0, result="{}")
    assert departures.end_leaving(database, "gpu1").is_over
    assert (catalog.snapshot().servers, list(catalog.snapshot().models)) == ({}, ["zimg"])


def test_a_server_that_stays_after_all_takes_jobs_again(database, catalog, store):
    a_running_job(store)
    departures.remove_server(database, "gpu1", T0, "ops", drain=True)
    departures.keep_server(database, "gpu1")
    assert catalog.snapshot().servers["gpu1"].takes_jobs
    assert departures.end_leaving(database, "gpu1") is None


def test_who_removes_a_server_by_force_is_told_which_runs_are_lost(database, catalog, store):
    run = a_running_job(store)
    found = departures.remove_server(database, "gpu1", T0, "ops", force=True)
    assert (found.is_over, found.lost, catalog.snapshot().servers) == (True, (run.job.id,), {})


def test_a_renamed_server_keeps_all_that_it_is(database, catalog, store):
    catalog.register("zimg", "gpu1", URL, 4, T0, {"gpu": "A100"}, 2.0, overrides={"preset": "x"}, description="{}")
    catalog.register("flux", "gpu1", URL + "/flux", 4, T0)
    catalog.set_server_state("gpu1", "paused", reason="r")
    before = catalog.snapshot().servers["gpu1"]
    run = a_running_job(store)
    store_remote_id(store, run.job.id, run.attempt, "r-1", T0)
    assert not departures.rename_server(database, "gpu1", "gpu2", T0, "ops").is_over
    assert departures.end_leaving(database, "gpu1") is None
    store.settle(run.job.id, run.attempt, Why.HANDED_BACK, T0)
    assert departures.end_leaving(database, "gpu1").name == "gpu2"
    after = catalog.snapshot().servers["gpu2"]
    for name in ("fleet", "slots", "state", "endpoints", "attributes", "weight", "reason", "overrides", "created_ms"):
        assert getattr(after, name) == getattr(before, name), name
    assert (after.formerly, after.leaving_ms, list(catalog.snapshot().servers)) == ("gpu1", None, ["gpu2"])
    assert (store.get(run.job.id).server, store.get(run.job.id).remote_id) == ("gpu2", "r-1"), "to be resumed there"


def test_a_server_gets_no_name_that_another_has_or_gets(database, catalog):
    catalog.register("zimg", "gpu2", URL, 1, T0)
    catalog.register("zimg", "gpu3", URL, 1, T0)
    departures.rename_server(database, "gpu3", "gpu4", T0, "")
    for name in ("gpu2", "gpu4"):
        with pytest.raises(Conflict):
            departures.rename_server(database, "gpu1", name, T0, "")
    with pytest.raises(Conflict, match="gpu3"):
        catalog.register("zimg", "gpu4", URL, 1, T0)
