"""BATCH-1: a line of a batch is accepted once, however often, in whatever parts and by how many clients it is sent."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from routing.dispatch.batch_lines import MissingLines, add_lines
from slotkeeper.errors import Conflict, TooManyRequests
from slotkeeper.jobs.batch_ids import line_job_id, line_of, new_batch_id
from slotkeeper.jobs.batches import Batch, Batches, BatchState, OnError
from slotkeeper.jobs.tables import batch_errors, jobs
from slotkeeper.registry.identity import LOCAL_IDENTITY
from tests.support.harness import Harness

GOOD, BAD = {"payload": {"prompt": "a cat"}}, {"payload": {"prompt": "a cat"}, "priority": 99}


@pytest.fixture
def batches(harness: Harness) -> Batches:
    harness.register(1)
    return Batches(harness.database)


def a_batch(batches: Batches, harness: Harness, **fields: Any) -> Batch:
    now = harness.now
    new = Batch("default", new_batch_id(), BatchState.OPEN, now, now, head={"model": "zimg"}, **fields)
    return batches.create(new, None, "")[0]


def stored(batches: Batches, batch: Batch) -> tuple[list[int], list[int]]:
    """The lines that have become jobs, and those that were refused, in order."""
    of_jobs = select(jobs.c.id).where(jobs.c.batch == batch.id)
    of_errors = select(batch_errors.c.line).where(batch_errors.c.batch == batch.id)
    with batches.database.read() as connection:
        accepted = sorted(line_of(job_id) for job_id in connection.execute(of_jobs).scalars())
        return accepted, sorted(connection.execute(of_errors).scalars())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.booleans(), min_size=1, max_size=12),
    sends=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.booleans()), max_size=12),
)
@example(lines=[True, False, True], sends=[(0, 2, False), (2, 1, False), (0, 3, True), (9, 1, False)])
def test_a_line_is_accepted_once_however_often_it_is_sent(
    harness: Harness, batches: Batches, lines: list[bool], sends: list[tuple[int, int, bool]]
) -> None:
    values = [GOOD if good else BAD for good in lines]
    first_read = a_batch(batches, harness)
    received = 0
    for first, count, is_stale in sends:
        batch = first_read if is_stale else batches.get("default", first_read.id)
        assert batch is not None
        part = values[first : first + count]
        if not part:
            continue
        if first > received:
            with pytest.raises(MissingLines) as refused:
                add_lines(harness.dispatcher, batches, batch, first, part, LOCAL_IDENTITY)
            # A client with an old copy of the batch gets the next line of that copy, and reads the batch again.
            assert refused.value.facts["next_line"] == batch.lines
            continue
        if first > batch.lines:  # The client's copy of the batch shows that lines are missing.
            with pytest.raises(MissingLines):
                add_lines(harness.dispatcher, batches, batch, first, part, LOCAL_IDENTITY)
            continue
        receipt = add_lines(harness.dispatcher, batches, batch, first, part, LOCAL_IDENTITY)
        received = max(received, first + len(part))
        assert receipt.batch.lines == received
        assert receipt.accepted + receipt.refused + receipt.known == len(part)
        accepted, refused_lines = stored(batches, first_read)
        assert accepted == [line for line in range(received) if lines[line]]
        assert refused_lines == [line for line in range(received) if not lines[line]]
        now = batches.get("default", first_read.id)
        assert now is not None and (now.lines, now.refused) == (received, len(refused_lines))


def in_threads(acts: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_each_line_is_accepted_once_when_several_clients_send_the_same_lines_at_once(
    harness: Harness, batches: Batches
) -> None:
    batch = a_batch(batches, harness)
    values = [GOOD if line % 7 else BAD for line in range(120)]

    def send(size: int) -> None:
        at = 0
        while at < len(values):
            known = batches.get("default", batch.id)
            assert known is not None
            with suppress(Conflict):  # Others were faster, three times in a row.
                chunk = values[at : at + size]
                at = add_lines(harness.dispatcher, batches, known, at, chunk, LOCAL_IDENTITY).batch.lines

    in_threads([lambda size=size: send(size) for size in (5, 7, 11, 13)])  # type: ignore[misc]
    accepted, refused = stored(batches, batch)
    assert accepted == [line for line in range(120) if line % 7]
    assert refused == [line for line in range(120) if not line % 7]


def test_a_line_that_is_added_to_a_paused_batch_is_delayed_without_a_due_time(
    harness: Harness, batches: Batches
) -> None:
    before = a_batch(batches, harness)
    batches.set_paused(before, True, lambda tx, **about: None)
    add_lines(harness.dispatcher, batches, before, 0, [GOOD], LOCAL_IDENTITY)
    job = harness.job(line_job_id(before.id, 0))
    assert (job.state, job.due_ms) == ("delayed", None) and harness.notifications.offers == []


def test_lines_on_hold_do_not_count_as_waiting(harness: Harness, batches: Batches) -> None:
    harness.register(1, max_waiting=1)
    held, queued = a_batch(batches, harness, on_error=OnError.REFUSE), a_batch(batches, harness)
    assert add_lines(harness.dispatcher, batches, held, 0, [GOOD] * 5, LOCAL_IDENTITY).accepted == 5
    assert add_lines(harness.dispatcher, batches, queued, 0, [GOOD] * 5, LOCAL_IDENTITY).accepted == 2
    after = batches.get("default", queued.id)
    assert after is not None
    with pytest.raises(TooManyRequests):
        add_lines(harness.dispatcher, batches, after, 2, [GOOD], LOCAL_IDENTITY)
