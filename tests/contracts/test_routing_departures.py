"""Models and servers that are removed or renamed while jobs wait and run: nothing is lost, doubled or out of order."""

import pytest

from admission import questions
from admission.submission import Submission
from dispatch.outcome import Kind
from foundation.errors import Conflict, UnknownModel
from jobs import withheld
from jobs.names import NameClosed
from jobs.states import State, Why
from registry import departures
from routing.leases import Renewal
from tests.support.stage import Stage
from tests.support.starts import begin_run, claim_offer
from upkeep import draining, reconcile
from upkeep.reconcile import departures as upkeep
from upkeep.rooms import depths


def _rename(stage: Stage, model: str = "zimg", to: str = "flux", **options: int) -> None:
    """As the door does it."""
    upkeep.follow_model(
        stage.dispatcher, departures.rename_model(stage.database, model, to, stage.now, "ops", **options), model
    )


def _run_ms(stage: Stage, model: str) -> int | None:
    """The mean slot time of a model's runs, as the room knows it."""
    (found,) = stage.dispatcher.queues.ask([questions.backlog(stage.dispatcher.queues, "zimg", model, "default")])
    return found.run_ms


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
    assert not departures.remove_model(stage.database, "zimg", stage.now, "ops", drain=True).is_over
    with pytest.raises(NameClosed, match="being removed"):
        stage.submit()
    assert upkeep.go_on(stage.dispatcher) == []
    assert stage.run_all() == ids
    assert [it.name for it in upkeep.go_on(stage.dispatcher)] == ["zimg"]
    with pytest.raises(UnknownModel):
        stage.submit()
    assert [stage.state(job_id) for job_id in ids] == [State.COMPLETED] * 3


def test_of_a_removed_model_nothing_is_left_in_redis(stage):
    stage.register(2)
    stage.register(2, model="flux")
    for model in ("zimg", "flux", "zimg"):
        stage.submit(model)
    stage.run_all()
    stage.dispatcher.observer.learn()
    assert _names_in_redis(stage, "zimg")
    upkeep.follow_model(stage.dispatcher, departures.remove_model(stage.database, "zimg", stage.now, "ops"), "zimg")
    assert _names_in_redis(stage, "zimg") == []
    stage.submit("flux")
    assert stage.run_all(), "its neighbour goes on"


def test_a_fleet_that_is_gone_leaves_no_key(stage):
    stage.register()
    stage.submit()
    stage.run_all()
    departures.remove_server(stage.database, "gpu", stage.now, "ops")
    upkeep.follow_model(stage.dispatcher, departures.remove_model(stage.database, "zimg", stage.now, "ops"), "zimg")
    assert stage.redis.keys("test:*{zimg}*") == []


@pytest.mark.parametrize("gone", [False, True], ids=["with its server", "alone"])
def test_a_removal_that_is_cut_before_redis_hears_of_it_is_completed_by_maintenance(stage, gone):
    stage.register()
    stage.submit()
    stage.run_all()
    departures.remove_model(stage.database, "zimg", stage.now, "ops")
    if gone:
        departures.remove_server(stage.database, "gpu", stage.now, "ops")
    reconcile.sweep(stage.dispatcher)
    reconcile.reconcile(stage.dispatcher)
    assert stage.redis.hkeys("test:3:{zimg}:rules") == []
    assert not gone or stage.redis.keys("test:3:{zimg}*") == []


def test_a_removal_that_was_asked_for_goes_on_in_another_process(stage):
    stage.register()
    stage.submit()
    departures.remove_model(stage.database, "zimg", stage.now, "ops", drain=True)
    other = stage.a_dispatcher(stage.redis)
    stage.run_all()
    assert [it.name for it in upkeep.go_on(other)] == ["zimg"]
    assert upkeep.go_on(stage.dispatcher) == []


def test_a_dead_job_of_a_removed_model_is_not_queued_again(stage):
    stage.register(max_crashes=1)
    job_id = stage.submit()
    task = stage.start()
    stage.later(60_000)
    reconcile.reap(stage.dispatcher)
    assert stage.state(job_id) is State.DEAD and task.run.job.id == job_id
    departures.remove_model(stage.database, "zimg", stage.now, "ops")
    with pytest.raises(Conflict, match="was removed"):
        stage.dispatcher.revive(job_id)
    assert stage.state(job_id) is State.DEAD


# -- renaming a model ------------------------------------------------------------------------------------------


def test_order_1_jobs_of_a_renamed_model_start_in_the_order_they_had(stage):
    stage.register()
    ids = [stage.submit(priority=priority) for priority in (5, 5, 7, 1, 5, 1)]
    stage.offered()
    _rename(stage)
    assert stage.run_all() == [ids[3], ids[5], ids[0], ids[1], ids[4], ids[2]]
    assert {stage.job(job_id).model for job_id in ids} == {"flux"}


def test_a_run_under_way_ends_as_if_its_model_had_its_name_still(stage):
    stage.register(2)
    ids = [stage.submit() for _ in range(3)]
    one, two = stage.start("w1"), stage.start("w1")
    _rename(stage)
    assert [stage.renewal(task) for task in (one, two)] == [Renewal.RENEWED] * 2
    assert stage.room.taken() == {one.lease.slot: ids[0], two.lease.slot: ids[1]} and stage.offered() == []
    assert stage.settle(one).moved.to is State.COMPLETED
    assert stage.offered() == [ids[2]], "its slot is the next job's, once"
    assert stage.settle(two).moved.to is State.COMPLETED
    assert depths(stage.dispatcher.queues.scripts, "zimg").waiting == {}


def test_an_offer_of_before_is_taken_up_by_one_worker_at_most(stage):
    stage.register()
    job_id = stage.submit()
    (before,) = stage.told.offers
    stage.told.offers.clear()
    _rename(stage)
    (after,) = stage.told.offers
    started = [begin_run(stage.dispatcher, offer, f"w{n}") for n, offer in enumerate((before, after))]
    assert [task is not None for task in started] == [False, True]
    assert (started[1].run.job.id, started[1].run.job.model, stage.job(job_id).attempt) == (job_id, "flux", 1)


def test_a_worker_that_had_claimed_before_the_name_changed_keeps_its_slot(stage):
    stage.register()
    stage.submit()
    second = stage.submit()
    offer = stage.told.offers.pop(0)
    claimed = claim_offer(stage.dispatcher.leases, offer, "w1")
    departures.rename_model(stage.database, "zimg", "flux", stage.now, "ops")
    task = begin_run(stage.dispatcher, claimed, "w1")
    reconcile.refresh_fleet(stage.dispatcher, "zimg")
    assert stage.room.taken() == {task.lease.slot: task.run.job.id}
    stage.settle(task)
    assert stage.offered() == [second]


@pytest.mark.parametrize("running", [0, 1])
def test_a_renaming_that_is_cut_before_redis_hears_of_it_is_completed_by_the_sweep(stage, running):
    stage.register()
    ids = [stage.submit(priority=priority) for priority in (5, 1, 5, 1)]
    task = stage.start() if running else None
    stage.offered()
    departures.rename_model(stage.database, "zimg", "flux", stage.now, "ops")
    for _ in range(3):
        reconcile.sweep(stage.dispatcher)
    if task is not None:
        stage.settle(task)
    order = [ids[0], ids[1], ids[3], ids[2]] if running else [ids[1], ids[3], ids[0], ids[2]]
    assert [*ids[:running], *stage.run_all()] == order
    assert depths(stage.dispatcher.queues.scripts, "zimg").waiting == {}


def test_who_still_knows_the_former_name_leaves_nothing_in_the_room(stage):
    """A process whose copy of the catalog is old puts a job where nobody would look for it."""
    stage.register()
    first = stage.submit()
    stage.start()
    job = stage.job(stage.submit()).waiting
    _rename(stage)
    stage.dispatcher.queues.enqueue("zimg", [job])
    assert depths(stage.dispatcher.queues.scripts, "zimg").waiting == {"zimg": 1, "flux": 1}
    stage.catalog.set_model_state("flux", "online")
    reconcile.refresh_fleet(stage.dispatcher, "zimg")
    assert depths(stage.dispatcher.queues.scripts, "zimg").waiting == {"flux": 1}
    assert stage.job(first).state is State.RUNNING


def test_slot_2_jobs_whose_models_name_was_given_away_before_redis_heard_of_it_come_in_by_its_new_one(stage):
    stage.register()
    ids = [stage.submit() for _ in range(3)]
    task = stage.start()
    departures.rename_model(stage.database, "zimg", "flux", stage.now, "ops", former_until_ms=stage.now)
    stage.catalog.register("zimg", "other", "http://other:1/run", 1, stage.now)
    reconcile.refresh_fleet(stage.dispatcher, "zimg")
    assert depths(stage.dispatcher.queues.scripts, "zimg").waiting == {"flux": 2}
    stage.settle(task)
    assert [task.run.job.id, *stage.run_all()] == ids


def test_a_submit_by_the_former_name_is_taken_for_as_long_as_was_said(stage):
    stage.register()
    _rename(stage, former_until_ms=stage.now + 1000)
    job_id = stage.submit("zimg", idempotency_key="k")
    assert stage.job(job_id).model == "flux"
    stage.later(1000)
    with pytest.raises(UnknownModel, match="called 'flux' now"):
        stage.submit("zimg")
    assert stage.run_all() == [job_id]


def test_a_submit_that_meets_the_change_of_name_is_written_by_the_new_one(stage, monkeypatch):
    """It was checked by the catalog of before."""
    stage.register()
    late = stage.a_dispatcher(stage.redis)
    monkeypatch.setattr(late.catalog, "_refresh_s", 3600)
    late.catalog.snapshot()
    _rename(stage)
    (receipt,) = late.submit([Submission("zimg", {})])
    assert stage.job(receipt.accepted.id).model == "flux"
    assert receipt.accepted.id in stage.run_all()


def test_what_runs_have_shown_of_a_model_goes_with_it(stage):
    stage.register()
    stage.submit()
    task = stage.start()
    stage.later(7_000)
    stage.settle(task)
    before = _run_ms(stage, "zimg")
    _rename(stage)
    assert _run_ms(stage, "flux") == before == 7_000
    assert _names_in_redis(stage, "zimg") == []


def test_a_retry_comes_back_under_the_new_name(stage):
    stage.register(max_retries=5)
    job_id = stage.submit()
    task = stage.start()
    _rename(stage)
    assert stage.settle(task, Kind.RETRY).moved.to is State.DELAYED
    stage.later(60_000)
    reconcile.promote_due(stage.dispatcher)
    assert stage.run_all() == [job_id]


# -- servers ---------------------------------------------------------------------------------------------------


def test_slot_1_a_server_gets_its_new_name_when_nothing_runs_there(stage):
    stage.register(2)
    ids = [stage.submit() for _ in range(3)]
    one, two = stage.start(), stage.start()
    stage.later(7_000)
    assert not departures.rename_server(stage.database, "gpu", "gpu-b", stage.now, "ops").is_over
    assert upkeep.go_on(stage.dispatcher) == []
    stage.settle(one)
    assert stage.offered() == [] and upkeep.go_on(stage.dispatcher) == [], "nothing new, and not yet"
    stage.settle(two)
    assert [it.name for it in upkeep.go_on(stage.dispatcher)] == ["gpu-b"]
    task = stage.start()
    assert (task.run.job.id, task.run.slot) == (ids[2], "gpu-b-slot0") or task.run.slot == "gpu-b-slot1"
    assert b"run_ms:zimg" in stage.redis.hkeys("test:3:{zimg}:stats:server:gpu-b")
    assert stage.redis.keys("test:3:{zimg}:stats:server:gpu") == []


def test_a_server_is_not_renamed_while_one_of_its_slots_is_offered(stage):
    stage.register()
    stage.submit()
    departures.rename_server(stage.database, "gpu", "gpu-b", stage.now, "ops")
    assert upkeep.go_on(stage.dispatcher) == []
    task = stage.start()
    assert upkeep.go_on(stage.dispatcher) == []
    stage.settle(task)
    assert [it.name for it in upkeep.go_on(stage.dispatcher)] == ["gpu-b"]


def test_a_renaming_of_a_server_that_is_cut_is_completed_by_the_sweep(stage):
    stage.register(2)
    departures.rename_server(stage.database, "gpu", "gpu-b", stage.now, "ops")
    reconcile.refresh_fleet(stage.dispatcher, "zimg")
    departures.end_leaving(stage.database, "gpu")
    job_id = stage.submit()
    reconcile.sweep(stage.dispatcher)
    assert stage.run_all() == [job_id]
    assert stage.job(job_id).server == "gpu-b"


def test_a_server_that_drains_is_removed_when_its_run_has_ended(stage):
    stage.register(server="a")
    job_id = stage.submit()
    task = stage.start()
    stage.register(server="b")
    departures.remove_server(stage.database, "a", stage.now, "ops", drain=True)
    assert upkeep.go_on(stage.dispatcher) == []
    second = stage.submit()
    assert stage.start().run.server == "b"
    stage.settle(task)
    assert [it.name for it in upkeep.go_on(stage.dispatcher)] == ["a"]
    assert (stage.state(job_id), stage.job(second).server) == (State.COMPLETED, "b")


@pytest.mark.parametrize("cut", [False, True], ids=["at once", "by maintenance"])
def test_runs_of_a_server_that_is_removed_by_force_are_lost_and_run_again_elsewhere(stage, cut):
    stage.register(server="a")
    job_id = stage.submit()
    task = stage.start()
    stage.register(server="b")
    found = departures.remove_server(stage.database, "a", stage.now, "ops", force=True)
    assert found.lost == (job_id,)
    if cut:  # Who removed it died before it said so.
        reconcile.sweep(stage.dispatcher)
        upkeep.go_on(stage.dispatcher)
    else:
        upkeep.follow_server(stage.dispatcher, found, "a")
        upkeep.end_runs_of(stage.dispatcher, found.lost)
    job = stage.job(job_id)
    assert (job.why, job.error_code, job.crashes) == (Why.SERVER_UNREACHABLE, "server_removed", 0)
    assert stage.renewal(task) is Renewal.LOST and stage.settle(task).moved is None
    reconcile.sweep(stage.dispatcher)
    again = stage.start()
    assert (again.run.job.id, again.run.server) == (job_id, "b")
    assert stage.settle(again).moved.to is State.COMPLETED


def test_slot_1_a_server_that_comes_again_after_it_was_removed_by_force_withholds_what_it_ran(stage):
    stage.register(server="a")
    stage.submit()
    stage.start()
    upkeep.follow_server(
        stage.dispatcher, departures.remove_server(stage.database, "a", stage.now, "ops", force=True), "a"
    )
    upkeep.end_lost(stage.dispatcher)
    stage.register(server="a")
    draining.keep(stage.dispatcher)
    assert stage.free() == 0 and len(withheld.read(stage.database)) == 1


def test_what_is_withheld_of_a_server_that_is_gone_is_forgotten_after_its_time(stage):
    stage.register(server="a")
    stage.submit()
    stage.start()
    departures.remove_server(stage.database, "a", stage.now, "ops", force=True)
    upkeep.end_lost(stage.dispatcher)
    draining.keep(stage.dispatcher)
    assert len(withheld.read(stage.database)) == 1
    stage.later(stage.dispatcher.settings.withhold_max_ms)
    draining.keep(stage.dispatcher)
    assert withheld.read(stage.database) == []


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
