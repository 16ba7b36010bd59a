"""Queue epochs: a start from an older queue of a fleet than the newest finds no row, and costs its job nothing."""

from collections.abc import Callable

import pytest

from routing.dispatch.run_steps import blocking_steps, run_blocking
from routing.maintenance import rebuild
from routing.queue.leases import Lease
from routing.queue.queues import Offer
from slotkeeper.jobs import queue_epochs
from slotkeeper.jobs.queue_epochs import Filling
from slotkeeper.jobs.states import State
from slotkeeper.redis.keys import QUEUE_FORMAT
from tests.support import passes
from tests.support.stage import Stage
from tools.cluster.direct_starts import begin_run


def set_policy_edf(stage: Stage) -> None:
    """As PUT /admin/model-configs does; jobs have other scores in their lanes then."""
    stage.catalog.configure("zimg", {"policy": "edf"}, stage.now)
    rebuild.refresh_fleet(stage.dispatcher, "zimg")


def empty_redis(stage: Stage) -> None:
    stage.lose_redis()
    rebuild.refresh_fleet(stage.dispatcher, "zimg")


def discard(stage: Stage) -> None:
    """Redis has lost its last moments."""
    assert stage.dispatcher.fleets.discard("zimg", numbers(stage)["zimg"])
    rebuild.refresh_fleet(stage.dispatcher, "zimg")


def numbers(stage: Stage) -> dict[str, int]:
    return queue_epochs.read_numbers(stage.database)


def claim(stage: Stage, owner: str = "w1") -> Offer:
    found = run_blocking(blocking_steps(stage.dispatcher).claim(stage.told.offers.pop(0), owner))
    assert found is not None
    return found


def run_everything(stage: Stage, owner: str) -> None:
    """Start what can be started, as a worker does; an offer that comes to nothing is given up."""
    steps = blocking_steps(stage.dispatcher)
    for found in stage.dispatcher.queues.offer("zimg", 1, claimant=owner):
        following: Offer | None = found
        while following is not None and begin_run(stage.dispatcher, following, owner) is None:
            following = run_blocking(steps.give_up(Lease.from_offer(following, owner), claimant=owner))


@pytest.mark.parametrize("disturb", [set_policy_edf, empty_redis, discard])
def test_slot_1_a_start_on_its_way_while_the_queue_is_filled_again_shares_its_slot_with_none(
    stage: Stage, disturb: Callable[[Stage], None]
):
    stage.register(slots=1)
    jobs = [stage.submit(), stage.submit()]
    claimed = claim(stage)
    disturb(stage)
    run_blocking(blocking_steps(stage.dispatcher).start(claimed, Lease.from_offer(claimed, "w1")))
    run_everything(stage, "w2")
    running = [(job.id, job.slot) for job in stage.store.list_running()]
    assert running == [(jobs[0], "gpu-slot0")]
    assert [(stage.job(job).crashes, stage.job(job).failures) for job in jobs] == [(0, 0)] * 2


def test_a_change_of_the_policy_takes_no_lease(stage: Stage):
    stage.register(slots=2)
    running, claimed, waits = stage.submit(), stage.submit(), stage.submit(ttl_s=100)
    run, second = stage.start(), claim(stage)
    set_policy_edf(stage)
    assert stage.renewal(run) == "renewed"
    assert run_blocking(blocking_steps(stage.dispatcher).start(second, Lease.from_offer(second, "w1"))) is not None
    assert {job.id for job in stage.store.list_running()} == {running, claimed}
    assert stage.state(waits) is State.QUEUED and stage.free() == 0


def test_a_job_that_returns_after_a_change_of_the_policy_comes_to_its_place_by_the_new_one(stage: Stage):
    stage.register(slots=1)
    stage.submit()
    run = stage.start()
    late, soon = stage.submit(ttl_s=500), stage.submit(ttl_s=100)
    set_policy_edf(stage)
    stage.dispatcher.leases.scripts.run(
        stage.dispatcher.leases.release_command(run.lease, return_to_lane=True, limit=0)
    )
    assert [offer.job_id for offer in stage.dispatcher.queues.offer("zimg", 1)] == [soon]
    lanes = stage.room.client.zrange(stage.room.key("lanes:5||default|zimg"), 0, -1)
    assert [member.decode().split("@")[0] for member in lanes] == [late, run.run.job.id]


def test_each_filling_has_a_number_of_its_own_and_processes_that_fill_together_share_it(stage: Stage):
    claim = queue_epochs.claim
    assert claim(stage.database, {"a": Filling("x"), "b": Filling("x")}, 4, 1) == {"a": 1, "b": 1}
    assert claim(stage.database, {"a": Filling("x", 1)}, 4, 2) == {"a": 1}
    assert claim(stage.database, {"a": Filling("y", 1)}, 4, 3) == {"a": 2}
    assert claim(stage.database, {"a": Filling("z", 9)}, 4, 4) == {"a": 10}, "the database was restored from a backup"
    assert claim(stage.database, {"c": Filling("x", 5)}, 4, 5) == {"c": 6}
    assert queue_epochs.read_numbers(stage.database, ["a", "c"]) == {"a": 10, "c": 6}


def test_a_fleet_that_a_newer_release_fills_is_left_alone(stage: Stage):
    assert queue_epochs.claim(stage.database, {"zimg": Filling("newer")}, QUEUE_FORMAT + 1, 1) == {"zimg": 1}
    assert queue_epochs.claim(stage.database, {"zimg": Filling("older")}, QUEUE_FORMAT, 2) == {}
    stage.register()
    assert not stage.dispatcher.fleets.counts(["zimg"])["zimg"].is_open


def test_a_queue_that_is_older_than_the_newest_is_left_and_then_filled_again(stage: Stage):
    """A proxy leads to the primary that was replaced: first by old connections, then by new ones."""
    stage.register()
    job = stage.submit()
    stage.offered()
    elsewhere = queue_epochs.claim(stage.database, {"zimg": Filling("at the new primary")}, QUEUE_FORMAT, stage.now)
    sweeper = passes.of(stage.dispatcher).sweeper
    sweeper.sweep()
    assert stage.dispatcher.fleets.counts(["zimg"])["zimg"].is_open, "the next connection may lead elsewhere"
    sweeper.sweep()
    sweeper.sweep()
    assert numbers(stage)["zimg"] > elsewhere["zimg"]
    assert stage.run_all() == [job]
