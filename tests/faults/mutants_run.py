"""Guards of one run's life and end in its worker."""

from tests.faults.mutant import LEASES, RECORD, RUNS, SLOTS, USES, Mutant

RUN = [
    Mutant(
        "an unavailable record is taken for a run that the server lost",
        "LEASE-3",
        "tasks/inference.py",
        """    except RecordUnavailable:
        raise  # It""",
        """    except ZeroDivisionError:
        raise  # It""",
        (f"{RUNS}test_a_record_that_stays_away_ends_nothing_and_is_held_against_nobody",),
    ),
    Mutant(
        "the server's id is stored at the first try or never",
        "LEASE-3",
        "tasks/runner.py",
        "if not when_stored(lambda: self._store.note_remote(run.job.id, run.attempt, found, now_ms()), self._hold):",
        "if not self._store.note_remote(run.job.id, run.attempt, found, now_ms()):",
        (f"{RUNS}test_a_record_that_is_away_when_a_server_takes_the_job_up_costs_nothing",),
    ),
    Mutant(
        "a resumed run is given up unasked",
        "R113",
        "tasks/runner.py",
        "            return self._poll(server)\n        self._look_up()",
        "            return Outcome(Kind.PENDING, remote_id=self._remote_id)\n        self._look_up()",
        (f"{RUNS}test_a_resumed_run_is_asked_for_once_before_it_is_given_up",),
    ),
    Mutant(
        "a question about a run has no time when the run has none left",
        "R113",
        "tasks/runner.py",
        "deadline_s=max(self._call.deadline_s, _ASK_S)",
        "deadline_s=self._call.deadline_s",
        (f"{RUNS}test_a_resumed_run_that_has_not_ended_in_its_time_is_given_up",),
    ),
    Mutant(
        "a run that is another's is sent all the same",
        "SLOT-1",
        "tasks/runner.py",
        "        self._look_up()  # Nothing",
        "        # Nothing",
        (f"{RUNS}test_a_run_that_is_over_before_its_request_was_sent_does_not_send_it",),
    ),
    Mutant(
        "a stale worker tells what came of its run",
        "JOB-1",
        "tasks/inference.py",
        """    if settled.moved is None:
        return _ended_elsewhere(task)
    match settled.moved.to:""",
        """    if settled.moved is None:
        raise JobFailed(outcome.code, outcome.message)
    match settled.moved.to:""",
        (f"{RUNS}test_a_stale_worker_says_nothing_to_anybody",),
    ),
    Mutant(
        "a canceled job waits again when its run comes to nothing",
        "JOB-1",
        "jobs/moves.py",
        "    if state is State.RUNNING and edge(state, why).to in UNFINISHED:\n",
        "    if state is None:\n",
        (
            f"{RECORD}test_a_job_that_shall_be_canceled_is_canceled_when_its_run_comes_to_no_result",
            f"{USES}test_a_canceled_run_that_comes_to_no_result_is_canceled_and_waits_for_nothing",
        ),
    ),
    Mutant(
        "a job whose end was stored unheard is in no room",
        "QUEUE-1",
        "routing/dispatcher.py",
        "now_in = moved.to if moved is not None else self.store.state_of(run.job.id)",
        "now_in = moved.to if moved is not None else None",
        (f"{USES}test_a_settle_whose_answer_was_lost_leaves_its_job_in_its_place",),
    ),
    Mutant(
        "a lease that Redis does not know is lost",
        "LEASE-3",
        "tasks/inquiry.py",
        "    return found.state is State.RUNNING and found.lease == held.tag\n",
        "    return False\n",
        (
            f"{RUNS}test_a_lease_that_redis_lost_is_written_again_and_the_run_goes_on",
            f"{RUNS}test_a_run_whose_slot_was_given_away_meanwhile_goes_on_beside_and_has_the_slot_next",
        ),
    ),
    Mutant(
        "a lease that another has by now is written again",
        "LEASE-1",
        "tasks/inquiry.py",
        "return found.state is State.RUNNING and found.lease == held.tag",
        "return found.state is State.RUNNING",
        (f"{RUNS}test_a_lease_that_another_has_by_now_is_lost",),
    ),
    Mutant(
        "the heartbeat waits for the database",
        "LEASE-4",
        "tasks/inquiry.py",
        "        self._aside.ask()\n",
        "        self.look(self._asked)\n",
        (f"{RUNS}test_leases_are_renewed_in_time_though_the_database_is_silent",),
    ),
    Mutant(
        "a slot is free while an older run stands beside it",
        "SLOT-1",
        "routing/lua/lib/slots.lua",
        'if not is_online_slot(slot) or redis.call("HEXISTS", SLOTS, slot) == 1 then return end',
        "if not is_online_slot(slot) then return end",
        (
            f"{SLOTS}test_a_slot_that_came_back_while_it_was_leased_is_not_free_twice",
            f"{LEASES}test_a_lease_that_comes_back_to_a_slot_that_was_given_away_stands_beside_and_gets_it_next",
            f"{RUNS}test_a_run_whose_slot_was_given_away_meanwhile_goes_on_beside_and_has_the_slot_next",
        ),
    ),
    Mutant(
        "a run that ended while its lease was written again holds a slot",
        "SLOT-2",
        "routing/runs.py",
        "    _free_ended(dispatcher, missing)\n",
        "",
        (f"{RUNS}test_a_run_that_ends_while_its_lease_is_written_again_leaves_none",),
    ),
    Mutant(
        "a run that began while its room was rebuilt has no lease",
        "LEASE-1",
        "routing/reconcile/room.py",
        "    dispatcher.leases.restore(fleet, runs.recorded(dispatcher)[fleet])\n    if",
        "    if",
        (f"{RUNS}test_a_run_that_began_while_its_room_was_rebuilt_keeps_its_slot",),
    ),
    Mutant(
        "a run that has waited for a thread is sent without a look",
        "SLOT-1",
        "tasks/worker.py",
        "        self.inquiry.look({hold: True})\n",
        "",
        (f"{RUNS}test_a_run_that_waited_long_for_a_thread_is_sent_only_if_it_is_still_ours",),
    ),
    Mutant(
        "a call whose line was cut is judged as the server's own end of it",
        "SLOT-1",
        "tasks/servers/client.py",
        "if isinstance(reply, Broken) and line is not None and line.is_cut:",
        "if isinstance(reply, Broken) and line is not None and line.is_cut is None:",
        ("tests/unit/servers/test_client.py::test_a_call_that_is_cut_ends_at_once_and_leaves_the_outcome_unknown",),
    ),
]
