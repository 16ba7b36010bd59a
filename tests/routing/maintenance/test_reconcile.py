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
from tests.support.stage import LEASE_MS, OFFER_MS, SECOND, UP_AND_IDLE, YEAR, OutcomeKind, Stage
from tools.cluster.direct_starts import claim_offer

# -- reap ------------------------------------------------------------------------------------------------------


def test_an_offer_that_no_worker_claims_keeps_its_slot_and_its_message_for_days(stage, monkeypatch):
    monkeypatch.setattr(stage.dispatcher.queues, "worker_capacity", lambda: 0)
    stage.register(2)
    first, second, third = stage.submit(), stage.submit(), stage.submit()
    made = list(stage.told.offers)
    for _ in range(20):
        stage.later(3_600 * SECOND)
        assert passes.reap(stage.dispatcher) == 0
        passes.sweep(stage.dispatcher)
    assert stage.told.offers == made and stage.room.waiting() == [third], (
        "no further message is sent, and no job is overtaken"
    )
    assert stage.run_all() == [first, second, third]
    assert [stage.job(job_id).crashes for job_id in (first, second)] == [0, 0]


@pytest.mark.parametrize("stop", ["server", "model", "tenant"])
def test_an_offer_goes_back_to_its_own_place_when_nothing_may_be_started_there_any_more(stage, stop):
    stage.register()
    first, second = stage.submit(), stage.submit()
    stage.offered()
    if stop == "server":
        stage.catalog.set_server_state("gpu", "paused")
    elif stop == "model":
        stage.catalog.set_model_state("zimg", "paused")
    else:
        stage.catalog.set_tenant_state("default", "frozen")
    passes.sweep(stage.dispatcher)
    stage.later(OFFER_MS)
    assert passes.reap(stage.dispatcher) == 1
    job = stage.job(first)
    assert (job.state, job.attempt, job.crashes) == (State.QUEUED, 0, 0)
    assert stage.room.taken() == {} and stage.room.waiting() == [first, second]


def test_slot_2_canceling_a_job_that_is_offered_frees_its_slot_for_the_next(stage):
    stage.register()
    gone, following = stage.submit(), stage.submit()
    stage.offered()
    stage.dispatcher.cancel(gone)
    assert stage.offered() == [following]
    assert stage.room.waiting() == []


def test_an_offer_of_a_job_that_has_ended_is_taken_back(stage):
    stage.register()
    gone, following = stage.submit(), stage.submit()
    stage.offered()
    stage.store.cancel_waiting(gone, stage.now)
    stage.later(OFFER_MS)
    passes.reap(stage.dispatcher)
    assert stage.offered() == [following]
    assert stage.room.waiting() == []


def test_a_worker_that_died_under_a_job_costs_a_crash_and_the_job_goes_back_to_its_place(stage):
    stage.register()
    first, second = stage.submit(), stage.submit()
    stage.start()
    stage.later(LEASE_MS - 1)
    assert passes.reap(stage.dispatcher) == 0
    stage.later(1)
    assert passes.reap(stage.dispatcher) == 1
    job = stage.job(first)
    assert (job.state, job.why, job.crashes, job.failures) == (State.QUEUED, Reason.LEASE_EXPIRED, 1, 0)
    assert stage.run_all() == [first, second]


def test_a_job_whose_workers_keep_dying_becomes_dead(stage):
    stage.register(1, max_crashes=3)
    poison, good = stage.submit(), stage.submit()
    for crash in range(1, 4):
        stage.start()
        stage.later(LEASE_MS)
        passes.reap(stage.dispatcher)
        assert stage.job(poison).crashes == crash
    assert stage.state(poison) is State.DEAD and stage.job(poison).why is Reason.CRASHES_EXHAUSTED
    assert stage.told.ends == [(poison, State.DEAD)]
    assert stage.offered() == [], "its server may still run the job"
    stage.later(SECOND)
    passes.apply_reports(stage.dispatcher, {"gpu": UP_AND_IDLE})
    assert stage.run_all() == [good]


def test_a_worker_that_wakes_too_late_can_neither_renew_nor_release_nor_settle(stage):
    stage.register()
    job_id = stage.submit()
    zombie = stage.start("zombie")
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    assert stage.renewal(zombie) is Renewal.LOST
    current = stage.start("w2")
    taken = stage.room.taken()
    before = row_of(stage.database, job_id)
    assert stage.renewal(zombie) is Renewal.LOST
    assert release(stage.dispatcher.leases, zombie.lease, return_to_lane=True) == (False, [])
    settled = stage.settle(zombie)
    assert settled.moved is None and settled.next is None
    assert hand_back(stage.dispatcher, zombie) is False
    assert row_of(stage.database, job_id) == before
    assert stage.room.taken() == taken and stage.room.waiting() == []
    assert stage.renewal(current) is Renewal.RENEWED
    assert stage.settle(current).moved is not None


def test_a_worker_that_renews_between_the_reapers_look_and_its_grip_is_not_reaped(stage, monkeypatch):
    stage.register()
    job_id = stage.submit()
    task = stage.start()
    stage.later(LEASE_MS)
    look = stage.dispatcher.leases.list_expired

    def and_then_it_renews(fleet: str) -> Any:
        found = look(fleet)
        assert len(found) == 1 and stage.renewal(task) is Renewal.RENEWED
        return found

    monkeypatch.setattr(stage.dispatcher.leases, "list_expired", and_then_it_renews)
    assert passes.reap(stage.dispatcher) == 0
    assert stage.state(job_id) is State.RUNNING and stage.renewal(task) is Renewal.RENEWED


def test_two_reapers_at_once_reap_each_lease_once(stage):
    stage.register(4)
    ids = [stage.submit() for _ in range(4)]
    for _ in ids:
        stage.start()
    stage.later(LEASE_MS)
    at_once(*[lambda: passes.reap(stage.dispatcher) for _ in range(3)])
    assert [stage.job(job_id).crashes for job_id in ids] == [1] * 4
    assert sorted(stage.offered()) == sorted(ids)


def test_a_lease_whose_run_had_already_ended_is_only_freed(stage):
    stage.register()
    job_id, following = stage.submit(), stage.submit()
    task = stage.start()
    store_end(stage.store, job_id, task.run.attempt, Reason.FINISHED, stage.now, result="1")  # and then the worker died
    stage.later(LEASE_MS)
    assert passes.reap(stage.dispatcher) == 1
    assert stage.state(job_id) is State.COMPLETED and stage.job(job_id).crashes == 0
    assert stage.offered() == [following]


def test_a_worker_that_died_between_claim_and_start_costs_the_job_nothing(stage):
    stage.register()
    job_id = stage.submit()
    assert claim_offer(stage.dispatcher.leases, stage.told.offers.pop(), "w1") is not None
    stage.later(LEASE_MS)
    assert passes.reap(stage.dispatcher) == 1
    job = stage.job(job_id)
    assert (job.state, job.crashes, job.attempt) == (State.QUEUED, 0, 0)
    assert stage.offered() == [job_id]


def test_a_reaper_that_dies_after_its_grip_is_followed_by_the_next(stage, faults):
    stage.register()
    job_id = stage.submit()
    stage.start()
    stage.later(LEASE_MS)
    with faults("UPDATE jobs"):
        assert passes.reap(stage.dispatcher) == 0
    assert stage.state(job_id) is State.RUNNING
    stage.later(OFFER_MS)
    assert passes.reap(stage.dispatcher) == 1
    assert stage.state(job_id) is State.QUEUED and stage.job(job_id).why is Reason.LEASE_EXPIRED
    assert stage.offered() == [job_id]


def test_a_canceled_job_whose_worker_dies_is_canceled_and_not_run_again(stage):
    stage.register()
    job_id = stage.submit()
    stage.start()
    assert stage.dispatcher.cancel(job_id) is State.RUNNING
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    assert stage.state(job_id) is State.CANCELED and stage.job(job_id).crashes == 0
    assert stage.offered() == [] and stage.room.taken() == {"gpu-slot0": f"{job_id}~1"}, (
        "its server may still run the job"
    )


# -- resuming what a server goes on with -----------------------------------------------------------------------


def test_a_job_that_its_server_has_is_offered_again_on_the_same_slot_and_resumed(stage):
    stage.register(2)
    job_id = stage.submit()
    task = stage.start()
    stage.remote(task)
    stage.later(LEASE_MS)
    assert passes.reap(stage.dispatcher) == 1
    (offer,) = stage.told.offers
    assert (offer.job_id, offer.slot, offer.owner) == (job_id, task.lease.slot, "")
    assert stage.free() == 1
    again = stage.start("w2")
    assert (again.run.remote_id, again.run.attempt, again.lease.slot) == ("r-1", 2, task.lease.slot)
    assert stage.settle(again).moved is not None and stage.free() == 2


def test_a_job_whose_worker_died_in_the_middle_of_a_call_is_repeated_on_the_same_slot_only(stage):
    """The server may still run the job: in another slot it could run twice at once."""
    stage.register(2)
    job_id = stage.submit()
    task = stage.start()
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    assert [(offer.job_id, offer.slot) for offer in stage.told.offers] == [(job_id, task.lease.slot)]
    assert stage.free() == 1


def test_a_draining_worker_hands_its_run_back_and_it_costs_the_job_nothing(stage):
    stage.register(2)
    job_id = stage.submit()
    task = stage.start()
    stage.remote(task)
    assert hand_back(stage.dispatcher, task) is True
    job = stage.job(job_id)
    assert (job.state, job.crashes, job.failures, job.remote_id) == (State.QUEUED, 0, 0, "r-1")
    assert stage.renewal(task) is Renewal.LOST
    again = stage.start("w2")
    assert (again.run.remote_id, again.lease.slot) == ("r-1", task.lease.slot)


@pytest.mark.parametrize("fill", ["sweep", "reconcile"])
@pytest.mark.parametrize("end", ["reap", "hand_back"])
def test_a_job_that_waits_to_be_resumed_keeps_its_slot_when_redis_is_emptied(stage, end, fill):
    """Its server may still run the job: in another slot it would run twice at once."""
    stage.register(1, server="z")
    job_id = stage.submit()
    task = stage.start()
    if end == "reap":
        stage.later(LEASE_MS)
        assert passes.reap(stage.dispatcher) == 1
    else:
        assert hand_back(stage.dispatcher, task)
    stage.register(2, server="a")
    stage.lose_redis()
    getattr(passes, fill)(stage.dispatcher)
    assert stage.room.taken() == {task.lease.slot: job_id} and stage.room.waiting() == []
    stage.told.offers.clear()  # Redis was the broker, too.
    assert stage.run_all() == [job_id]
    assert (stage.state(job_id), stage.job(job_id).slot) == (State.COMPLETED, task.lease.slot)


@pytest.mark.parametrize("refill", ["sweep", "reconcile"])
def test_a_run_that_ends_after_redis_was_emptied_waits_by_its_deadline(stage, refill):
    stage.register(1, policy="edf")
    stage.submit(ttl_s=5000.0)
    run = stage.start()
    soon = stage.submit(ttl_s=100.0)
    stage.lose_redis()
    getattr(passes, refill)(stage.dispatcher)
    stage.told.offers.clear()
    stage.settle(run, OutcomeKind.BUSY)
    stage.later(60 * SECOND)
    assert [offer.job_id for offer in stage.dispatcher.queues.offer_all("zimg")] == [soon]


@pytest.mark.parametrize("refill", ["sweep", "reconcile"])
def test_jobs_that_came_into_an_emptied_redis_before_its_policies_wait_by_their_deadlines(stage, refill):
    stage.register(1, policy="edf")
    stage.submit(ttl_s=50.0)
    run = stage.start()
    stage.lose_redis()
    late, soon, middle = (
        stage.submit(ttl_s=ttl_s, tenant=tenant) for ttl_s, tenant in ((5000.0, "a"), (100.0, "b"), (200.0, "c"))
    )
    getattr(passes, refill)(stage.dispatcher)
    stage.told.offers.clear()
    stage.settle(run)
    assert stage.run_all() == [soon, middle, late]


def test_a_job_that_waits_to_be_resumed_keeps_its_slot_where_redis_has_no_memory_for_the_others(stage, monkeypatch):
    stage.register(1, server="z")
    job_id = stage.submit()
    task = stage.start()
    assert hand_back(stage.dispatcher, task)
    stage.lose_redis()
    monkeypatch.setattr(stage.dispatcher.queues, "fill", _is_full)
    passes.sweep(stage.dispatcher)
    assert stage.room.taken() == {task.lease.slot: job_id}


def _is_full(*_: Any) -> int:
    raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")


@pytest.mark.parametrize("end", ["cancel", "expire"])
def test_a_job_that_ends_while_it_waits_to_be_resumed_quarantines_its_slot_in_an_emptied_redis(stage, end):
    stage.register(1, server="z")
    job_id, waits = stage.submit(ttl_s=LEASE_MS / SECOND), stage.submit()
    task = stage.start()
    assert hand_back(stage.dispatcher, task)
    if end == "cancel":
        assert stage.dispatcher.cancel(job_id) is State.CANCELED
    else:
        stage.later(LEASE_MS)
        assert deadlines.expire_deadlines(stage.dispatcher) == 1
    stage.lose_redis()
    passes.sweep(stage.dispatcher)
    assert stage.room.waiting() == [waits], "its server may still execute the run"
    (row,) = quarantine.list_all(stage.database)
    assert (row.job_id, row.attempt, row.slot) == (job_id, task.run.attempt, task.lease.slot)


def test_a_job_that_is_handed_back_while_it_is_canceled_quarantines_its_slot(stage, monkeypatch):
    stage.register()
    job_id = stage.submit()
    task = stage.start()
    elsewhere = JobStore(Database(stage.database.url))  # another process
    slot_quarantine = Quarantine("canceled", stage.now + YEAR, resumes=True)
    of_run = elsewhere, job_id, task.run.attempt, Reason.HANDED_BACK, stage.now
    handing_back = Thread(target=store_end, args=of_run, kwargs={"quarantine": slot_quarantine})
    note_many = quarantine.quarantine_slots

    def is_handed_back_just_after(*args: Any) -> None:
        note_many(*args)
        if handing_back.ident is None:
            handing_back.start()
            handing_back.join(2.0)  # It waits for the end of this transaction, and must.

    monkeypatch.setattr("slotkeeper.jobs.store.quarantine_slots", is_handed_back_just_after)
    stage.dispatcher.cancel(job_id)
    handing_back.join()
    elsewhere.database.close()
    assert stage.state(job_id) is State.CANCELED
    assert [(row.job_id, row.slot) for row in quarantine.list_all(stage.database)] == [(job_id, task.lease.slot)]


def test_a_job_that_waits_to_be_resumed_is_offered_elsewhere_once_its_server_is_removed(stage):
    stage.register(1, server="a")
    job_id = stage.submit()
    assert hand_back(stage.dispatcher, stage.start())
    stage.register(1, server="b")
    catalog_removal.remove_server(stage.database, "a", stage.now, "")
    stage.dispatcher.catalog.refresh()
    stage.lose_redis()
    passes.sweep(stage.dispatcher)
    assert stage.room.taken() == {"b-slot0": job_id}


def test_while_no_worker_comes_the_slot_stays_with_the_job_that_its_server_has(stage):
    stage.register(3)
    job_id = stage.submit()
    task = stage.start()
    stage.remote(task)
    hand_back(stage.dispatcher, task)
    for _ in range(5):
        stage.later(OFFER_MS)
        assert passes.reap(stage.dispatcher) == 0
        assert stage.room.taken() == {task.lease.slot: job_id}
    assert stage.start("w2").run.remote_id == "r-1"


def test_a_job_that_came_to_another_server_is_not_bound_to_it(stage):
    stage.register(1, server="a")
    job_id = stage.submit()
    task = stage.start()
    stage.remote(task)
    stage.lose_redis()
    store_end(stage.store, job_id, 1, Reason.HANDED_BACK, stage.now)
    stage.set_state("paused", "a")
    stage.offered()
    stage.register(2, server="b")
    assert stage.told.offers.pop().slot == "b-slot0"
    stage.register(1, server="c")
    stage.set_state("paused", "b")
    stage.later(OFFER_MS)
    passes.reap(stage.dispatcher)
    assert [(offer.job_id, offer.slot) for offer in stage.told.offers] == [(job_id, "c-slot0")]
    assert stage.job(job_id).server == "a"


def test_a_job_on_another_server_runs_from_the_start(stage):
    stage.register(1, server="a")
    job_id = stage.submit()
    task = stage.start()
    stage.remote(task)
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    stage.told.offers.clear()
    stage.lose_redis()
    catalog_removal.remove_server(stage.database, "a", stage.now, "", force=True)
    stage.register(1, server="b")
    passes.sweep(stage.dispatcher)
    again = stage.start()
    assert (again.run.job.id, again.run.server, again.run.remote_id) == (job_id, "b", None)


# -- Redis is lost ---------------------------------------------------------------------------------------------


def test_an_emptied_redis_is_rebuilt_in_order_with_the_leases_of_running_jobs(stage):
    stage.register(2)
    ids = [stage.submit(priority=priority) for priority in (5, 5, 7, 1, 5, 1)]
    one, two = stage.start("w1"), stage.start("w2")
    stage.lose_redis()
    assert stage.renewal(one) is Renewal.UNKNOWN
    stage.offered()
    passes.sweep(stage.dispatcher)
    assert stage.offered() == [] and stage.room.taken() == {one.lease.slot: ids[0], two.lease.slot: ids[1]}
    assert stage.renewal(one) is Renewal.RENEWED and stage.renewal(two) is Renewal.RENEWED
    stage.settle(one)
    assert stage.run_all() == [ids[3], ids[5], ids[4], ids[2]]
    assert stage.settle(two).moved is not None and stage.free() == 2


def test_after_a_rebuild_leases_whose_workers_died_expire_like_any_other(stage):
    stage.register()
    job_id = stage.submit()
    stage.start()
    stage.lose_redis()
    passes.sweep(stage.dispatcher)
    stage.later(LEASE_MS)
    assert passes.reap(stage.dispatcher) == 1
    assert stage.job(job_id).crashes == 1 and stage.offered() == [job_id]


def test_until_the_room_is_rebuilt_a_late_job_does_not_overtake_an_early_one(stage):
    stage.register()
    early = stage.submit()
    stage.offered()
    stage.lose_redis()
    late = stage.submit()
    assert stage.offered() == []
    passes.sweep(stage.dispatcher)
    assert stage.run_all() == [early, late]


def test_two_rebuilds_at_once_are_harmless(stage):
    stage.register(2)
    ids = [stage.submit() for _ in range(6)]
    stage.start("w1")
    stage.lose_redis()
    stage.offered()
    assert not [e for e in at_once(*[lambda: passes.sweep(stage.dispatcher)] * 4) if isinstance(e, Exception)]
    assert stage.offered() == [ids[1]]
    assert stage.room.waiting() == ids[2:]


@pytest.mark.parametrize("fleets_job", ["lease", "seized"])
def test_a_running_job_whose_lease_is_lost_gets_it_back(stage, fleets_job):
    stage.register(2)
    job_id = stage.submit()
    task = stage.start()
    stage.redis.delete(stage.room.key(f"leases:{job_id}"))
    stage.redis.zrem(stage.room.key("leases"), job_id)
    stage.redis.hdel(stage.room.key("slots"), task.lease.slot)
    assert passes.restore_missing(stage) == 1
    assert stage.renewal(task) is Renewal.RENEWED
    assert passes.restore_missing(stage) == 0


# -- reconcile, sweep ------------------------------------------------------------------------------------------


def test_reconcile_leaves_waiting_jobs_where_they_are(stage):
    stage.register(2)
    for priority in (5, 1, 9, 5, 1, 5, 5):
        stage.submit(priority=priority)
    stage.start()
    stage.later(3_000)
    before = stage.room.dump()
    offers = len(stage.told.offers)
    for _ in range(3):
        passes.reconcile(stage.dispatcher)
        assert stage.room.dump() == before
    at_once(*[lambda: passes.reconcile(stage.dispatcher)] * 4)
    assert stage.room.dump() == before
    assert len(stage.told.offers) == offers


def test_queue_1_a_queued_job_that_the_room_has_lost_is_brought_back_to_its_place(stage):
    stage.register()
    ids = [stage.submit() for _ in range(4)]
    lost = stage.job(ids[2])
    stage.dispatcher.queues.withdraw("zimg", [lost.queued])
    assert stage.room.waiting() == [ids[1], ids[3]]
    assert passes.reconcile(stage.dispatcher) == 1
    assert stage.room.waiting() == ids[1:]


def test_reconcile_reads_no_queued_jobs_of_a_queue_that_is_complete(stage, monkeypatch):
    stage.register()
    for _ in range(3):
        stage.submit()
    monkeypatch.delattr(JobStore, "list_queued")
    assert passes.reconcile(stage.dispatcher) == 0


def test_slot_2_the_sweep_offers_what_was_missed(stage):
    stage.register()
    ids = [stage.submit() for _ in range(2)]
    task = stage.start()
    release(stage.dispatcher.leases, task.lease, return_to_lane=False, limit=0)  # no offers made
    assert stage.offered() == []
    passes.sweep(stage.dispatcher)
    assert stage.offered() == [ids[1]]


def test_queue_1_the_sweep_brings_in_what_was_accepted_while_redis_was_away(stage):
    stage.register()
    running = stage.submit()
    for _ in range(3):
        passes.sweep(stage.dispatcher)
    cut_off = stage.cut_off()
    late = [cut_off.submit([stage.a()], LOCAL_IDENTITY)[0].accepted.id for _ in range(2)]
    assert stage.room.waiting() == []
    passes.sweep(stage.dispatcher)
    assert stage.room.waiting() == late
    assert stage.run_all() == [running, *late]


def test_a_sweep_leaves_waiting_jobs_where_they_are(stage):
    stage.register()
    for priority in (5, 1, 9, 5):
        stage.submit(priority=priority)
    before = stage.room.dump()
    for _ in range(4):
        passes.sweep(stage.dispatcher)
        assert stage.room.dump() == before


def test_two_sweeps_at_once_offer_each_job_once(stage):
    stage.register(3)
    stage.set_state("paused")
    ids = [stage.submit() for _ in range(5)]
    stage.catalog.set_server_state("gpu", "online")
    at_once(*[lambda: passes.sweep(stage.dispatcher)] * 4)
    assert sorted(stage.offered()) == ids[:3]


@pytest.mark.parametrize("state", ["paused", "draining"])
def test_a_server_that_is_paused_finishes_what_runs_and_gets_nothing_new(stage, state):
    stage.register()
    _, following = stage.submit(), stage.submit()
    task = stage.start()
    stage.set_state(state)
    assert stage.renewal(task) is Renewal.RENEWED
    assert stage.settle(task).moved is not None
    passes.sweep(stage.dispatcher)
    assert stage.offered() == []
    stage.set_state("online")
    assert stage.offered() == [following]


def test_a_policy_can_change_while_jobs_wait_and_run(stage):
    stage.register(1, policy="fifo")
    ids = [stage.submit(priority=priority) for priority in (5, 9, 1, 5, 1)]
    assert _ahead(stage, ids[4]) == 3
    stage.catalog.configure("zimg", {"policy": "priority"}, stage.now)
    rebuild.refresh_fleet(stage.dispatcher, "zimg")
    assert _ahead(stage, ids[4]) == 1
    assert stage.run_all() == [ids[0], ids[2], ids[4], ids[3], ids[1]]


def test_a_process_with_an_old_catalog_cannot_bring_an_old_policy_back(stage):
    stage.register(1, policy="fifo")
    stage.set_state("paused")
    old = stage.a_dispatcher(stage.redis)
    old.catalog.get()
    ids = [stage.submit(priority=priority) for priority in (9, 1)]
    stage.catalog.configure("zimg", {"policy": "priority"}, stage.now)
    rebuild.refresh_fleet(stage.dispatcher, "zimg")
    old.queues.enqueue("zimg", [_waiting(stage.job(job)) for job in ids], 0)
    assert [_ahead(stage, job) for job in ids] == [1, 0]


def _ahead(stage, job_id: str) -> int | None:
    position = stage.dispatcher.queues.job_status("zimg", stage.job(job_id).queued).position
    return position and position.ahead


def _waiting(job: Job) -> QueuedJob:
    return job.queued


# -- deadlines -------------------------------------------------------------------------------------------------


def _in_state(stage: Stage, state: State, **changes: Any) -> tuple[str, ActiveRun | None]:
    """A job in a state in which it may still expire, and its run if it has one."""
    if state is State.DELAYED:
        return stage.submit(delay_s=1, **changes), None
    job_id = stage.submit(**changes)
    return job_id, stage.start() if state is State.RUNNING else None


@pytest.mark.parametrize("state", [State.QUEUED, State.DELAYED, State.RUNNING])
@pytest.mark.parametrize("late_ms", [0, YEAR])
def test_a_deadline_ends_a_job_in_every_state_however_late_the_check_runs(stage, state, late_ms):
    stage.register()
    job_id, task = _in_state(stage, state, ttl_s=10, callback_url=CALLBACK)
    stage.later(9_999)
    assert deadlines.expire_deadlines(stage.dispatcher) == 0
    stage.later(1 + late_ms)
    assert deadlines.expire_deadlines(stage.dispatcher) == 1
    job = stage.job(job_id)
    assert (job.state, job.error_code) == (State.EXPIRED, "deadline_passed")
    assert stage.told.ends == [(job_id, State.EXPIRED)]
    assert deadlines.expire_deadlines(stage.dispatcher) == 0
    assert stage.room.waiting() == []
    if task is not None:
        assert stage.renewal(task) is Renewal.CANCEL
        assert stage.settle(task).moved is None
        assert stage.state(job_id) is State.EXPIRED and stage.free() == 1


def test_a_waiting_job_that_expires_makes_room_in_the_line(stage):
    stage.register()
    stage.submit()
    overdue, last = stage.submit(ttl_s=1), stage.submit()
    stage.later(SECOND)
    deadlines.expire_deadlines(stage.dispatcher)
    assert stage.room.waiting() == [last] and stage.state(overdue) is State.EXPIRED


def test_concurrent_checks_of_the_deadlines_end_a_job_once(stage):
    stage.register()
    ids = [stage.submit(ttl_s=1, callback_url=CALLBACK) for _ in range(5)]
    stage.later(SECOND)
    assert sum(at_once(*[lambda: deadlines.expire_deadlines(stage.dispatcher)] * 3)) == 5
    assert sorted(job_id for job_id, _ in stage.told.ends) == ids


# -- purge -----------------------------------------------------------------------------------------------------


def test_what_ended_before_the_retention_time_is_removed_and_nothing_else(stage):
    stage.register(2)
    old, waiting, running = stage.submit(), stage.submit(), stage.submit()
    stage.settle(stage.start())
    stage.start()
    stage.later(100 * SECOND)
    fresh = stage.submit()
    stage.dispatcher.cancel(fresh)
    stage.later(1)
    assert deadlines.purge_ended_jobs(stage.dispatcher, retention_s=100) == 1
    assert stage.store.get(old) is None
    assert all(stage.store.get(job_id) is not None for job_id in (waiting, running, fresh))
    assert deadlines.purge_ended_jobs(stage.dispatcher, retention_s=100) == 0
