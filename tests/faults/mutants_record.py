"""Guards of the record against lost answers, silent servers and what others hold."""

from tests.faults.mutant import WORKERS, Mutant

DB = "tests/unit/jobs/test_db.py::"
COMMIT = "tests/contracts/test_record_uncertain.py::"
TOGETHER = "tests/contracts/test_record_together.py::"
MASS = "tests/contracts/test_record_mass.py::"

KEPT = [
    Mutant(
        "a lost answer is not asked for",
        "JOB-2",
        "database/db.py",
        "if found is Fate.STORED:",
        "if found is None:",
        (
            f"{COMMIT}test_a_submit_that_was_stored_is_answered_as_stored_though_the_answer_was_lost",
            f"{COMMIT}test_a_commit_that_fails_on_sqlite_is_looked_up_before_anybody_is_answered",
        ),
        postgres=True,
    ),
    Mutant(
        "who is told of a commit keeps others from the disk",
        "JOB-2",
        "database/db.py",
        """                    batch[0].tell()
            finally:
                self._secure_and_wake(batch)
""",
        """                    batch[0].tell()
                self._secure_and_wake(batch)
            finally:
                pass
""",
        (f"{DB}test_who_is_told_of_a_commit_and_fails_at_it_keeps_nobody_from_the_disk",),
        still=f"{DB}test_who_asks_for_it_is_told_when_all_see_it_and_before_the_disk_is_waited_for",
    ),
    Mutant(
        "what is not stored is told as committed",
        "JOB-2",
        "database/db.py",
        "        if self.done and self.error is None:\n            tell,",
        "        if self.done:\n            tell,",
        (f"{DB}test_each_who_shares_a_commit_is_told_once_and_of_what_is_refused_nobody",),
    ),
    Mutant(
        "Redis waits until the disk has a job",
        "time",
        "database/db.py",
        "                    batch[0].tell()\n",
        "                    pass\n",
        (f"{DB}test_who_asks_for_it_is_told_when_all_see_it_and_before_the_disk_is_waited_for",),
    ),
    Mutant(
        "an answer does not wait for the disk",
        "JOB-2",
        "database/db.py",
        "                self._secure(promised)\n",
        "                pass\n",
        (f"{DB}test_only_what_nobody_was_promised_does_not_wait_for_the_disk",),
    ),
    Mutant(
        "a failing disk is taken for one that has stored",
        "JOB-3",
        "database/db.py",
        "                ticket.fail(_uncertain(_reason(error)))\n            if not",
        "                pass\n            if not",
        (f"{DB}test_what_the_disk_may_not_have_is_not_called_stored_nor_refused",),
    ),
    Mutant(
        "a disk that has failed once is believed",
        "JOB-3",
        "database/writer.py",
        "            self._failed = True\n",
        "            pass\n",
        (f"{DB}test_a_disk_that_failed_once_is_not_believed_before_all_was_written_anew",),
    ),
    Mutant(
        "who cannot write anew after the disk failed is not called uncertain",
        "JOB-3",
        "database/engines.py",
        "    except SQLAlchemyError as error:\n",
        "    except ZeroDivisionError as error:\n",
        (f"{DB}test_what_cannot_be_written_anew_after_the_disk_failed_is_uncertain",),
    ),
    Mutant(
        "who goes away keeps the lead",
        "JOB-3",
        "database/db.py",
        "        if any(ticket.leads and not ticket.done for ticket in tickets):\n",
        "        if False:\n",
        (f"{DB}test_who_is_interrupted_while_it_waits_keeps_nobody_from_writing",),
    ),
    Mutant(
        "an unknown is called a no",
        "JOB-3",
        "database/db.py",
        "elif found is Fate.NOT_STORED:",
        "else:",
        (f"{COMMIT}test_what_cannot_be_found_out_is_said_to_be_unknown_and_the_same_request_finds_the_job",),
        postgres=True,
    ),
    Mutant(
        "a transaction whose COMMIT did not arrive keeps its locks",
        "JOB-3",
        "database/fate.py",
        'connection.execute(_END_BACKEND, {"number": of.number})',
        "pass",
        (f"{COMMIT}test_what_was_not_stored_is_refused_as_such_and_leaves_no_lock_behind",),
        postgres=True,
    ),
    Mutant(
        "another server's number is believed",
        "JOB-3",
        "database/fate.py",
        "return Fate.NOT_STORED if _by_witness(connection, of) is Fate.NOT_STORED else Fate.STORED",
        "return Fate.STORED",
        (f"{COMMIT}test_a_number_that_another_server_gave_again_proves_nothing",),
        postgres=True,
    ),
    Mutant(
        "a settle that had succeeded is taken for somebody else's",
        "JOB-1",
        "jobs/store.py",
        "if (unheard := self._stored_unheard(tx, run)) is not None:",
        "if (unheard := None) is not None:",
        (f"{COMMIT}test_a_settle_of_unknown_outcome_that_is_asked_again_is_not_taken_for_somebody_elses",),
        postgres=True,
    ),
    Mutant(
        "a commit that failed leaves its transaction open",
        "JOB-3",
        "database/db.py",
        "self._writer.drop(connection)",
        "self._writer._keep(connection)",
        (f"{COMMIT}test_a_commit_that_did_not_happen_on_sqlite_stored_nothing",),
    ),
    Mutant(
        "what was interrupted keeps its transaction as long as its error lasts",
        "JOB-3",
        "database/prepared.py",
        "            cursor.close()",
        "            pass",
        (f"{DB}test_who_is_interrupted_between_a_statement_and_its_answer_keeps_nobody_from_writing",),
    ),
    Mutant(
        "who writes for several waits for a lock as long as for one",
        "JOB-3",
        "database/db.py",
        "            engines.hurry(transaction.connection)\n",
        "",
        (f"{TOGETHER}test_one_end_whose_job_is_locked_by_somebody_fails_alone_and_the_others_are_stored_in_time",),
        postgres=True,
    ),
    Mutant(
        "a connection that was busy is given up",
        "time",
        "database/writer.py",
        "if engines.is_busy(error):",
        "if error is None:",
        (f"{DB}test_who_must_not_wait_does_not_wait_for_another_process_and_keeps_its_connection",),
    ),
    Mutant(
        "what was begun and failed is kept",
        "JOB-3",
        "database/writer.py",
        "            undo(connection)\n        finally:\n            engines.end_writer(connection)\n",
        "            pass\n        finally:\n            self._keep(connection)\n",
        (f"{TOGETHER}test_one_end_that_cannot_be_stored_fails_alone_and_costs_the_others_few_commits",),
    ),
    Mutant(
        "of two starts of one job in one transaction both are told that it is theirs",
        "LEASE-1",
        "database/db.py",
        "1 < len(group) == len({write.about for write in group})",
        "1 < len(group)",
        (
            "tests/contracts/test_record_commit.py::"
            "test_of_two_transitions_of_one_job_in_one_group_only_the_first_counts",
        ),
        still=f"{TOGETHER}test_ends_that_come_together_take_no_more_statements_than_one",
    ),
    Mutant(
        "whoever shares a statement with one that fails is committed by himself",
        "time",
        "database/db.py",
        "self._commit(group, until, singly=True)",
        "self._commit(group, until)",
        (f"{TOGETHER}test_one_end_that_cannot_be_stored_fails_alone_and_costs_the_others_few_commits",),
    ),
    Mutant(
        "an end that was stored unheard is taken for somebody else's when it is asked again among others",
        "JOB-1",
        "jobs/store.py",
        "return None if is_open else",
        "return",
        (f"{TOGETHER}test_an_end_that_was_stored_unheard_is_told_so_when_it_is_asked_again_among_others",),
        still=f"{TOGETHER}test_ends_that_come_together_take_no_more_statements_than_one",
    ),
    Mutant(
        "a start of unknown outcome is put back",
        "LEASE-1",
        "tasks/worker.py",
        "if isinstance(error, RecordUncertain):",
        "if error is None:",
        (f"{WORKERS}test_a_job_whose_start_may_have_been_stored_keeps_its_lease_until_the_reaper_has_looked",),
    ),
    Mutant(
        "what somebody is changing is waited for",
        "time",
        "jobs/store.py",
        "with_for_update(skip_locked=True)",
        "with_for_update()",
        (f"{MASS}test_a_job_that_somebody_is_just_canceling_holds_up_no_other_that_is_due",),
    ),
    Mutant(
        "a connection that went away since the last write refuses the next",
        "JOB-3",
        "database/db.py",
        "isinstance(error, IntegrityError) or _was_lost(error)",
        "isinstance(error, IntegrityError)",
        (
            "tests/contracts/test_record_commit.py::"
            "test_a_connection_that_was_lost_between_two_writes_is_replaced_before_anybody_hears_of_it",
        ),
        postgres=True,
    ),
    Mutant(
        "an answer that was interrupted is read by the next",
        "JOB-3",
        "database/prepared.py",
        "lost = not isinstance(error, Exception)",
        "lost = False",
        ("tests/unit/jobs/test_prepared.py::test_a_connection_that_was_interrupted_is_used_no_more",),
    ),
    Mutant(
        "on PostgreSQL nobody counts what is accepted",
        "JOB-3",
        "migrations/versions/0007_accepted.py",
        "AFTER INSERT ON jobs",
        "AFTER UPDATE ON jobs",
        ("tests/contracts/test_record_ledger.py::test_job_3_a_job_that_vanished_behind_our_back_is_missed",),
        postgres=True,
    ),
]
