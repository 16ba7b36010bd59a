"""Each event is counted once, with any number of counting processes, and after a crash at any point."""

import pytest

from routing.queries import job_counters
from routing.queries.job_counters import OTHER_MODELS, WAIT_BUCKETS_S, EventCounter
from slotkeeper.db import Database
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import JobError
from slotkeeper.outbox import retention
from tests.support.builders import SECOND, T0, a_delayed_job, a_queued_job, a_start, an_ended_job
from tests.support.ends import store_end


def _counted(database: Database) -> job_counters.JobCounters:
    counter = EventCounter(database)
    while counter.count_new_events():
        pass
    return job_counters.read_counters(database)


def _buckets(seconds: float) -> list[int]:
    """Return the buckets of a histogram with one value."""
    buckets = [0] * (len(WAIT_BUCKETS_S) + 1)
    buckets[next(n for n, bound in enumerate((*WAIT_BUCKETS_S, float("inf"))) if seconds <= bound)] = 1
    return buckets


def test_a_jobs_wait_and_run_are_counted_from_its_events(database: Database, store: JobStore) -> None:
    job = a_queued_job(store, priority=2)
    run = a_start(store, job.id, now_ms=T0 + 3 * SECOND)
    store_end(store, job.id, run.attempt, Reason.FINISHED, T0 + 23 * SECOND, result="{}")
    found = _counted(database)
    assert found.accepted == {("zimg",): 1}
    assert found.ended == {("zimg", "completed"): 1}
    assert found.attempts == {("zimg", "finished"): 1}
    assert (found.waits[("zimg", "2")].buckets, found.waits[("zimg", "2")].sum_s) == (_buckets(3), 3.0)
    assert (found.runs[("zimg",)].buckets, found.runs[("zimg",)].sum_s) == (_buckets(20), 20.0)


def test_each_attempt_is_counted_by_its_reason_and_each_retry_has_its_own_wait(
    database: Database, store: JobStore
) -> None:
    job = a_queued_job(store)
    run = a_start(store, job.id, now_ms=T0 + SECOND)
    store_end(
        store,
        job.id,
        run.attempt,
        Reason.SERVER_ERROR,
        T0 + 2 * SECOND,
        error=JobError("x", "y"),
        due_ms=T0 + 9 * SECOND,
    )
    store.promote_due(T0 + 9 * SECOND)
    run = a_start(store, job.id, now_ms=T0 + 10 * SECOND)
    store_end(store, job.id, run.attempt, Reason.FINISHED, T0 + 14 * SECOND, result="{}")
    found = _counted(database)
    assert found.accepted == {("zimg",): 1}
    assert found.attempts == {("zimg", "server_error"): 1, ("zimg", "finished"): 1}
    assert found.waits[("zimg", "5")].sum_s == 2.0, "from its queue to its start, each time"
    assert found.runs[("zimg",)].sum_s == 5.0


def test_a_job_for_later_waits_from_when_it_is_due(database: Database, store: JobStore) -> None:
    job = a_delayed_job(store, due_ms=T0 + 60 * SECOND)
    store.promote_due(T0 + 60 * SECOND)
    a_start(store, job.id, now_ms=T0 + 61 * SECOND)
    found = _counted(database)
    assert found.accepted == {("zimg",): 1}
    assert found.waits[("zimg", "5")].sum_s == 1.0


def test_a_delayed_job_that_is_due_in_a_later_page_is_counted_as_accepted_once(
    database: Database, store: JobStore
) -> None:
    job = a_delayed_job(store, due_ms=T0 + 60 * SECOND)
    _counted(database)
    store.promote_due(T0 + 60 * SECOND)
    _counted(database)
    a_start(store, job.id, now_ms=T0 + 61 * SECOND)
    assert _counted(database).accepted == {("zimg",): 1}


def test_a_job_that_ends_while_it_waits_is_no_attempt(database: Database, store: JobStore) -> None:
    job = a_queued_job(store)
    store.cancel_waiting(job.id, T0 + SECOND)
    found = _counted(database)
    assert (found.attempts, found.runs) == ({}, {})
    assert found.ended == {("zimg", "canceled"): 1}


def test_a_run_that_starts_and_ends_in_different_passes_is_counted_with_its_full_duration(
    database: Database, store: JobStore
) -> None:
    job = a_queued_job(store)
    _counted(database)
    run = a_start(store, job.id, now_ms=T0 + 4 * SECOND)
    _counted(database)
    store_end(store, job.id, run.attempt, Reason.FINISHED, T0 + 9 * SECOND, result="{}")
    found = _counted(database)
    assert found.waits[("zimg", "5")].sum_s == 4.0
    assert found.runs[("zimg",)].sum_s == 5.0


def test_two_concurrent_counters_count_each_event_once(
    database: Database, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    an_ended_job(store)
    slow, position = EventCounter(database), EventCounter._position
    slow._position()

    def overtaken(self: EventCounter) -> int:
        before = position(self)
        monkeypatch.setattr(EventCounter, "_position", position)
        _counted(database)
        return before

    monkeypatch.setattr(EventCounter, "_position", overtaken)
    assert slow.count_new_events() == 0
    assert job_counters.read_counters(database).accepted == {("zimg",): 1}


def test_models_beyond_the_first_are_counted_as_one(
    database: Database, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_counters, "MAX_MODEL_LABELS", 2)
    for model in ("a", "b", "c", "d"):
        a_queued_job(store, model=model)
        _counted(database)
    assert _counted(database).accepted == {("a",): 1, ("b",): 1, (OTHER_MODELS,): 2}


def test_sums_outlive_the_jobs_that_they_count(database: Database, store: JobStore) -> None:
    job = an_ended_job(store, State.DEAD)
    _counted(database)
    assert retention.delete_dead_job(store.database, job.id)
    assert _counted(database).ended == {("zimg", "dead"): 1}


def test_the_counting_lag_is_the_age_of_the_oldest_uncounted_event(database: Database, store: JobStore) -> None:
    assert job_counters.counting_lag_ms(database, T0) == 0
    a_queued_job(store)
    assert job_counters.counting_lag_ms(database, T0 + SECOND) == SECOND
    _counted(database)
    assert job_counters.counting_lag_ms(database, T0 + SECOND) == 0
