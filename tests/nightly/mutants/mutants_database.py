"""Commits and their outcomes; migrations."""

from tests.nightly.mutants.operators import Mutant, always, drop, never, swap, text_swap

MUTANTS = [
    Mutant(
        "the outcome of a lost commit is not looked up",
        "slotkeeper.db.group_commit:GroupCommit._resolve_lost_commit",
        never("found is CommitOutcome.COMMITTED"),
        kills=[
            "test_a_stored_submit_returns_its_job_although_the_commit_reply_was_lost",
            "test_a_failed_sqlite_commit_is_looked_up_before_the_write_returns",
        ],
        breaks="JOB-2",
        postgres=True,
    ),
    Mutant(
        "an answer does not wait for the disk",
        "slotkeeper.db.group_commit:GroupCommit._sync_and_wake",
        drop("self._sync_entries(durable)"),
        kills=["test_only_a_write_that_is_not_durable_skips_the_disk_sync"],
        breaks="JOB-2",
    ),
    Mutant(
        "a failing disk counts as having stored",
        "slotkeeper.db.group_commit:GroupCommit._sync_entries",
        drop("entry.fail(commit_unknown(first_line(error)))"),
        kills=["test_a_write_whose_sync_fails_is_reported_as_unknown"],
        breaks="JOB-3",
    ),
    Mutant(
        "a disk that has failed once is trusted",
        "slotkeeper.db.write_connection:LogFile._sync",
        never("rewrite"),
        kills=["test_after_a_failed_disk_sync_no_write_succeeds_before_the_log_is_rewritten"],
        breaks="JOB-3",
    ),
    Mutant(
        "readers open the log anew after its failure",
        "slotkeeper.db.write_connection:Writer.sync_for_readers",
        swap("self._open_log(path)", "LogFile(path)"),
        kills=["test_readers_do_not_trust_a_disk_that_failed_for_a_writer_before_all_was_written_again"],
        breaks="JOB-3",
    ),
    Mutant(
        "an unknown outcome is called a rejection",
        "slotkeeper.db.group_commit:GroupCommit._resolve_lost_commit",
        always("found is CommitOutcome.NOT_COMMITTED"),
        kills=["test_a_commit_without_a_reply_is_reported_as_unknown_and_the_same_request_finds_the_job"],
        breaks="JOB-3",
        postgres=True,
    ),
    Mutant(
        "a transaction whose COMMIT was lost keeps its locks",
        "slotkeeper.db.commit_outcome:find_outcome",
        drop("connection.execute("),
        kills=["test_a_commit_that_did_not_arrive_is_reported_as_not_stored_and_leaves_no_lock"],
        breaks="JOB-3",
        postgres=True,
    ),
    Mutant(
        "a transaction number of another server is trusted",
        "slotkeeper.db.commit_outcome:find_outcome",
        never("_by_witness(connection, of) is CommitOutcome.NOT_COMMITTED"),
        kills=["test_a_number_that_another_server_gave_again_proves_nothing"],
        breaks="JOB-3",
        postgres=True,
    ),
    Mutant(
        "a failed commit leaves its transaction open",
        "slotkeeper.db.group_commit:GroupCommit._transact",
        swap("self._writer.drop", "self._writer._keep"),
        kills=["test_a_commit_that_did_not_happen_on_sqlite_stored_nothing"],
        breaks="JOB-3",
    ),
    Mutant(
        "accepted jobs are not counted on PostgreSQL",
        "file:migrations/versions/0001_initial.py",
        text_swap("AFTER INSERT ON jobs", "AFTER UPDATE ON jobs"),
        kills=["test_job_3_a_job_that_vanished_behind_our_back_is_missed"],
        breaks="JOB-3",
        postgres=True,
    ),
    Mutant(
        "a group that was stored in part is stored again",
        "slotkeeper.db.group_commit:GroupCommit._commit_at_once",
        swap(
            "self._transact(run_units, time.monotonic())",
            "[self._transact(lambda tx, one=one: results.append(one.unit(tx)), time.monotonic()) for one in writes]",
        ),
        kills=["test_a_nonblocking_commit_stores_all_its_writes_or_none"],
        breaks="JOB-2",
    ),
    Mutant(
        "SQLite creates its files by the umask",
        "slotkeeper.db.sqlite:_make_private",
        drop("make_private_file(file)"),
        kills=["test_a_sqlite_database_and_its_wal_files_are_readable_only_by_their_owner"],
        breaks="private files",
        still="test_concurrent_first_readers_get_the_same_text",
    ),
    Mutant(
        "an audit entry may be changed",
        "file:migrations/versions/0001_initial.py",
        text_swap(
            'acts_are_not_changed BEFORE UPDATE ON events WHEN OLD.actor IS NOT NULL "',
            'acts_are_not_changed BEFORE UPDATE ON events WHEN OLD.id < 0 "',
        ),
        kills=["test_the_database_refuses_to_change_or_delete_an_audit_entry"],
        breaks="audit",
        still="test_acts_are_found_by_actor_server_model_and_time",
    ),
    Mutant(
        "events are written after the commit",
        "slotkeeper.db.group_commit:GroupCommit._transact",
        (
            swap("transaction.flush_inserts()", "TransactionMark(None, None)"),
            swap(
                "self._writer.commit(connection)",
                "self._writer.commit(connection)\n"
                "with self._inquirer.connect() as transaction.connection:\n"
                "    transaction.flush_inserts()",
            ),
        ),
        kills=[
            "test_job_2_a_transition_whose_event_cannot_be_written_did_not_happen",
            "test_job_2_an_end_whose_webhook_cannot_be_written_did_not_happen",
        ],
        breaks="JOB-2",
    ),
    Mutant(
        "a clock that is set moves no stored time",
        "slotkeeper.db.shared_clock:ClockSynchronizer._replace",
        swap("move_times(tx.connection, by_ms)", "0"),
        kills=["test_a_time_given_in_seconds_moves_with_the_clock_and_an_absolute_time_stays"],
        breaks="deadlines",
    ),
    Mutant(
        "after a step of the clock, retention counts from the new time",
        "slotkeeper.clock:Clock.ago_ms",
        swap("min(ago_ms - step.by_ms, step.at_ms)", "ago_ms"),
        kills=["test_a_step_of_years_deletes_no_ended_job_before_its_time"],
        breaks="retention",
    ),
    Mutant(
        "after a step back, new jobs count as old",
        "slotkeeper.clock:Clock.ago_ms",
        swap("min(ago_ms - step.by_ms, step.at_ms)", "ago_ms - step.by_ms"),
        kills=["test_after_a_step_back_no_new_job_is_deleted_early"],
        breaks="retention",
    ),
    Mutant(
        "a write by a clock that was set since is stored",
        "slotkeeper.db.group_commit:Write.run",
        swap("check.refuse(self.clock_offset_ms) or self.unit(transaction)", "self.unit(transaction)"),
        kills=[
            "test_a_process_that_has_not_received_the_clock_step_stores_nothing_by_its_old_clock",
            "test_a_write_that_waited_while_the_clock_was_set_is_refused",
        ],
        breaks="deadlines",
    ),
]
