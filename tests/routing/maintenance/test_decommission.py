"""Models and servers that are removed while jobs wait and run: nothing is lost, doubled or out of order."""

import pytest

from routing.maintenance import decommission as upkeep
from routing.maintenance import quarantined_slots, rebuild
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


def test_a_model_that_is_removed_works_off_what_waits_and_refuses_what_comes(stage):
    stage.register()
    ids = [stage.submit() for _ in range(3)]
    assert not catalog_removal.remove_model(stage.database, "zimg", stage.now, "ops", drain=True).is_over
    with pytest.raises(ModelClosed, match="being removed"):
        stage.submit()
    assert upkeep.finish_removals(stage.dispatcher) == []
    assert stage.run_all() == ids
    assert [it.name for it in upkeep.finish_removals(stage.dispatcher)] == ["zimg"]
    with pytest.raises(UnknownModel):
        stage.submit()
    assert [stage.state(job_id) for job_id in ids] == [State.COMPLETED] * 3


def test_of_a_removed_model_nothing_is_left_in_redis(stage):
    stage.register(2)
    stage.register(2, model="flux")
    for model in ("zimg", "flux", "zimg"):
        stage.submit(model)
    stage.run_all()
    assert _names_in_redis(stage, "zimg")
    upkeep.forget_model(stage.dispatcher, catalog_removal.remove_model(stage.database, "zimg", stage.now, "ops"))
    assert _names_in_redis(stage, "zimg") == []
    stage.submit("flux")
    assert stage.run_all(), "its neighbour goes on"


def test_a_fleet_that_is_gone_leaves_no_key(stage):
    stage.register()
    stage.submit()
    stage.run_all()
    catalog_removal.remove_server(stage.database, "gpu", stage.now, "ops")
    upkeep.forget_model(stage.dispatcher, catalog_removal.remove_model(stage.database, "zimg", stage.now, "ops"))
    assert stage.redis.keys("test:*{zimg}*") == []


@pytest.mark.parametrize("gone", [False, True], ids=["with its server", "alone"])
def test_a_removal_that_is_cut_before_redis_hears_of_it_is_completed_by_maintenance(stage, gone):
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


def test_a_removal_that_was_asked_for_goes_on_in_another_process(stage):
    stage.register()
    stage.submit()
    catalog_removal.remove_model(stage.database, "zimg", stage.now, "ops", drain=True)
    other = stage.a_dispatcher(stage.redis)
    stage.run_all()
    assert [it.name for it in upkeep.finish_removals(other)] == ["zimg"]
    assert upkeep.finish_removals(stage.dispatcher) == []


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


def test_a_process_that_does_not_know_of_the_removal_leaves_nothing_in_the_room(stage):
    """Its copy of the catalog is old, and it puts a job where nobody would look for it."""
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
    assert upkeep.finish_removals(stage.dispatcher) == []
    offered = stage.start()
    assert upkeep.finish_removals(stage.dispatcher) == []
    stage.settle(offered)
    assert [it.name for it in upkeep.finish_removals(stage.dispatcher)] == ["gpu"]


def test_a_server_that_drains_is_removed_when_its_run_has_ended(stage):
    stage.register(server="a")
    job_id = stage.submit()
    task = stage.start()
    stage.register(server="b")
    catalog_removal.remove_server(stage.database, "a", stage.now, "ops", drain=True)
    assert upkeep.finish_removals(stage.dispatcher) == []
    second = stage.submit()
    assert stage.start().run.server == "b"
    stage.submit()
    stage.settle(task)
    assert stage.offered() == []
    assert [it.name for it in upkeep.finish_removals(stage.dispatcher)] == ["a"]
    assert (stage.state(job_id), stage.job(second).server) == (State.COMPLETED, "b")


@pytest.mark.parametrize("cut", [False, True], ids=["at once", "by maintenance"])
def test_runs_of_a_server_that_is_removed_by_force_are_lost_and_run_again_elsewhere(stage, cut):
    stage.register(server="a")
    job_id = stage.submit()
    task = stage.start()
    stage.register(server="b")
    found = catalog_removal.remove_server(stage.database, "a", stage.now, "ops", force=True)
    assert found.lost == (job_id,)
    if cut:  # Who removed it died before it said so.
        passes.sweep(stage.dispatcher)
        upkeep.finish_removals(stage.dispatcher)
    else:
        upkeep.forget_server(stage.dispatcher, found)
        upkeep.end_runs_now(stage.dispatcher, found.lost)
    job = stage.job(job_id)
    assert (job.why, job.error_code, job.crashes) == (Reason.SERVER_UNREACHABLE, "server_removed", 0)
    assert stage.renewal(task) is Renewal.LOST and stage.settle(task).moved is None
    passes.sweep(stage.dispatcher)
    again = stage.start()
    assert (again.run.job.id, again.run.server) == (job_id, "b")
    assert stage.settle(again).moved.to is State.COMPLETED


def test_slot_1_a_server_that_comes_again_after_it_was_removed_by_force_withholds_what_it_ran(stage):
    stage.register(server="a")
    stage.submit()
    stage.start()
    upkeep.forget_server(
        stage.dispatcher, catalog_removal.remove_server(stage.database, "a", stage.now, "ops", force=True)
    )
    upkeep.end_runs_of_removed_servers(stage.dispatcher)
    stage.register(server="a")
    quarantined_slots.sync_leases(stage.dispatcher)
    assert stage.free() == 0 and len(quarantine.list_all(stage.database)) == 1


def test_what_is_withheld_of_a_server_that_is_gone_is_forgotten_after_its_time(stage):
    stage.register(server="a")
    stage.submit()
    stage.start()
    catalog_removal.remove_server(stage.database, "a", stage.now, "ops", force=True)
    upkeep.end_runs_of_removed_servers(stage.dispatcher)
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
