"""Models and servers that are removed while jobs wait and run: nothing is lost, doubled or out of order."""

import pytest

from routing.maintenance import decommission, quarantined_slots, rebuild
from routing.queue.leases import Renewal
from slotkeeper.errors import Conflict, UnknownModel
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.closed_models import ModelClosed
from slotkeeper.jobs.states import Reason, State
from slotkeeper.registry import catalog_removal
from tests.support import passes
from tests.support.harness import Harness


def _names_in_redis(harness: Harness, name: str) -> list[str]:
    """Keys, fields and members that name a model, but the fleet's own tag."""
    found = []
    for key in harness.redis.keys("test:*"):
        kind = harness.redis.type(key).decode()
        parts = {"hash": harness.redis.hkeys, "zset": lambda k: harness.redis.zrange(k, 0, -1)}.get(kind, lambda k: [])(
            key
        )
        texts = [key.decode().replace("{zimg}", "{}"), *(part.decode() for part in parts)]
        found += [text for text in texts if name in text.replace("{zimg}", "{}")]
    return found


# -- removing a model ------------------------------------------------------------------------------------------


def test_a_model_that_is_being_removed_completes_its_waiting_jobs_and_rejects_new_ones(harness):
    harness.register()
    ids = [harness.submit() for _ in range(3)]
    assert not catalog_removal.remove_model(harness.database, "zimg", harness.now, "ops", drain=True).is_over
    with pytest.raises(ModelClosed, match="being removed"):
        harness.submit()
    assert decommission.finish_removals(harness.dispatcher) == []
    assert harness.run_all() == ids
    assert [removal.name for removal in decommission.finish_removals(harness.dispatcher)] == ["zimg"]
    with pytest.raises(UnknownModel):
        harness.submit()
    assert [harness.state(job_id) for job_id in ids] == [State.COMPLETED] * 3


def test_a_removed_model_leaves_nothing_in_redis(harness):
    harness.register(2)
    harness.register(2, model="flux")
    for model in ("zimg", "flux", "zimg"):
        harness.submit(model)
    harness.run_all()
    assert _names_in_redis(harness, "zimg")
    decommission.forget_model(
        harness.dispatcher, catalog_removal.remove_model(harness.database, "zimg", harness.now, "ops")
    )
    assert _names_in_redis(harness, "zimg") == []
    harness.submit("flux")
    assert harness.run_all(), "the other model continues"


def test_a_removed_fleet_leaves_no_key(harness):
    harness.register()
    harness.submit()
    harness.run_all()
    catalog_removal.remove_server(harness.database, "gpu", harness.now, "ops")
    decommission.forget_model(
        harness.dispatcher, catalog_removal.remove_model(harness.database, "zimg", harness.now, "ops")
    )
    assert harness.redis.keys("test:*{zimg}*") == []


@pytest.mark.parametrize("gone", [False, True], ids=["with its server", "alone"])
def test_a_removal_that_was_interrupted_before_its_update_of_redis_is_completed_by_maintenance(harness, gone):
    harness.register()
    harness.submit()
    harness.run_all()
    catalog_removal.remove_model(harness.database, "zimg", harness.now, "ops")
    if gone:
        catalog_removal.remove_server(harness.database, "gpu", harness.now, "ops")
    passes.sweep(harness.dispatcher)
    passes.reconcile(harness.dispatcher)
    assert harness.redis.hkeys("test:3:{zimg}:rules") == []
    assert not gone or harness.redis.keys("test:3:{zimg}*") == []


def test_another_process_completes_a_requested_removal(harness):
    harness.register()
    harness.submit()
    catalog_removal.remove_model(harness.database, "zimg", harness.now, "ops", drain=True)
    other = harness.a_dispatcher(harness.redis)
    harness.run_all()
    assert [removal.name for removal in decommission.finish_removals(other)] == ["zimg"]
    assert decommission.finish_removals(harness.dispatcher) == []


def test_a_dead_job_of_a_removed_model_is_not_queued_again(harness):
    harness.register(max_crashes=1)
    job_id = harness.submit()
    task = harness.start()
    harness.later(60_000)
    passes.reap(harness.dispatcher)
    assert harness.state(job_id) is State.DEAD and task.run.job.id == job_id
    catalog_removal.remove_model(harness.database, "zimg", harness.now, "ops")
    with pytest.raises(Conflict, match="was removed"):
        harness.dispatcher.revive(job_id)
    assert harness.state(job_id) is State.DEAD


def test_a_job_that_a_process_with_an_old_catalog_enqueues_is_removed_from_the_queue(harness):
    """Its copy of the catalog is old, and it enqueues a job of the removed model."""
    harness.register()
    harness.register(model="flux")
    job = harness.job(harness.submit()).queued
    harness.run_all()
    harness.submit("flux")
    harness.start()
    catalog_removal.remove_model(harness.database, "zimg", harness.now, "ops")
    harness.dispatcher.queues.enqueue("zimg", [job])
    assert harness.dispatcher.fleets.counts(["zimg"])["zimg"].waiting == {"zimg": 1}
    rebuild.refresh_fleet(harness.dispatcher, "zimg")
    assert harness.dispatcher.fleets.counts(["zimg"])["zimg"].waiting == {}


# -- servers ---------------------------------------------------------------------------------------------------


def test_a_server_is_not_removed_while_one_of_its_slots_is_offered(harness):
    harness.register(2)
    harness.submit()
    harness.submit()
    running = harness.start()
    catalog_removal.remove_server(harness.database, "gpu", harness.now, "ops", drain=True)
    harness.settle(running)
    assert decommission.finish_removals(harness.dispatcher) == []
    offered = harness.start()
    assert decommission.finish_removals(harness.dispatcher) == []
    harness.settle(offered)
    assert [removal.name for removal in decommission.finish_removals(harness.dispatcher)] == ["gpu"]


def test_a_server_that_drains_is_removed_when_its_run_has_ended(harness):
    harness.register(server="a")
    job_id = harness.submit()
    task = harness.start()
    harness.register(server="b")
    catalog_removal.remove_server(harness.database, "a", harness.now, "ops", drain=True)
    assert decommission.finish_removals(harness.dispatcher) == []
    second = harness.submit()
    assert harness.start().run.server == "b"
    harness.submit()
    harness.settle(task)
    assert harness.offered() == []
    assert [removal.name for removal in decommission.finish_removals(harness.dispatcher)] == ["a"]
    assert (harness.state(job_id), harness.job(second).server) == (State.COMPLETED, "b")


@pytest.mark.parametrize("cut", [False, True], ids=["at once", "by maintenance"])
def test_runs_of_a_server_that_is_removed_by_force_are_lost_and_run_again_elsewhere(harness, cut):
    harness.register(server="a")
    job_id = harness.submit()
    task = harness.start()
    harness.register(server="b")
    found = catalog_removal.remove_server(harness.database, "a", harness.now, "ops", force=True)
    assert found.lost == (job_id,)
    if cut:  # The process that removed the server died before it updated Redis.
        passes.sweep(harness.dispatcher)
        decommission.finish_removals(harness.dispatcher)
    else:
        decommission.forget_server(harness.dispatcher, found)
        decommission.end_runs_now(harness.dispatcher, found.lost)
    job = harness.job(job_id)
    assert (job.why, job.error_code, job.crashes) == (Reason.SERVER_UNREACHABLE, "server_removed", 0)
    assert harness.renewal(task) is Renewal.LOST and harness.settle(task).moved is None
    passes.sweep(harness.dispatcher)
    again = harness.start()
    assert (again.run.job.id, again.run.server) == (job_id, "b")
    assert harness.settle(again).moved.to is State.COMPLETED


def test_slot_1_a_server_that_returns_after_a_forced_removal_quarantines_the_slots_of_its_runs(harness):
    harness.register(server="a")
    harness.submit()
    harness.start()
    decommission.forget_server(
        harness.dispatcher, catalog_removal.remove_server(harness.database, "a", harness.now, "ops", force=True)
    )
    decommission.end_runs_of_removed_servers(harness.dispatcher)
    harness.register(server="a")
    quarantined_slots.sync_leases(harness.dispatcher)
    assert harness.free() == 0 and len(quarantine.list_all(harness.database)) == 1


def test_the_quarantine_of_a_removed_server_is_deleted_after_its_maximum_time(harness):
    harness.register(server="a")
    harness.submit()
    harness.start()
    catalog_removal.remove_server(harness.database, "a", harness.now, "ops", force=True)
    decommission.end_runs_of_removed_servers(harness.dispatcher)
    quarantined_slots.sync_leases(harness.dispatcher)
    assert len(quarantine.list_all(harness.database)) == 1
    harness.later(harness.dispatcher.settings.withhold_max_ms)
    quarantined_slots.sync_leases(harness.dispatcher)
    assert quarantine.list_all(harness.database) == []


# -- many models on one server ---------------------------------------------------------------------------------


def test_models_on_the_same_servers_share_one_queue_in_the_order_of_acceptance(harness):
    """A pipeline: its versions wait as one, for the same slots."""
    for model in ("zimg", "zimg-2", "zimg-3"):
        harness.register(model=model, affinity=0)
    ids = [harness.submit(model) for model in ("zimg", "zimg-3", "zimg-2", "zimg-2", "zimg", "zimg-3")]
    first = harness.start()
    assert harness.offered() == [], "one slot for all of them"
    harness.settle(first)
    assert [first.run.job.id, *harness.run_all()] == ids
