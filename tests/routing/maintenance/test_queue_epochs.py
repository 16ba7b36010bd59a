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
from tests.support.harness import Harness
from tools.cluster.direct_starts import begin_run


def set_policy_edf(harness: Harness) -> None:
    """As PUT /admin/model-configs does; jobs have other scores in their lanes then."""
    harness.catalog.configure("zimg", {"policy": "edf"}, harness.now)
    rebuild.refresh_fleet(harness.dispatcher, "zimg")


def empty_redis(harness: Harness) -> None:
    harness.lose_redis()
    rebuild.refresh_fleet(harness.dispatcher, "zimg")


def discard(harness: Harness) -> None:
    """Redis has lost its last moments."""
    assert harness.dispatcher.fleets.discard("zimg", numbers(harness)["zimg"])
    rebuild.refresh_fleet(harness.dispatcher, "zimg")


def numbers(harness: Harness) -> dict[str, int]:
    return queue_epochs.read_numbers(harness.database)


def claim(harness: Harness, owner: str = "w1") -> Offer:
    found = run_blocking(blocking_steps(harness.dispatcher).claim(harness.notifications.offers.pop(0), owner))
    assert found is not None
    return found


def run_everything(harness: Harness, owner: str) -> None:
    """Start what can be started, as a worker does; an offer that comes to nothing is given up."""
    steps = blocking_steps(harness.dispatcher)
    for found in harness.dispatcher.queues.offer("zimg", 1, claimant=owner):
        following: Offer | None = found
        while following is not None and begin_run(harness.dispatcher, following, owner) is None:
            following = run_blocking(steps.give_up(Lease.from_offer(following, owner), claimant=owner))


@pytest.mark.parametrize("disturb", [set_policy_edf, empty_redis, discard])
def test_slot_1_a_start_during_a_refill_of_the_queue_shares_its_slot_with_no_other_run(
    harness: Harness, disturb: Callable[[Harness], None]
):
    harness.register(slots=1)
    jobs = [harness.submit(), harness.submit()]
    claimed = claim(harness)
    disturb(harness)
    run_blocking(blocking_steps(harness.dispatcher).start(claimed, Lease.from_offer(claimed, "w1")))
    run_everything(harness, "w2")
    running = [(job.id, job.slot) for job in harness.store.list_running()]
    assert running == [(jobs[0], "gpu-slot0")]
    assert [(harness.job(job).crashes, harness.job(job).failures) for job in jobs] == [(0, 0)] * 2


def test_a_change_of_the_policy_takes_no_lease(harness: Harness):
    harness.register(slots=2)
    running, claimed, waits = harness.submit(), harness.submit(), harness.submit(ttl_s=100)
    run, second = harness.start(), claim(harness)
    set_policy_edf(harness)
    assert harness.renewal(run) == "renewed"
    assert run_blocking(blocking_steps(harness.dispatcher).start(second, Lease.from_offer(second, "w1"))) is not None
    assert {job.id for job in harness.store.list_running()} == {running, claimed}
    assert harness.state(waits) is State.QUEUED and harness.free() == 0


def test_a_job_that_returns_after_a_policy_change_gets_its_place_by_the_new_policy(harness: Harness):
    harness.register(slots=1)
    harness.submit()
    run = harness.start()
    late, soon = harness.submit(ttl_s=500), harness.submit(ttl_s=100)
    set_policy_edf(harness)
    harness.dispatcher.leases.scripts.run(
        harness.dispatcher.leases.release_command(run.lease, return_to_lane=True, limit=0)
    )
    assert [offer.job_id for offer in harness.dispatcher.queues.offer("zimg", 1)] == [soon]
    lanes = harness.queue.client.zrange(harness.queue.key("lanes:5||default|zimg"), 0, -1)
    assert [member.decode().split("@")[0] for member in lanes] == [late, run.run.job.id]


def test_each_fill_has_its_epoch_number_and_processes_that_fill_together_share_the_number(harness: Harness):
    claim = queue_epochs.claim
    assert claim(harness.database, {"a": Filling("x"), "b": Filling("x")}, 4, 1) == {"a": 1, "b": 1}
    assert claim(harness.database, {"a": Filling("x", 1)}, 4, 2) == {"a": 1}
    assert claim(harness.database, {"a": Filling("y", 1)}, 4, 3) == {"a": 2}
    assert claim(harness.database, {"a": Filling("z", 9)}, 4, 4) == {"a": 10}, "the database was restored from a backup"
    assert claim(harness.database, {"c": Filling("x", 5)}, 4, 5) == {"c": 6}
    assert queue_epochs.read_numbers(harness.database, ["a", "c"]) == {"a": 10, "c": 6}


def test_a_fleet_that_a_newer_release_fills_is_not_filled_by_an_older_release(harness: Harness):
    assert queue_epochs.claim(harness.database, {"zimg": Filling("newer")}, QUEUE_FORMAT + 1, 1) == {"zimg": 1}
    assert queue_epochs.claim(harness.database, {"zimg": Filling("older")}, QUEUE_FORMAT, 2) == {}
    harness.register()
    assert not harness.dispatcher.fleets.counts(["zimg"])["zimg"].is_open


def test_a_queue_with_an_old_epoch_is_kept_by_the_first_sweep_and_refilled_by_a_later_sweep(harness: Harness):
    """A proxy leads to the primary that was replaced: first by old connections, then by new ones."""
    harness.register()
    job = harness.submit()
    harness.offered()
    elsewhere = queue_epochs.claim(harness.database, {"zimg": Filling("at the new primary")}, QUEUE_FORMAT, harness.now)
    sweeper = passes.of(harness.dispatcher).sweeper
    sweeper.sweep()
    assert harness.dispatcher.fleets.counts(["zimg"])["zimg"].is_open, "the next connection may reach another Redis"
    sweeper.sweep()
    sweeper.sweep()
    assert numbers(harness)["zimg"] > elsewhere["zimg"]
    assert harness.run_all() == [job]
