"""Guards of the worker's loop, which must not wait, and of what is written in it."""

from tests.faults.mutant import WORKERS, Mutant

_DB = "tests/unit/jobs/test_db.py::"
_ENGINE = "tests/unit/test_engine.py::"
_PULSE = "tests/unit/test_pulse.py::"

LOOP = [
    Mutant(
        "the loop gives promises that the disk does not know",
        "JOB-2",
        "database/db.py",
        "if batch.committed is not None and all(write.relaxed for write in batch.writes):",
        "if batch.committed is not None:",
        (f"{_DB}test_who_must_not_wait_hears_what_was_promised_when_it_is_on_the_disk",),
    ),
    Mutant(
        "the loop writes beside the thread that leads",
        "time",
        "database/db.py",
        """            if self._led:
                return
            self._led = True
""",
        """            self._led = True
""",
        (f"{_DB}test_who_must_not_wait_leaves_it_to_others_while_a_thread_of_its_process_writes",),
    ),
    Mutant(
        "the loop waits for others who write",
        "time",
        "database/engines.py",
        "min(patience_s, left())",
        "patience_s",
        (f"{_DB}test_who_must_not_wait_does_not_wait_for_another_process_and_keeps_its_connection",),
    ),
    Mutant(
        "the loop waits until it is known what became of a commit",
        "time",
        "database/db.py",
        "            return [_uncertain(lost.reason) for _ in writes]  # To ask what came of it may take seconds.",
        "            self._fate_of(lost.mark)\n            return [_uncertain(lost.reason) for _ in writes]",
        (f"{_DB}test_who_must_not_wait_does_not_ask_what_became_of_a_commit",),
    ),
    Mutant(
        "the loop tries each end again on a disk that is full",
        "time",
        "database/db.py",
        "            self._is_doubted = True\n",
        "",
        (f"{_DB}test_after_a_commit_that_failed_who_must_not_wait_leaves_it_to_others_until_one_has_not",),
    ),
    Mutant(
        "after a commit that failed the loop never writes again",
        "time",
        "database/db.py",
        "            self._is_doubted = False\n            _fulfil",
        "            _fulfil",
        (f"{_DB}test_after_a_commit_that_failed_who_must_not_wait_leaves_it_to_others_until_one_has_not",),
    ),
    Mutant(
        "what the loop stored in part is stored again",
        "JOB-2",
        "database/db.py",
        "            batch.committed = self._tried(batch.writes)\n",
        "            batch.committed = [it for one in batch.writes for it in self._tried([one]) or [None]]\n",
        (f"{_DB}test_what_is_spoiled_at_once_is_stored_as_a_whole_or_not_at_all",),
    ),
    Mutant(
        "the loop writes however much there is",
        "time",
        "tasks/worker/engine.py",
        "        if len(asked) <= _MOST_AT_ONCE:\n",
        "        if True:\n",
        (f"{_ENGINE}test_so_much_that_the_loop_would_stand_still_is_done_by_the_thread",),
    ),
    Mutant(
        "the loop stands still for a large result",
        "time",
        "database/db.py",
        " or batch.size > _LARGEST_AT_ONCE",
        "",
        (f"{_DB}test_who_must_not_wait_leaves_much_to_others",),
    ),
    Mutant(
        "an end that the loop has written is told before it is on the disk",
        "JOB-1",
        "tasks/worker/engine.py",
        "        if turn.batch.answers is None:\n            self._turns.put(turn)\n",
        "        if turn.batch.committed is None:\n            self._turns.put(turn)\n",
        (f"{_ENGINE}test_what_was_done_in_the_loop_is_answered_when_the_thread_has_secured_it",),
    ),
    Mutant(
        "a run whose first word to the record failed ends unheard",
        "JOB-1",
        "tasks/worker/engine.py",
        "with suppress(Exception, asyncio.CancelledError):  # What",
        "if True:  # What",
        (f"{_ENGINE}test_a_run_hears_itself_that_what_it_asked_for_first_was_not_done",),
    ),
    Mutant(
        "a dead thread of the record is not missed",
        "JOB-3",
        "tasks/worker/engine.py",
        "(self._pulse, self._relaxed.pulse, self._durable.pulse)",
        "(self._pulse,)",
        (f"{WORKERS}test_a_worker_whose_thread_of_the_record_is_dead_ends_so_that_others_go_on_with_its_runs",),
    ),
    Mutant(
        "a worker whose heartbeat is dead goes on and takes more",
        "LEASE-1",
        "tasks/worker/background.py",
        "lambda: end_if_stopped(heartbeat)",
        "lambda: None",
        (f"{WORKERS}test_a_worker_whose_heartbeat_is_dead_ends",),
    ),
    Mutant(
        "a worker that takes very many jobs at once is taken for a dead one",
        "time",
        "tasks/worker/poller.py",
        "            self._pulse.beat()  # With much room, and a Redis that is far away, one look takes long.",
        "",
        (f"{_PULSE}test_a_poller_that_takes_very_many_jobs_in_one_look_is_not_taken_for_a_dead_one",),
    ),
    Mutant(
        "a process that was halted is taken for a dead one",
        "time",
        "tasks/pulse.py",
        "self._looks > _STOPPED_LOOKS and ",
        "",
        (f"{_PULSE}test_what_does_not_come_round_has_stopped_after_a_time_and_as_many_looks",),
    ),
]
