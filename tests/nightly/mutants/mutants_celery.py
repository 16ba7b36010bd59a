"""Celery's messages and results."""

from tests.nightly.mutants.operators import Mutant, swap, swap_argument

MUTANTS = [
    Mutant(
        "a bare message is dropped while the database is away",
        "tasks.inference:_retry_while_away",
        swap_argument("requeue=True", "requeue=False"),
        kills=["test_a_bare_message_goes_back_to_the_broker_when_the_database_stays_away"],
        breaks="JOB-3",
    ),
    Mutant(
        "a bare message is acknowledged before it is stored",
        "tasks.inference:InferTask",
        swap("acks_late = True", "acks_late = False"),
        kills=["test_a_bare_message_is_a_task_in_a_thread_and_is_acknowledged_when_it_is_done"],
        breaks="JOB-3",
    ),
    Mutant(
        "an offer from the wire may claim to be the worker's own",
        "tasks.offer_messages:read_offer",
        swap("Offer(**fields)", 'Offer(**fields, owner=found.get("owner", ""))'),
        kills=["test_an_offer_from_the_wire_is_open_whatever_it_says_of_its_owner"],
        breaks="LEASE-4",
        still="test_a_wake_up_carries_its_offer",
    ),
    Mutant(
        "a worker ends when the broker refuses a command",
        "celeryconfig",
        swap("broker_channel_error_retry = True", "broker_channel_error_retry = False"),
        kills=["test_redis_answers_and_refuses_writes"],
        breaks="outages",
    ),
    Mutant(
        "a revoked wake-up is dropped",
        "tasks.inference:InferRequest.revoked",
        swap("return False", "return super().revoked()"),
        kills=["test_no_message_of_a_job_is_dropped_as_revoked"],
        breaks="SLOT-2",
        still="test_a_wake_up_goes_to_the_loop_and_leaves_nothing_with_celery",
    ),
    Mutant(
        "a malformed message ends the worker",
        "tasks.extensions.consumer:Consumer.create_task_handler",
        swap("self._reject(message, error)", "raise"),
        kills=["test_no_message_ends_a_worker_or_is_read_twice"],
        breaks="JOB-3",
        still="test_no_broadcast_ends_a_worker",
    ),
    Mutant(
        "a failed message is reported under the id of a job",
        "tasks.extensions.consumer:_report_failure",
        swap("dispatcher().store.get_state(str(request.id)) is None", "request.id"),
        kills=["test_a_message_with_the_id_of_a_job_changes_nothing_about_it"],
        breaks="JOB-1",
        still="test_no_broadcast_ends_a_worker",
    ),
    Mutant(
        "a message is unpacked without limit",
        "tasks.extensions.transport:_bounded",
        swap("one.decompress(packed, MAX_DECOMPRESSED_BYTES + 1)", "one.decompress(packed)"),
        kills=["test_what_does_not_is_refused_and_never_whole"],
        breaks="limits",
        still="test_what_fits_is_unpacked",
    ),
    Mutant(
        "a model's own retry settings are ignored",
        "tasks.retries:with_task_options",
        swap("options.keys() - config.model_fields_set", "options.keys()"),
        kills=["test_what_the_model_sets_comes_before_what_the_task_says"],
        breaks="charges",
        still="test_celery_computes_the_waits",
    ),
]
