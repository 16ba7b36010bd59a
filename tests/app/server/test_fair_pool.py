import asyncio
import threading
from queue import SimpleQueue

import pytest

from app.server.fair_pool import ClientGone, FairPool, QueueFull, TurnLate
from tests.support.threads import no_thread_left


class Work:
    """Calls that last until they are released, and the order in which they were begun."""

    def __init__(self):
        self.begun = SimpleQueue()
        self.go = threading.Semaphore(0)

    def call(self, name):
        def work():
            self.begun.put(name)
            self.go.acquire(timeout=10)
            return name

        return work

    async def next(self):
        return await asyncio.to_thread(self.begun.get, timeout=10)


def run(pool, work, owner, name=None, wanted=True):
    return asyncio.ensure_future(pool.run(owner, work.call(name or owner), lambda: wanted))


def in_loop(test):
    """A test that is a coroutine, and gets calls that end with it."""

    def run_it():
        work = Work()

        async def play():
            try:
                await test(work)
            finally:
                work.go.release(99)

        asyncio.run(play())

    run_it.__name__ = test.__name__
    return run_it


@in_loop
async def test_no_owner_holds_more_than_its_share(work):
    pool = FairPool("web", 3, 2)
    calls = [run(pool, work, owner) for owner in ["mallory"] * 5 + ["alice"]]
    assert sorted([await work.next() for _ in range(3)]) == ["alice", "mallory", "mallory"]
    work.go.release(9)
    assert await asyncio.gather(*calls) == ["mallory"] * 5 + ["alice"]
    assert pool.has_room


@in_loop
async def test_a_call_for_which_there_is_no_thread_takes_no_place(work):
    pool = FairPool("web", 1, 1)
    with no_thread_left(), pytest.raises(RuntimeError):
        await pool.run("alice", lambda: None)
    work.go.release(9)
    assert pool.has_room and await run(pool, work, "alice") == "alice"


@in_loop
async def test_what_a_call_raises_is_raised_and_its_thread_is_free(work):
    pool = FairPool("web", 1, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run("alice", lambda: 1 // 0)
    work.go.release(9)
    assert await run(pool, work, "bob") == "bob"


@in_loop
async def test_those_who_wait_get_turns_one_after_the_other(work):
    pool = FairPool("web", 1, 1)
    calls = [run(pool, work, "mallory", f"m{number}") for number in range(3)]
    calls.append(run(pool, work, "alice", "a0"))
    seen = [await work.next()]
    for _ in range(3):
        work.go.release()
        seen.append(await work.next())
    assert seen == ["m0", "m1", "a0", "m2"]
    work.go.release(9)
    await asyncio.gather(*calls)


@in_loop
async def test_of_one_owner_only_so_many_wait(work):
    pool = FairPool("web", 1, 1, 2)
    calls = [run(pool, work, "mallory") for _ in range(3)]
    await work.next()
    with pytest.raises(QueueFull):
        await pool.run("mallory", lambda: None)
    calls.append(run(pool, work, "alice"))
    work.go.release(9)
    await asyncio.gather(*calls)


@in_loop
async def test_what_nobody_waits_for_any_more_is_not_begun(work):
    pool = FairPool("web", 1, 1)
    first, left = run(pool, work, "a", "first"), run(pool, work, "a", "left", wanted=False)
    canceled, last = run(pool, work, "a", "canceled"), run(pool, work, "a", "last")
    assert await work.next() == "first"
    canceled.cancel()
    work.go.release(9)
    with pytest.raises(ClientGone):
        await left
    assert (await first, await last, work.begun.qsize()) == ("first", "last", 1)


@in_loop
async def test_a_caller_that_is_canceled_leaves_its_thread_at_work(work):
    pool = FairPool("web", 1, 1)
    call = run(pool, work, "a")
    await work.next()
    call.cancel()
    await asyncio.wait([call])
    assert not pool.has_room
    work.go.release(9)
    assert await run(pool, work, "b") == "b"


@in_loop
async def test_a_call_whose_turn_does_not_come_in_time_is_given_up(work):
    pool = FairPool("web", 1, 1)
    first = run(pool, work, "a", "first")
    await work.next()
    with pytest.raises(TurnLate):
        await pool.run("a", lambda: None, longest_wait_s=0.01)
    work.go.release(9)
    assert await first == "first" and await run(pool, work, "a", "second") == "second"
