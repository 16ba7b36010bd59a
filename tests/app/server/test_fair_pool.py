import asyncio
import threading
from queue import SimpleQueue

import pytest

from app.server.fair_pool import ClientGone, FairPool, QueueFull, TurnLate
from tests.support.threads import no_thread_left


class Work:
    """Calls that run until they are released, and the order in which they started."""

    def __init__(self):
        self.started = SimpleQueue()
        self.permits = threading.Semaphore(0)

    def call(self, name):
        def work():
            self.started.put(name)
            self.permits.acquire(timeout=10)
            return name

        return work

    async def next(self):
        return await asyncio.to_thread(self.started.get, timeout=10)


def run(pool, work, owner, name=None, wanted=True):
    return asyncio.ensure_future(pool.run(owner, work.call(name or owner), lambda: wanted))


def in_loop(test):
    """Decorator: run a test coroutine with a Work, whose calls end with the test."""

    def run_test():
        work = Work()

        async def run_and_release():
            try:
                await test(work)
            finally:
                work.permits.release(99)

        asyncio.run(run_and_release())

    run_test.__name__ = test.__name__
    return run_test


@in_loop
async def test_no_owner_holds_more_than_its_share(work):
    pool = FairPool("web", 3, 2)
    calls = [run(pool, work, owner) for owner in ["mallory"] * 5 + ["alice"]]
    assert sorted([await work.next() for _ in range(3)]) == ["alice", "mallory", "mallory"]
    work.permits.release(9)
    assert await asyncio.gather(*calls) == ["mallory"] * 5 + ["alice"]
    assert pool.has_room


@in_loop
async def test_a_call_whose_thread_cannot_start_occupies_no_place(work):
    pool = FairPool("web", 1, 1)
    with no_thread_left(), pytest.raises(RuntimeError):
        await pool.run("alice", lambda: None)
    work.permits.release(9)
    assert pool.has_room and await run(pool, work, "alice") == "alice"


@in_loop
async def test_an_exception_of_a_call_is_raised_and_frees_its_thread(work):
    pool = FairPool("web", 1, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run("alice", lambda: 1 // 0)
    work.permits.release(9)
    assert await run(pool, work, "bob") == "bob"


@in_loop
async def test_waiting_owners_take_turns(work):
    pool = FairPool("web", 1, 1)
    calls = [run(pool, work, "mallory", f"m{number}") for number in range(3)]
    calls.append(run(pool, work, "alice", "a0"))
    seen = [await work.next()]
    for _ in range(3):
        work.permits.release()
        seen.append(await work.next())
    assert seen == ["m0", "m1", "a0", "m2"]
    work.permits.release(9)
    await asyncio.gather(*calls)


@in_loop
async def test_the_waiting_calls_of_one_owner_are_limited(work):
    pool = FairPool("web", 1, 1, 2)
    calls = [run(pool, work, "mallory") for _ in range(3)]
    await work.next()
    with pytest.raises(QueueFull):
        await pool.run("mallory", lambda: None)
    calls.append(run(pool, work, "alice"))
    work.permits.release(9)
    await asyncio.gather(*calls)


@in_loop
async def test_an_unwanted_or_canceled_call_is_not_started(work):
    pool = FairPool("web", 1, 1)
    first, unwanted = run(pool, work, "a", "first"), run(pool, work, "a", "left", wanted=False)
    canceled, last = run(pool, work, "a", "canceled"), run(pool, work, "a", "last")
    assert await work.next() == "first"
    canceled.cancel()
    work.permits.release(9)
    with pytest.raises(ClientGone):
        await unwanted
    assert (await first, await last, work.started.qsize()) == ("first", "last", 1)


@in_loop
async def test_the_thread_of_a_canceled_caller_finishes_its_call(work):
    pool = FairPool("web", 1, 1)
    call = run(pool, work, "a")
    await work.next()
    call.cancel()
    await asyncio.wait([call])
    assert not pool.has_room
    work.permits.release(9)
    assert await run(pool, work, "b") == "b"


@in_loop
async def test_a_call_without_a_thread_in_time_raises_turn_late(work):
    pool = FairPool("web", 1, 1)
    first = run(pool, work, "a", "first")
    await work.next()
    with pytest.raises(TurnLate):
        await pool.run("a", lambda: None, longest_wait_s=0.01)
    work.permits.release(9)
    assert await first == "first" and await run(pool, work, "a", "second") == "second"
