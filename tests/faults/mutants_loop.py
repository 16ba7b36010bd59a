"""Guards of the worker's loop, which must not wait, and of what is written in it."""

from tests.faults.mutant import Mutant

_DB = "tests/unit/jobs/test_db.py::"
_ENGINE = "tests/unit/test_engine.py::"
_THREADS = "tests/unit/test_threads.py::"

LOOP = [
    Mutant(
        "the loop gives promises that the disk does not know",
        "JOB-2",
        "slotkeeper/db/group_commit.py",
        "if batch.committed is not None and all(write.relaxed for write in batch.writes):",
        "if batch.committed is not None:",
        (f"{_DB}test_who_must_not_wait_hears_what_was_promised_when_it_is_on_the_disk",),
    ),
    Mutant(
        "the loop writes beside the thread that leads",
        "time",
        "slotkeeper/db/group_commit.py",
        """            if self._has_leader:
                return
            self._has_leader = True
""",
        """            self._has_leader = True
""",
        (f"{_DB}test_who_must_not_wait_leaves_it_to_others_while_a_thread_of_its_process_writes",),
    ),
    Mutant(
        "the loop waits for others who write",
        "time",
        "slotkeeper/db/sqlite.py",
        "min(patience_s, time_left())",
        "patience_s",
        (f"{_DB}test_who_must_not_wait_does_not_wait_for_another_process_and_keeps_its_connection",),
    ),
    Mutant(
        "the loop waits until it is known what became of a commit",
        "time",
        "slotkeeper/db/group_commit.py",
        "            return [_uncertain(lost.reason) for _ in writes]  # To ask what came of it may take seconds.",
        "            self._fate_of(lost.mark)\n            return [_uncertain(lost.reason) for _ in writes]",
        (f"{_DB}test_who_must_not_wait_does_not_ask_what_became_of_a_commit",),
    ),
    Mutant(
        "the loop tries each end again on a disk that is full",
        "time",
        "slotkeeper/db/group_commit.py",
        "            self._must_reconnect = True\n",
        "",
        (f"{_DB}test_after_a_commit_that_failed_who_must_not_wait_leaves_it_to_others_until_one_has_not",),
    ),
    Mutant(
        "after a commit that failed the loop never writes again",
        "time",
        "slotkeeper/db/group_commit.py",
        "            self._must_reconnect = False\n            _fulfil",
        "            _fulfil",
        (f"{_DB}test_after_a_commit_that_failed_who_must_not_wait_leaves_it_to_others_until_one_has_not",),
    ),
    Mutant(
        "what the loop stored in part is stored again",
        "JOB-2",
        "slotkeeper/db/group_commit.py",
        "            batch.committed = self._tried(batch.writes)\n",
        "            batch.committed = [it for one in batch.writes for it in self._tried([one]) or [None]]\n",
        (f"{_DB}test_what_is_spoiled_at_once_is_stored_as_a_whole_or_not_at_all",),
    ),
    Mutant(
        "the loop writes however much there is",
        "time",
        "tasks/worker/event_loop.py",
        "        if len(asked) <= _MOST_AT_ONCE:\n",
        "        if True:\n",
        (f"{_ENGINE}test_so_much_that_the_loop_would_stand_still_is_done_by_the_thread",),
    ),
    Mutant(
        "the loop stands still for a large result",
        "time",
        "slotkeeper/db/group_commit.py",
        " or batch.size > _LARGEST_AT_ONCE",
        "",
        (f"{_DB}test_who_must_not_wait_leaves_much_to_others",),
    ),
    Mutant(
        "an end that the loop has written is told before it is on the disk",
        "JOB-1",
        "tasks/worker/event_loop.py",
        "        if turn.batch.answers is None:\n            self._turns.put(turn)\n",
        "        if turn.batch.committed is None:\n            self._turns.put(turn)\n",
        (f"{_ENGINE}test_what_was_done_in_the_loop_is_answered_when_the_thread_has_secured_it",),
    ),
    Mutant(
        "a run whose first word to the record failed ends unheard",
        "JOB-1",
        "tasks/worker/event_loop.py",
        "with suppress(Exception, asyncio.CancelledError):  # What",
        "if True:  # What",
        (f"{_ENGINE}test_a_run_hears_itself_that_what_it_asked_for_first_was_not_done",),
    ),
    Mutant(
        "a process goes on without a thread that has failed",
        "JOB-3",
        "tasks/threads.py",
        "                os._exit(os.EX_SOFTWARE)\n",
        "                pass\n",
        (f"{_THREADS}test_a_thread_that_fails_ends_its_process_and_says_which_it_was",),
    ),
    Mutant(
        "a worker goes on without a heartbeat",
        "LEASE-1",
        "tasks/worker/heartbeat.py",
        "threads.start_vital_thread(self.name, self._beat)",
        "threading.Thread(target=self._beat, daemon=True).start_vital_thread()",
        (f"{_THREADS}test_a_process_ends_when_a_thread_fails_that_it_cannot_do_without",),
    ),
]
