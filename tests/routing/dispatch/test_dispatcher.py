"""The use cases of the dispatcher: submit, start, settle, cancel, revive, and the cost of each outcome."""

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
from tests.support.harness import LEASE_MS, SECOND, SETTINGS, UP_AND_IDLE, Harness
from tools.cluster.direct_starts import begin_run

# -- submit ----------------------------------------------------------------------------------------------------


def test_a_submitted_job_is_stored_and_offered_at_once(harness):
    harness.register()
    job_id = harness.submit()
    assert harness.state(job_id) is State.QUEUED
    assert [(offer.job_id, offer.slot, offer.model, offer.owner) for offer in harness.notifications.offers] == [
        (job_id, "gpu-slot0", "zimg", "")
    ]


def test_without_a_free_slot_a_job_is_queued_and_not_offered(harness):
    harness.register()
    first, second = harness.submit(), harness.submit()
    assert harness.offered() == [first]
    assert harness.queue.waiting() == [second]


def _raise(error: Exception) -> Callable[..., Any]:
    def fail(*args: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("how", ["skipped", "refused"])
def test_order_1_a_job_that_could_not_be_enqueued_starts_before_those_accepted_after_it(harness, monkeypatch, how):
    harness.register()
    queues = harness.dispatcher.queues
    with monkeypatch.context() as fails:
        if how == "skipped":
            fails.setattr(queues, "is_unavailable", lambda fleet=None: True)
        else:
            fails.setattr(queues, "mark_unavailable", lambda fleet=None, error=None: None)
            fails.setattr(queues, "enqueue_new", _raise(ResponseError("OOM command not allowed")))
        first, second = harness.submit(), harness.submit()
    third = harness.submit()
    assert harness.run_all() == [first, second, third]


def test_order_1_more_than_one_call_should_enqueue_is_enqueued_by_several(harness, monkeypatch):
    monkeypatch.setattr(dispatcher_module, "_POSTPONED_AT_ONCE", 2)
    harness.register()
    with monkeypatch.context() as fails:
        fails.setattr(harness.dispatcher.queues, "is_unavailable", lambda fleet=None: True)
        ids = [harness.submit() for _ in range(3)]
    ids.append(harness.submit())
    assert harness.offered() == [], "the first two are there, and nothing newer"
    ids.append(harness.submit())
    assert harness.offered() == [], "so are the next two"
    ids.append(harness.submit())
    assert harness.run_all() == ids


def test_order_1_a_job_that_fails_to_enqueue_during_a_fill_keeps_its_place(harness, monkeypatch):
    """Another thread commits a job after the fill has read the missing jobs, and fails to enqueue it too."""
    harness.register()
    queues = harness.dispatcher.queues
    with monkeypatch.context() as fails:
        fails.setattr(queues, "is_unavailable", lambda fleet=None: True)
        ids = [harness.submit()]
    fill = queues.fill

    def fill_while_another_fails(fleet, jobs):
        with monkeypatch.context() as fails:
            fails.setattr(queues, "is_unavailable", lambda fleet=None: True)
            ids.append(harness.submit())
        return fill(fleet, jobs)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(queues, "fill", fill_while_another_fails)
        overtaking = harness.submit()
    ids += [harness.submit(), harness.submit()]
    assert harness.run_all() == [ids[0], overtaking, *ids[1:]]


def test_a_submit_is_accepted_while_earlier_jobs_missing_from_the_queue_cannot_be_read(harness, monkeypatch):
    harness.register()
    with monkeypatch.context() as fails:
        fails.setattr(harness.dispatcher.queues, "is_unavailable", lambda fleet=None: True)
        first = harness.submit()
    with monkeypatch.context() as fails:
        fails.setattr(harness.store, "list_queued", _raise(DatabaseUnavailable("The database did not answer.")))
        second = harness.submit()
        assert harness.offered() == []
    passes.sweep(harness.dispatcher)
    assert harness.run_all() == [first, second]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"payload": "text"}, InvalidJob),
        ({"model": "nobody"}, UnknownModel),
        ({"callback_url": "http://inside"}, InvalidJob),
    ],
)
def test_jobs_are_accepted_all_or_none(harness, asked, error):
    harness.register(3)
    with pytest.raises(error):
        harness.submit_all([harness.a(), harness.a(**asked)])
    assert sum(ledger.read(harness.store.database).by_state.values()) == 0
    assert harness.offered() == [] and harness.queue.waiting() == []


def test_limits_that_one_fleet_cannot_check_keep_no_other_fleet_out_of_redis(harness):
    harness.register(model="zimg", server="gpu1", capacity=5)
    harness.register(model="flux", server="gpu2", capacity=5)
    harness.redis.set(harness.dispatcher.queues.scripts.keys.fleet_key("zimg", "lanes"), "not a hash")
    harness.submit("zimg")
    job_id = harness.submit("flux")
    assert [offer.job_id for offer in harness.notifications.offers] == [job_id]


def test_the_deadlines_of_similar_jobs_are_checked_with_one_request(harness):
    harness.register()
    harness.submit()

    def calls(**fields: int) -> int:
        before = harness.redis.info("commandstats")["cmdstat_fcall"]["calls"]
        harness.submit_all([harness.a(**fields) for _ in range(20)])
        return int(harness.redis.info("commandstats")["cmdstat_fcall"]["calls"] - before)

    without = calls()
    assert calls(ttl_s=600) < without + 5


def test_among_similar_jobs_the_job_with_the_earliest_deadline_is_refused(harness):
    harness.register()
    harness.submit()
    task = harness.start()
    harness.hold(task, 60 * SECOND)
    harness.settle(task)
    harness.submit_all([harness.a(), harness.a()])
    with pytest.raises(InvalidJob) as refused:
        harness.submit_all([harness.a(ttl_s=200), harness.a(ttl_s=50), harness.a(ttl_s=100)])
    assert refused.value.facts["index"] == 1


def test_a_deadline_is_refused_only_before_half_of_the_estimated_start(harness):
    harness.register()
    harness.submit()
    task = harness.start()
    harness.hold(task, 60 * SECOND)
    harness.settle(task)
    harness.submit_all([harness.a(), harness.a()])  # One is offered, one waits.
    harness.submit(ttl_s=60)
    with pytest.raises(InvalidJob, match=r"probably cannot start within 89 s: the estimate is 180.0 s"):
        harness.submit(ttl_s=89)
    harness.submit(ttl_s=90)


def test_a_deduplicated_job_is_not_enqueued_again(harness):
    harness.register()
    running = harness.submit(id="one")
    task = harness.start()
    (receipt,) = harness.dispatcher.submit([harness.a(id="one")], LOCAL_IDENTITY)
    assert receipt.accepted.deduplicated and receipt.accepted.id == running
    assert harness.queue.waiting() == []
    harness.settle(task)
    assert harness.offered() == []


def test_a_job_with_a_not_before_time_is_not_offered_until_then(harness):
    harness.register()
    job_id = harness.submit(delay_s=5)
    assert harness.state(job_id) is State.DELAYED and harness.offered() == []
    harness.later(4_999)
    assert deadlines.promote_due_jobs(harness.dispatcher) == 0
    harness.later(1)
    assert deadlines.promote_due_jobs(harness.dispatcher) == 1
    assert harness.offered() == [job_id]


def test_each_job_of_one_submit_is_offered_to_the_fleet_of_its_model(harness):
    harness.register(2)
    harness.register(1, server="other", model="flux")
    ids = harness.submit_all([harness.a(), harness.a("flux"), harness.a(), harness.a("flux")])
    assert sorted((offer.job_id, offer.server) for offer in harness.notifications.offers) == [
        (ids[0], "gpu"),
        (ids[1], "other"),
        (ids[2], "gpu"),
    ]


def test_jobs_submitted_while_redis_is_down_are_accepted_and_later_queued_in_order(harness):
    harness.register(1)
    cut_off = harness.cut_off()
    early = [cut_off.submit([harness.a()], LOCAL_IDENTITY)[0].accepted.id for _ in range(3)]
    assert [harness.state(job_id) for job_id in early] == [State.QUEUED] * 3
    assert harness.offered() == [] and harness.queue.waiting() == []
    assert passes.reconcile(harness.dispatcher) == 3
    assert harness.run_all() == early


def test_with_redis_down_the_limits_admit_every_submit(harness):
    harness.register(1, max_waiting=0)
    cut_off = harness.cut_off()
    assert len(cut_off.submit([harness.a()], harness.limited("acme", rate_per_s=1))) == 1


def test_a_submit_that_fails_in_the_database_changes_neither_the_queue_nor_the_counters(harness, faults):
    harness.register()
    with faults("INSERT INTO"), pytest.raises(ZeroDivisionError):
        harness.submit()
    assert harness.queue.waiting() == [] and harness.offered() == []
    assert sum(ledger.read(harness.store.database).by_state.values()) == 0


def test_a_full_queue_is_refused_with_the_time_to_wait(harness):
    harness.register(1, max_waiting=2)
    harness.submit_all([harness.a()])
    harness.submit_all([harness.a(), harness.a()])
    with pytest.raises(TooManyRequests) as refused:
        harness.submit()
    assert refused.value.retry_after_s > 0
    assert sum(ledger.read(harness.store.database).by_state.values()) == 3


def test_a_tenant_above_its_rate_is_rejected_until_the_reported_retry_time(harness):
    harness.register()
    acme = harness.limited("acme", rate_per_s=2, burst=3)
    harness.submit_all([harness.a() for _ in range(3)], acme)
    with pytest.raises(TooManyRequests) as refused:
        harness.submit_all([harness.a()], acme)
    assert refused.value.retry_after_s == 0.5
    harness.later(500)
    harness.submit_all([harness.a()], acme)
    assert sum(ledger.read(harness.store.database).by_state.values()) == 4


def test_more_jobs_at_once_than_a_tenant_may_ever_submit_are_no_matter_of_waiting(harness):
    harness.register()
    acme = harness.limited("acme", rate_per_s=2, burst=3)
    with pytest.raises(InvalidJob, match="3 at once"):
        harness.submit_all([harness.a() for _ in range(4)], acme)
    assert sum(ledger.read(harness.store.database).by_state.values()) == 0
    harness.submit_all([harness.a() for _ in range(3)], acme)  # nothing was spent


def test_a_worker_that_polls_gets_a_job_whose_notification_was_lost(harness):
    harness.register()
    harness.notifications.broken = True
    job_id = harness.submit()
    (offer,) = harness.dispatcher.queues.offer("zimg", 1, claimant="w1")
    task = begin_run(harness.dispatcher, offer, "w1")
    assert (task.run.job.id, task.run.attempt, task.lease.owner) == (job_id, 1, "w1")


# -- start, settle, hand-off -----------------------------------------------------------------------------------


def test_a_job_runs_from_its_submit_to_its_completion(harness):
    harness.register()
    first, second = harness.submit(callback_url=CALLBACK), harness.submit()
    task = harness.start()
    assert task.run.job.id == first and (task.run.attempt, task.run.slot) == (1, "gpu-slot0")
    assert harness.state(first) is State.RUNNING and harness.renewal(task) is Renewal.RENEWED
    settled = harness.settle(task)
    assert settled.moved is not None and settled.moved.to is State.COMPLETED and settled.next is None
    assert harness.job(first).result == '{"url":"x"}'
    assert [offer.job_id for offer in harness.notifications.offers] == [second]
    assert [why for _, why, _ in trail_of(harness.store, first)] == ["submitted", "started", "finished"]
    assert harness.notifications.ends == [(first, State.COMPLETED)]


def test_a_settle_returns_the_next_job_to_the_worker_without_the_broker(harness):
    harness.register()
    first, second = harness.submit(), harness.submit()
    task = harness.start()
    following = harness.settle(task, claimant="w1").next
    assert following is not None and (following.job_id, following.owner) == (second, "w1")
    assert harness.offered() == []
    again = begin_run(harness.dispatcher, following, "w1")
    assert again is not None and harness.renewal(again) is Renewal.RENEWED
    assert harness.state(first) is State.COMPLETED and harness.state(second) is State.RUNNING


def test_the_end_of_a_job_is_notified_after_its_slot_is_free(harness):
    harness.register()
    harness.submit()
    harness.settle(harness.start())
    assert harness.notifications.slots_taken_at_end == [0]


def test_a_failed_notification_does_not_undo_the_end_of_a_job(harness):
    harness.register()
    job_id = harness.submit(callback_url=CALLBACK)
    task = harness.start()
    harness.notifications.broken = True
    moved = harness.settle(task).moved
    assert moved is not None and due_ids(harness.store.database, harness.now)
    assert harness.state(job_id) is State.COMPLETED and harness.free() == 1


def test_a_duplicate_wake_up_does_not_start_a_job_twice(harness):
    harness.register()
    job_id = harness.submit()
    offer = harness.notifications.offers[0]
    assert begin_run(harness.dispatcher, offer, "w1") is not None
    assert begin_run(harness.dispatcher, offer, "w1") is None
    assert begin_run(harness.dispatcher, offer, "w2") is None
    assert harness.job(job_id).attempt == 1


def test_only_one_of_many_workers_with_the_same_offer_starts_the_job(harness):
    harness.register()
    job_id = harness.submit()
    offer = harness.notifications.offers[0]
    started = at_once(*[lambda n=n: begin_run(harness.dispatcher, offer, f"w{n}") for n in range(8)])
    assert sum(task is not None for task in started) == 1
    assert harness.job(job_id).attempt == 1


def test_a_job_canceled_after_its_offer_is_not_started_and_its_slot_gets_the_next_job(harness):
    harness.register()
    job_id, following = harness.submit(), harness.submit()
    offer = harness.notifications.offers.pop()
    assert harness.dispatcher.cancel(job_id) is State.CANCELED
    assert begin_run(harness.dispatcher, offer, "w1") is None
    assert harness.job(job_id).attempt == 0
    held = Lease(offer.fleet, offer.job_id, offer.lease, "w1", offer.slot)
    free(harness.dispatcher, held, return_to_lane=False)
    assert harness.offered() == [following] and harness.queue.waiting() == []


def test_an_offer_that_was_taken_back_cannot_be_started(harness):
    harness.register()
    job_id = harness.submit()
    old = harness.notifications.offers.pop()
    free(harness.dispatcher, Lease("zimg", job_id, old.lease, "", old.slot), return_to_lane=True)
    assert begin_run(harness.dispatcher, old, "w1") is None
    assert harness.state(job_id) is State.QUEUED
    assert harness.start("w2").run.attempt == 1


def test_with_redis_down_a_settle_is_stored_and_a_later_reap_releases_the_slot(harness):
    harness.register()
    first, second = harness.submit(), harness.submit()
    task = harness.start()
    cut_off = harness.cut_off()
    assert end_run_with(cut_off, task, Reason.FINISHED, result="1") is not None
    assert harness.state(first) is State.COMPLETED and harness.free() == 0
    harness.later(LEASE_MS)
    assert passes.reap(harness.dispatcher) == 1
    assert harness.offered() == [second] and harness.state(first) is State.COMPLETED


def test_a_settle_while_the_database_is_down_keeps_the_lease(harness, monkeypatch):
    harness.register()
    job_id = harness.submit()
    task = harness.start()

    def away(*_: object, **__: object) -> None:
        raise DatabaseUnavailable("away")

    with monkeypatch.context() as down:
        down.setattr(harness.store, "settle_write", away)
        with pytest.raises(DatabaseUnavailable):
            harness.settle(task, OutcomeKind.BUSY)
    assert harness.renewal(task) is Renewal.RENEWED and harness.state(job_id) is State.RUNNING


# -- the separate budgets --------------------------------------------------------------------------------------


def test_a_busy_server_costs_no_attempt_and_the_job_is_offered_on_another_server_at_once(harness):
    harness.register(1, server="a")
    harness.register(1, server="b")
    job_id, later = harness.submit(), harness.submit()
    one, two = harness.start(), harness.start()
    harness.settle(two)
    settled = harness.settle(one, OutcomeKind.BUSY, retry_after_s=2.0)
    assert settled.moved is not None and settled.moved.to is State.QUEUED
    assert [(offer.job_id, offer.slot) for offer in harness.notifications.offers] == [(job_id, two.lease.slot)]
    job = harness.job(job_id)
    assert (job.attempts, job.failures, job.crashes, job.waits) == (0, 0, 0, 1)
    assert harness.free() == 0
    harness.later(1_999)
    passes.sweep(harness.dispatcher)
    assert harness.free() == 0
    harness.later(1)
    passes.sweep(harness.dispatcher)
    assert harness.free() == 1 and harness.state(later) is State.COMPLETED


def test_the_cooldown_of_a_busy_server_has_a_default_and_a_maximum(harness):
    harness.register()
    for wish, cooldown_ms in ((None, SETTINGS.busy_cooldown_ms), (3600.0, SETTINGS.busy_cooldown_max_ms), (0.0, 0)):
        job_id = harness.submit()
        harness.settle(harness.start(), OutcomeKind.BUSY, retry_after_s=wish)
        if cooldown_ms:
            harness.later(cooldown_ms - 1)
            passes.sweep(harness.dispatcher)
            assert harness.offered() == []
            harness.later(1)
            passes.sweep(harness.dispatcher)
        assert [offer.job_id for offer in harness.notifications.offers] == [job_id]
        harness.settle(harness.start())


def test_a_job_returned_by_a_busy_server_keeps_its_position(harness):
    harness.register()
    ids = [harness.submit() for _ in range(3)]
    harness.settle(harness.start(), OutcomeKind.BUSY)
    harness.later(SETTINGS.busy_cooldown_ms)
    passes.sweep(harness.dispatcher)
    assert harness.run_all() == ids


def test_a_job_whose_server_is_unreachable_for_a_day_uses_no_attempt(harness):
    harness.register(1, max_retries=0, max_crashes=1)
    job_id, starts, end = harness.submit(), 0, harness.now + 86_400_000
    while harness.now < end:
        if harness.notifications.offers:
            harness.settle(harness.start(), OutcomeKind.UNREACHABLE)
            starts += 1
        harness.later(300_000)
        passes.sweep(harness.dispatcher)
    job = harness.job(job_id)
    assert job.state is State.QUEUED and starts > 200
    assert (job.attempts, job.failures, job.crashes) == (0, 0, 0)
    harness.settle(harness.start())
    assert harness.state(job_id) is State.COMPLETED


def test_the_cooldown_of_an_unreachable_server_covers_all_its_slots_and_grows_each_time(harness):
    harness.register(3)
    harness.submit()
    cooldowns = []
    for _ in range(7):
        harness.settle(harness.start(), OutcomeKind.UNREACHABLE)
        assert harness.free() == 0, "the other slots of the server have it as well"
        began = harness.now
        while not harness.notifications.offers:
            harness.later(500)
            passes.sweep(harness.dispatcher)
        cooldowns.append((harness.now - began) // SECOND)
    assert cooldowns == [1, 2, 4, 8, 16, 30, 30]


def test_a_failed_run_costs_one_retry_and_the_delayed_job_is_not_in_the_queue(harness):
    harness.register()
    job_id, following = harness.submit(), harness.submit()
    settled = harness.settle(harness.start(), OutcomeKind.RETRY)
    assert settled.moved is not None and settled.moved.to is State.DELAYED
    job = harness.job(job_id)
    assert (job.failures, job.attempts) == (1, 1)
    assert job.due_ms is not None and 900 <= job.due_ms - harness.now <= 1100
    assert harness.offered() == [following] and harness.queue.waiting() == []


def test_a_job_returns_to_its_place_in_the_queue_when_its_retry_is_due(harness):
    harness.register()
    ids = [harness.submit(priority=2), harness.submit(priority=2), harness.submit(priority=3)]
    harness.settle(harness.start(), OutcomeKind.RETRY)
    running = harness.start()
    harness.later(1_100)
    assert deadlines.promote_due_jobs(harness.dispatcher) == 1
    urgent = harness.submit(priority=1)
    harness.settle(running)
    assert harness.run_all() == [urgent, ids[0], ids[2]]


def test_a_server_may_ask_for_a_longer_wait_but_not_beyond_the_models_longest(harness):
    harness.register()
    for wish, low, high in ((10.0, 9_000, 11_000), (3600.0, 27_000, 33_000)):
        job_id = harness.submit()
        harness.settle(harness.start(), OutcomeKind.RETRY, retry_after_s=wish)
        due = harness.job(job_id).due_ms
        assert due is not None and low <= due - harness.now <= high


def test_a_job_is_dead_after_max_retries_and_a_revive_restores_all_its_retries(harness):
    harness.register(1, max_retries=2)
    job_id = harness.submit()
    for _ in range(3):
        assert harness.state(job_id) is State.QUEUED
        harness.settle(harness.start(), OutcomeKind.RETRY)
        harness.later(60_000)
        deadlines.promote_due_jobs(harness.dispatcher)
    assert harness.state(job_id) is State.DEAD and harness.job(job_id).why is Reason.RETRIES_EXHAUSTED
    assert harness.notifications.ends == [(job_id, State.DEAD)]
    harness.dispatcher.revive(job_id)
    assert harness.offered() == [job_id]
    assert harness.job(job_id).failures == 0
    with pytest.raises(Conflict):
        harness.dispatcher.revive(job_id)
    with pytest.raises(JobNotFound):
        harness.dispatcher.revive("nobody")


def test_a_request_that_the_server_refuses_fails_at_once_and_the_next_job_runs(harness):
    harness.register()
    bad, good = harness.submit(), harness.submit()
    harness.settle(harness.start(), OutcomeKind.FAILED)
    assert harness.state(bad) is State.FAILED and harness.job(bad).error_code == "said"
    assert harness.run_all() == [good]


# -- cancel ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [None, 5])
def test_a_job_that_waits_is_canceled_at_once(harness, delay_s):
    harness.register()
    harness.submit()
    job_id = harness.submit(delay_s=delay_s)
    assert harness.dispatcher.cancel(job_id) is State.CANCELED
    assert harness.state(job_id) is State.CANCELED and harness.queue.waiting() == []
    assert harness.notifications.ends == [(job_id, State.CANCELED)]


def test_a_running_job_is_canceled_only_when_its_server_has_ended_the_run(harness):
    harness.register()
    job_id = harness.submit()
    task = harness.start()
    assert harness.dispatcher.cancel(job_id) is State.RUNNING
    assert harness.state(job_id) is State.RUNNING and harness.renewal(task) is Renewal.CANCEL
    assert harness.dispatcher.cancel(job_id) is State.RUNNING
    end_run_with(harness.dispatcher, task, Reason.CANCEL_REQUESTED)
    assert harness.state(job_id) is State.CANCELED and harness.free() == 1


def test_each_cancel_and_retry_of_a_job_is_audited_once(harness):
    harness.register(max_retries=0)
    job_id = harness.submit()
    with audit.acting_as(audit.Actor("eve", "REST")):
        harness.settle(harness.start(), OutcomeKind.RETRY)
        harness.dispatcher.revive(job_id)
        task = harness.start()
        harness.dispatcher.cancel(job_id)
        harness.later(SECOND)
        harness.dispatcher.cancel(job_id)
        harness.settle(task, OutcomeKind.DONE)
        waiting = harness.submit(delay_s=60)
        harness.dispatcher.cancel(waiting)
        harness.dispatcher.cancel(waiting)
        with pytest.raises(Conflict):
            harness.dispatcher.revive(waiting)
    done = [entry for entry in audit.find_entries(harness.store.database, audit.AuditFilter()) if entry.job_id]
    assert [(entry.act, entry.job_id, entry.actor) for entry in done] == [
        ("job.cancel", waiting, "eve"),
        ("job.cancel", job_id, "eve"),
        ("job.retry", job_id, "eve"),
    ]


def test_a_cancel_request_does_not_undo_a_result_that_the_run_returns(harness):
    harness.register()
    job_id = harness.submit()
    task = harness.start()
    harness.dispatcher.cancel(job_id)
    harness.settle(task, OutcomeKind.DONE)
    assert harness.state(job_id) is State.COMPLETED


@pytest.mark.parametrize("kind", [OutcomeKind.BUSY, OutcomeKind.RETRY, OutcomeKind.LOST, OutcomeKind.UNREACHABLE, None])
def test_a_canceled_run_without_a_result_is_canceled_at_once(harness, kind):
    harness.register(1, max_retries=0)
    job_id = harness.submit(callback_url=CALLBACK)
    task = harness.start()
    harness.dispatcher.cancel(job_id)
    if kind is None:
        hand_back(harness.dispatcher, task)
    else:
        harness.settle(task, kind)
    assert harness.state(job_id) is State.CANCELED
    draining = {"gpu-slot0": f"{job_id}~1"} if kind is None else {}  # Its server goes on with what is handed back.
    assert harness.queue.taken() == draining and harness.queue.waiting() == []
    assert [(ended_id, state) for ended_id, state in harness.notifications.ends] == [(job_id, State.CANCELED)]


def test_a_settle_whose_reply_is_lost_keeps_the_position_of_its_job(harness, monkeypatch):
    """The commit is done and its reply is lost; a repeated settle changes nothing."""
    harness.register()
    first, second = harness.submit(), harness.submit()
    task = harness.start()
    write = harness.store.settle_write
    with monkeypatch.context() as lost:
        lost.setattr(
            harness.store,
            "settle_write",
            lambda *args, **more: harness.database.commit(write(*args, **more)) and _is_unavailable(),
        )
        with pytest.raises(DatabaseUnavailable):
            harness.settle(task, OutcomeKind.BUSY, retry_after_s=0.0)
    harness.later(1)
    assert harness.settle(task, OutcomeKind.BUSY, retry_after_s=0.0).moved is None
    passes.sweep(harness.dispatcher)
    assert harness.run_all() == [first, second]


def _is_unavailable() -> None:
    raise DatabaseUnavailable("the answer was lost")


def test_a_canceled_job_may_be_canceled_again_by_a_client_that_got_no_answer(harness):
    harness.register(1)
    job_id = _ended(harness, State.CANCELED)
    before = row_of(harness.database, job_id), harness.store.list_events(job_id)
    assert harness.dispatcher.cancel(job_id) is State.CANCELED
    assert (row_of(harness.database, job_id), harness.store.list_events(job_id)) == before


@pytest.mark.parametrize("state", sorted(FINAL_STATES - {State.CANCELED}))
def test_an_ended_job_cannot_be_canceled(harness, state):
    harness.register(1, max_retries=0)
    job_id = _ended(harness, state)
    before = row_of(harness.database, job_id)
    with pytest.raises(Conflict, match=state.value):
        harness.dispatcher.cancel(job_id)
    assert row_of(harness.database, job_id) == before


def _ended(harness: Harness, state: State) -> str:
    """A job that came to its end in the ordinary way."""
    job_id = harness.submit(ttl_s=60)
    match state:
        case State.CANCELED:
            harness.dispatcher.cancel(job_id)
        case State.EXPIRED:
            harness.later(60_000)
            deadlines.expire_deadlines(harness.dispatcher)
        case _:
            kinds = {State.COMPLETED: OutcomeKind.DONE, State.FAILED: OutcomeKind.FAILED, State.DEAD: OutcomeKind.RETRY}
            harness.settle(harness.start(), kinds[state])
    assert harness.state(job_id) is state
    return job_id


def test_a_job_that_does_not_exist_cannot_be_canceled(harness):
    with pytest.raises(JobNotFound):
        harness.dispatcher.cancel("nobody")


def test_a_job_that_changes_its_state_between_the_two_reads_of_a_cancel_is_still_canceled(harness, monkeypatch):
    harness.register()
    job_id = harness.submit()
    task = harness.start()
    look = harness.store.request_cancel

    def after_a_retry(*args: Any) -> bool:
        harness.settle(task, OutcomeKind.RETRY)
        monkeypatch.setattr(harness.store, "request_cancel", look)
        return look(*args)

    monkeypatch.setattr(harness.store, "request_cancel", after_a_retry)
    assert harness.dispatcher.cancel(job_id) is State.CANCELED
    assert harness.state(job_id) is State.CANCELED


def test_a_cancel_is_stored_while_redis_is_down(harness):
    harness.register()
    harness.submit()
    job_id = harness.submit()
    cut_off = harness.cut_off()
    assert cut_off.cancel(job_id) is State.CANCELED
    assert harness.queue.waiting() == [job_id]
    harness.settle(harness.start())
    assert begin_run(harness.dispatcher, harness.notifications.offers.pop(), "w1") is None
    assert harness.state(job_id) is State.CANCELED


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["zimg-api4", "a-slot3", "a-slot3-slot0", "rack.2/gpu:0"])
@pytest.mark.parametrize("model", ["stable-diffusion", "org/model.v2"])
def test_a_name_may_contain_the_separators_of_other_names(harness, server, model):
    harness.redis.set(f"clock:{{{model}}}", harness.now)
    harness.register(1, server=server, model=model)
    first, second = harness.submit(model), harness.submit(model)
    task = harness.start()
    assert (task.run.server, task.run.slot) == (server, f"{server}-slot0")
    harness.remote(task)
    hand_back(harness.dispatcher, task)
    assert harness.notifications.offers[0].server == server
    again = harness.start()
    assert again.run.remote_id == "r-1"
    harness.settle(again, OutcomeKind.UNREACHABLE)
    assert harness.dispatcher.fleets.counts([model])[model].cooling == 1
    assert harness.state(first) is harness.state(second) is State.QUEUED


def test_each_lease_owner_gets_a_unique_name():
    assert len({new_lease_owner("worker") for _ in range(1000)}) == 1000


def test_no_server_report_is_needed_of_what_is_not_running(
    harness, faults: Callable[[str], AbstractContextManager[None]]
):
    harness.register()
    harness.submit()
    harness.later(60_000)
    assert passes.find_stale_runs(harness.dispatcher, {"gpu": UP_AND_IDLE}) == []


def test_a_slot_is_released_even_if_the_cooldown_of_its_server_fails(harness, monkeypatch):
    """Redis fails once, between two calls; the dispatcher still makes the second call."""
    harness.register(1)
    job_id = harness.submit()
    task = harness.start()

    def away(*_: object) -> int:
        raise ConnectionError("Redis is away")

    monkeypatch.setattr(harness.dispatcher.slots, "cool_down_command", away)
    harness.settle(task, OutcomeKind.UNREACHABLE)
    assert harness.dispatcher.leases.list_all(["zimg"])["zimg"][0][0].owner == "", "offered again"
    assert harness.state(job_id) is State.QUEUED


def test_a_job_whose_deadline_has_passed_when_it_is_submitted_is_offered_to_no_server(harness):
    harness.register()
    job_id = harness.submit(ttl_s=0)
    assert harness.offered() == []
    assert deadlines.expire_deadlines(harness.dispatcher) == 1
    job = harness.job(job_id)
    assert (job.state, job.why, job.attempt) == (State.EXPIRED, Reason.DEADLINE_PASSED, 0)


# -- forged messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["job_id", "lease"])
def test_a_forged_wake_up_claims_nothing(harness, field):
    """A client of the broker can send any message; only an offer that Redis has made starts a job."""
    harness.register(1)
    offered, waiting = harness.submit(), harness.submit()
    (offer,) = harness.notifications.offers
    forged = replace(offer, **{"job_id": waiting} if field == "job_id" else {"lease": "1.guessed"})
    assert begin_run(harness.dispatcher, forged, "w1") is None
    assert (harness.state(offered), harness.state(waiting)) == (State.QUEUED, State.QUEUED)
    assert harness.start() is not None, "the offer still stands"


@pytest.mark.parametrize("forged", [{"slot": "other-slot0"}, {"server": "other"}, {"model": "flux"}, {"number": 99}])
def test_a_forged_wake_up_starts_its_job_nowhere_else(harness, forged):
    """The other fields of a message only inform: the claim returns the values that Redis stores."""
    harness.register(1)
    harness.register(1, server="other", model="flux")
    job_id = harness.submit()
    (offer,) = harness.notifications.offers
    active = begin_run(harness.dispatcher, replace(offer, **forged), "w1")
    assert active is not None
    assert (active.run.job.id, active.run.server, active.run.slot) == (job_id, "gpu", "gpu-slot0")
    assert active.lease.slot == "gpu-slot0"
