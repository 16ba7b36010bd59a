"""Guards of what is done about workers that were killed: only the end of a process is taken for one."""

from tests.faults.mutant import WORKERS, Mutant

_PROOF = "tests/unit/test_lifetimes.py::"
_KILLED = "tests/contracts/test_routing_killed.py::"
_ENDS = f"{_PROOF}test_who_ends_in_order_leaves_nothing"
_GOES_ON = f"{_KILLED}test_what_a_killed_worker_had_claimed_and_not_started_costs_the_job_nothing"


def _of_proof(name: str, old: str, new: str, *tests: str) -> Mutant:
    found = tuple(f"{_PROOF}{test}" for test in tests)
    return Mutant(name, "LEASE-4", "slotkeeper/process_locks.py", old, new, found, _ENDS)


def _of_reaper(name: str, breaks: str, old: str, new: str, *tests: str) -> Mutant:
    found = tuple(f"{_KILLED}{test}" for test in tests)
    return Mutant(name, breaks, "routing/maintenance/reaper.py", old, new, found, _GOES_ON)


KILLED = [
    _of_proof(
        "a process that lives is taken for dead",
        """                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return name""",
        "                    return name",
        "test_a_process_that_was_killed_is_proved_to_have_ended_and_one_that_is_stopped_is_not",
        "test_a_process_does_not_take_itself_for_dead",
    ),
    _of_proof(
        "a lock is believed of another kernel's process",
        "{self._kernel} {found",
        "{len(self._kernel) * 0} {found",
        "test_what_another_kernel_wrote_proves_nothing",
    ),
    _of_proof(
        "a copy of its file proves a living process dead",
        "{found.st_dev} {found.st_ino}",
        "{found.st_dev * 0} 0",
        "test_a_copy_of_a_living_processs_file_proves_nothing",
    ),
    _of_proof(
        "a process is found before it has its lock",
        """            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_locked(path):
                raise OSError(errno.ENOLCK, "Its file system does not keep locks")
            text = self._text(file, name)
            if os.write(file, text) != len(text):""",
        """            text = self._text(file, name)
            written = os.write(file, text)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_locked(path):
                raise OSError(errno.ENOLCK, "Its file system does not keep locks")
            if written != len(text):""",
        "test_nobody_who_looks_in_the_midst_of_a_beginning_takes_it_for_an_end",
    ),
    _of_proof(
        "locks are believed that nobody keeps",
        "if not _is_locked(path):\n                raise OSError(errno.ENOLCK",
        "if not path:\n                raise OSError(errno.ENOLCK",
        "test_on_a_file_system_that_keeps_no_locks_nobody_begins",
    ),
    _of_proof(
        "whoever can write a file can prove anybody dead",
        " and _is_ours(file):",
        ":",
        "test_a_file_that_others_could_have_written_proves_nothing",
    ),
    _of_proof(
        "a file by another's name proves an end",
        "if path == self._path(name) and text ==",
        "if text ==",
        "test_a_file_proves_the_end_of_whom_it_names_only",
    ),
    _of_proof(
        "what cannot be taken away is looked into for ever",
        "if name not in self._stuck]",
        "if name]",
        "test_what_cannot_be_taken_away_is_forgotten_all_the_same",
    ),
    _of_reaper(
        "leases of living workers are taken with those of a killed one",
        "LEASE-4",
        "for lease, _ in leases if lease.owner in killed]",
        "for lease, _ in leases if lease.owner]",
        "test_a_killed_workers_run_goes_on_at_once_on_its_slot_and_a_living_ones_is_not_touched",
        "test_a_slot_that_drains_and_what_another_reaper_has_seized_are_left_alone",
    ),
    _of_reaper(
        "a killed worker is forgotten before all rooms were looked through",
        "LEASE-1",
        "    if len(held) == len(fleets):",
        "    if len(held) <= len(fleets):",
        "test_a_killed_worker_is_not_forgotten_while_a_room_cannot_be_read",
    ),
    _of_reaper(
        "runs of a killed worker lose their slots in a room that is being filled",
        "SLOT-1",
        "for fleet, room in found.items() if room.open]",
        "for fleet, room in found.items() if room]",
        "test_a_room_that_is_being_filled_is_left_to_its_rebuild",
    ),
    _of_reaper(
        "a killed worker is forgotten by the look that finds its leases",
        "LEASE-1",
        "killed - running - {lease.owner for lease in theirs}",
        "killed - running",
        "test_what_a_killed_worker_sent_last_is_found_by_the_next_look",
        "test_a_killed_worker_is_not_forgotten_while_a_job_of_its_cannot_be_reaped",
    ),
    _of_reaper(
        "a run that has passed its slot on is waited for though its worker is dead",
        "SLOT-2",
        "running = restore_leases.restore_of(dispatcher, killed)",
        "running = set[str]()",
        "test_a_run_that_had_passed_its_slot_on_and_not_ended_is_not_waited_for",
    ),
    Mutant(
        "a killed worker is forgotten while the record has a run of its, whose job is offered again",
        "SLOT-2",
        "routing/maintenance/restore_leases.py",
        "return {run.lease.owner for runs in theirs.values() for run in runs}",
        "return set()",
        (f"{_KILLED}test_a_start_that_a_killed_worker_had_sent_and_that_comes_after_the_first_look_is_no_silence",),
        _GOES_ON,
    ),
    _of_reaper(
        "offers are made for the room of a worker that is dead",
        "SLOT-2",
        "        workers.remove(owner)",
        "        del owner",
        "test_a_killed_worker_has_no_room_from_then_on",
    ),
    Mutant(
        "a worker that ends under a run is forgotten",
        "LEASE-1",
        "tasks/worker/worker.py",
        "        if not self.concurrency.running:\n",
        "        if True:\n",
        (f"{WORKERS}test_a_worker_that_ends_under_a_run_is_proved_dead_when_its_process_has_ended",),
        f"{WORKERS}test_a_worker_that_ends_in_order_leaves_nothing_to_prove",
    ),
    Mutant(
        "a worker refuses to work where nobody could prove its end",
        "time",
        "slotkeeper/process_locks.py",
        "        except (OSError, SlotkeeperError) as error:\n            log.warning",
        "        except ZeroDivisionError as error:\n            log.warning",
        (f"{WORKERS}test_a_worker_whose_end_nobody_could_prove_works_all_the_same",),
        f"{WORKERS}test_a_worker_that_ends_in_order_leaves_nothing_to_prove",
    ),
    Mutant(
        "only a folder with a database proves the end of a worker",
        "time",
        "slotkeeper/process_locks.py",
        "if not is_state_folder(home) and not is_private_folder(home):",
        "if not is_state_folder(home):",
        ("tests/unit/test_lifetimes.py::test_a_private_folder_without_a_database_is_enough_for_the_proof",),
        f"{WORKERS}test_a_worker_that_ends_in_order_leaves_nothing_to_prove",
    ),
    Mutant(
        "a worker takes up all offers that a broker sends it",
        "SLOT-2",
        "tasks/worker/concurrency.py",
        "        if len(self._taken) >= self.limit:\n            return False\n",
        "",
        (f"{WORKERS}test_a_worker_takes_up_no_more_offers_than_it_has_room_for",),
        f"{WORKERS}test_a_worker_that_ends_in_order_leaves_nothing_to_prove",
    ),
    Mutant(
        "an error of ours at a run's end leaves the run to the reaper",
        "time",
        "tasks/worker/executor.py",
        "await self._end_run(own, _outcome_of_internal_error(error))",
        "raise",
        (f"{WORKERS}test_an_error_of_ours_at_a_runs_end_costs_the_job_nothing_and_is_told",),
        f"{WORKERS}test_a_run_whose_end_fails_as_nobody_foresaw_gives_its_place_back",
    ),
]
