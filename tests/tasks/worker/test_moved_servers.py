"""A change of a registered server ends no run that began before, and counts no crash for it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from routing.dispatch.dispatcher import ActiveRun
from routing.maintenance import rebuild
from routing.maintenance.server_report import ServerReport
from routing.queue.leases import Renewal
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import JobError
from tasks import server_adapters
from tests.support import passes
from tests.support.builders import T0, a_queued_job
from tests.support.ends import store_end
from tests.support.harness import Harness
from tools.cluster.direct_starts import store_remote_id, store_start

OLD, NEW = "http://gpu:1/run", "http://other:1/run"
REPORT_WITHOUT_RUNS = ServerReport(True, 0, frozenset(), endpoints={"zimg": NEW})
MINUTE = 60_000


def _start(store: JobStore, job_id: str, sent_to: str, *, server: str = "gpu", offer: int = 1) -> str | None:
    run = store_start(store, job_id, server, f"{server}-slot0", "l w", T0, offer, None, sent_to)
    assert run is not None and run.sent_to == _stored(store, job_id)
    return run.sent_to


def _stored(store: JobStore, job_id: str) -> str | None:
    job = store.get(job_id)
    assert job is not None
    return job.sent_to


# -- the address in the database -------------------------------------------------------------------------------


@pytest.mark.parametrize("why", [Reason.LEASE_EXPIRED, Reason.HANDED_BACK])
def test_a_run_that_is_resumed_keeps_the_address_to_which_it_was_sent(store: JobStore, why: Reason) -> None:
    polled, offered_again, sent_again = (a_queued_job(store).id for _ in range(3))
    for job_id in (polled, offered_again, sent_again):
        assert _start(store, job_id, OLD) == OLD
        if job_id == polled:
            store_remote_id(store, job_id, 1, "r", T0)
        store_end(store, job_id, 1, why, T0)
    assert _start(store, polled, NEW) == OLD
    assert _start(store, offered_again, NEW, offer=0) == OLD, "the server may still run the job"
    assert _start(store, sent_again, NEW) == NEW


def test_a_run_at_another_server_is_sent_to_the_address_of_that_server(store: JobStore) -> None:
    job_id = a_queued_job(store).id
    _start(store, job_id, OLD)
    store_remote_id(store, job_id, 1, "r", T0)
    store_end(store, job_id, 1, Reason.LEASE_EXPIRED, T0)
    assert _start(store, job_id, NEW, server="other") == NEW


@pytest.mark.parametrize(
    "why", [Reason.FINISHED, Reason.SERVER_LOST, Reason.SERVER_UNREACHABLE, Reason.CANCEL_REQUESTED]
)
def test_the_stored_address_of_a_run_is_deleted_at_its_end(store: JobStore, why: Reason) -> None:
    job_id = a_queued_job(store).id
    _start(store, job_id, "http://user:password@gpu:1/run")
    store_end(store, job_id, 1, why, T0, result="1" if why is Reason.FINISHED else None, error=JobError("said", "so"))
    assert _stored(store, job_id) is None


# -- a server that is registered again -------------------------------------------------------------------------


def _run_before_move(harness: Harness, url: str = NEW, slots: int = 1) -> ActiveRun:
    """Start a run, register its server again with another address, and return the run."""
    harness.register()
    harness.submit()
    active = harness.start()
    assert active.run.sent_to == OLD
    harness.catalog.register("zimg", "gpu", url, slots, harness.now)
    rebuild.refresh_fleet(harness.dispatcher, "zimg")
    return active


def _compare_for_a_minute(harness: Harness, active: ActiveRun, report: ServerReport) -> None:
    for _ in range(12):
        harness.later(MINUTE // 12)
        harness.renewal(active)
        passes.apply_reports(harness.dispatcher, {"gpu": report})
        suspects = passes.find_stale_runs(harness.dispatcher, {"gpu": report})
        passes.end_stale_runs(harness.dispatcher, suspects, {"gpu": report})


def test_a_run_is_not_compared_with_the_report_of_another_address(harness: Harness) -> None:
    active = _run_before_move(harness)
    _compare_for_a_minute(harness, active, REPORT_WITHOUT_RUNS)
    job = harness.job(active.run.job.id)
    assert (job.state, job.attempt, job.crashes) == (State.RUNNING, 1, 0)
    assert harness.renewal(active) is Renewal.RENEWED and harness.settle(active).moved is not None
    harness.submit()
    assert harness.start().run.sent_to == NEW


def test_a_polled_run_is_not_compared_with_the_report_of_another_address(harness: Harness) -> None:
    active = _run_before_move(harness)
    harness.remote(active)
    _compare_for_a_minute(harness, active, REPORT_WITHOUT_RUNS)
    assert (harness.state(active.run.job.id), harness.job(active.run.job.id).crashes) == (State.RUNNING, 0)


def test_a_run_is_compared_with_a_report_from_its_old_address(harness: Harness) -> None:
    active = _run_before_move(harness)
    _compare_for_a_minute(harness, active, replace(REPORT_WITHOUT_RUNS, endpoints={"zimg": OLD}))
    assert harness.job(active.run.job.id).why is Reason.SERVER_LOST


def test_a_run_is_compared_with_a_report_from_its_address_although_the_password_changed(harness: Harness) -> None:
    new_url = "http://user:password@gpu:1/run?token=x"
    active = _run_before_move(harness, new_url)
    assert server_adapters.endpoint_of_run(harness.dispatcher.catalog.get(), "gpu", "zimg", OLD) == new_url
    _compare_for_a_minute(harness, active, replace(REPORT_WITHOUT_RUNS, endpoints={"zimg": new_url}))
    assert harness.job(active.run.job.id).why is Reason.SERVER_LOST


def test_a_run_is_polled_at_the_address_to_which_it_was_sent(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run_before_move(harness).run
    monkeypatch.setattr(server_adapters, "adapter_for", lambda url, *_: url)
    address_for = partial(server_adapters.adapter_of_run, harness.dispatcher.catalog.get(), "gpu", "zimg", None)
    assert (address_for(run.sent_to), address_for(None)) == (OLD, NEW)
    assert server_adapters.adapter_of_run(harness.dispatcher.catalog.get(), "gone", "zimg", None, run.sent_to) is None


def test_a_report_names_the_addresses_that_its_server_had_at_the_request(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    server = harness.catalog.read().servers["gpu"]
    passes.run_tasks_with(monkeypatch, harness.dispatcher)
    assert passes.read_report(server).endpoints == {"zimg": OLD}


def test_a_removed_slot_neither_ends_its_run_nor_counts_a_crash(harness: Harness) -> None:
    harness.register(2)
    ids = [harness.submit() for _ in range(3)]
    active_runs = [harness.start() for _ in range(2)]
    harness.register(1)
    assert [harness.renewal(active) for active in active_runs] == [Renewal.RENEWED] * 2
    harness.settle(active_runs[0])
    assert harness.offered() == [], "the other run uses the only slot"
    harness.settle(active_runs[1])
    assert harness.run_all() == ids[2:]
    assert [(harness.job(job_id).attempt, harness.job(job_id).crashes) for job_id in ids] == [(1, 0)] * 3


def _register_twice(harness: Harness) -> None:
    harness.register(2)
    harness.catalog.register("zimg", "again", OLD, 2, harness.now)
    rebuild.refresh_fleet(harness.dispatcher, "zimg")


@pytest.mark.parametrize(
    "make_report", [lambda ids: ServerReport(True, len(ids)), lambda ids: ServerReport(True, None, ids)]
)
def test_runs_of_two_servers_at_one_address_do_not_count_as_foreign(
    harness: Harness, make_report: Callable[[frozenset[str]], ServerReport]
) -> None:
    _register_twice(harness)
    ids = frozenset(harness.submit() for _ in range(3))
    for _ in ids:
        harness.start()
    passes.apply_reports(harness.dispatcher, dict.fromkeys(("gpu", "again"), make_report(ids)))
    assert harness.free() == 1
