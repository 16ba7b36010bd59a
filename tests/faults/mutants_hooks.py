"""Guards of a webhook's pace, of callbacks that were given up, and of what anybody may send to the door."""

from tests.faults.mutant import Mutant

RECORD = "tests/contracts/test_record_receivers.py::"
CALLBACKS = "tests/contracts/test_record_webhooks.py::"
UNDER_WAY = "tests/faults/test_receivers.py::"
API = "tests/contracts/test_api_webhooks.py::"
PAGE_TESTS = "tests/contracts/test_page.py::"
ERRORS = "tests/contracts/test_api_errors.py::"
ADMIN = "tests/contracts/test_api_admin.py::"

PACED = [
    # -- pace ------------------------------------------------------------------------------------------------
    Mutant(
        "a message goes out before its turn",
        "pace",
        "tasks/webhooks/message_delivery.py",
        "        if (early_ms := message.send_ms - now_ms()) > 0:",
        "        if (early_ms := message.send_ms - now_ms()) > 1e9:",
        (f"{UNDER_WAY}test_a_message_is_sent_when_its_turn_comes",),
        still=f"{UNDER_WAY}test_two_processes_tell_each_message_once",
    ),
    Mutant(
        "a receiver's pace holds up to any time",
        "pace",
        "slotkeeper/outbox/subscriptions.py",
        "update(receivers).where(whose, receivers.c.paced_until_us <= claim_horizon_us(now_ms))",
        "update(receivers).where(whose)",
        (f"{RECORD}test_messages_are_as_far_apart_as_the_pace_says_however_many_processes_send",),
        still=f"{RECORD}test_who_finds_nothing_to_send_takes_no_turn",
    ),
    Mutant(
        "who finds nothing to send keeps the turn",
        "pace",
        "slotkeeper/outbox/webhook_messages.py",
        "            self.receivers.return_send_time(tx, receiver_id, turn)\n",
        "",
        (f"{RECORD}test_who_finds_nothing_to_send_takes_no_turn",),
        still=f"{RECORD}test_a_success_closes_the_breaker",
    ),
    # -- given up --------------------------------------------------------------------------------------------
    Mutant(
        "a callback that was given up is anybody's",
        "tenants",
        "slotkeeper/outbox/redelivery.py",
        "    return () if tenant is None else (unindexed(jobs.c.tenant) == tenant,)",
        "    return ()",
        (
            f"{CALLBACKS}test_what_was_given_up_is_listed_by_when_its_job_ended_and_to_its_own_tenant",
            f"{CALLBACKS}test_one_that_was_given_up_is_sent_once_more_under_its_id_and_only_for_its_own_tenant",
            f"{API}test_callbacks_that_were_given_up_are_shown_and_sent_again_to_their_own_tenant",
        ),
        still=f"{CALLBACKS}test_a_job_stays_while_its_callback_is_sent_once_more",
    ),
    Mutant(
        "all callbacks of anybody are sent once more",
        "tenants",
        "slotkeeper/outbox/redelivery.py",
        "which if tenant is None else which & (_tenant == tenant)",
        "which",
        (f"{CALLBACKS}test_all_given_up_since_a_time_are_sent_once_more_each_once",),
        still=f"{CALLBACKS}test_a_job_stays_while_its_callback_is_sent_once_more",
    ),
    Mutant(
        "a callback that is being sent is sent beside that",
        "HOOK-1",
        "slotkeeper/outbox/webhook_messages.py",
        ".where(*there, IS_GIVEN_UP)",
        ".where(*there)",
        (f"{CALLBACKS}test_a_callback_that_is_being_sent_is_not_sent_beside_that",),
        still=f"{CALLBACKS}test_a_job_stays_while_its_callback_is_sent_once_more",
    ),
    # -- the door --------------------------------------------------------------------------------------------
    Mutant(
        "a NUL in an address reaches the record",
        "door",
        "app/request_json.py",
        "    for field, text in (seen.view_args or {}).items():\n",
        "    for field, text in {}.items():\n",
        (f"{ERRORS}test_a_nul_in_a_name_is_refused_before_the_record_is_asked",),
        still=f"{ERRORS}test_a_nul_in_a_form_is_refused",
    ),
    Mutant(
        "a NUL in a query reaches the record",
        "door",
        "app/request_json.py",
        "    for field, texts in seen.args.lists():\n        reject_nul_in(field, *texts)\n",
        "",
        (f"{ERRORS}test_a_nul_in_a_query_is_refused_by_name_before_the_record_is_asked",),
        still=f"{ERRORS}test_a_nul_in_a_form_is_refused",
    ),
    Mutant(
        "a copied cookie outlives its log-out",
        "page",
        "app/page/login.py",
        "    if visit is not None and visit.key_hash and RevokedSessions(database()).is_revoked(visit.id):\n",
        "    if False:\n",
        (f"{PAGE_TESTS}test_a_copied_cookie_opens_nothing_after_log_out",),
        still=f"{PAGE_TESTS}test_a_key_opens_a_visit_and_log_out_ends_it",
    ),
    Mutant(
        "a stream goes on after the log-out of its visit",
        "page",
        "app/auth/session_cookie.py",
        "if visit is not None and visit.id not in self._ended else",
        "if visit is not None else",
        (f"{PAGE_TESTS}test_turns_are_given_to_no_visit_that_a_log_out_has_ended",),
        still=f"{PAGE_TESTS}test_a_key_opens_a_visit_and_log_out_ends_it",
    ),
    Mutant(
        "wrong keys are heard out without end",
        "page",
        "app/page/attempts.py",
        "if self._wrong[address] >= _MOST_OF_ADDRESS or self._wrong.total() >= _MOST_OF_ALL:",
        "if False:",
        (f"{PAGE_TESTS}test_wrong_keys_are_heard_out_ten_times_a_minute_and_a_right_one_always",),
        still=f"{PAGE_TESTS}test_a_wrong_key_opens_nothing",
    ),
    Mutant(
        "each question after readiness is a look of its own",
        "bounds",
        "app/readiness.py",
        "if self._clock() >= self._until:",
        "if True:",
        (f"{ERRORS}test_however_many_ask_at_once_one_looks",),
        still=f"{ERRORS}test_a_look_that_fails_is_nobody_elses_answer",
    ),
    Mutant(
        "the dead of one model are those of all",
        "dlq",
        "app/api/dlq.py",
        "model=model_filter(query.model), limit=_AT_ONCE + 1)",
        "limit=_AT_ONCE + 1)",
        (f"{ADMIN}test_all_dead_jobs_of_one_model_are_retried_and_no_others",),
        still=f"{ADMIN}test_all_dead_jobs_are_retried_in_the_order_of_their_acceptance",
    ),
]
