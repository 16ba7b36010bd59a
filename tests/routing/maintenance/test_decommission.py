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
from tests.support.stage import Stage


def _names_in_redis(stage: Stage, name: str) -> list[str]:
    """Keys, fields and members that name a model, but the fleet's own tag."""
    found = []
    for key in stage.redis.keys("test:*"):
        kind = stage.redis.type(key).decode()
        parts = {"hash": stage.redis.hkeys, "zset": lambda k: stage.redis.zrange(k, 0, -1)}.get(kind, lambda k: [])(key)
        texts = [key.decode().replace("{zimg}", "{}"), *(part.decode() for part in parts)]
        found += [text for text in texts if name in text.replace("{zimg}", "{}")]
    return found


# -- removing a model ------------------------------------------------------------------------------------------


def test_a_model_that_is_being_removed_completes_its_waiting_jobs_and_rejects_new_ones(stage):
    stage.register()
    ids = [stage.submit() for _ in range(3)]
    assert not catalog_removal.remove_model(stage.database, "zimg", stage.now, "ops", drain=True).is_over
    with pytest.raises(ModelClosed, match="being removed"):
        stage.submit()
    assert decommission.finish_removals(stage.dispatcher) == []
    assert stage.run_all() == ids
    assert [removal.name for removal in decommission.finish_removals(stage.dispatcher)] == ["zimg"]
    with pytest.raises(UnknownModel):
        stage.submit()
    assert [stage.state(job_id) for job_id in ids] == [State.COMPLETED] * 3


def test_a_removed_model_leaves_nothing_in_redis(stage):
    stage.register(2)
    stage.register(2, model="flux")
    for model in ("zimg", "flux", "zimg"):
        stage.submit(model)
    stage.run_all()
    assert _names_in_redis(stage, "zimg")
    decommission.forget_model(stage.dispatcher, catalog_removal.remove_model(stage.database, "zimg", stage.now, "ops"))
    assert _names_in_redis(stage, "zimg") == []
    stage.submit("flux")
    assert stage.run_all(), "the other model continues"


def test_a_removed_fleet_leaves_no_key(stage):
    stage.register()
    stage.submit()
    stage.run_all()
    catalog_removal.remove_server(stage.database, "gpu", stage.now, "ops")
    decommission.forget_model(stage.dispatcher, catalog_removal.remove_model(stage.database, "zimg", stage.now, "ops"))
    assert stage.redis.keys("test:*{zimg}*") == []


@pytest.mark.parametrize("gone", [False, True], ids=["with its server", "alone"])
def test_a_removal_that_was_interrupted_before_its_update_of_redis_is_completed_by_maintenance(stage, gone):
    stage.register()
    stage.submit()
    stage.run_all()
    catalog_removal.remove_model(stage.database, "zimg", stage.now, "ops")
    if gone:
        catalog_removal.remove_server(stage.database, "gpu", stage.now, "ops")
    passes.sweep(stage.dispatcher)
    passes.reconcile(stage.dispatcher)
    assert stage.redis.hkeys("test:3:{zimg}:rules") == []
    assert not gone or stage.redis.keys("test:3:{zimg}*") == []


def test_another_process_completes_a_requested_removal(stage):
    stage.register()
    stage.submit()
    catalog_removal.remove_model(stage.database, "zimg", stage.now, "ops", drain=True)
    other = stage.a_dispatcher(stage.redis)
    stage.run_all()
    assert [removal.name for removal in decommission.finish_removals(other)] == ["zimg"]
    assert decommission.finish_removals(stage.dispatcher) == []


def test_a_dead_job_of_a_removed_model_is_not_queued_again(stage):
    stage.register(max_crashes=1)
    job_id = stage.submit()
    task = stage.start()
    stage.later(60_000)
    passes.reap(stage.dispatcher)
    assert stage.state(job_id) is State.DEAD and task.run.job.id == job_id
    catalog_removal.remove_model(stage.database, "zimg", stage.now, "ops")
    with pytest.raises(Conflict, match="was removed"):
        stage.dispatcher.revive(job_id)
    assert stage.state(job_id) is State.DEAD


def test_a_job_that_a_process_with_an_old_catalog_enqueues_is_removed_from_the_queue(stage):
    """Its copy of the catalog is old, and it enqueues a job of the removed model."""
    stage.register()
    stage.register(model="flux")
    job = stage.job(stage.submit()).queued
    stage.run_all()
    stage.submit("flux")
    stage.start()
    catalog_removal.remove_model(stage.database, "zimg", stage.now, "ops")
    stage.dispatcher.queues.enqueue("zimg", [job])
    assert stage.dispatcher.fleets.counts(["zimg"])["zimg"].waiting == {"zimg": 1}
    rebuild.refresh_fleet(stage.dispatcher, "zimg")
    assert stage.dispatcher.fleets.counts(["zimg"])["zimg"].waiting == {}


# -- servers ---------------------------------------------------------------------------------------------------


def test_a_server_is_not_removed_while_one_of_its_slots_is_offered(stage):
    stage.register(2)
    stage.submit()
    stage.submit()
    running = stage.start()
    catalog_removal.remove_server(stage.database, "gpu", stage.now, "ops", drain=True)
    stage.settle(running)
    assert decommission.finish_removals(stage.dispatcher) == []
    offered = stage.start()
    assert decommission.finish_removals(stage.dispatcher) == []
    stage.settle(offered)
    assert [removal.name for removal in decommission.finish_removals(stage.dispatcher)] == ["gpu"]


def test_a_server_that_drains_is_removed_when_its_run_has_ended(stage):
    stage.register(server="a")
    job_id = stage.submit()
    task = stage.start()
    stage.register(server="b")
    catalog_removal.remove_server(stage.database, "a", stage.now, "ops", drain=True)
    assert decommission.finish_removals(stage.dispatcher) == []
    second = stage.submit()
    assert stage.start().run.server == "b"
    stage.submit()
    stage.settle(task)
    assert stage.offered() == []
    assert [removal.name for removal in decommission.finish_removals(stage.dispatcher)] == ["a"]
    assert (stage.state(job_id), stage.job(second).server) == (State.COMPLETED, "b")


@pytest.mark.parametrize("cut", [False, True], ids=["at once", "by maintenance"])
def test_runs_of_a_server_that_is_removed_by_force_are_lost_and_run_again_elsewhere(stage, cut):
    stage.register(server="a")
    job_id = stage.submit()
    task = stage.start()
    stage.register(server="b")
    found = catalog_removal.remove_server(stage.database, "a", stage.now, "ops", force=True)
    assert found.lost == (job_id,)
    if cut:  # The process that removed the server died before it updated Redis.
        passes.sweep(stage.dispatcher)
        decommission.finish_removals(stage.dispatcher)
    else:
        decommission.forget_server(stage.dispatcher, found)
        decommission.end_runs_now(stage.dispatcher, found.lost)
    job = stage.job(job_id)
    assert (job.why, job.error_code, job.crashes) == (Reason.SERVER_UNREACHABLE, "server_removed", 0)
    assert stage.renewal(task) is Renewal.LOST and stage.settle(task).moved is None
    passes.sweep(stage.dispatcher)
    again = stage.start()
    assert (again.run.job.id, again.run.server) == (job_id, "b")
    assert stage.settle(again).moved.to is State.COMPLETED


def test_slot_1_a_server_that_returns_after_a_forced_removal_quarantines_the_slots_of_its_runs(stage):
    stage.register(server="a")
    stage.submit()
    stage.start()
    decommission.forget_server(
        stage.dispatcher, catalog_removal.remove_server(stage.database, "a", stage.now, "ops", force=True)
    )
    decommission.end_runs_of_removed_servers(stage.dispatcher)
    stage.register(server="a")
    quarantined_slots.sync_leases(stage.dispatcher)
    assert stage.free() == 0 and len(quarantine.list_all(stage.database)) == 1


def test_the_quarantine_of_a_removed_server_is_deleted_after_its_maximum_time(stage):
    stage.register(server="a")
    stage.submit()
    stage.start()
    catalog_removal.remove_server(stage.database, "a", stage.now, "ops", force=True)
    decommission.end_runs_of_removed_servers(stage.dispatcher)
    quarantined_slots.sync_leases(stage.dispatcher)
    assert len(quarantine.list_all(stage.database)) == 1
    stage.later(stage.dispatcher.settings.withhold_max_ms)
    quarantined_slots.sync_leases(stage.dispatcher)
    assert quarantine.list_all(stage.database) == []


# -- many models on one server ---------------------------------------------------------------------------------


def test_models_on_the_same_servers_share_one_queue_in_the_order_of_acceptance(stage):
    """A pipeline: its versions wait as one, for the same slots."""
    for model in ("zimg", "zimg-2", "zimg-3"):
        stage.register(model=model, affinity=0)
    ids = [stage.submit(model) for model in ("zimg", "zimg-3", "zimg-2", "zimg-2", "zimg", "zimg-3")]
    first = stage.start()
    assert stage.offered() == [], "one slot for all of them"
    stage.settle(first)
    assert [first.run.job.id, *stage.run_all()] == ids
