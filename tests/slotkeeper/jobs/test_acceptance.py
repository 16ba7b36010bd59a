"""A batch of jobs is accepted as a whole or not at all, and one job for each id and each idempotency key."""

from typing import Any

import pytest
from sqlalchemy import event, func, select, text

from slotkeeper.db import Database
from slotkeeper.errors import IdempotencyConflict
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import events, idempotency_keys
from slotkeeper.jobs.tables import jobs as jobs_table
from slotkeeper.jobs.values import new_job_id
from slotkeeper.outbox import event_reader, retention
from tests.support.builders import SECOND, T0, a_job, a_queued_job, an_ended_job, at_once, eventually, row_of, trail_of
from tests.support.ends import store_end
from tools.cluster.direct_starts import store_start

WINDOW_S = 100
KEYED: dict[str, Any] = {"idempotency_key": "k1", "fingerprint": "same request"}


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database, idempotency_window_s=WINDOW_S)


def _stored(database: Database) -> tuple[int, int, int]:
    """How many (jobs, events, keys) there are."""
    with database.read() as connection:
        counted = [select(func.count()).select_from(table) for table in (jobs_table, events, idempotency_keys)]
        jobs, written, keys = (connection.execute(query).scalar_one() for query in counted)
    return jobs, written, keys


# -- accepting -------------------------------------------------------------------------------------------------


def test_a_submitted_job_is_stored_as_queued_with_its_event_and_all_its_fields(database, store):
    job = a_job(priority=2, tenant="acme", callback_url="https://c.example/h", deadline_ms=T0 + 9, source="celery")
    (accepted,) = store.submit([job], T0)
    row = row_of(database, job.id)
    assert (accepted.id, accepted.seq, accepted.state, accepted.deduplicated) == (job.id, row["seq"], "queued", False)
    assert (row["model"], row["payload"], row["priority"], row["tenant"]) == ("zimg", '{"prompt":"a cat"}', 2, "acme")
    assert (row["callback_url"], row["deadline_ms"], row["source"]) == ("https://c.example/h", T0 + 9, "celery")
    assert (row["created_ms"], row["why"], row["attempt"], row["due_ms"]) == (T0, "submitted", 0, None)
    assert trail_of(store, job.id) == [("job.enqueued", "submitted", 0)]


def test_a_job_with_a_time_before_which_it_must_not_run_is_delayed(database, store):
    (accepted,) = store.submit([a_job(not_before_ms=T0 + SECOND)], T0)
    assert (accepted.state, row_of(database, accepted.id)["due_ms"]) == (State.DELAYED, T0 + SECOND)
    assert trail_of(store, accepted.id) == [("job.delayed", "scheduled", 0)]


def test_the_event_of_a_submit_names_the_accepted_job(store, database):
    (accepted,) = store.submit([a_job(priority=3, tenant="acme")], T0)
    (entry,) = event_reader.read_page(database, 0, 10).events
    assert (entry.event.job_id, entry.event.data) == (accepted.id, {"why": "submitted"})
    assert (entry.model, entry.priority, entry.tenant) == ("zimg", 3, "acme")


def test_a_batch_is_accepted_in_the_order_of_its_jobs(store):
    batch = [a_job() for _ in range(5)]
    accepted = store.submit(batch, T0)
    assert [a.id for a in accepted] == [job.id for job in batch]
    assert [a.seq for a in accepted] == sorted(a.seq for a in accepted)
    assert store.submit([], T0) == []


def test_a_large_batch_takes_few_statements_and_is_numbered_in_its_order(database, store):
    """Each statement releases the GIL, while other writers wait for the write lock."""
    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda c, cursor, text, *_: statements.append(text))
    batch = [a_job() for _ in range(300)]
    first, *others = store.submit(batch, T0)
    assert sum(text.startswith("INSERT") for text in statements) < 20
    assert [job.seq for job in others] == list(range(first.seq + 1, first.seq + 300))
    assert [entry.event.job_id for entry in event_reader.read_page(database, 0, 300).events] == [
        job.id for job in batch
    ]


def test_known_ids_and_keys_of_a_batch_are_deduplicated_and_the_others_numbered_in_its_order(database, store):
    by_id, by_key = a_job(), a_job(**KEYED)
    store.submit([by_id, by_key], T0)
    batch = [a_job(), by_id, a_job(), a_job(**KEYED), a_job(idempotency_key="k2"), a_job(), a_job()]
    accepted = store.submit(batch, T0)
    assert [acceptance.deduplicated for acceptance in accepted] == [False, True, False, True, False, False, False]
    assert accepted[3].id == by_key.id
    fresh = [acceptance.seq for acceptance in accepted if not acceptance.deduplicated]
    assert fresh == sorted(fresh) and min(fresh) > max(accepted[1].seq, accepted[3].seq)
    assert ledger.read(database).balanced


def test_a_batch_is_accepted_as_a_whole_or_not_at_all(database, store):
    store.submit([a_job(**KEYED)], T0)
    before = _stored(database)
    with pytest.raises(IdempotencyConflict):
        store.submit([a_job(), a_job(idempotency_key="k1", fingerprint="another request"), a_job()], T0)
    assert _stored(database) == before


@pytest.mark.parametrize("statement", ["INSERT INTO jobs", "INSERT INTO events", "INSERT INTO idempotency_keys"])
def test_a_submit_that_fails_midway_stores_nothing(database, store, faults, statement):
    """A crash between key and job stores neither, so the client's retry creates a new job."""
    job = a_job(**KEYED)
    with faults(statement), pytest.raises(ZeroDivisionError):
        store.submit([a_job(), job], T0)
    assert _stored(database) == (0, 0, 0)
    assert not store.submit([job], T0)[0].deduplicated


def test_two_submits_with_the_same_id_make_one_job(database, store):
    job = a_job()
    (first,) = store.submit([job], T0)
    (second,) = store.submit([job], T0 + SECOND)
    assert (second.id, second.seq, second.deduplicated) == (first.id, first.seq, True)
    assert _stored(database) == (1, 1, 0)


def test_a_second_submit_with_the_same_id_returns_the_current_state(database, store):
    done = an_ended_job(store)
    before = row_of(database, done.id)
    (again,) = store.submit([a_job(id=done.id)], T0 + SECOND)
    assert (again.state, again.deduplicated) == (State.COMPLETED, True)
    assert row_of(database, done.id) == before


@pytest.mark.parametrize(
    "other",
    [
        {"model": "flux"},
        {"payload": '{"prompt":"a dog"}'},
        {"tenant": "acme"},
        {"callback_url": "https://c.example/h"},
        {"constraints": "gpu=A100"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_an_id_that_is_reused_for_another_request_refuses_the_whole_batch(database, store, other):
    done = an_ended_job(store)
    before = row_of(database, done.id)
    with pytest.raises(IdempotencyConflict, match=next(iter(other))):
        store.submit([a_job(), a_job(id=done.id, **other)], T0 + SECOND)
    assert row_of(database, done.id) == before
    assert _stored(database)[0] == 1


def test_a_later_submit_with_the_same_id_is_deduplicated_although_its_deadline_differs(store):
    job = a_queued_job(store, deadline_ms=T0 + 9 * SECOND)
    (again,) = store.submit([a_job(id=job.id, deadline_ms=T0 + 10 * SECOND)], T0 + SECOND)
    assert again.deduplicated


def test_the_same_id_twice_in_one_batch_makes_one_job(database, store):
    job = a_job()
    first, second = store.submit([job, job], T0)
    assert (first.deduplicated, second.deduplicated) == (False, True)
    assert _stored(database) == (1, 1, 0)


def test_concurrent_submits_with_the_same_id_make_one_job(database, store):
    other = JobStore(Database(database.url))
    job = a_job()
    answers = at_once(*[lambda s=s: s.submit([job], T0)[0] for s in (store, other) * 3])
    assert sorted(answer.deduplicated for answer in answers) == [False, True, True, True, True, True]
    assert {answer.seq for answer in answers} == {answers[0].seq}
    assert _stored(database) == (1, 1, 0)
    other.database.close()


# -- Idempotency-Key -------------------------------------------------------------------------------------------


def test_the_same_key_again_names_the_job_of_the_first_time(database, store):
    (first,) = store.submit([a_job(**KEYED)], T0)
    (second,) = store.submit([a_job(**KEYED)], T0 + SECOND)
    assert (second.id, second.seq, second.deduplicated) == (first.id, first.seq, True)
    assert _stored(database) == (1, 1, 1)


def test_the_same_key_with_another_request_is_a_conflict_that_names_the_job(database, store):
    (first,) = store.submit([a_job(**KEYED)], T0)
    with pytest.raises(IdempotencyConflict) as refused:
        store.submit([a_job(idempotency_key="k1", fingerprint="another request")], T0)
    assert refused.value.facts == {"job_id": first.id}
    assert _stored(database) == (1, 1, 1)


def test_a_key_belongs_to_its_tenant(database, store):
    tenants = ("default", "acme", "other")
    first = [store.submit([a_job(tenant=tenant, **KEYED)], T0)[0] for tenant in tenants]
    again = [store.submit([a_job(tenant=tenant, **KEYED)], T0)[0] for tenant in tenants]
    assert [answer.deduplicated for answer in first + again] == [False] * 3 + [True] * 3
    assert [answer.id for answer in again] == [answer.id for answer in first]
    assert _stored(database) == (3, 3, 3)


def test_the_same_idempotency_key_twice_in_one_batch_makes_one_job(database, store):
    first, second = store.submit([a_job(**KEYED), a_job(**KEYED)], T0)
    assert (second.id, second.deduplicated) == (first.id, True)
    assert _stored(database) == (1, 1, 1)


def test_concurrent_submits_with_the_same_idempotency_key_make_one_job(database, store):
    other = JobStore(Database(database.url))
    for n in range(5):
        keyed = KEYED | {"idempotency_key": f"k{n}"}
        answers = at_once(*[lambda s=s, k=keyed: s.submit([a_job(**k)], T0)[0] for s in (store, other) * 2])
        assert sorted(getattr(a, "deduplicated", repr(a)) for a in answers) == [False, True, True, True]
        assert len({answer.id for answer in answers}) == 1
    assert _stored(database) == (5, 5, 5)
    other.database.close()


@pytest.mark.postgres
def test_a_key_that_another_process_is_just_storing_is_waited_for(postgres_url):
    """Between our look and our insert, another process stores the key and commits."""
    database = Database(postgres_url)
    store = JobStore(database)
    (first,) = store.submit([a_job(idempotency_key="before", fingerprint="same request")], T0)
    rival = database.engine.connect()
    store_key = idempotency_keys.insert().values(
        tenant="default", key="k1", job_id=first.id, fingerprint="same request", expires_ms=T0 + SECOND
    )
    rival.execute(store_key)

    def commit_when_waited_for() -> None:
        with database.read() as connection:
            waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            eventually(lambda: connection.execute(waiting).scalar())
        rival.commit()

    answers, _ = at_once(lambda: store.submit([a_job(**KEYED)], T0), commit_when_waited_for)
    assert [(a.id, a.deduplicated) for a in answers] == [(first.id, True)]
    assert _stored(database) == (1, 1, 2)
    rival.close()
    database.close()


def test_an_idempotency_key_returns_its_job_within_the_window_and_creates_a_job_after_it(database, store):
    (first,) = store.submit([a_job(**KEYED)], T0)
    end = T0 + WINDOW_S * SECOND
    assert store.submit([a_job(**KEYED)], end - 1)[0].id == first.id
    (fresh,) = store.submit([a_job(**KEYED)], end)
    assert (fresh.deduplicated, fresh.id == first.id) == (False, False)
    assert store.submit([a_job(**KEYED)], end + 1)[0].id == fresh.id  # the fresh job has a new window


def test_an_idempotency_key_may_be_reused_for_another_request_after_its_window(store):
    store.submit([a_job(**KEYED)], T0)
    other = a_job(idempotency_key="k1", fingerprint="another request")
    assert not store.submit([other], T0 + WINDOW_S * SECOND)[0].deduplicated


def test_an_idempotency_key_is_deleted_at_the_end_of_its_window_and_not_before(database, store):
    store.submit([a_job(**KEYED)], T0)
    store.submit([a_job(idempotency_key="k2")], T0 + SECOND)
    assert store.delete_expired_keys(T0 + WINDOW_S * SECOND - 1) == 0
    assert store.delete_expired_keys(T0 + WINDOW_S * SECOND) == 1
    assert _stored(database) == (2, 2, 1)


def test_expired_keys_are_deleted_in_pages(database, store):
    store.submit([a_job(idempotency_key=f"k{n}") for n in range(5)], T0)
    until = T0 + WINDOW_S * SECOND
    assert [store.delete_expired_keys(until, limit=2) for _ in range(4)] == [2, 2, 1, 0]
    assert _stored(database)[2] == 0


def test_a_key_never_names_a_job_that_is_not_there(store):
    """The job was removed within the window: the key is fresh work, not a pointer to nothing."""
    (first,) = store.submit([a_job(**KEYED)], T0)
    run = store_start(store, first.id, "gpu1", "gpu1-slot0", "l", T0)
    store_end(store, first.id, run.attempt, Reason.FINISHED, T0, result="{}")
    assert retention.delete_ended_jobs(store.database, T0 + 1) == 1
    (fresh,) = store.submit([a_job(**KEYED)], T0 + 2)
    assert not fresh.deduplicated
    assert store.get(fresh.id) is not None
    assert store.submit([a_job(**KEYED)], T0 + 3)[0].id == fresh.id


def test_jobs_without_an_idempotency_key_are_never_deduplicated_by_their_request(database, store):
    same = {"fingerprint": "same request"}
    store.submit([a_job(**same), a_job(**same)], T0)
    assert _stored(database) == (2, 2, 0)


def test_ids_are_unique_and_sorted_by_time():
    ids = [new_job_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert ids == sorted(ids)
