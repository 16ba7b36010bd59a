"""What the use cases promise: submit, start, settle, cancel, revive, and what each outcome costs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ConnectionError, ResponseError

from routing.dispatch import dispatcher as dispatcher_module
from routing.dispatch.outcome import OutcomeKind
from routing.maintenance import deadlines
from routing.queue.leases import Lease, Renewal, new_lease_owner
from slotkeeper import audit
from slotkeeper.errors import Conflict, DatabaseUnavailable, InvalidJob, JobNotFound, TooManyRequests, UnknownModel
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import FINAL_STATES, Reason, State
from slotkeeper.registry.identity import LOCAL_IDENTITY
from tests.support import passes
from tests.support.builders import CALLBACK, at_once, row_of, trail_of
from tests.support.callbacks import due_ids
from tests.support.ends import end_run_with, free, hand_back
from tests.support.stage import LEASE_MS, SECOND, SETTINGS, UP_AND_IDLE, Stage
from tools.cluster.direct_starts import begin_run

# -- submit ----------------------------------------------------------------------------------------------------


def test_a_submitted_job_is_recorded_and_offered_at_once(stage):
    stage.register()
    job_id = stage.submit()
    assert stage.state(job_id) is State.QUEUED
    assert [(offer.job_id, offer.slot, offer.model, offer.owner) for offer in stage.told.offers] == [
        (job_id, "gpu-slot0", "zimg", "")
    ]


def test_without_a_free_slot_a_job_waits_in_the_room_and_nobody_is_woken(stage):
    stage.register()
    first, second = stage.submit(), stage.submit()
    assert stage.offered() == [first]
    assert stage.room.waiting() == [second]


def _raise(error: Exception) -> Callable[..., Any]:
    def fail(*args: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("how", ["skipped", "refused"])
def test_order_1_a_job_that_could_not_be_enqueued_starts_before_those_accepted_after_it(stage, monkeypatch, how):
    stage.register()
    queues = stage.dispatcher.queues
    with monkeypatch.context() as fails:
        if how == "skipped":
            fails.setattr(queues, "is_unavailable", lambda fleet=None: True)
        else:
            fails.setattr(queues, "mark_unavailable", lambda fleet=None, error=None: None)
            fails.setattr(queues, "enqueue_new", _raise(ResponseError("OOM command not allowed")))
        first, second = stage.submit(), stage.submit()
    third = stage.submit()
    assert stage.run_all() == [first, second, third]


def test_order_1_more_than_one_call_should_enqueue_is_enqueued_by_several(stage, monkeypatch):
    monkeypatch.setattr(dispatcher_module, "_POSTPONED_AT_ONCE", 2)
    stage.register()
    with monkeypatch.context() as fails:
        fails.setattr(stage.dispatcher.queues, "is_unavailable", lambda fleet=None: True)
        ids = [stage.submit() for _ in range(3)]
    ids.append(stage.submit())
    assert stage.offered() == [], "the first two are there, and nothing newer"
    ids.append(stage.submit())
    assert stage.offered() == [], "so are the next two"
    ids.append(stage.submit())
    assert stage.run_all() == ids


def test_order_1_a_failure_meanwhile_is_not_forgotten(stage, monkeypatch):
    """Another thread's job is committed after the left ones were read, and is not enqueued either."""
    stage.register()
    queues = stage.dispatcher.queues
    with monkeypatch.context() as fails:
        fails.setattr(queues, "is_unavailable", lambda fleet=None: True)
        ids = [stage.submit()]
    fill = queues.fill

    def fill_while_another_fails(fleet, jobs):
        with monkeypatch.context() as fails:
            fails.setattr(queues, "is_unavailable", lambda fleet=None: True)
            ids.append(stage.submit())
        return fill(fleet, jobs)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(queues, "fill", fill_while_another_fails)
        overtaking = stage.submit()
    ids += [stage.submit(), stage.submit()]
    assert stage.run_all() == [ids[0], overtaking, *ids[1:]]


def test_a_submit_is_accepted_though_what_was_left_before_cannot_be_read(stage, monkeypatch):
    stage.register()
    with monkeypatch.context() as fails:
        fails.setattr(stage.dispatcher.queues, "is_unavailable", lambda fleet=None: True)
        first = stage.submit()
    with monkeypatch.context() as fails:
        fails.setattr(stage.store, "list_queued", _raise(DatabaseUnavailable("The database did not answer.")))
        second = stage.submit()
        assert stage.offered() == []
    passes.sweep(stage.dispatcher)
    assert stage.run_all() == [first, second]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"payload": "text"}, InvalidJob),
        ({"model": "nobody"}, UnknownModel),
        ({"callback_url": "http://inside"}, InvalidJob),
    ],
)
def test_jobs_are_accepted_all_or_none(stage, asked, error):
    stage.register(3)
    with pytest.raises(error):
        stage.submit_all([stage.a(), stage.a(**asked)])
    assert sum(ledger.read(stage.store.database).by_state.values()) == 0
    assert stage.offered() == [] and stage.room.waiting() == []


def test_limits_that_one_fleet_cannot_check_keep_no_other_fleet_out_of_redis(stage):
    stage.register(model="zimg", server="gpu1", capacity=5)
    stage.register(model="flux", server="gpu2", capacity=5)
    stage.redis.set(stage.dispatcher.queues.scripts.keys.fleet_key("zimg", "lanes"), "not a hash")
    stage.submit("zimg")
    job_id = stage.submit("flux")
    assert [offer.job_id for offer in stage.told.offers] == [job_id]


def test_the_deadlines_of_like_jobs_cost_one_question(stage):
    stage.register()
    stage.submit()

    def calls(**fields: int) -> int:
        before = stage.redis.info("commandstats")["cmdstat_fcall"]["calls"]
        stage.submit_all([stage.a(**fields) for _ in range(20)])
        return int(stage.redis.info("commandstats")["cmdstat_fcall"]["calls"] - before)

    without = calls()
    assert calls(ttl_s=600) < without + 5


def test_of_like_jobs_the_one_with_the_first_deadline_is_refused(stage):
    stage.register()
    stage.submit()
    task = stage.start()
    stage.hold(task, 60 * SECOND)
    stage.settle(task)
    stage.submit_all([stage.a(), stage.a()])
    with pytest.raises(InvalidJob) as refused:
        stage.submit_all([stage.a(ttl_s=200), stage.a(ttl_s=50), stage.a(ttl_s=100)])
    assert refused.value.facts["index"] == 1


def test_a_deadline_is_refused_only_before_half_of_the_estimated_start(stage):
    stage.register()
    stage.submit()
    task = stage.start()
    stage.hold(task, 60 * SECOND)
    stage.settle(task)
    stage.submit_all([stage.a(), stage.a()])  # One is offered, one waits.
    stage.submit(ttl_s=60)
    with pytest.raises(InvalidJob, match=r"probably cannot start within 89 s: the estimate is 180.0 s"):
        stage.submit(ttl_s=89)
    stage.submit(ttl_s=90)


def test_a_job_that_was_accepted_before_is_not_put_into_the_room_again(stage):
    stage.register()
    running = stage.submit(id="one")
    task = stage.start()
    (receipt,) = stage.dispatcher.submit([stage.a(id="one")], LOCAL_IDENTITY)
    assert receipt.accepted.deduplicated and receipt.accepted.id == running
    assert stage.room.waiting() == []
    stage.settle(task)
    assert stage.offered() == []


def test_a_job_with_a_not_before_time_is_not_offered_until_then(stage):
    stage.register()
    job_id = stage.submit(delay_s=5)
    assert stage.state(job_id) is State.DELAYED and stage.offered() == []
    stage.later(4_999)
    assert deadlines.promote_due_jobs(stage.dispatcher) == 0
    stage.later(1)
    assert deadlines.promote_due_jobs(stage.dispatcher) == 1
    assert stage.offered() == [job_id]


def test_jobs_of_several_models_go_to_their_own_fleets(stage):
    stage.register(2)
    stage.register(1, server="other", model="flux")
    ids = stage.submit_all([stage.a(), stage.a("flux"), stage.a(), stage.a("flux")])
    assert sorted((offer.job_id, offer.server) for offer in stage.told.offers) == [
        (ids[0], "gpu"),
        (ids[1], "other"),
        (ids[2], "gpu"),
    ]


def test_with_redis_down_a_submit_is_accepted_and_brought_in_later_in_order(stage):
    stage.register(1)
    cut_off = stage.cut_off()
    early = [cut_off.submit([stage.a()], LOCAL_IDENTITY)[0].accepted.id for _ in range(3)]
    assert [stage.state(job_id) for job_id in early] == [State.QUEUED] * 3
    assert stage.offered() == [] and stage.room.waiting() == []
    assert passes.reconcile(stage.dispatcher) == 3
    assert stage.run_all() == early


def test_with_redis_down_limits_admit_everybody(stage):
    stage.register(1, max_waiting=0)
    cut_off = stage.cut_off()
    assert len(cut_off.submit([stage.a()], stage.limited("acme", rate_per_s=1))) == 1


def test_with_the_database_down_nothing_is_half_done(stage, faults):
    stage.register()
    with faults("INSERT INTO"), pytest.raises(ZeroDivisionError):
        stage.submit()
    assert stage.room.waiting() == [] and stage.offered() == []
    assert sum(ledger.read(stage.store.database).by_state.values()) == 0


def test_a_full_queue_is_refused_with_the_time_to_wait(stage):
    stage.register(1, max_waiting=2)
    stage.submit_all([stage.a()])
    stage.submit_all([stage.a(), stage.a()])
    with pytest.raises(TooManyRequests) as refused:
        stage.submit()
    assert refused.value.retry_after_s > 0
    assert sum(ledger.read(stage.store.database).by_state.values()) == 3


def test_a_tenant_above_its_rate_is_rejected_until_the_reported_retry_time(stage):
    stage.register()
    acme = stage.limited("acme", rate_per_s=2, burst=3)
    stage.submit_all([stage.a() for _ in range(3)], acme)
    with pytest.raises(TooManyRequests) as refused:
        stage.submit_all([stage.a()], acme)
    assert refused.value.retry_after_s == 0.5
    stage.later(500)
    stage.submit_all([stage.a()], acme)
    assert sum(ledger.read(stage.store.database).by_state.values()) == 4


def test_more_jobs_at_once_than_a_tenant_may_ever_submit_are_no_matter_of_waiting(stage):
    stage.register()
    acme = stage.limited("acme", rate_per_s=2, burst=3)
    with pytest.raises(InvalidJob, match="3 at once"):
        stage.submit_all([stage.a() for _ in range(4)], acme)
    assert sum(ledger.read(stage.store.database).by_state.values()) == 0
    stage.submit_all([stage.a() for _ in range(3)], acme)  # nothing was spent


def test_a_job_whose_wake_up_was_lost_is_found_by_the_worker_that_looks_for_work(stage):
    stage.register()
    stage.told.broken = True
    job_id = stage.submit()
    (offer,) = stage.dispatcher.queues.offer("zimg", 1, claimant="w1")
    task = begin_run(stage.dispatcher, offer, "w1")
    assert (task.run.job.id, task.run.attempt, task.lease.owner) == (job_id, 1, "w1")


# -- start, settle, hand-off -----------------------------------------------------------------------------------


def test_a_job_runs_from_its_submit_to_its_completion(stage):
    stage.register()
    first, second = stage.submit(callback_url=CALLBACK), stage.submit()
    task = stage.start()
    assert task.run.job.id == first and (task.run.attempt, task.run.slot) == (1, "gpu-slot0")
    assert stage.state(first) is State.RUNNING and stage.renewal(task) is Renewal.RENEWED
    settled = stage.settle(task)
    assert settled.moved is not None and settled.moved.to is State.COMPLETED and settled.next is None
    assert stage.job(first).result == '{"url":"x"}'
    assert [offer.job_id for offer in stage.told.offers] == [second]
    assert [why for _, why, _ in trail_of(stage.store, first)] == ["submitted", "started", "finished"]
    assert stage.told.ends == [(first, State.COMPLETED)]


def test_the_worker_that_settles_goes_on_with_the_next_job_without_the_broker(stage):
    stage.register()
    first, second = stage.submit(), stage.submit()
    task = stage.start()
    following = stage.settle(task, claimant="w1").next
    assert following is not None and (following.job_id, following.owner) == (second, "w1")
    assert stage.offered() == []
    again = begin_run(stage.dispatcher, following, "w1")
    assert again is not None and stage.renewal(again) is Renewal.RENEWED
    assert stage.state(first) is State.COMPLETED and stage.state(second) is State.RUNNING


def test_the_end_of_a_job_is_notified_after_its_slot_is_free(stage):
    stage.register()
    stage.submit()
    stage.settle(stage.start())
    assert stage.told.slots_taken_at_end == [0]


def test_a_failed_notification_does_not_undo_the_end_of_a_job(stage):
    stage.register()
    job_id = stage.submit(callback_url=CALLBACK)
    task = stage.start()
    stage.told.broken = True
    moved = stage.settle(task).moved
    assert moved is not None and due_ids(stage.store.database, stage.now)
    assert stage.state(job_id) is State.COMPLETED and stage.free() == 1


def test_a_duplicate_wake_up_does_not_start_a_job_twice(stage):
    stage.register()
    job_id = stage.submit()
    offer = stage.told.offers[0]
    assert begin_run(stage.dispatcher, offer, "w1") is not None
    assert begin_run(stage.dispatcher, offer, "w1") is None
    assert begin_run(stage.dispatcher, offer, "w2") is None
    assert stage.job(job_id).attempt == 1


def test_of_many_workers_with_one_wake_up_one_starts_the_job(stage):
    stage.register()
    job_id = stage.submit()
    offer = stage.told.offers[0]
    started = at_once(*[lambda n=n: begin_run(stage.dispatcher, offer, f"w{n}") for n in range(8)])
    assert sum(task is not None for task in started) == 1
    assert stage.job(job_id).attempt == 1


def test_a_job_that_was_canceled_meanwhile_is_not_started_and_its_slot_goes_on(stage):
    stage.register()
    job_id, following = stage.submit(), stage.submit()
    offer = stage.told.offers.pop()
    assert stage.dispatcher.cancel(job_id) is State.CANCELED
    assert begin_run(stage.dispatcher, offer, "w1") is None
    assert stage.job(job_id).attempt == 0
    held = Lease(offer.fleet, offer.job_id, offer.lease, "w1", offer.slot)
    free(stage.dispatcher, held, return_to_lane=False)
    assert stage.offered() == [following] and stage.room.waiting() == []


def test_an_offer_that_was_taken_back_cannot_be_started(stage):
    stage.register()
    job_id = stage.submit()
    old = stage.told.offers.pop()
    free(stage.dispatcher, Lease("zimg", job_id, old.lease, "", old.slot), return_to_lane=True)
    assert begin_run(stage.dispatcher, old, "w1") is None
    assert stage.state(job_id) is State.QUEUED
    assert stage.start("w2").run.attempt == 1


def test_with_redis_down_a_settled_job_is_settled_and_its_slot_comes_back_later(stage):
    stage.register()
    first, second = stage.submit(), stage.submit()
    task = stage.start()
    cut_off = stage.cut_off()
    assert end_run_with(cut_off, task, Reason.FINISHED, result="1") is not None
    assert stage.state(first) is State.COMPLETED and stage.free() == 0
    stage.later(LEASE_MS)
    assert passes.reap(stage.dispatcher) == 1
    assert stage.offered() == [second] and stage.state(first) is State.COMPLETED


def test_with_the_database_down_the_lease_is_held_on(stage, monkeypatch):
    stage.register()
    job_id = stage.submit()
    task = stage.start()

    def away(*_: object, **__: object) -> None:
        raise DatabaseUnavailable("away")

    with monkeypatch.context() as down:
        down.setattr(stage.store, "settle_write", away)
        with pytest.raises(DatabaseUnavailable):
            stage.settle(task, OutcomeKind.BUSY)
    assert stage.renewal(task) is Renewal.RENEWED and stage.state(job_id) is State.RUNNING


# -- the separate budgets --------------------------------------------------------------------------------------


def test_a_busy_server_costs_no_attempt_and_the_job_is_offered_on_another_server_at_once(stage):
    stage.register(1, server="a")
    stage.register(1, server="b")
    job_id, later = stage.submit(), stage.submit()
    one, two = stage.start(), stage.start()
    stage.settle(two)
    settled = stage.settle(one, OutcomeKind.BUSY, retry_after_s=2.0)
    assert settled.moved is not None and settled.moved.to is State.QUEUED
    assert [(offer.job_id, offer.slot) for offer in stage.told.offers] == [(job_id, two.lease.slot)]
    job = stage.job(job_id)
    assert (job.attempts, job.failures, job.crashes, job.waits) == (0, 0, 0, 1)
    assert stage.free() == 0
    stage.later(1_999)
    passes.sweep(stage.dispatcher)
    assert stage.free() == 0
    stage.later(1)
    passes.sweep(stage.dispatcher)
    assert stage.free() == 1 and stage.state(later) is State.COMPLETED


def test_the_cooldown_of_a_busy_server_has_a_default_and_a_maximum(stage):
    stage.register()
    for wish, cooldown_ms in ((None, SETTINGS.busy_cooldown_ms), (3600.0, SETTINGS.busy_cooldown_max_ms), (0.0, 0)):
        job_id = stage.submit()
        stage.settle(stage.start(), OutcomeKind.BUSY, retry_after_s=wish)
        if cooldown_ms:
            stage.later(cooldown_ms - 1)
            passes.sweep(stage.dispatcher)
            assert stage.offered() == []
            stage.later(1)
            passes.sweep(stage.dispatcher)
        assert [offer.job_id for offer in stage.told.offers] == [job_id]
        stage.settle(stage.start())


def test_a_job_that_met_a_busy_server_keeps_its_place(stage):
    stage.register()
    ids = [stage.submit() for _ in range(3)]
    stage.settle(stage.start(), OutcomeKind.BUSY)
    stage.later(SETTINGS.busy_cooldown_ms)
    passes.sweep(stage.dispatcher)
    assert stage.run_all() == ids


def test_a_day_without_its_server_costs_a_job_nothing(stage):
    stage.register(1, max_retries=0, max_crashes=1)
    job_id, starts, end = stage.submit(), 0, stage.now + 86_400_000
    while stage.now < end:
        if stage.told.offers:
            stage.settle(stage.start(), OutcomeKind.UNREACHABLE)
            starts += 1
        stage.later(300_000)
        passes.sweep(stage.dispatcher)
    job = stage.job(job_id)
    assert job.state is State.QUEUED and starts > 200
    assert (job.attempts, job.failures, job.crashes) == (0, 0, 0)
    stage.settle(stage.start())
    assert stage.state(job_id) is State.COMPLETED


def test_the_cooldown_of_an_unreachable_server_covers_all_its_slots_and_grows_each_time(stage):
    stage.register(3)
    stage.submit()
    cooldowns = []
    for _ in range(7):
        stage.settle(stage.start(), OutcomeKind.UNREACHABLE)
        assert stage.free() == 0, "the other slots of the server have it as well"
        began = stage.now
        while not stage.told.offers:
            stage.later(500)
            passes.sweep(stage.dispatcher)
        cooldowns.append((stage.now - began) // SECOND)
    assert cooldowns == [1, 2, 4, 8, 16, 30, 30]


def test_a_wrong_answer_costs_one_retry_and_the_job_waits_outside_the_room(stage):
    stage.register()
    job_id, following = stage.submit(), stage.submit()
    settled = stage.settle(stage.start(), OutcomeKind.RETRY)
    assert settled.moved is not None and settled.moved.to is State.DELAYED
    job = stage.job(job_id)
    assert (job.failures, job.attempts) == (1, 1)
    assert job.due_ms is not None and 900 <= job.due_ms - stage.now <= 1100
    assert stage.offered() == [following] and stage.room.waiting() == []


def test_a_job_that_waited_for_its_retry_returns_to_its_own_place(stage):
    stage.register()
    ids = [stage.submit(priority=2), stage.submit(priority=2), stage.submit(priority=3)]
    stage.settle(stage.start(), OutcomeKind.RETRY)
    running = stage.start()
    stage.later(1_100)
    assert deadlines.promote_due_jobs(stage.dispatcher) == 1
    urgent = stage.submit(priority=1)
    stage.settle(running)
    assert stage.run_all() == [urgent, ids[0], ids[2]]


def test_a_server_may_ask_for_a_longer_wait_but_not_beyond_the_models_longest(stage):
    stage.register()
    for wish, low, high in ((10.0, 9_000, 11_000), (3600.0, 27_000, 33_000)):
        job_id = stage.submit()
        stage.settle(stage.start(), OutcomeKind.RETRY, retry_after_s=wish)
        due = stage.job(job_id).due_ms
        assert due is not None and low <= due - stage.now <= high


def test_a_job_is_dead_after_max_retries_and_a_revive_restores_all_its_retries(stage):
    stage.register(1, max_retries=2)
    job_id = stage.submit()
    for _ in range(3):
        assert stage.state(job_id) is State.QUEUED
        stage.settle(stage.start(), OutcomeKind.RETRY)
        stage.later(60_000)
        deadlines.promote_due_jobs(stage.dispatcher)
    assert stage.state(job_id) is State.DEAD and stage.job(job_id).why is Reason.RETRIES_EXHAUSTED
    assert stage.told.ends == [(job_id, State.DEAD)]
    stage.dispatcher.revive(job_id)
    assert stage.offered() == [job_id]
    assert stage.job(job_id).failures == 0
    with pytest.raises(Conflict):
        stage.dispatcher.revive(job_id)
    with pytest.raises(JobNotFound):
        stage.dispatcher.revive("nobody")


def test_a_request_that_is_wrong_fails_at_once_and_a_good_one_goes_on(stage):
    stage.register()
    bad, good = stage.submit(), stage.submit()
    stage.settle(stage.start(), OutcomeKind.FAILED)
    assert stage.state(bad) is State.FAILED and stage.job(bad).error_code == "said"
    assert stage.run_all() == [good]


# -- cancel ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [None, 5])
def test_a_job_that_waits_is_canceled_at_once(stage, delay_s):
    stage.register()
    stage.submit()
    job_id = stage.submit(delay_s=delay_s)
    assert stage.dispatcher.cancel(job_id) is State.CANCELED
    assert stage.state(job_id) is State.CANCELED and stage.room.waiting() == []
    assert stage.told.ends == [(job_id, State.CANCELED)]


def test_a_running_job_is_canceled_when_its_server_lets_go(stage):
    stage.register()
    job_id = stage.submit()
    task = stage.start()
    assert stage.dispatcher.cancel(job_id) is State.RUNNING
    assert stage.state(job_id) is State.RUNNING and stage.renewal(task) is Renewal.CANCEL
    assert stage.dispatcher.cancel(job_id) is State.RUNNING
    end_run_with(stage.dispatcher, task, Reason.CANCEL_REQUESTED)
    assert stage.state(job_id) is State.CANCELED and stage.free() == 1


def test_each_cancel_and_retry_of_a_job_is_audited_once(stage):
    stage.register(max_retries=0)
    job_id = stage.submit()
    with audit.acting_as(audit.Actor("eve", "REST")):
        stage.settle(stage.start(), OutcomeKind.RETRY)
        stage.dispatcher.revive(job_id)
        task = stage.start()
        stage.dispatcher.cancel(job_id)
        stage.later(SECOND)
        stage.dispatcher.cancel(job_id)
        stage.settle(task, OutcomeKind.DONE)
        waiting = stage.submit(delay_s=60)
        stage.dispatcher.cancel(waiting)
        stage.dispatcher.cancel(waiting)
        with pytest.raises(Conflict):
            stage.dispatcher.revive(waiting)
    done = [entry for entry in audit.find_entries(stage.store.database, audit.AuditFilter()) if entry.job_id]
    assert [(entry.act, entry.job_id, entry.actor) for entry in done] == [
        ("job.cancel", waiting, "eve"),
        ("job.cancel", job_id, "eve"),
        ("job.retry", job_id, "eve"),
    ]


def test_a_cancel_that_came_too_late_does_not_undo_a_result(stage):
    stage.register()
    job_id = stage.submit()
    task = stage.start()
    stage.dispatcher.cancel(job_id)
    stage.settle(task, OutcomeKind.DONE)
    assert stage.state(job_id) is State.COMPLETED


@pytest.mark.parametrize("kind", [OutcomeKind.BUSY, OutcomeKind.RETRY, OutcomeKind.LOST, OutcomeKind.UNREACHABLE, None])
def test_a_canceled_run_without_a_result_is_canceled_at_once(stage, kind):
    stage.register(1, max_retries=0)
    job_id = stage.submit(callback_url=CALLBACK)
    task = stage.start()
    stage.dispatcher.cancel(job_id)
    if kind is None:
        hand_back(stage.dispatcher, task)
    else:
        stage.settle(task, kind)
    assert stage.state(job_id) is State.CANCELED
    draining = {"gpu-slot0": f"{job_id}~1"} if kind is None else {}  # Its server goes on with what is handed back.
    assert stage.room.taken() == draining and stage.room.waiting() == []
    assert [(ended_id, state) for ended_id, state in stage.told.ends] == [(job_id, State.CANCELED)]


def test_a_settle_whose_answer_was_lost_leaves_its_job_in_its_place(stage, monkeypatch):
    """The commit is done and its reply is lost; a repeated settle changes nothing."""
    stage.register()
    first, second = stage.submit(), stage.submit()
    task = stage.start()
    write = stage.store.settle_write
    with monkeypatch.context() as lost:
        lost.setattr(
            stage.store,
            "settle_write",
            lambda *args, **more: stage.database.commit(write(*args, **more)) and _is_unavailable(),
        )
        with pytest.raises(DatabaseUnavailable):
            stage.settle(task, OutcomeKind.BUSY, retry_after_s=0.0)
    stage.later(1)
    assert stage.settle(task, OutcomeKind.BUSY, retry_after_s=0.0).moved is None
    passes.sweep(stage.dispatcher)
    assert stage.run_all() == [first, second]


def _is_unavailable() -> None:
    raise DatabaseUnavailable("the answer was lost")


def test_a_canceled_job_may_be_canceled_again_by_a_client_that_got_no_answer(stage):
    stage.register(1)
    job_id = _ended(stage, State.CANCELED)
    before = row_of(stage.database, job_id), stage.store.list_events(job_id)
    assert stage.dispatcher.cancel(job_id) is State.CANCELED
    assert (row_of(stage.database, job_id), stage.store.list_events(job_id)) == before


@pytest.mark.parametrize("state", sorted(FINAL_STATES - {State.CANCELED}))
def test_an_ended_job_cannot_be_canceled(stage, state):
    stage.register(1, max_retries=0)
    job_id = _ended(stage, state)
    before = row_of(stage.database, job_id)
    with pytest.raises(Conflict, match=state.value):
        stage.dispatcher.cancel(job_id)
    assert row_of(stage.database, job_id) == before


def _ended(stage: Stage, state: State) -> str:
    """A job that came to its end in the ordinary way."""
    job_id = stage.submit(ttl_s=60)
    match state:
        case State.CANCELED:
            stage.dispatcher.cancel(job_id)
        case State.EXPIRED:
            stage.later(60_000)
            deadlines.expire_deadlines(stage.dispatcher)
        case _:
            kinds = {State.COMPLETED: OutcomeKind.DONE, State.FAILED: OutcomeKind.FAILED, State.DEAD: OutcomeKind.RETRY}
            stage.settle(stage.start(), kinds[state])
    assert stage.state(job_id) is state
    return job_id


def test_a_job_that_does_not_exist_cannot_be_canceled(stage):
    with pytest.raises(JobNotFound):
        stage.dispatcher.cancel("nobody")


def test_a_job_that_moves_between_the_two_looks_of_a_cancel_is_canceled_all_the_same(stage, monkeypatch):
    stage.register()
    job_id = stage.submit()
    task = stage.start()
    look = stage.store.request_cancel

    def after_a_retry(*args: Any) -> bool:
        stage.settle(task, OutcomeKind.RETRY)
        monkeypatch.setattr(stage.store, "request_cancel", look)
        return look(*args)

    monkeypatch.setattr(stage.store, "request_cancel", after_a_retry)
    assert stage.dispatcher.cancel(job_id) is State.CANCELED
    assert stage.state(job_id) is State.CANCELED


def test_a_cancel_is_stored_while_redis_is_down(stage):
    stage.register()
    stage.submit()
    job_id = stage.submit()
    cut_off = stage.cut_off()
    assert cut_off.cancel(job_id) is State.CANCELED
    assert stage.room.waiting() == [job_id]
    stage.settle(stage.start())
    assert begin_run(stage.dispatcher, stage.told.offers.pop(), "w1") is None
    assert stage.state(job_id) is State.CANCELED


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["zimg-api4", "a-slot3", "a-slot3-slot0", "rack.2/gpu:0"])
@pytest.mark.parametrize("model", ["stable-diffusion", "org/model.v2"])
def test_a_name_may_contain_the_separators_of_other_names(stage, server, model):
    stage.redis.set(f"clock:{{{model}}}", stage.now)
    stage.register(1, server=server, model=model)
    first, second = stage.submit(model), stage.submit(model)
    task = stage.start()
    assert (task.run.server, task.run.slot) == (server, f"{server}-slot0")
    stage.remote(task)
    hand_back(stage.dispatcher, task)
    assert stage.told.offers[0].server == server
    again = stage.start()
    assert again.run.remote_id == "r-1"
    stage.settle(again, OutcomeKind.UNREACHABLE)
    assert stage.dispatcher.fleets.counts([model])[model].cooling == 1
    assert stage.state(first) is stage.state(second) is State.QUEUED


def test_an_owners_name_is_its_own():
    assert len({new_lease_owner("worker") for _ in range(1000)}) == 1000


def test_no_server_report_is_needed_of_what_is_not_running(
    stage, faults: Callable[[str], AbstractContextManager[None]]
):
    stage.register()
    stage.submit()
    stage.later(60_000)
    assert passes.find_stale_runs(stage.dispatcher, {"gpu": UP_AND_IDLE}) == []


def test_a_server_that_cannot_be_given_a_cooldown_does_not_keep_the_slot(stage, monkeypatch):
    """Redis fails once, between two calls: the second one is tried all the same."""
    stage.register(1)
    job_id = stage.submit()
    task = stage.start()

    def away(*_: object) -> int:
        raise ConnectionError("Redis is away")

    monkeypatch.setattr(stage.dispatcher.slots, "cool_down_command", away)
    stage.settle(task, OutcomeKind.UNREACHABLE)
    assert stage.dispatcher.leases.list_all(["zimg"])["zimg"][0][0].owner == "", "offered again"
    assert stage.state(job_id) is State.QUEUED


def test_a_job_whose_deadline_has_passed_when_it_is_submitted_is_offered_to_no_server(stage):
    stage.register()
    job_id = stage.submit(ttl_s=0)
    assert stage.offered() == []
    assert deadlines.expire_deadlines(stage.dispatcher) == 1
    job = stage.job(job_id)
    assert (job.state, job.why, job.attempt) == (State.EXPIRED, Reason.DEADLINE_PASSED, 0)


# -- forged messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["job_id", "lease"])
def test_a_forged_wake_up_claims_nothing(stage, field):
    """A client of the broker can send any message; only an offer that Redis has made starts a job."""
    stage.register(1)
    offered, waiting = stage.submit(), stage.submit()
    (offer,) = stage.told.offers
    forged = replace(offer, **{"job_id": waiting} if field == "job_id" else {"lease": "1.guessed"})
    assert begin_run(stage.dispatcher, forged, "w1") is None
    assert (stage.state(offered), stage.state(waiting)) == (State.QUEUED, State.QUEUED)
    assert stage.start() is not None, "the offer still stands"


@pytest.mark.parametrize("forged", [{"slot": "other-slot0"}, {"server": "other"}, {"model": "flux"}, {"number": 99}])
def test_a_forged_wake_up_starts_its_job_nowhere_else(stage, forged):
    """The other fields of a message only inform: the claim returns the values that Redis stores."""
    stage.register(1)
    stage.register(1, server="other", model="flux")
    job_id = stage.submit()
    (offer,) = stage.told.offers
    active = begin_run(stage.dispatcher, replace(offer, **forged), "w1")
    assert active is not None
    assert (active.run.job.id, active.run.server, active.run.slot) == (job_id, "gpu", "gpu-slot0")
    assert active.lease.slot == "gpu-slot0"
