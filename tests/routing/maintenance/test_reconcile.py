"""Maintenance loses no job and runs none twice, whichever process dies and however many of them run at once."""

from threading import Thread
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from routing.dispatch.dispatcher import ActiveRun
from routing.maintenance import deadlines, rebuild
from routing.queue.leases import Renewal
from slotkeeper.db import Database
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import Job, Quarantine, QueuedJob
from slotkeeper.registry import catalog_removal
from slotkeeper.registry.identity import LOCAL_IDENTITY
from tests.support import passes
from tests.support.builders import CALLBACK, at_once, row_of
from tests.support.ends import hand_back, release, store_end
from tests.support.harness import LEASE_MS, OFFER_MS, SECOND, UP_AND_IDLE, YEAR, Harness, OutcomeKind
from tools.cluster.direct_starts import claim_offer

# -- reap ------------------------------------------------------------------------------------------------------


def test_an_offer_that_no_worker_claims_keeps_its_slot_and_its_message_for_days(harness, monkeypatch):
    monkeypatch.setattr(harness.dispatcher.queues, "worker_capacity", lambda: 0)
    harness.register(2)
    first, second, third = harness.submit(), harness.submit(), harness.submit()
    made = list(harness.notifications.offers)
    for _ in range(20):
        harness.later(3_600 * SECOND)
        assert passes.reap(harness.dispatcher) == 0
        passes.sweep(harness.dispatcher)
    assert harness.notifications.offers == made and harness.queue.waiting() == [third], (
        "no further message is sent, and no job is overtaken"
    )
    assert harness.run_all() == [first, second, third]
    assert [harness.job(job_id).crashes for job_id in (first, second)] == [0, 0]


@pytest.mark.parametrize("stop", ["server", "model", "tenant"])
def test_an_offer_returns_to_its_place_when_its_server_model_or_tenant_stops(harness, stop):
    harness.register()
    first, second = harness.submit(), harness.submit()
    harness.offered()
    if stop == "server":
        harness.catalog.set_server_state("gpu", "paused")
    elif stop == "model":
        harness.catalog.set_model_state("zimg", "paused")
    else:
        harness.catalog.set_tenant_state("default", "frozen")
    passes.sweep(harness.dispatcher)
    harness.later(OFFER_MS)
    assert passes.reap(harness.dispatcher) == 1
    job = harness.job(first)
    assert (job.state, job.attempt, job.crashes) == (State.QUEUED, 0, 0)
    assert harness.queue.taken() == {} and harness.queue.waiting() == [first, second]


def test_slot_2_canceling_a_job_that_is_offered_frees_its_slot_for_the_next(harness):
    harness.register()
    gone, following = harness.submit(), harness.submit()
    harness.offered()
    harness.dispatcher.cancel(gone)
    assert harness.offered() == [following]
    assert harness.queue.waiting() == []


def test_an_offer_of_a_job_that_has_ended_is_taken_back(harness):
    harness.register()
    gone, following = harness.submit(), harness.submit()
    harness.offered()
    harness.store.cancel_waiting(gone, harness.now)
    harness.later(OFFER_MS)
    passes.reap(harness.dispatcher)
    assert harness.offered() == [following]
    assert harness.queue.waiting() == []


def test_a_worker_that_dies_during_a_run_costs_a_crash_and_the_job_keeps_its_position(harness):
    harness.register()
    first, second = harness.submit(), harness.submit()
    harness.start()
    harness.later(LEASE_MS - 1)
    assert passes.reap(harness.dispatcher) == 0
    harness.later(1)
    assert passes.reap(harness.dispatcher) == 1
    job = harness.job(first)
    assert (job.state, job.why, job.crashes, job.failures) == (State.QUEUED, Reason.LEASE_EXPIRED, 1, 0)
    assert harness.run_all() == [first, second]


def test_a_job_whose_workers_keep_dying_becomes_dead(harness):
    harness.register(1, max_crashes=3)
    poison, good = harness.submit(), harness.submit()
    for crash in range(1, 4):
        harness.start()
        harness.later(LEASE_MS)
        passes.reap(harness.dispatcher)
        assert harness.job(poison).crashes == crash
    assert harness.state(poison) is State.DEAD and harness.job(poison).why is Reason.CRASHES_EXHAUSTED
    assert harness.notifications.ends == [(poison, State.DEAD)]
    assert harness.offered() == [], "its server may still run the job"
    harness.later(SECOND)
    passes.apply_reports(harness.dispatcher, {"gpu": UP_AND_IDLE})
    assert harness.run_all() == [good]


def test_a_worker_whose_lease_was_reaped_can_neither_renew_nor_release_nor_settle(harness):
    harness.register()
    job_id = harness.submit()
    zombie = harness.start("zombie")
    harness.later(LEASE_MS)
    passes.reap(harness.dispatcher)
    assert harness.renewal(zombie) is Renewal.LOST
    current = harness.start("w2")
    taken = harness.queue.taken()
    before = row_of(harness.database, job_id)
    assert harness.renewal(zombie) is Renewal.LOST
    assert release(harness.dispatcher.leases, zombie.lease, return_to_lane=True) == (False, [])
    settled = harness.settle(zombie)
    assert settled.moved is None and settled.next is None
    assert hand_back(harness.dispatcher, zombie) is False
    assert row_of(harness.database, job_id) == before
    assert harness.queue.taken() == taken and harness.queue.waiting() == []
    assert harness.renewal(current) is Renewal.RENEWED
    assert harness.settle(current).moved is not None


def test_a_lease_that_is_renewed_between_the_reapers_read_and_write_is_not_reaped(harness, monkeypatch):
    harness.register()
    job_id = harness.submit()
    task = harness.start()
    harness.later(LEASE_MS)
    look = harness.dispatcher.leases.list_expired

    def and_then_it_renews(fleet: str) -> Any:
        found = look(fleet)
        assert len(found) == 1 and harness.renewal(task) is Renewal.RENEWED
        return found

    monkeypatch.setattr(harness.dispatcher.leases, "list_expired", and_then_it_renews)
    assert passes.reap(harness.dispatcher) == 0
    assert harness.state(job_id) is State.RUNNING and harness.renewal(task) is Renewal.RENEWED


def test_two_reapers_at_once_reap_each_lease_once(harness):
    harness.register(4)
    ids = [harness.submit() for _ in range(4)]
    for _ in ids:
        harness.start()
    harness.later(LEASE_MS)
    at_once(*[lambda: passes.reap(harness.dispatcher) for _ in range(3)])
    assert [harness.job(job_id).crashes for job_id in ids] == [1] * 4
    assert sorted(harness.offered()) == sorted(ids)


def test_a_lease_whose_run_had_already_ended_is_only_freed(harness):
    harness.register()
    job_id, following = harness.submit(), harness.submit()
    task = harness.start()
    store_end(
        harness.store, job_id, task.run.attempt, Reason.FINISHED, harness.now, result="1"
    )  # and then the worker died
    harness.later(LEASE_MS)
    assert passes.reap(harness.dispatcher) == 1
    assert harness.state(job_id) is State.COMPLETED and harness.job(job_id).crashes == 0
    assert harness.offered() == [following]


def test_a_worker_that_dies_between_claim_and_start_costs_the_job_no_crash(harness):
    harness.register()
    job_id = harness.submit()
    assert claim_offer(harness.dispatcher.leases, harness.notifications.offers.pop(), "w1") is not None
    harness.later(LEASE_MS)
    assert passes.reap(harness.dispatcher) == 1
    job = harness.job(job_id)
    assert (job.state, job.crashes, job.attempt) == (State.QUEUED, 0, 0)
    assert harness.offered() == [job_id]


def test_a_reaper_that_dies_after_its_grip_is_followed_by_the_next(harness, faults):
    harness.register()
    job_id = harness.submit()
    harness.start()
    harness.later(LEASE_MS)
    with faults("UPDATE jobs"):
        assert passes.reap(harness.dispatcher) == 0
    assert harness.state(job_id) is State.RUNNING
    harness.later(OFFER_MS)
    assert passes.reap(harness.dispatcher) == 1
    assert harness.state(job_id) is State.QUEUED and harness.job(job_id).why is Reason.LEASE_EXPIRED
    assert harness.offered() == [job_id]


def test_a_canceled_job_whose_worker_dies_is_canceled_and_not_run_again(harness):
    harness.register()
    job_id = harness.submit()
    harness.start()
    assert harness.dispatcher.cancel(job_id) is State.RUNNING
    harness.later(LEASE_MS)
    passes.reap(harness.dispatcher)
    assert harness.state(job_id) is State.CANCELED and harness.job(job_id).crashes == 0
    assert harness.offered() == [] and harness.queue.taken() == {"gpu-slot0": f"{job_id}~1"}, (
        "its server may still run the job"
    )


# -- resuming what a server goes on with -----------------------------------------------------------------------


def test_a_job_that_its_server_has_is_offered_again_on_the_same_slot_and_resumed(harness):
    harness.register(2)
    job_id = harness.submit()
    task = harness.start()
    harness.remote(task)
    harness.later(LEASE_MS)
    assert passes.reap(harness.dispatcher) == 1
    (offer,) = harness.notifications.offers
    assert (offer.job_id, offer.slot, offer.owner) == (job_id, task.lease.slot, "")
    assert harness.free() == 1
    again = harness.start("w2")
    assert (again.run.remote_id, again.run.attempt, again.lease.slot) == ("r-1", 2, task.lease.slot)
    assert harness.settle(again).moved is not None and harness.free() == 2


def test_a_job_whose_worker_died_in_the_middle_of_a_call_is_repeated_on_the_same_slot_only(harness):
    """The server may still run the job: in another slot it could run twice at once."""
    harness.register(2)
    job_id = harness.submit()
    task = harness.start()
    harness.later(LEASE_MS)
    passes.reap(harness.dispatcher)
    assert [(offer.job_id, offer.slot) for offer in harness.notifications.offers] == [(job_id, task.lease.slot)]
    assert harness.free() == 1


def test_a_run_that_a_draining_worker_hands_back_counts_neither_as_a_crash_nor_as_a_failure(harness):
    harness.register(2)
    job_id = harness.submit()
    task = harness.start()
    harness.remote(task)
    assert hand_back(harness.dispatcher, task) is True
    job = harness.job(job_id)
    assert (job.state, job.crashes, job.failures, job.remote_id) == (State.QUEUED, 0, 0, "r-1")
    assert harness.renewal(task) is Renewal.LOST
    again = harness.start("w2")
    assert (again.run.remote_id, again.lease.slot) == ("r-1", task.lease.slot)


@pytest.mark.parametrize("fill", ["sweep", "reconcile"])
@pytest.mark.parametrize("end", ["reap", "hand_back"])
def test_a_job_that_waits_to_be_resumed_keeps_its_slot_when_redis_is_emptied(harness, end, fill):
    """Its server may still run the job: in another slot it would run twice at once."""
    harness.register(1, server="z")
    job_id = harness.submit()
    task = harness.start()
    if end == "reap":
        harness.later(LEASE_MS)
        assert passes.reap(harness.dispatcher) == 1
    else:
        assert hand_back(harness.dispatcher, task)
    harness.register(2, server="a")
    harness.lose_redis()
    getattr(passes, fill)(harness.dispatcher)
    assert harness.queue.taken() == {task.lease.slot: job_id} and harness.queue.waiting() == []
    harness.notifications.offers.clear()  # Redis was the broker, too.
    assert harness.run_all() == [job_id]
    assert (harness.state(job_id), harness.job(job_id).slot) == (State.COMPLETED, task.lease.slot)


@pytest.mark.parametrize("refill", ["sweep", "reconcile"])
def test_a_run_that_ends_after_redis_was_emptied_waits_by_its_deadline(harness, refill):
    harness.register(1, policy="edf")
    harness.submit(ttl_s=5000.0)
    run = harness.start()
    soon = harness.submit(ttl_s=100.0)
    harness.lose_redis()
    getattr(passes, refill)(harness.dispatcher)
    harness.notifications.offers.clear()
    harness.settle(run, OutcomeKind.BUSY)
    harness.later(60 * SECOND)
    assert [offer.job_id for offer in harness.dispatcher.queues.offer_all("zimg")] == [soon]


@pytest.mark.parametrize("refill", ["sweep", "reconcile"])
def test_edf_orders_jobs_that_are_submitted_to_an_emptied_redis_before_its_policies_are_restored(harness, refill):
    harness.register(1, policy="edf")
    harness.submit(ttl_s=50.0)
    run = harness.start()
    harness.lose_redis()
    late, soon, middle = (
        harness.submit(ttl_s=ttl_s, tenant=tenant) for ttl_s, tenant in ((5000.0, "a"), (100.0, "b"), (200.0, "c"))
    )
    getattr(passes, refill)(harness.dispatcher)
    harness.notifications.offers.clear()
    harness.settle(run)
    assert harness.run_all() == [soon, middle, late]


def test_a_job_that_waits_to_be_resumed_keeps_its_slot_where_redis_has_no_memory_for_the_others(harness, monkeypatch):
    harness.register(1, server="z")
    job_id = harness.submit()
    task = harness.start()
    assert hand_back(harness.dispatcher, task)
    harness.lose_redis()
    monkeypatch.setattr(harness.dispatcher.queues, "fill", _is_full)
    passes.sweep(harness.dispatcher)
    assert harness.queue.taken() == {task.lease.slot: job_id}


def _is_full(*_: Any) -> int:
    raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")


@pytest.mark.parametrize("end", ["cancel", "expire"])
def test_a_job_that_ends_while_it_waits_to_be_resumed_quarantines_its_slot_in_an_emptied_redis(harness, end):
    harness.register(1, server="z")
    job_id, waits = harness.submit(ttl_s=LEASE_MS / SECOND), harness.submit()
    task = harness.start()
    assert hand_back(harness.dispatcher, task)
    if end == "cancel":
        assert harness.dispatcher.cancel(job_id) is State.CANCELED
    else:
        harness.later(LEASE_MS)
        assert deadlines.expire_deadlines(harness.dispatcher) == 1
    harness.lose_redis()
    passes.sweep(harness.dispatcher)
    assert harness.queue.waiting() == [waits], "its server may still execute the run"
    (row,) = quarantine.list_all(harness.database)
    assert (row.job_id, row.attempt, row.slot) == (job_id, task.run.attempt, task.lease.slot)


def test_a_job_that_is_handed_back_while_it_is_canceled_quarantines_its_slot(harness, monkeypatch):
    harness.register()
    job_id = harness.submit()
    task = harness.start()
    elsewhere = JobStore(Database(harness.database.url))  # another process
    slot_quarantine = Quarantine("canceled", harness.now + YEAR, resumes=True)
    of_run = elsewhere, job_id, task.run.attempt, Reason.HANDED_BACK, harness.now
    handing_back = Thread(target=store_end, args=of_run, kwargs={"quarantine": slot_quarantine})
    note_many = quarantine.quarantine_slots

    def is_handed_back_just_after(*args: Any) -> None:
        note_many(*args)
        if handing_back.ident is None:
            handing_back.start()
            handing_back.join(2.0)  # It waits for the end of this transaction, and must.

    monkeypatch.setattr("slotkeeper.jobs.store.quarantine_slots", is_handed_back_just_after)
    harness.dispatcher.cancel(job_id)
    handing_back.join()
    elsewhere.database.close()
    assert harness.state(job_id) is State.CANCELED
    assert [(row.job_id, row.slot) for row in quarantine.list_all(harness.database)] == [(job_id, task.lease.slot)]


def test_a_job_that_waits_to_be_resumed_is_offered_elsewhere_once_its_server_is_removed(harness):
    harness.register(1, server="a")
    job_id = harness.submit()
    assert hand_back(harness.dispatcher, harness.start())
    harness.register(1, server="b")
    catalog_removal.remove_server(harness.database, "a", harness.now, "")
    harness.dispatcher.catalog.refresh()
    harness.lose_redis()
    passes.sweep(harness.dispatcher)
    assert harness.queue.taken() == {"b-slot0": job_id}


def test_the_slot_of_a_handed_back_run_stays_reserved_until_a_worker_claims_the_job(harness):
    harness.register(3)
    job_id = harness.submit()
    task = harness.start()
    harness.remote(task)
    hand_back(harness.dispatcher, task)
    for _ in range(5):
        harness.later(OFFER_MS)
        assert passes.reap(harness.dispatcher) == 0
        assert harness.queue.taken() == {task.lease.slot: job_id}
    assert harness.start("w2").run.remote_id == "r-1"


def test_a_job_that_is_offered_on_another_server_is_not_bound_to_it(harness):
    harness.register(1, server="a")
    job_id = harness.submit()
    task = harness.start()
    harness.remote(task)
    harness.lose_redis()
    store_end(harness.store, job_id, 1, Reason.HANDED_BACK, harness.now)
    harness.set_state("paused", "a")
    harness.offered()
    harness.register(2, server="b")
    assert harness.notifications.offers.pop().slot == "b-slot0"
    harness.register(1, server="c")
    harness.set_state("paused", "b")
    harness.later(OFFER_MS)
    passes.reap(harness.dispatcher)
    assert [(offer.job_id, offer.slot) for offer in harness.notifications.offers] == [(job_id, "c-slot0")]
    assert harness.job(job_id).server == "a"


def test_a_job_on_another_server_runs_from_the_start(harness):
    harness.register(1, server="a")
    job_id = harness.submit()
    task = harness.start()
    harness.remote(task)
    harness.later(LEASE_MS)
    passes.reap(harness.dispatcher)
    harness.notifications.offers.clear()
    harness.lose_redis()
    catalog_removal.remove_server(harness.database, "a", harness.now, "", force=True)
    harness.register(1, server="b")
    passes.sweep(harness.dispatcher)
    again = harness.start()
    assert (again.run.job.id, again.run.server, again.run.remote_id) == (job_id, "b", None)


# -- Redis is lost ---------------------------------------------------------------------------------------------


def test_an_emptied_redis_is_rebuilt_in_order_with_the_leases_of_running_jobs(harness):
    harness.register(2)
    ids = [harness.submit(priority=priority) for priority in (5, 5, 7, 1, 5, 1)]
    one, two = harness.start("w1"), harness.start("w2")
    harness.lose_redis()
    assert harness.renewal(one) is Renewal.UNKNOWN
    harness.offered()
    passes.sweep(harness.dispatcher)
    assert harness.offered() == [] and harness.queue.taken() == {one.lease.slot: ids[0], two.lease.slot: ids[1]}
    assert harness.renewal(one) is Renewal.RENEWED and harness.renewal(two) is Renewal.RENEWED
    harness.settle(one)
    assert harness.run_all() == [ids[3], ids[5], ids[4], ids[2]]
    assert harness.settle(two).moved is not None and harness.free() == 2


def test_after_a_rebuild_leases_whose_workers_died_expire_like_any_other(harness):
    harness.register()
    job_id = harness.submit()
    harness.start()
    harness.lose_redis()
    passes.sweep(harness.dispatcher)
    harness.later(LEASE_MS)
    assert passes.reap(harness.dispatcher) == 1
    assert harness.job(job_id).crashes == 1 and harness.offered() == [job_id]


def test_a_later_job_does_not_overtake_an_earlier_job_before_the_queue_is_rebuilt(harness):
    harness.register()
    early = harness.submit()
    harness.offered()
    harness.lose_redis()
    late = harness.submit()
    assert harness.offered() == []
    passes.sweep(harness.dispatcher)
    assert harness.run_all() == [early, late]


def test_concurrent_rebuilds_restore_each_job_once_and_in_order(harness):
    harness.register(2)
    ids = [harness.submit() for _ in range(6)]
    harness.start("w1")
    harness.lose_redis()
    harness.offered()
    assert not [e for e in at_once(*[lambda: passes.sweep(harness.dispatcher)] * 4) if isinstance(e, Exception)]
    assert harness.offered() == [ids[1]]
    assert harness.queue.waiting() == ids[2:]


@pytest.mark.parametrize("fleets_job", ["lease", "seized"])
def test_a_running_job_whose_lease_is_lost_gets_it_back(harness, fleets_job):
    harness.register(2)
    job_id = harness.submit()
    task = harness.start()
    harness.redis.delete(harness.queue.key(f"leases:{job_id}"))
    harness.redis.zrem(harness.queue.key("leases"), job_id)
    harness.redis.hdel(harness.queue.key("slots"), task.lease.slot)
    assert passes.restore_missing(harness) == 1
    assert harness.renewal(task) is Renewal.RENEWED
    assert passes.restore_missing(harness) == 0


# -- reconcile, sweep ------------------------------------------------------------------------------------------


def test_reconcile_leaves_waiting_jobs_where_they_are(harness):
    harness.register(2)
    for priority in (5, 1, 9, 5, 1, 5, 5):
        harness.submit(priority=priority)
    harness.start()
    harness.later(3_000)
    before = harness.queue.dump()
    offers = len(harness.notifications.offers)
    for _ in range(3):
        passes.reconcile(harness.dispatcher)
        assert harness.queue.dump() == before
    at_once(*[lambda: passes.reconcile(harness.dispatcher)] * 4)
    assert harness.queue.dump() == before
    assert len(harness.notifications.offers) == offers


def test_queue_1_a_queued_job_that_is_missing_from_the_queue_is_restored_at_its_place(harness):
    harness.register()
    ids = [harness.submit() for _ in range(4)]
    lost = harness.job(ids[2])
    harness.dispatcher.queues.withdraw("zimg", [lost.queued])
    assert harness.queue.waiting() == [ids[1], ids[3]]
    assert passes.reconcile(harness.dispatcher) == 1
    assert harness.queue.waiting() == ids[1:]


def test_reconcile_reads_no_queued_jobs_of_a_queue_that_is_complete(harness, monkeypatch):
    harness.register()
    for _ in range(3):
        harness.submit()
    monkeypatch.delattr(JobStore, "list_queued")
    assert passes.reconcile(harness.dispatcher) == 0


def test_slot_2_the_sweep_offers_what_was_missed(harness):
    harness.register()
    ids = [harness.submit() for _ in range(2)]
    task = harness.start()
    release(harness.dispatcher.leases, task.lease, return_to_lane=False, limit=0)  # no offers made
    assert harness.offered() == []
    passes.sweep(harness.dispatcher)
    assert harness.offered() == [ids[1]]


def test_queue_1_the_sweep_enqueues_the_jobs_that_were_accepted_while_redis_was_down(harness):
    harness.register()
    running = harness.submit()
    for _ in range(3):
        passes.sweep(harness.dispatcher)
    cut_off = harness.cut_off()
    late = [cut_off.submit([harness.a()], LOCAL_IDENTITY)[0].accepted.id for _ in range(2)]
    assert harness.queue.waiting() == []
    passes.sweep(harness.dispatcher)
    assert harness.queue.waiting() == late
    assert harness.run_all() == [running, *late]


def test_a_sweep_leaves_waiting_jobs_where_they_are(harness):
    harness.register()
    for priority in (5, 1, 9, 5):
        harness.submit(priority=priority)
    before = harness.queue.dump()
    for _ in range(4):
        passes.sweep(harness.dispatcher)
        assert harness.queue.dump() == before


def test_two_sweeps_at_once_offer_each_job_once(harness):
    harness.register(3)
    harness.set_state("paused")
    ids = [harness.submit() for _ in range(5)]
    harness.catalog.set_server_state("gpu", "online")
    at_once(*[lambda: passes.sweep(harness.dispatcher)] * 4)
    assert sorted(harness.offered()) == ids[:3]


@pytest.mark.parametrize("state", ["paused", "draining"])
def test_a_server_that_is_paused_finishes_what_runs_and_gets_nothing_new(harness, state):
    harness.register()
    _, following = harness.submit(), harness.submit()
    task = harness.start()
    harness.set_state(state)
    assert harness.renewal(task) is Renewal.RENEWED
    assert harness.settle(task).moved is not None
    passes.sweep(harness.dispatcher)
    assert harness.offered() == []
    harness.set_state("online")
    assert harness.offered() == [following]


def test_a_policy_can_change_while_jobs_wait_and_run(harness):
    harness.register(1, policy="fifo")
    ids = [harness.submit(priority=priority) for priority in (5, 9, 1, 5, 1)]
    assert _ahead(harness, ids[4]) == 3
    harness.catalog.configure("zimg", {"policy": "priority"}, harness.now)
    rebuild.refresh_fleet(harness.dispatcher, "zimg")
    assert _ahead(harness, ids[4]) == 1
    assert harness.run_all() == [ids[0], ids[2], ids[4], ids[3], ids[1]]


def test_a_process_with_an_old_catalog_cannot_restore_an_old_policy(harness):
    harness.register(1, policy="fifo")
    harness.set_state("paused")
    old = harness.a_dispatcher(harness.redis)
    old.catalog.get()
    ids = [harness.submit(priority=priority) for priority in (9, 1)]
    harness.catalog.configure("zimg", {"policy": "priority"}, harness.now)
    rebuild.refresh_fleet(harness.dispatcher, "zimg")
    old.queues.enqueue("zimg", [_waiting(harness.job(job)) for job in ids], 0)
    assert [_ahead(harness, job) for job in ids] == [1, 0]


def _ahead(harness, job_id: str) -> int | None:
    position = harness.dispatcher.queues.job_status("zimg", harness.job(job_id).queued).position
    return position and position.ahead


def _waiting(job: Job) -> QueuedJob:
    return job.queued


# -- deadlines -------------------------------------------------------------------------------------------------


def _in_state(harness: Harness, state: State, **changes: Any) -> tuple[str, ActiveRun | None]:
    """A job in a state in which it may still expire, and its run if it has one."""
    if state is State.DELAYED:
        return harness.submit(delay_s=1, **changes), None
    job_id = harness.submit(**changes)
    return job_id, harness.start() if state is State.RUNNING else None


@pytest.mark.parametrize("state", [State.QUEUED, State.DELAYED, State.RUNNING])
@pytest.mark.parametrize("late_ms", [0, YEAR])
def test_a_passed_deadline_expires_a_job_in_each_state_even_if_the_check_is_late(harness, state, late_ms):
    harness.register()
    job_id, task = _in_state(harness, state, ttl_s=10, callback_url=CALLBACK)
    harness.later(9_999)
    assert deadlines.expire_deadlines(harness.dispatcher) == 0
    harness.later(1 + late_ms)
    assert deadlines.expire_deadlines(harness.dispatcher) == 1
    job = harness.job(job_id)
    assert (job.state, job.error_code) == (State.EXPIRED, "deadline_passed")
    assert harness.notifications.ends == [(job_id, State.EXPIRED)]
    assert deadlines.expire_deadlines(harness.dispatcher) == 0
    assert harness.queue.waiting() == []
    if task is not None:
        assert harness.renewal(task) is Renewal.CANCEL
        assert harness.settle(task).moved is None
        assert harness.state(job_id) is State.EXPIRED and harness.free() == 1


def test_a_queued_job_that_expires_is_removed_from_the_queue(harness):
    harness.register()
    harness.submit()
    overdue, last = harness.submit(ttl_s=1), harness.submit()
    harness.later(SECOND)
    deadlines.expire_deadlines(harness.dispatcher)
    assert harness.queue.waiting() == [last] and harness.state(overdue) is State.EXPIRED


def test_concurrent_checks_of_the_deadlines_end_a_job_once(harness):
    harness.register()
    ids = [harness.submit(ttl_s=1, callback_url=CALLBACK) for _ in range(5)]
    harness.later(SECOND)
    assert sum(at_once(*[lambda: deadlines.expire_deadlines(harness.dispatcher)] * 3)) == 5
    assert sorted(job_id for job_id, _ in harness.notifications.ends) == ids


# -- purge -----------------------------------------------------------------------------------------------------


def test_only_jobs_that_ended_before_the_retention_time_are_removed(harness):
    harness.register(2)
    old, waiting, running = harness.submit(), harness.submit(), harness.submit()
    harness.settle(harness.start())
    harness.start()
    harness.later(100 * SECOND)
    fresh = harness.submit()
    harness.dispatcher.cancel(fresh)
    harness.later(1)
    assert deadlines.purge_ended_jobs(harness.dispatcher, retention_s=100) == 1
    assert harness.store.get(old) is None
    assert all(harness.store.get(job_id) is not None for job_id in (waiting, running, fresh))
    assert deadlines.purge_ended_jobs(harness.dispatcher, retention_s=100) == 0
