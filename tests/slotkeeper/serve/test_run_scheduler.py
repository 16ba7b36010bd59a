"""The run scheduler alone: no HTTP, no unnecessary threads, a clock that the test sets."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slotkeeper.serve.run_scheduler import (
    AlreadyKnown,
    Busy,
    Call,
    Callback,
    Queued,
    QueueFull,
    ResultRetention,
    Run,
    RunEnd,
    RunScheduler,
    Started,
    State,
    Stopping,
)

DONE = RunEnd(State.COMPLETED, result=b'{"n":1}')
ERROR = RunEnd(State.FAILED, error="RuntimeError: no", retryable=True)


def direct(key: str | None = None) -> Call:
    return Call({}, key=key)


def dispatched(job_id: str | None = None, attempt: int | None = None, key: str | None = None) -> Call:
    return Call({}, dispatcher=True, job_id=job_id, attempt=attempt, key=key)


def started(engine: RunScheduler, call: Call) -> Run:
    decision = engine.submit(call)
    assert isinstance(decision, Started)
    return decision.run


def queued(engine: RunScheduler, call: Call | None = None) -> Run:
    decision = engine.submit(call or direct())
    assert isinstance(decision, Queued)
    return decision.run


# Slots and the direct queue


def test_each_run_has_a_separate_slot_number_and_a_released_number_is_reused():
    engine = RunScheduler(slots=3)
    runs = [started(engine, dispatched()) for _ in range(3)]
    assert [run.slot for run in runs] == [0, 1, 2]
    engine.finish(runs[1], DONE)
    assert started(engine, dispatched()).slot == 1


def test_dispatcher_traffic_never_waits():
    engine = RunScheduler(slots=1)
    started(engine, dispatched())
    assert engine.submit(dispatched()) == Busy()
    assert engine.health().direct_queue == 0


def test_a_freed_slot_goes_to_the_direct_call_in_the_same_step():
    """DIRECT-1: there is no moment at which dispatcher traffic could take it."""
    engine = RunScheduler(slots=1)
    run = started(engine, dispatched())
    waiting = queued(engine)
    assert engine.finish(run, DONE) is waiting
    assert (waiting.state, waiting.slot) == (State.PROCESSING, run.slot)
    assert engine.submit(dispatched()) == Busy()
    assert engine.finish(waiting, DONE) is None
    started(engine, dispatched())


@pytest.mark.parametrize(("call", "expected"), [(dispatched(), Busy), (direct(), Queued)])
def test_no_call_overtakes_a_waiting_direct_call(call: Call, expected: type):
    """DIRECT-1 also with a free slot.  The hand-over prevents that state, so the test sets a private field."""
    engine = RunScheduler(slots=1)
    started(engine, dispatched())
    queued(engine)
    engine._free.append(1)
    assert isinstance(engine.submit(call), expected)


def test_the_direct_queue_takes_no_more_than_its_bound():
    """DIRECT-2"""
    engine = RunScheduler(slots=1, max_direct_queue=2)
    run = started(engine, direct())
    first, second = queued(engine), queued(engine)
    assert engine.submit(direct()) == QueueFull()
    assert (engine.position(first), engine.position(second)) == (1, 2)
    engine.finish(run, DONE)
    assert engine.position(second) == 1
    queued(engine)


def test_a_queue_of_none_refuses_at_once():
    engine = RunScheduler(slots=1, max_direct_queue=0)
    started(engine, direct())
    assert engine.submit(direct()) == QueueFull()


# Names


def test_a_direct_caller_cannot_take_a_name_of_the_dispatchers():
    engine = RunScheduler(slots=2)
    real = started(engine, dispatched("a", 1))
    claimed = started(engine, Call({}, job_id="a", attempt=1))
    assert claimed.id != real.id
    assert engine.find("a") is real
    assert engine.health().job_ids == ["a", claimed.id]


def test_a_run_without_an_attempt_gets_a_random_id_and_is_still_found_by_its_job():
    engine = RunScheduler(slots=2)
    run = started(engine, dispatched("a"))
    assert run.id != "a"
    assert engine.find("a") is engine.find(run.id) is run


def test_two_live_runs_never_share_an_id():
    """The same attempt under two keys is a mistake of the caller, but both can be found."""
    engine = RunScheduler(slots=2)
    one, other = started(engine, dispatched("a", 1, key="x")), started(engine, dispatched("a", 1, key="y"))
    assert one.id == "a.1"
    assert other.id != one.id
    assert engine.find(one.id) is one


# Idempotency


def test_a_second_submit_with_the_key_of_a_live_run_returns_this_run():
    """IDEM-1"""
    engine = RunScheduler(slots=2)
    run = started(engine, dispatched("a", 1, key="k"))
    assert engine.submit(dispatched("a", 2, key="k")) == AlreadyKnown(run)
    assert engine.health().active == 1


def test_an_attempt_without_a_key_is_identified_by_its_job_and_number():
    """A request sent twice by a proxy or a retrying client runs once."""
    engine = RunScheduler(slots=2)
    run = started(engine, dispatched("a", 1))
    assert engine.submit(dispatched("a", 1)) == AlreadyKnown(run)
    started(engine, dispatched("a", 2))


def test_a_completed_run_is_known_before_anybody_can_see_its_end():
    engine = RunScheduler(slots=1)
    run = started(engine, dispatched(key="k"))
    engine.finish(run, DONE)
    assert run.done.is_set()
    assert engine.submit(dispatched(key="k")) == AlreadyKnown(run)


@pytest.mark.parametrize("ending", [ERROR, RunEnd(State.FAILED), RunEnd(State.CANCELED)])
def test_a_key_whose_run_did_not_complete_starts_a_new_run(ending: RunEnd):
    engine = RunScheduler(slots=1)
    run = started(engine, dispatched("a", 1, key="k"))
    engine.finish(run, ending)
    assert engine.find("a.1") is run
    assert started(engine, dispatched("a", 2, key="k")) is not run


def test_the_end_of_an_old_run_does_not_take_the_key_from_a_newer_one():
    engine = RunScheduler(slots=1, memory=ResultRetention(runs=1))
    first = started(engine, dispatched("a", 1, key="k"))
    engine.finish(first, ERROR)
    second = started(engine, dispatched("a", 1, key="k"))
    engine.finish(second, DONE)  # the first is forgotten here
    assert engine.find("a.1") is second
    assert engine.submit(dispatched("a", 2, key="k")) == AlreadyKnown(second)


def test_dispatcher_and_direct_callers_do_not_meet_under_one_key():
    engine = RunScheduler(slots=2)
    started(engine, dispatched(key="k"))
    started(engine, direct(key="k"))


def test_a_repeated_direct_call_does_not_wait_twice():
    engine = RunScheduler(slots=1)
    started(engine, direct())
    waiting = queued(engine, direct(key="k"))
    assert engine.submit(direct(key="k")) == AlreadyKnown(waiting)
    assert engine.health().direct_queue == 1


def test_the_newest_caller_gets_the_push():
    """After a crash of the dispatcher the token of the first attempt is worth nothing."""
    engine = RunScheduler(slots=1)
    run = started(engine, Call({}, key="k", callback=Callback("http://a/", "old")))
    engine.submit(Call({}, key="k", callback=Callback("http://a/", "new")))
    engine.submit(direct(key="k"))
    assert run.callback == Callback("http://a/", "new")


# Memory


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_ended_run_is_deleted_after_its_retention_time():
    clock = Clock()
    engine = RunScheduler(slots=1, memory=ResultRetention(age_s=60), clock=clock)
    engine.finish(started(engine, dispatched("a", 1, key="k")), DONE)
    clock.now += 60
    assert engine.find("a.1")
    clock.now += 1
    assert engine.find("a.1") is engine.find("a") is None
    started(engine, dispatched("a", 2, key="k"))


def test_a_run_in_progress_is_never_deleted():
    clock = Clock()
    engine = RunScheduler(slots=1, memory=ResultRetention(age_s=60), clock=clock)
    run = started(engine, dispatched("a", 1, key="k"))
    clock.now += 10_000
    assert engine.find("a.1") is run
    assert engine.submit(dispatched("a", 2, key="k")) == AlreadyKnown(run)


def test_only_the_newest_completed_runs_are_kept():
    engine = RunScheduler(slots=1, memory=ResultRetention(runs=2))
    for name in ("a", "b", "c"):
        engine.finish(started(engine, dispatched(name, 1)), DONE)
    assert [engine.find(name) is not None for name in ("a", "b", "c")] == [False, True, True]


def test_results_above_the_size_limit_are_deleted_except_the_newest():
    engine = RunScheduler(slots=1, memory=ResultRetention(result_bytes=100))
    for name in ("a", "b"):
        engine.finish(started(engine, dispatched(name, 1)), RunEnd(State.COMPLETED, result=b"x" * 200))
    assert engine.find("a") is None
    assert engine.find("b")


def test_a_deleted_run_leaves_no_entry_in_the_scheduler():
    engine = RunScheduler(slots=1, memory=ResultRetention(runs=1))
    for number in range(50):
        engine.finish(started(engine, dispatched(f"job-{number}", 1, key=f"key-{number}")), DONE)
    assert (len(engine._runs_by_id), len(engine._runs_by_key), engine._ended_bytes) == (2, 1, len(DONE.result))


def test_the_payload_is_not_kept_after_the_end():
    engine = RunScheduler(slots=1)
    run = started(engine, Call({"image": "…"}))
    engine.finish(run, DONE)
    assert run.payload is None


# Cancel and stop


def test_a_cancel_removes_a_waiting_run_and_only_notifies_a_running_one():
    engine = RunScheduler(slots=1)
    running, waiting = started(engine, dispatched("a", 1)), queued(engine)
    assert engine.cancel(waiting.id) is waiting
    assert waiting.state is State.CANCELED
    assert waiting.done.is_set()
    assert engine.cancel("a") is running
    assert running.cancel.is_set()
    assert running.state is State.PROCESSING
    assert engine.health().active == 1
    assert engine.finish(running, RunEnd(State.CANCELED)) is None


def test_a_cancel_of_nothing_is_none():
    assert RunScheduler(slots=1).cancel("x") is None


def test_a_stopping_scheduler_starts_no_run_and_still_returns_its_known_runs():
    engine = RunScheduler(slots=2, memory=ResultRetention())
    done = started(engine, dispatched(key="k"))
    engine.finish(done, DONE)
    running = [started(engine, dispatched()), started(engine, dispatched())]
    waiting = queued(engine)
    engine.close()
    assert waiting.state is State.CANCELED
    assert engine.submit(dispatched()) == engine.submit(direct()) == Stopping()
    assert engine.submit(dispatched(key="k")) == AlreadyKnown(done)
    assert not engine.wait_idle(0)
    for run in running:
        engine.finish(run, DONE)
    assert engine.wait_idle(0)


# Many at once


def test_slots_hold_under_threads():
    """SLOT-1: while a thread has a slot number, no other thread gets it."""
    engine, taken, trouble = RunScheduler(slots=3), [threading.Lock() for _ in range(3)], SimpleQueue()

    def work() -> None:
        for _ in range(500):
            decision = engine.submit(dispatched())
            if isinstance(decision, Started):
                if not taken[decision.run.slot].acquire(blocking=False):
                    trouble.put("two in one slot")
                    return
                taken[decision.run.slot].release()
                engine.finish(decision.run, DONE)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trouble.empty()
    assert engine.health().active == 0
    assert engine.health().max_active <= 3


class Sequences(RuleBasedStateMachine):
    """Any order of calls, ends and cancels keeps the four promises, checked against a plain list of what happened."""

    @initialize(slots=st.integers(1, 3), max_waiting=st.integers(0, 3))
    def begin(self, slots: int, max_waiting: int) -> None:
        self.engine, self.slots, self.max_waiting = RunScheduler(slots, max_waiting), slots, max_waiting
        self.running: list[Run] = []
        self.waiting: list[Run] = []
        self.completed: set[tuple[bool, str]] = set()

    @rule(dispatcher=st.booleans(), key=st.sampled_from([None, "x", "y"]))
    def submit(self, dispatcher: bool, key: str | None) -> None:
        full = len(self.running) == self.slots or bool(self.waiting)
        live = {run.key for run in self.running + self.waiting}
        match self.engine.submit(Call({}, dispatcher=dispatcher, key=key)):
            case Started(run):
                assert not full
                assert run.key is None or run.key not in live | self.completed
                self.running.append(run)
            case Queued(run, position):
                assert full
                assert not dispatcher
                self.waiting.append(run)
                assert position == len(self.waiting) <= self.max_waiting
            case AlreadyKnown(run):
                assert run in self.running + self.waiting or run.key in self.completed
            case Busy():
                assert full
                assert dispatcher
            case QueueFull():
                assert len(self.waiting) == self.max_waiting
                assert not dispatcher

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99), ending=st.sampled_from([DONE, ERROR]))
    def end(self, index: int, ending: RunEnd) -> None:
        run = self.running.pop(index % len(self.running))
        if ending is DONE and run.key:
            self.completed.add(run.key)
        next_run = self.engine.finish(run, ending)
        assert next_run is (self.waiting[0] if self.waiting else None)
        if next_run:
            self.running.append(self.waiting.pop(0))

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99))
    def cancel(self, index: int) -> None:
        self.engine.cancel(self.waiting.pop(index % len(self.waiting)).id)

    @invariant()
    def slots_are_not_shared(self) -> None:
        now = self.engine.health()
        assert sorted(now.job_ids) == sorted(run.job_id for run in self.running)
        assert len({run.slot for run in self.running}) == len(self.running) <= self.slots
        assert now.direct_queue == len(self.waiting) <= self.max_waiting


test_sequences: Callable = Sequences.TestCase
Sequences.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)
