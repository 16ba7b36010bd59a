"""A COMMIT whose reply is lost or does not come is reported as unknown, and never as failed."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event, text

from slotkeeper.config import DatabaseTimeouts
from slotkeeper.db import Database, commit_outcome
from slotkeeper.errors import CommitUnknown, DatabaseUnavailable
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import events
from tests.support.builders import T0, a_job, a_queued_job, a_running_job, at_once, eventually, trail_of
from tests.support.ends import store_end
from tests.support.groups import in_one_group
from tests.support.silence import Network, between
from tools.cluster.direct_starts import store_start

# A new connection is given two seconds at least.
QUICK = DatabaseTimeouts(turn_s=0.5, transaction_s=2.5, inquiry_s=2.5, lock_s=0.3)
LATER = T0 + 60_000
postgres = pytest.mark.postgres


@pytest.fixture
def network_and_url(postgres_url) -> Iterator[tuple[Network, str]]:
    with between(postgres_url) as made:
        yield made


@pytest.fixture
def network(network_and_url) -> Network:
    return network_and_url[0]


@pytest.fixture
def far(network_and_url) -> Iterator[JobStore]:
    """A record behind a network that can fail."""
    database = Database(network_and_url[1], QUICK)
    store = JobStore(database)
    store.submit([a_job()], T0)  # It is connected.
    yield store
    database.close()


@pytest.fixture
def near(postgres_url) -> Iterator[JobStore]:
    """The same record, whatever the network does."""
    database = Database(postgres_url)
    yield JobStore(database)
    database.close()


def _result(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except DatabaseUnavailable as error:
        return error


# -- the reply is lost, and the database can be queried --------------------------------------------------------


@postgres
def test_a_stored_submit_returns_its_job_although_the_commit_reply_was_lost(network, far, near):
    job, network.loses = a_job(), True
    (accepted,) = far.submit([job], T0)
    assert (accepted.id, accepted.deduplicated) == (job.id, False)
    assert near.get(job.id).seq == accepted.seq
    assert len(trail_of(near, job.id)) == 1


@postgres
def test_a_stored_start_returns_its_run_although_the_commit_reply_was_lost(network, far, near):
    job, network.loses = a_queued_job(near), True
    run = store_start(far, job.id, "gpu1", "gpu1-slot0", "l w", T0)
    assert (run.attempt, near.get(job.id).state) == (1, State.RUNNING)


@postgres
@pytest.mark.parametrize("why", [Reason.FINISHED, Reason.SERVER_BUSY])
def test_a_group_whose_answer_was_lost_is_answered_from_one_commit_and_never_run_again(network, far, near, why):
    runs = [a_running_job(near) for _ in range(5)]
    times: list[int] = []

    def counted(tx: Any) -> str:
        times.append(1)
        return "counted"

    settles = [lambda run=run: store_end(far, run.job.id, 1, why, T0, result="{}") for run in runs]
    acts = [*settles, lambda: far.database.write(counted)]
    holding = lambda: setattr(network, "loses", True)  # noqa: E731
    event.listen(far.database.engine, "rollback", lambda _: pytest.fail("a group was undone"))
    *settled, count = in_one_group(far.database, *acts, before=holding)
    assert [moved.to for moved in settled] == [near.get(run.job.id).state for run in runs]
    assert all(len(trail_of(near, run.job.id)) == 3 for run in runs)
    assert (count, len(times)) == ("counted", 1)


@postgres
def test_a_commit_that_did_not_arrive_is_reported_as_not_stored_and_leaves_no_lock(network, far, near):
    """The COMMIT did not arrive: its transaction stays open at the server until the inquiry ends it."""
    job, network.swallows = a_queued_job(near), True
    answer = _result(lambda: store_start(far, job.id, "gpu1", "gpu1-slot0", "l w", T0))
    assert type(answer) is DatabaseUnavailable
    assert "nothing was stored" in answer.detail
    network.swallows = False
    assert near.get(job.id).state is State.QUEUED
    assert store_start(near, job.id, "gpu2", "gpu2-slot0", "l w", T0).attempt == 1


@postgres
def test_a_number_that_another_server_gave_again_proves_nothing(far, near):
    """A standby that took over may not have the transaction, and give its number to the next."""
    numbered = text("SELECT txid_current()")
    other = near.database.write(lambda tx: tx.connection.execute(numbered).scalar())
    with near.database.read() as connection:
        event_ = {"job_id": "nowhere", "type": "t", "at_ms": 1, "attempt": 0, "data": "{}"}
        assert (
            commit_outcome.find_outcome(
                connection, commit_outcome.TransactionMark(other, commit_outcome.WitnessRow(events, event_))
            )
            is commit_outcome.CommitOutcome.NOT_COMMITTED
        )
        assert (
            commit_outcome.find_outcome(connection, commit_outcome.TransactionMark(other, None))
            is commit_outcome.CommitOutcome.COMMITTED
        )
        assert (
            commit_outcome.find_outcome(connection, commit_outcome.TransactionMark(other + 1_000_000, None))
            is commit_outcome.CommitOutcome.NOT_COMMITTED
        )


# -- the database cannot be queried -------------------------------------------------------------------------------


@postgres
def test_a_commit_without_a_reply_is_reported_as_unknown_and_the_same_request_finds_the_job(network, far, near):
    job, network.loses, network.closed = a_job(idempotency_key="k"), True, True
    answer = _result(lambda: far.submit([job], T0))
    assert type(answer) is CommitUnknown
    assert answer.code == "record_uncertain"
    assert "nothing was stored" not in answer.detail
    network.loses = network.closed = False
    eventually(lambda: near.get(job.id) is not None)
    assert far.submit([job], LATER)[0].deduplicated
    (again,) = far.submit([a_job(idempotency_key="k")], LATER)
    assert (again.id, again.deduplicated) == (job.id, True)


@postgres
@pytest.mark.parametrize("why", [Reason.FINISHED, Reason.SERVER_BUSY, Reason.SERVER_ERROR])
def test_a_retried_settle_of_unknown_outcome_finds_its_stored_transition(network, far, near, why):
    run = a_running_job(near)

    end = far.settle_write(run.job.id, 1, why, T0, result="{}", due_ms=T0 + 5000)
    network.loses = network.closed = True
    assert type(_result(lambda: far.database.commit(end))) is CommitUnknown
    network.loses = network.closed = False
    eventually(lambda: near.get(run.job.id).state is not State.RUNNING)
    moved = far.database.commit(end)
    assert (moved.job, moved.to, moved.attempt) == (run.job, near.get(run.job.id).state, 1)
    assert len(trail_of(near, run.job.id)) == 3
    assert store_end(far, run.job.id, 1, why, LATER, result="{}", due_ms=LATER) is None, (
        "a second settle of the same attempt is refused"
    )


@postgres
def test_a_settle_of_unknown_outcome_that_was_not_stored_is_stored_when_it_is_repeated(network, far, near):
    run = a_running_job(near)
    network.swallows = network.closed = True
    assert type(_result(lambda: store_end(far, run.job.id, 1, Reason.FINISHED, T0, result="1"))) is CommitUnknown
    network.swallows = network.closed = False
    with near.database.read() as connection:  # The server has noticed that the client is gone.
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
            )
        )
    assert store_end(far, run.job.id, 1, Reason.FINISHED, LATER, result="2").to is State.COMPLETED
    assert near.get(run.job.id).result == "2"


@postgres
def test_a_settle_of_unknown_outcome_does_not_claim_a_transition_of_another_process(network, far, near):
    run = a_running_job(near)
    network.swallows = network.closed = True
    assert type(_result(lambda: store_end(far, run.job.id, 1, Reason.FINISHED, T0, result="1"))) is CommitUnknown
    network.swallows = network.closed = False
    with near.database.read() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
            )
        )
    assert store_end(near, run.job.id, 1, Reason.LEASE_EXPIRED, LATER)
    assert store_end(far, run.job.id, 1, Reason.FINISHED, LATER, result="2") is None


# -- SQLite: the COMMIT itself fails ---------------------------------------------------------------------------


@pytest.fixture
def failing(sqlite_url) -> Iterator[Callable[..., JobStore]]:
    """A record whose next COMMIT ends with an error, after it was done or instead of it."""
    database = Database(sqlite_url, QUICK)

    def fail(*, done: bool) -> JobStore:
        def commit(connection: Any) -> None:
            del database.engine.dialect.do_commit
            if done:
                connection.commit()
            raise sqlite3.OperationalError("disk I/O error")

        database.engine.dialect.do_commit = commit
        return JobStore(database)

    yield fail
    database.close()


def test_a_failed_sqlite_commit_is_looked_up_before_the_write_returns(failing):
    store, job = failing(done=True), a_job()
    assert store.submit([job], T0)[0].id == job.id
    assert len(trail_of(store, job.id)) == 1


def test_a_commit_that_did_not_happen_on_sqlite_stored_nothing(failing):
    store, job = failing(done=False), a_job()
    answer = _result(lambda: store.submit([job], T0))
    assert type(answer) is DatabaseUnavailable
    assert "disk I/O error" in answer.detail
    assert store.get(job.id) is None
    assert store.submit([job], T0)


def test_a_commit_whose_outcome_cannot_be_queried_is_reported_as_unknown_at_once(failing):
    store = failing(done=False)
    began = time.monotonic()
    answer = _result(lambda: store.request_cancel("j", T0))
    assert type(answer) is CommitUnknown
    assert time.monotonic() - began < QUICK.inquiry_s


# -- silence ---------------------------------------------------------------------------------------------------

_AT_WORST_S = QUICK.turn_s + QUICK.transaction_s + QUICK.inquiry_s


@postgres
def test_each_submit_returns_within_its_limit_on_a_silent_network_and_works_again_afterwards(network, far, near):
    for _ in range(3):
        at_once(
            *[lambda: far.submit([a_job()], T0)] * 4, lambda: ledger.read(far.database).by_state
        )  # Several connections are open.
    network.fall_silent()
    jobs = [a_job() for _ in range(8)]
    began = time.monotonic()
    answers = at_once(*[lambda job=job: far.submit([job], T0) for job in jobs], timeout_s=30)
    assert time.monotonic() - began < _AT_WORST_S + 2  # for a loaded machine
    for job, answer in zip(jobs, answers, strict=True):
        if type(answer) is DatabaseUnavailable:
            assert near.get(job.id) is None
        else:
            assert isinstance(answer, list | CommitUnknown)
    assert far.submit([a_job()], T0)
    assert ledger.read(far.database).by_state[State.QUEUED] > 0


@postgres
def test_a_commit_lost_in_a_silent_network_is_reported_as_failed_once_its_outcome_is_known(network, far, near):
    """The network drops the COMMIT of this one connection.

    A machine that is too slow to look up the outcome may report it as unknown, but not each time.
    """
    answers = []
    while DatabaseUnavailable not in answers and len(answers) < 3:
        job, network.swallows = a_job(), True
        began = time.monotonic()
        answers.append(type(_result(lambda job=job: far.submit([job], T0))))
        network.swallows = False
        assert time.monotonic() - began < _AT_WORST_S + 2
        assert near.get(job.id) is None
    assert answers[-1] is DatabaseUnavailable and set(answers) <= {DatabaseUnavailable, CommitUnknown}


@pytest.fixture
def quick(database_url) -> Iterator[JobStore]:
    database = Database(database_url, QUICK)
    yield JobStore(database)
    database.close()


@pytest.fixture
def locked(database) -> Iterator[None]:
    """Somebody else holds a lock that every submit needs."""
    with database.engine.connect() as connection, connection.begin():
        if connection.dialect.name == "postgresql":
            connection.execute(text("LOCK TABLE jobs IN EXCLUSIVE MODE"))
        yield


def test_while_a_lock_is_held_each_writer_learns_in_time_that_nothing_was_stored(quick, request):
    request.getfixturevalue("locked")
    jobs = [a_job() for _ in range(6)]
    began = time.monotonic()
    answers = at_once(*[lambda job=job: quick.submit([job], T0) for job in jobs])
    assert time.monotonic() - began < _AT_WORST_S + 2
    assert [type(answer) for answer in answers] == [DatabaseUnavailable] * 6
    assert all(quick.get(job.id) is None for job in jobs)


def test_a_write_that_times_out_while_it_waits_is_refused_and_never_executed(quick):
    goes_on, began = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        began.set()
        assert goes_on.wait(30)

    holder = threading.Thread(target=lambda: _result(lambda: quick.database.write(hold)))
    holder.start()
    assert began.wait(30)
    job = a_job()
    answer = _result(lambda: quick.submit([job], T0))
    assert type(answer) is DatabaseUnavailable
    goes_on.set()
    holder.join(30)
    assert quick.get(job.id) is None
    assert quick.submit([a_job()], T0)  # Another write can still lead a commit.


@postgres
def test_a_write_that_waits_for_a_locked_row_does_not_fail_the_rest_of_its_group(postgres_url, near):
    database = Database(postgres_url, QUICK)
    store, held = JobStore(database), a_queued_job(near)
    with near.database.engine.begin() as somebody:
        somebody.execute(text("SELECT 1 FROM jobs WHERE id = :id FOR UPDATE"), {"id": held.id})
        waiting, *others = in_one_group(
            database,
            lambda: store_start(store, held.id, "gpu1", "gpu1-slot0", "l", T0),
            *[lambda: store.submit([a_job()], T0)] * 4,
        )
    assert type(waiting) is DatabaseUnavailable
    assert all(isinstance(answer, list) for answer in others)
    database.close()
