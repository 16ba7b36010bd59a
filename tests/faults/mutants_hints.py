"""Guards of what a server is told of a run, and of what it pushes when another worker goes on with that."""

from tests.faults.mutant import CALLBACK, PLACES, Mutant

TEMPLATES = "tests/unit/servers/test_templates.py::"
DESCRIBED = "tests/contracts/test_descriptions.py::"
FILLED = f"{TEMPLATES}test_a_string_that_is_one_template_keeps_the_type_of_the_value"
SWAPS = f"{PLACES}test_a_server_changes_its_model_if_its_last_job_was_of_another_or_is_not_known"
ONCE_MORE = f"{PLACES}test_a_server_is_told_of_a_change_once_more_if_the_"
WRITTEN_AGAIN = f"{PLACES}test_what_a_server_had_before_a_lease_that_was_written_again_is_not_known"
SIZES = f"{TEMPLATES}test_the_expected_output_is_the_first_size_that_the_payload_says_or_the_default"

HINTS = [
    Mutant(
        "a server is not told that its model changes",
        "what a server is told",
        "routing/lua/lib/offer.lua",
        'if note_loaded(server, lane.model, by_name) then redis.call("HSET", lease_key(job), "swap", "1") end',
        "note_loaded(server, lane.model, by_name)",
        (SWAPS,),
        still=WRITTEN_AGAIN,
    ),
    Mutant(
        "a lease that was written again is taken for one that tells of a swap",
        "what a server is told",
        "routing/lua/swaps.lua",
        ' and found[2] ~= "0"',
        "",
        (WRITTEN_AGAIN,),
        still=SWAPS,
    ),
    Mutant(
        "a server is taken to have what a run that never reached it would have loaded",
        "what a server is told",
        "routing/lua/release.lua",
        'if it.outcome ~= "ok" then doubt_loaded(was) end',
        "",
        (f"{ONCE_MORE}run_that_was_told_did_not_end_well",),
        still=SWAPS,
    ),
    Mutant(
        "a server is taken to have what a withdrawn job would have loaded",
        "what a server is told",
        "routing/lua/withdraw.lua",
        "  doubt_loaded(lease)\n",
        "",
        (f"{ONCE_MORE}job_was_withdrawn_that_was_to_bring_it",),
        still=SWAPS,
    ),
    Mutant(
        "a server that was away is taken to have what it had",
        "what a server is told",
        "routing/lua/cool_down.lua",
        'redis.call("HDEL", stats_key("server", server), "loaded")',
        "",
        (f"{PLACES}test_what_a_server_has_that_was_away_is_not_known",),
        still=SWAPS,
    ),
    Mutant(
        "a server of one model is told that it changes",
        "what a server is told",
        "routing/lua/lib/holding.lua",
        "if entry and serves_several(entry) and ",
        "if entry and ",
        (f"{PLACES}test_a_server_of_one_model_has_it_whatever_came_of_a_run",),
        still=SWAPS,
    ),
    Mutant(
        "a server is told of no time at all",
        "what a server is told",
        "tasks/servers/call.py",
        "max(self.deadline_ms // 1000, 1)",
        "self.deadline_ms // 1000",
        (f"{TEMPLATES}test_what_is_left_of_a_run_is_at_least_one_and_rounded_down",),
        still=FILLED,
    ),
    Mutant(
        "whatever stands there is a size",
        "what a server is told",
        "tasks/servers/templates.py",
        "if isinstance(it, int) and not isinstance(it, bool) and it >= 0)",
        "if isinstance(it, int | str))",
        (SIZES,),
        still=FILLED,
    ),
    Mutant(
        "an output size is put in that nothing says",
        "descriptions are checked whole",
        "tasks/servers/description.py",
        "if self.output_size is None and (at :=",
        "if False and (at :=",
        (f"{DESCRIBED}test_what_describes_no_server_is_refused_with_its_place_and_a_remedy",),
        still=f"{DESCRIBED}test_nested_objects_are_merged_and_all_else_is_replaced",
    ),
    Mutant(
        "a push for a run that another worker goes on with is refused",
        "a resumed run ends",
        "tasks/server_push.py",
        "if job.sent_ms is None or job.started_ms is None or job.sent_ms >= job.started_ms:",
        "if True:",
        (
            f"{CALLBACK}test_a_run_that_another_worker_goes_on_with_ends_under_the_token_that_its_server_has",
            f"{CALLBACK}test_a_run_that_was_resumed_twice_ends_under_its_first_token",
        ),
        still=f"{CALLBACK}test_the_token_may_come_in_its_own_header",
    ),
    Mutant(
        "any earlier attempt's token ends a run",
        "LEASE-3",
        "tasks/server_push.py",
        " and attempt == _attempt_at_server(job)",
        "",
        (f"{CALLBACK}test_a_run_that_was_resumed_twice_ends_under_its_first_token",),
        still=f"{CALLBACK}test_the_token_may_come_in_its_own_header",
    ),
    Mutant(
        "a push between two workers is thrown away",
        "a resumed run ends",
        "tasks/server_push.py",
        "return job.state is State.QUEUED and job.remote_id is not None",
        "return False",
        (f"{CALLBACK}test_a_push_between_two_workers_is_wanted_again",),
        still=f"{CALLBACK}test_the_token_may_come_in_its_own_header",
    ),
]
