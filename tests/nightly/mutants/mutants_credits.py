"""Credits, prices and validations."""

from tests.nightly.mutants.operators import Mutant, never, swap

_CREDITS = "slotkeeper.jobs.credits"

MUTANTS = [
    Mutant(
        "a tenant reserves more than it has",
        f"{_CREDITS}:find_shortage",
        never("account.left < amount"),
        kills=["test_too_few_credits_refuse_all_jobs_of_a_submit_and_store_nothing"],
        breaks="CREDIT-1",
        still="test_a_job_holds_credits_until_its_end_charges_the_time_of_its_slot",
    ),
    Mutant(
        "failures are charged",
        f"{_CREDITS}:settle",
        swap("why in CHARGED_ENDS", "True"),
        kills=["test_a_run_that_ends_through_no_fault_of_the_customer_costs_nothing"],
        breaks="what a failure costs",
        still="test_a_job_holds_credits_until_its_end_charges_the_time_of_its_slot",
    ),
    Mutant(
        "a run that only waited for an earlier request is charged",
        f"{_CREDITS}:settle",
        swap("(was_answered or was_sent)", "True"),
        kills=["test_a_run_that_only_waited_for_an_earlier_request_costs_nothing"],
        breaks="what a failure costs",
    ),
    Mutant(
        "a deadline that was noticed late is charged",
        f"{_CREDITS}:_end_by_deadline",
        swap("seen_ms - row.deadline_ms <= _SEEN_WITHIN_MS", "True"),
        kills=["test_a_run_whose_passed_deadline_is_found_late_costs_nothing"],
        breaks="what an outage costs",
        still="test_a_run_that_its_deadline_ended_is_charged_until_the_deadline",
    ),
    Mutant(
        "a key whose job was deleted needs no credits",
        "slotkeeper.jobs.acceptance:_is_known",
        swap('JOB_STATE.fetch_first(connection, {"p_id": one}) is not None', "True"),
        kills=["test_a_key_whose_job_was_deleted_pays_again"],
        breaks="CREDIT-1",
    ),
    Mutant(
        "a job that ends is not settled",
        "slotkeeper.jobs.store:_add_consequences",
        never("row.reserved is not None and change.to in FINAL_STATES"),
        kills=["test_a_job_holds_credits_until_its_end_charges_the_time_of_its_slot"],
        breaks="CREDIT-1",
    ),
    Mutant(
        "a start raises the price",
        "slotkeeper.jobs.statements:_values",
        swap("jobs.c.price > _PRICE", "jobs.c.price != _PRICE"),
        kills=["test_a_start_lowers_the_price_to_that_of_its_server_and_never_raises_it"],
        breaks="prices",
    ),
    Mutant(
        "an earlier tenant's key names a later one's act",
        "slotkeeper.registry.credit_accounts:_reference",
        swap('f"{account.opened_ms} {act.reference}"', "act.reference"),
        kills=["test_the_transfers_of_an_earlier_tenant_of_the_same_name_are_carried_separately"],
        breaks="CREDIT-1",
    ),
    Mutant(
        "transfers of a stored job are added up",
        _CREDITS,
        swap("~exists().where(jobs.c.seq == transfers.c.seq)", "transfers.c.id > 0"),
        kills=["test_old_transfers_are_added_up_by_kind"],
        breaks="refunds",
    ),
    Mutant(
        "the last server of a model is drained",
        "routing.maintenance.validation_jobs:_judge_server",
        never("is_last"),
        kills=["test_a_server_that_is_often_wrong_is_drained_until_an_operator_resumes_it"],
        breaks="validation",
        still="test_few_wrong_answers_drain_nothing",
    ),
    Mutant(
        "what a server answered before it was resumed counts",
        "routing.maintenance.validation_jobs:_judge_server",
        swap("{server: found.changed_ms or 0}", "{}"),
        kills=["test_a_server_that_is_often_wrong_is_drained_until_an_operator_resumes_it"],
        breaks="validation",
        still="test_few_wrong_answers_drain_nothing",
    ),
]
