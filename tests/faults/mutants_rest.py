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
        "self._threads.submit(self._run, entry)",
        "self._run(entry)",
        (f"{_BEAT}test_a_task_that_fails_or_takes_long_holds_up_no_other",),
    ),
]
