"""What is decided of a job and its run; what is accepted."""

from tests.nightly.mutants.operators import Mutant, never, swap

MUTANTS = [
    Mutant(
        "a run is retried after its deadline",
        "routing.dispatch.decision:_reason_of",
        never("run.is_overdue(now_ms)"),
        kills=["test_a_run_that_went_wrong_after_its_deadline_is_not_tried_again"],
        breaks="deadlines",
    ),
    Mutant(
        "a start that was not stored leaves its job outside the queue",
        "routing.dispatch.run_steps:RunSteps.find_stored_start",
        swap("job is not None and job.state is State.QUEUED", "job is None"),
        kills=["test_a_job_whose_start_was_neither_stored_nor_heard_of_goes_back_to_its_place"],
        breaks="QUEUE-1",
    ),
    Mutant(
        "a worker goes on with a run that another has started",
        "routing.dispatch.run_steps:RunSteps.find_stored_start",
        swap("active is not None and active.lease.stored_text == lease.stored_text", "active is not None"),
        kills=["test_a_job_whose_start_was_not_heard_of_and_that_another_has_by_now_is_left_to_him"],
        breaks="LEASE-3",
    ),
    Mutant(
        "the cancel of a running job is not audited",
        "routing.dispatch.dispatcher:Dispatcher.cancel",
        swap("self.store.request_cancel(job_id, now, canceling.write)", "self.store.request_cancel(job_id, now)"),
        kills=["test_who_cancels_or_retries_a_job_is_noted_once"],
        breaks="audit",
    ),
    Mutant(
        "the slot of a result that is read once goes on before that is stored",
        "routing.dispatch.decision:decide",
        swap(
            "server_keeps_result and quarantine is None and reason in _FREES_SLOT_FIRST",
            "quarantine is None and reason in _FREES_SLOT_FIRST",
        ),
        kills=["test_a_result_that_its_server_has_no_more_is_stored_before_the_slot_goes_on"],
        breaks="JOB-1",
        still="test_a_server_that_cannot_be_asked_by_it_needs_no_note",
    ),
    Mutant(
        "a job whose end was stored without an answer is not queued",
        "routing.dispatch.run_steps:RunSteps.give_up",
        swap(
            "self.free(lease, return_to_lane=is_queued, claimant=claimant)",
            "self.free(lease, return_to_lane=False, claimant=claimant)",
        ),
        kills=["test_a_settle_whose_answer_was_lost_leaves_its_job_in_its_place"],
        breaks="QUEUE-1",
    ),
    Mutant(
        "a run that its server may still execute frees its slot",
        "routing.dispatch.run_steps:RunSteps.release",
        swap("decision.quarantine is not None", "decision.quarantine is None and decision.resume_in_slot"),
        kills=["test_slot_1_a_slot_is_withheld_until_its_servers_report_no_longer_shows_the_run"],
        breaks="SLOT-1",
    ),
    Mutant(
        "leaving a lease frees a quarantined slot",
        "routing.dispatch.run_steps:RunSteps.give_up",
        swap("quarantined.slot == lease.slot", "quarantined.slot != lease.slot"),
        kills=[
            "test_slot_1_a_slot_is_withheld_until_its_servers_report_no_longer_shows_the_run",
            "test_a_worker_that_dies_when_the_end_is_written_leaves_a_slot_that_drains",
        ],
        breaks="SLOT-1",
    ),
    Mutant(
        "a slot waits until the last result is stored",
        "routing.dispatch.decision:decide",
        swap("server_keeps_result and quarantine is None and reason in _FREES_SLOT_FIRST", "False"),
        kills=["test_the_slot_of_a_run_whose_server_has_answered_does_not_wait_for_the_record"],
        breaks="SLOT-2",
    ),
    Mutant(
        "a slot is passed on before its job has come back",
        "routing.dispatch.decision:decide",
        swap("server_keeps_result and quarantine is None and reason in _FREES_SLOT_FIRST", "True"),
        kills=["test_a_slot_whose_job_comes_back_or_whose_server_is_at_it_waits_for_the_record"],
        breaks="SLOT-1",
    ),
    Mutant(
        "a batch of the same name shows another tenant's jobs",
        "slotkeeper.jobs.batches:Batches.find",
        never("tenant is not None"),
        kills=["test_two_tenants_that_name_the_same_batch_share_nothing"],
        breaks="authorization",
        still="test_batches_are_listed_page_by_page_the_newest_first",
    ),
    Mutant(
        "a job that kills its workers never ends",
        "routing.dispatch.decision:crash_reason",
        never("crashes + 1 >= config.max_crashes"),
        kills=[
            "test_the_last_of_max_crashes_makes_a_job_dead",
            "test_a_job_under_which_workers_keep_dying_is_set_aside_as_poison",
        ],
        breaks="charges",
    ),
    Mutant(
        "a job is retried for ever",
        "routing.dispatch.decision:_reason_of",
        never("run.failures >= config.max_retries"),
        kills=[
            "test_a_job_is_run_once_and_then_retried_as_often_as_allowed",
            "test_after_max_retries_a_job_is_dead_and_revived_it_has_all_of_them_again",
        ],
        breaks="charges",
    ),
]
