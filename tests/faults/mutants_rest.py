"""Guards of what an installation does without being asked, so that it costs little at rest."""

from tests.faults.mutant import Mutant

_BEAT = "tests/unit/test_embedded_beat.py::"

REST = [
    Mutant(
        "a worker goes on without its beat",
        "SLOT-2",
        "tasks/embedded_beat.py",
        "state.should_stop = 1",
        "state.should_stop = None",
        (f"{_BEAT}test_a_worker_whose_beat_has_ended_ends",),
    ),
    Mutant(
        "a long task of maintenance holds up beat",
        "SLOT-2",
        "tasks/embedded_beat.py",
        "self._threads.begin(entry.name, partial(self._run, entry))",
        "self._run(entry)",
        (f"{_BEAT}test_a_task_that_fails_or_takes_long_holds_up_no_other",),
    ),
    Mutant(
        "a task of maintenance that hangs takes a thread whenever it is due",
        "SLOT-2",
        "tasks/embedded_beat.py",
        "if name in self.lasting():",
        "if not name:",
        (f"{_BEAT}test_an_entry_that_hangs_takes_one_thread_however_often_it_is_due",),
        still=f"{_BEAT}test_an_entry_is_begun_again_after_its_end",
    ),
    Mutant(
        "a worker waits for beat that has failed, or hangs, to say that it has ended",
        "SLOT-2",
        "tasks/embedded_beat.py",
        "self._service.stop()",
        "self._service.stop(wait=True)",
        (
            f"{_BEAT}test_a_beat_that_fails_before_its_first_tick_ends_the_worker_and_lets_it_stop",
            f"{_BEAT}test_a_beat_whose_task_or_tick_hangs_stops_in_a_bounded_time",
        ),
        still=f"{_BEAT}test_a_beat_that_is_told_to_stop_is_no_failure",
    ),
    Mutant(
        "a worker that stops waits for a task of maintenance that hangs",
        "SLOT-2",
        "tasks/embedded_beat.py",
        "thread.join(max(until - time.monotonic(), 0))",
        "thread.join()",
        (f"{_BEAT}test_a_beat_that_fails_while_a_task_hangs_ends_the_worker_before_it_waits_for_that",),
        still=f"{_BEAT}test_a_beat_that_is_told_to_stop_is_no_failure",
    ),
    Mutant(
        "a process waits at its exit for a task of maintenance that hangs",
        "SLOT-2",
        "tasks/embedded_beat.py",
        "name=name, daemon=True)",
        "name=name)",
        (f"{_BEAT}test_a_task_that_hangs_does_not_keep_the_process_from_its_exit",),
        still=f"{_BEAT}test_a_beat_that_is_told_to_stop_is_no_failure",
    ),
]
