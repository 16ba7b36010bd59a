"""Guards of workers and maintenance for when the database, Redis or the time is gone."""

from tests.faults.mutant import OUTAGES, WORKERS, Mutant

UNSUITED = "tests/faults/test_unsuited_redis.py::"

AWAY = [
    Mutant(
        "a Cluster is taken for a Redis",
        "what cannot work is refused at start",
        "slotkeeper/redis/suitability.py",
        "    return explain_not_single(redis) or explain_eviction(redis)",
        "    return explain_eviction(redis)",
        (f"{UNSUITED}test_every_process_refuses_it_at_start_with_one_sentence",),
        still=f"{UNSUITED}test_a_redis_that_is_away_is_not_refused",
    ),
    Mutant(
        "a process goes on with a Redis that evicts keys",
        "what cannot work is refused at start",
        "tasks/startup.py",
        "        _refuse(explain_unsuitable(redis))\n",
        "",
        (f"{UNSUITED}test_every_process_refuses_it_at_start_with_one_sentence",),
        still=f"{UNSUITED}test_a_redis_that_is_away_is_not_refused",
    ),
    Mutant(
        "a bare message is dropped while the database is away",
        "JOB-3",
        "tasks/inference.py",
        'raise Reject("the database is away", requeue=True)',
        'raise Reject("the database is away", requeue=False)',
        (f"{WORKERS}test_a_bare_message_goes_back_to_the_broker_when_the_database_stays_away",),
    ),
    Mutant(
        "a bare message does not wait for the database",
        "JOB-3",
        "tasks/inference.py",
        """        except UNAVAILABLE:
            this_worker().heartbeat.wait(_STORE_AGAIN_S)
    raise Reject""",
        """        except UNAVAILABLE:
            break
    raise Reject""",
        (f"{WORKERS}test_a_bare_message_waits_for_the_database_and_is_recorded_once",),
    ),
    Mutant(
        "a bare message is acknowledged before it is recorded",
        "JOB-3",
        "tasks/inference.py",
        "    acks_late = True",
        "    acks_late = False",
        ("tests/unit/test_pool.py::test_a_bare_message_is_a_task_in_a_thread_and_is_acknowledged_when_it_is_done",),
    ),
    Mutant(
        "a job that could not be started keeps its slot",
        "SLOT-2",
        "tasks/worker/executor.py",
        "await self._steps.free(Lease.from_offer(offer, self._owner), back=True, cooldown_ms=_START_AGAIN_MS)",
        "pass",
        (f"{WORKERS}test_a_job_that_cannot_be_started_goes_back_to_its_place_and_is_not_offered_at_once",),
    ),
    Mutant(
        "a run that could not be resumed is put back for all servers",
        "LEASE-1",
        "tasks/worker/executor.py",
        "        if offer.is_resumption:\n            return  #",
        "        if offer is None:\n            return  #",
        (f"{WORKERS}test_a_job_that_another_server_may_be_at_is_not_put_back_for_all_servers",),
    ),
    Mutant(
        "a job that could not be started is tried at once again",
        "SLOT-2",
        "tasks/worker/executor.py",
        "back=True, cooldown_ms=_START_AGAIN_MS)",
        "back=True)",
        (f"{WORKERS}test_a_job_that_cannot_be_started_goes_back_to_its_place_and_is_not_offered_at_once",),
    ),
    Mutant(
        "a slot that could not be freed waits until its lease expires",
        "SLOT-2",
        "tasks/worker/background_tasks.py",
        "                run_blocking(steps.free(lease, back=back, cooldown_ms=cooldown_ms))\n",
        "                pass\n",
        (f"{WORKERS}test_slot_2_a_slot_that_could_not_be_freed_is_freed_by_the_first_beat_that_can",),
    ),
    Mutant(
        "a run is tried again after its deadline",
        "time",
        "routing/dispatch/verdict.py",
        "case _ if overdue:",
        "case _ if overdue is None:",
        (f"{WORKERS}test_a_run_that_went_wrong_after_its_deadline_is_not_tried_again",),
    ),
    Mutant(
        "leases are reaped as soon as Redis is back",
        "LEASE-4",
        "routing/maintenance/reaper.py",
        "if self._until is None and away:",
        "if self._until is None and away is None:",
        (
            f"{OUTAGES}test_after_redis_was_away_living_workers_renew_before_anything_is_reaped",
            f"{OUTAGES}test_after_a_look_that_failed_living_workers_renew_before_anything_is_reaped",
        ),
    ),
    Mutant(
        "what a worker was not told while Redis was away it never hears",
        "JOB-1",
        "tasks/worker/background_tasks.py",
        "        if was_away:  #",
        "        if was_away is None:  #",
        (f"{WORKERS}test_what_a_worker_could_not_be_told_while_redis_was_away_it_reads_in_the_record",),
    ),
    Mutant(
        "an error that nobody foresaw takes a place of the worker for ever",
        "SLOT-2",
        "tasks/worker/executor.py",
        "        except Exception as error:  # Whatever",
        "        except (SlotkeeperError, RedisError) as error:  # Whatever",
        (f"{WORKERS}test_an_error_that_nobody_foresaw_costs_neither_the_job_nor_its_place_in_the_worker",),
    ),
    Mutant(
        "a run whose end fails is never shown as ended",
        "SLOT-2",
        "tasks/worker/executor.py",
        "        except Exception:  # The lease expires",
        "        except RedisError:  # The lease expires",
        (f"{WORKERS}test_a_run_whose_end_fails_as_nobody_foresaw_gives_its_place_back",),
    ),
    Mutant(
        "a start that was stored and not heard of counts as a crash",
        "LEASE-1",
        "tasks/worker/patient_io.py",
        "        while not (self._watch.lost or self._watch.stop):\n",
        "        while False:\n",
        (f"{WORKERS}test_a_job_whose_start_was_stored_and_not_heard_of_runs_and_costs_nothing",),
    ),
    Mutant(
        "a start that was not stored leaves its job in no place",
        "QUEUE-1",
        "routing/dispatch/run_steps.py",
        "        if job is not None and job.state is State.QUEUED:\n            raise",
        "        if job is None:\n            raise",
        (f"{WORKERS}test_a_job_whose_start_was_neither_stored_nor_heard_of_goes_back_to_its_place",),
    ),
    Mutant(
        "a worker goes on with a run that another has started",
        "LEASE-3",
        "routing/dispatch/run_steps.py",
        "if active is not None and active.lease.stored_text == lease.stored_text else None",
        "if active is not None else None",
        (f"{WORKERS}test_a_job_whose_start_was_not_heard_of_and_that_another_has_by_now_is_left_to_him",),
    ),
]
