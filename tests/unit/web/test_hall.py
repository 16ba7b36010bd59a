import threading
from queue import SimpleQueue

import pytest

from app.web.hall import Errand, Lane
from tests.support.threads import no_thread_left


class Loop:
    """An event loop whose turns the test takes."""

    def __init__(self):
        self.calls = SimpleQueue()

    def soon(self, function, *args):
        self.calls.put((function, args))

    def turn(self):
        function, args = self.calls.get(timeout=10)
        function(*args)


@pytest.fixture
def loop():
    return Loop()


class Work:
    """Errands that last until they are let go, and the order in which they were begun."""

    def __init__(self):
        self.begun = SimpleQueue()
        self.go = threading.Semaphore(0)

    def errand(self, owner, name=None, wanted=True):
        def work():
            self.begun.put(name or owner)
            self.go.acquire(timeout=10)

        return Errand(owner, work, lambda: wanted)

    def next(self):
        return self.begun.get(timeout=10)


def test_no_owner_holds_more_than_its_share(loop):
    lane, work = Lane("web", 3, 2, loop.soon, 9), Work()
    for _ in range(5):
        assert lane.enter(work.errand("mallory"))
    assert lane.enter(work.errand("alice"))
    assert sorted(work.next() for _ in range(3)) == ["alice", "mallory", "mallory"]
    work.go.release(9)


def test_an_errand_for_which_there_is_no_thread_takes_no_place(loop):
    lane, work = Lane("web", 1, 1, loop.soon, 9), Work()
    with no_thread_left(), pytest.raises(RuntimeError):
        lane.enter(work.errand("alice"))
    assert lane.has_room_for("alice") and lane.enter(work.errand("alice"))
    assert work.next() == "alice"
    work.go.release(9)


def test_what_an_errand_answers_is_called_in_the_loop_and_its_thread_is_free_whatever_comes_of_it(loop):
    lane, told = Lane("web", 1, 1, loop.soon, 9), []

    def fail():
        told.append(threading.current_thread())
        raise RuntimeError

    assert lane.enter(Errand("alice", lambda: fail))
    with pytest.raises(RuntimeError):
        loop.turn()
    assert told == [threading.current_thread()] and lane.has_room_for("alice")


def test_an_errand_that_fails_costs_no_thread(loop):
    lane, work = Lane("web", 1, 1, loop.soon, 9), Work()
    assert lane.enter(Errand("alice", lambda: 1 // 0))
    loop.turn()
    assert lane.enter(work.errand("bob")) and work.next() == "bob"
    work.go.release(9)


def test_those_who_wait_get_turns_one_after_the_other(loop):
    lane, work = Lane("web", 1, 1, loop.soon, 9), Work()
    for number in range(3):
        lane.enter(work.errand("mallory", f"m{number}"))
    lane.enter(work.errand("alice", "a0"))
    seen = [work.next()]
    for _ in range(3):
        work.go.release()
        loop.turn()
        seen.append(work.next())
    assert seen == ["m0", "m1", "a0", "m2"]
    work.go.release(9)


def test_of_one_owner_only_so_many_wait(loop):
    lane, work = Lane("web", 1, 1, loop.soon, 2), Work()
    assert [lane.enter(work.errand("mallory")) for _ in range(4)] == [True, True, True, False]
    assert lane.enter(work.errand("alice"))
    work.go.release(9)


def test_what_nobody_waits_for_any_more_is_not_begun(loop):
    lane, work = Lane("web", 1, 1, loop.soon, 9), Work()
    lane.enter(work.errand("a", "first"))
    lane.enter(work.errand("a", "left", wanted=False))
    lane.enter(work.errand("a", "last"))
    assert work.next() == "first"
    work.go.release()
    loop.turn()
    assert work.next() == "last"
    work.go.release(9)


def test_threads_are_started_as_they_are_needed(loop):
    lane, work = Lane("a-lane", 8, 8, loop.soon, 9), Work()
    for _ in range(3):
        work.go.release()
        lane.enter(work.errand("a"))
        loop.turn()
    assert sum(thread.name.startswith("a-lane-") for thread in threading.enumerate()) == 1
