"""Starts and ends that are written in one batch take few statements, and each has its own outcome."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, select

from slotkeeper.config import DatabaseTimeouts
from slotkeeper.db import Database, Write
from slotkeeper.errors import CommitUnknown, DatabaseUnavailable
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import jobs, messages, result_notifications
from slotkeeper.jobs.values import JobError, Run
from tests.support.builders import CALLBACK, T0, a_queued_job, a_running_job, rows_in, trail_of
from tests.support.ends import store_end

LATER = T0 + 60_000
_NOT_TEXT = "\ud800\x00"  # neither database stores both halves of it


@contextmanager
def _recorded(database: Database, name: str) -> Iterator[list[Any]]:
    """Record the statements or the commits of the engine."""
    recorded: list[Any] = []

    def note(*args: Any) -> None:
        recorded.append(args[2] if len(args) > 2 else args)

    if name == "commit":
        event.listen(database.engine, name, one := lambda connection: note(connection))
    else:
        event.listen(database.engine, name, one := lambda c, cursor, text, values, context, many: note(c, cursor, text))
    try:
        yield recorded
    finally:
        event.remove(database.engine, name, one)


def _statements(recorded: Sequence[str]) -> list[str]:
    return [text for text in recorded if not text.startswith(("BEGIN", "SET LOCAL", "SELECT txid"))]


def _end(
    store: JobStore, run: Run, why: Reason = Reason.FINISHED, attempt: int | None = None, result: str = "{}"
) -> Write[Any]:
    error = None if why is Reason.FINISHED else JobError("bad", f"of {run.job.id}")
    return store.settle_write(run.job.id, attempt or run.attempt, why, LATER, result=result, error=error)


def test_batched_ends_share_one_commit_and_one_insert_of_their_events(database, store):
    runs = [a_running_job(store) for _ in range(8)]
    with _recorded(database, "before_cursor_execute") as recorded, _recorded(database, "commit") as commits:
        moved = database.commit_all([_end(store, run, result=f'"{n}"') for n, run in enumerate(runs)])
    assert [text.split()[0] for text in _statements(recorded)] == ["UPDATE"] * 8 + ["INSERT"]
    assert len(commits) == 1
    assert [transition.job for transition in moved] == [run.job for run in runs]
    assert [store.get(run.job.id).result for run in runs] == [f'"{n}"' for n in range(8)]
    assert all(trail_of(store, run.job.id)[-1] == ("job.completed", "finished", 1) for run in runs)


def test_each_batched_start_returns_the_job_that_it_names(database, store):
    waiting = [a_queued_job(store, payload=f'"{n}"') for n in range(8)]
    starts = [
        store.start_write(job.id, f"gpu{n}", f"gpu{n}-slot0", f"l{n}", LATER, n, f"v{n}", fleet="")
        for n, job in enumerate(waiting)
    ]
    runs = database.commit_all(starts)
    for n, (job, run) in enumerate(zip(waiting, runs, strict=True)):
        assert (run.job.id, run.payload, run.attempt, run.described_by) == (job.id, f'"{n}"', 1, f"v{n}")
        assert (run.server, run.slot, store.get(job.id).lease) == (f"gpu{n}", f"gpu{n}-slot0", f"l{n}")
        (data,) = [entry.data for entry in store.list_events(job.id) if entry.type == "job.started"]
        assert data == {"why": "started", "server": f"gpu{n}", "slot": f"gpu{n}-slot0", "offer": n, "epoch": 0}


def test_lease_3_each_batched_end_checks_its_jobs_state_and_token_and_returns_its_outcome(database, store):
    ends, old, over, gone, failed, again = (a_running_job(store) for _ in range(6))
    store_end(store, over.job.id, 1, Reason.FINISHED, T0, result='"first"')
    waits = a_queued_job(store)
    asked = [
        _end(store, ends),
        _end(store, old, attempt=7),
        _end(store, over),
        store.settle_write("nobody", 1, Reason.FINISHED, LATER, result="{}"),
        store.settle_write(waits.id, 1, Reason.FINISHED, LATER, result="{}"),
        _end(store, failed, Reason.INVALID_REQUEST),
        _end(store, again, Reason.SERVER_BUSY),
        _end(store, gone),
    ]
    outcomes = database.commit_all(asked)
    assert [outcome and (outcome.job.id, outcome.to) for outcome in outcomes] == [
        (ends.job.id, State.COMPLETED),
        None,
        None,
        None,
        None,
        (failed.job.id, State.FAILED),
        (again.job.id, State.QUEUED),
        (gone.job.id, State.COMPLETED),
    ]
    assert (store.get(old.job.id).state, store.get(over.job.id).result) == (State.RUNNING, '"first"')
    assert store.get(waits.id).state is State.QUEUED
    assert store.get(failed.job.id).error_message == f"of {failed.job.id}"
    assert [len(trail_of(store, run.job.id)) for run in (ends, old, over, gone)] == [3, 2, 3, 3]


def test_lease_1_a_start_of_what_is_not_queued_is_none_among_others(database, store):
    first, running, last = a_queued_job(store), a_running_job(store).job, a_queued_job(store)
    started = database.commit_all(
        [store.start_write(job.id, "gpu1", "gpu1-slot0", "l", LATER, 1, fleet="") for job in (first, running, last)]
    )
    assert [run and (run.job.id, run.attempt) for run in started] == [(first.id, 1), None, (last.id, 1)]


def test_each_batched_end_writes_the_notifications_that_its_job_requested(database, store):
    runs = [a_running_job(store, **more) for more in ({}, {"callback_url": CALLBACK}, {"envelope": "{}"})]
    moved = database.commit_all([_end(store, run) for run in runs])
    assert [transition.notification_id is not None for transition in moved] == [False, False, True]
    assert (rows_in(database, messages), rows_in(database, result_notifications)) == (1, 1)


def test_a_batched_end_that_cannot_be_stored_fails_alone_and_the_other_ends_commit_separately(database, store):
    runs = [a_running_job(store) for _ in range(6)]
    asked = [_end(store, run, result=_NOT_TEXT if n == 4 else "{}") for n, run in enumerate(runs)]
    with _recorded(database, "commit") as commits:
        outcomes = database.commit_all(asked)
    assert [isinstance(outcome, Exception) for outcome in outcomes] == [False, False, False, False, True, False]
    assert [store.get(run.job.id).state for run in runs] == [
        State.RUNNING if n == 4 else State.COMPLETED for n in range(6)
    ]
    assert len(commits) == 5
    assert all(len(trail_of(store, run.job.id)) == (2 if n == 4 else 3) for n, run in enumerate(runs))


def test_ends_and_other_writes_of_one_batch_run_in_their_order(database, store):
    one, two, three = (a_running_job(store) for _ in range(3))
    outcomes = database.commit_all(
        [
            _end(store, one),
            store.remote_id_write(two.job.id, 1, "r", LATER),
            _end(store, two),
            _end(store, three),
            store.remote_id_write(three.job.id, 1, "r", LATER),
        ]
    )
    assert [getattr(outcome, "to", outcome) for outcome in outcomes] == [
        State.COMPLETED,
        True,
        State.COMPLETED,
        State.COMPLETED,
        False,
    ]


def test_an_end_that_was_stored_without_an_answer_is_found_when_it_is_committed_again(database, store):
    run, other = a_running_job(store, envelope="{}"), a_running_job(store)
    end = _end(store, run)
    first = database.commit(end)
    assert first.to is State.COMPLETED and first.notification_id is not None
    assert database.commit_all([_end(store, other), end])[1] == first
    assert len(trail_of(store, run.job.id)) == 3


def test_an_end_that_was_never_stored_is_not_found(database, store):
    run = a_running_job(store)
    store_end(store, run.job.id, 1, Reason.FINISHED, T0, result='"first"')
    assert database.commit(_end(store, run)) is None, "another end, at another time"


@pytest.mark.postgres
@pytest.mark.parametrize("locked", [0, 2, 3])
def test_one_end_whose_job_row_is_locked_fails_alone_and_the_others_are_stored_in_time(postgres_url, locked):
    """The time limit of a transaction is shorter than two lock timeouts."""
    database = Database(postgres_url, DatabaseTimeouts(transaction_s=2.5, lock_s=1.5))
    store = JobStore(database)
    runs = [a_running_job(store) for _ in range(4)]
    with database.engine.begin() as other:
        other.execute(select(jobs.c.id).where(jobs.c.id == runs[locked].job.id).with_for_update())
        outcomes = database.commit_all([_end(store, run) for run in runs])
    assert [isinstance(outcome, DatabaseUnavailable) for outcome in outcomes] == [n == locked for n in range(4)]
    assert [store.get(run.job.id).state is State.RUNNING for run in runs] == [n == locked for n in range(4)]
    database.close()


@pytest.mark.postgres
def test_batched_ends_whose_commit_reply_was_lost_are_recognized_by_what_they_wrote(postgres_url, monkeypatch):
    database = Database(postgres_url)
    store = JobStore(database)
    runs = [a_running_job(store) for _ in range(3)]

    def lost(raw: Any) -> None:
        raw.commit()
        raise database.engine.dialect.loaded_dbapi.OperationalError("the answer was lost")

    with monkeypatch.context() as network:
        network.setattr(database.engine.dialect, "do_commit", lost)
        outcomes = database.commit_all([_end(store, run) for run in runs])
    assert not [outcome for outcome in outcomes if isinstance(outcome, CommitUnknown)]
    assert [outcome.to for outcome in outcomes] == [State.COMPLETED] * 3
    database.close()
