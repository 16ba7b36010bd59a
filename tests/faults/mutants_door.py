"""Guards of the API: bodies, connections, threads."""

from tests.faults.mutant import Mutant

ASKED = "tests/contracts/test_api_submit.py::"
READING = "tests/unit/app/test_reading.py::"
HALL = "tests/unit/web/test_hall.py::"
CROWD = "tests/unit/web/test_crowd.py::"
EXACT = "tests/unit/routing/test_exact.py::"
ACCESS = "tests/contracts/test_api_door.py::"
ALIVE = f"{ASKED}test_a_submitted_job_is_in_the_record_when_it_is_answered"

DOOR = [
    Mutant(
        "a body that broke off passes for a whole one",
        "all or none",
        "app/api/reading.py",
        "if announced is not None and len(body) != announced:",
        "if False:",
        (f"{ASKED}test_a_body_that_broke_off_is_refused_whole",),
        still=ALIVE,
    ),
    Mutant(
        "lines are taken without knowing their end",
        "all or none",
        "app/api/reading.py",
        "if request.content_length is None and not request.environ.get(WHOLE):",
        "if False:",
        (f"{ASKED}test_lines_of_which_nobody_knows_the_end_are_refused",),
        still=ALIVE,
    ),
    Mutant(
        "a batch has no end",
        "linear cost",
        "app/api/batch.py",
        "if index == MOST:",
        "if False:",
        (f"{ASKED}test_a_thousand_jobs_are_a_batch",),
        still=ALIVE,
    ),
    Mutant(
        "a job of a batch has no end",
        "linear cost",
        "app/api/reading.py",
        "if len(text) - at <= longest:",
        "if True:",
        (f"{ASKED}test_a_job_of_a_batch_is_no_longer_than_one_alone_may_be",),
        still=ALIVE,
    ),
    Mutant(
        "each unknown field costs a sentence",
        "linear cost",
        "app/schemas.py",
        "if not isinstance(given, dict) or len(given) <= len(known) + _MOST_UNKNOWN:",
        "if True:",
        ("tests/unit/app/test_schemas.py::test_of_very_many_unknown_fields_only_a_few_are_looked_at",),
        still=ALIVE,
    ),
    Mutant(
        "an owner takes all threads",
        "turns",
        "app/web/hall.py",
        "return self._held.get(owner, 0) < self.share",
        "return True",
        (f"{HALL}test_no_owner_holds_more_than_its_share",),
        still=f"{HALL}test_of_one_owner_only_so_many_wait",
    ),
    Mutant(
        "who has waited once is always next",
        "turns",
        "app/web/hall.py",
        "self._waiting.move_to_end(owner)",
        "pass",
        (f"{HALL}test_those_who_wait_get_turns_one_after_the_other",),
        still=f"{HALL}test_of_one_owner_only_so_many_wait",
    ),
    Mutant(
        "connections wait without bound",
        "bounds",
        "app/web/hall.py",
        "if len(waiting) >= self.most_waiting:",
        "if False:",
        (f"{HALL}test_of_one_owner_only_so_many_wait",),
        still=f"{HALL}test_no_owner_holds_more_than_its_share",
    ),
    Mutant(
        "whoever speaks is not remembered",
        "bounds",
        "app/web/crowd.py",
        "                part.move_to_end(guest)",
        "                pass",
        (f"{CROWD}test_the_connection_that_was_silent_for_longest_gives_way",),
        still=f"{CROWD}test_an_owner_holds_a_fourth_of_all_bytes",
    ),
    Mutant(
        "strangers send those away who have a key",
        "bounds",
        "app/web/crowd.py",
        "            parts.reverse()",
        "            pass",
        (f"{CROWD}test_strangers_do_not_send_those_away_who_have_shown_a_key",),
        still=f"{CROWD}test_an_owner_holds_a_fourth_of_all_bytes",
    ),
    Mutant(
        "an owner holds all bytes",
        "bounds",
        "app/web/crowd.py",
        "self.most_bytes if whole else self.most_bytes // _SHARE",
        "self.most_bytes",
        (f"{CROWD}test_an_owner_holds_a_fourth_of_all_bytes",),
        still=f"{CROWD}test_who_has_left_is_not_counted",
    ),
    Mutant(
        "long numbers are rounded",
        "numbers",
        "routing/exact.py",
        "if not may_hold_long_numbers(raw):",
        "if True:",
        (f"{EXACT}test_numbers_within_64_bits_are_pythons_own",),
        still=f"{EXACT}test_digits_in_a_text_change_nothing",
    ),
    Mutant(
        "what a proxy passes on is this machine's",
        "keyless",
        "app/auth.py",
        "    _refuse_forwarded(remote)\n",
        "",
        (f"{ACCESS}test_without_keys_what_a_proxy_passes_on_is_refused_with_the_remedy",),
        still=f"{ACCESS}test_a_proxy_that_is_named_is_served",
    ),
    Mutant(
        "a push ends another job's run",
        "LEASE-3",
        "tasks/push.py",
        "if _names_another(job, body):",
        "if False:",
        ("tests/contracts/test_api_callback.py::test_a_push_that_names_another_job_of_ours_ends_nothing",),
        still="tests/contracts/test_api_callback.py::test_a_push_ends_the_run_and_hands_the_slot_on",
    ),
]
