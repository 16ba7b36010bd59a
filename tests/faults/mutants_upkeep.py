"""Guards of maintenance and webhooks: nothing that one is owed holds up another."""

from tests.faults.mutant import Mutant

_UPKEEP = "tests/faults/test_upkeep.py::"
_OUTAGES = "tests/faults/test_outages.py::"
_BERTHS = "tests/unit/test_berths.py::"
_LINES = "tests/unit/test_lines.py::"
_CLOCK = "tests/unit/jobs/test_clock.py::"
_TELLINGS = "tests/faults/test_tellings.py::"
_LETTING_GO = "tests/faults/test_letting_go.py::"
_AUDIT = "tests/faults/test_audit.py::"
_STANDING = "tests/contracts/test_api_standing.py::"
_DELIVERIES = "tests/faults/test_deliveries.py::"

UPKEEP = [
    Mutant(
        "one fleet's error is everybody's",
        "SLOT-2",
        "routing/each.py",
        """    except Exception as error:
        log.error""",
        """    except ZeroDivisionError as error:
        log.error""",
        (
            f"{_UPKEEP}test_a_fleet_whose_room_is_broken_holds_up_no_other",
            f"{_UPKEEP}test_a_job_that_cannot_be_reaped_holds_up_no_other",
        ),
    ),
    Mutant(
        "what was queued since the last sweep is not looked for",
        "QUEUE-1",
        "routing/reconcile/room.py",
        "    while batch := outbox.queued_between(database, after, last, _CHUNK):",
        "    while batch := outbox.queued_between(database, last, last, _CHUNK):",
        (
            f"{_UPKEEP}test_what_another_process_queued_while_it_did_not_reach_redis_is_swept",
            f"{_UPKEEP}test_a_job_revived_by_a_process_without_redis_is_swept",
            f"{_UPKEEP}test_a_job_whose_promoter_died_is_swept",
        ),
    ),
    Mutant(
        "an event that becomes visible late is missed",
        "QUEUE-1",
        "routing/seen.py",
        "self.looks[1][0] <= now - late_s",
        "self.looks[1][0] <= now",
        (f"{_UPKEEP}test_what_becomes_visible_late_is_swept_all_the_same",),
    ),
    Mutant(
        "a room that lost a job is not filled",
        "QUEUE-1",
        "routing/reconcile/room.py",
        "            seen.filling[fleet] = 0\n\n\ndef short_rooms",
        "            pass\n\n\ndef short_rooms",
        (f"{_UPKEEP}test_a_job_that_only_its_room_has_lost_is_found_by_counting",),
    ),
    Mutant(
        "a room is filled as often as it looks short",
        "SLOT-2",
        "routing/reconcile/room.py",
        "doubt.looks >= 2 and now >= doubt.until and",
        "doubt.looks >= 2 and",
        (f"{_UPKEEP}test_a_room_that_only_looked_short_is_not_read_again_and_again",),
    ),
    Mutant(
        "one step of offers is all of them",
        "SLOT-2",
        "routing/queues.py",
        "            if len(more) < limit:\n",
        "            if more is not None:\n",
        (f"{_UPKEEP}test_slot_2_a_thousand_slots_fill_in_one_sweep",),
    ),
    Mutant(
        "a release forgets that its job was queued again",
        "QUEUE-1",
        "routing/lua/release.lua",
        'if ARGV[4] == "1" or was.again then',
        'if ARGV[4] == "1" then',
        (f"{_UPKEEP}test_a_job_that_is_queued_again_before_its_slot_is_freed_goes_to_its_place_then",),
    ),
    Mutant(
        "a step of Redis' clock kills living workers' leases",
        "LEASE-4",
        "routing/reconcile/reaper.py",
        "        if self._clock_was_set(redis_s - now_s, redis_s - asked_s):",
        "        if self._clock_was_set(redis_s - now_s, redis_s - asked_s) and pause_s < 0:",
        (
            f"{_OUTAGES}test_the_reaper_leaves_a_living_workers_lease_that_a_step_of_the_clock_let_expire",
            f"{_OUTAGES}test_after_redis_clock_was_set_living_workers_renew_before_anything_is_reaped",
        ),
        still=f"{_OUTAGES}test_a_slow_answer_is_no_clock_that_was_set",
    ),
    Mutant(
        "a lease lasts as long as the clock was set back",
        "LEASE-1",
        "routing/reconcile/reaper.py",
        "        if span.last_ms > span.now_ms + dispatcher.leases.longest_ms:",
        "        if span.last_ms < 0:",
        (f"{_OUTAGES}test_a_dead_holders_lease_does_not_last_as_long_as_redis_clock_was_set_back",),
    ),
    Mutant(
        "messages that have piled up are all obeyed",
        "SLOT-2",
        "tasks/maintenance.py",
        "if self.request.called_directly or now - began.get(args, -every_s) >= _TOO_SOON * every_s:",
        "if now:",
        (f"{_OUTAGES}test_messages_that_have_piled_up_are_one",),
    ),
    Mutant(
        "deadlines have all the time they want",
        "R122",
        "routing/reconcile/timekeeping.py",
        """        done += len(batch)
        if time.monotonic() >= until:""",
        """        done += len(batch)
        if until < 0:""",
        (f"{_UPKEEP}test_many_deadlines_leave_the_others_their_turn",),
    ),
    Mutant(
        "due jobs wait until all deadlines are dealt with",
        "R122",
        "tasks/maintenance.py",
        "    while reconcile.promote_due(dispatcher(), 0) + reconcile.expire_overdue(dispatcher(), 0):",
        "    while reconcile.promote_due(dispatcher()) + reconcile.expire_overdue(dispatcher()):",
        (f"{_UPKEEP}test_however_many_deadlines_pass_a_due_job_waits_for_one_batch_of_them",),
    ),
    Mutant(
        "the leases of a dead worker are reaped one after another",
        "LEASE-1",
        "routing/reconcile/reaper.py",
        'ThreadPoolExecutor(_AT_ONCE, "reap")',
        'ThreadPoolExecutor(1, "reap")',
        (f"{_UPKEEP}test_the_leases_of_a_worker_that_died_are_reaped_some_at_a_time",),
    ),
    Mutant(
        "to resume a server leaves its breaker open",
        "SLOT-2",
        "app/api/servers.py",
        '        close_breaker(known.fleet, "server", known.name)',
        "        pass",
        (f"{_STANDING}test_to_resume_a_server_closes_its_breaker",),
    ),
    Mutant(
        "a reset remembers that slots were busy",
        "SLOT-2",
        "routing/lua/reset.lua",
        'if string.match(field, "^busy:") then',
        'if field == "" then',
        (f"{_STANDING}test_a_reset_wakes_slots_that_rest_because_they_were_busy",),
    ),
    Mutant(
        "offers that nobody starts are seen by nobody",
        "SLOT-2",
        "routing/seen.py",
        "        times = times + 1 if known == attempt else 1",
        "        times = 1",
        (
            f"{_AUDIT}test_a_job_that_is_offered_and_never_started_is_found_and_workers_are_woken_once_more",
            f"{_AUDIT}test_a_job_under_which_workers_die_before_its_start_is_found",
        ),
    ),
    Mutant(
        "workers are woken again and again where there are none",
        "SLOT-2",
        "routing/reconcile/reaper.py",
        "if times == OFTEN and dispatcher.queues.room():",
        "if times == OFTEN:",
        (f"{_AUDIT}test_nobody_is_woken_once_more_while_no_worker_has_room",),
    ),
    Mutant(
        "a room that is gone is forgotten with its leases",
        "LEASE-1",
        "routing/slots.py",
        "        empty = [fleet for fleet in gone if fleet not in holding]",
        "        empty = gone",
        (f"{_UPKEEP}test_the_keys_of_a_fleet_that_is_gone_stay_while_it_holds_a_lease",),
    ),
    Mutant(
        "Celery's times go by the host's clock",
        "R122",
        "tasks/asking.py",
        "when.timestamp() - now_ms() / 1000",
        "when.timestamp() - __import__('time').time()",
        ("tests/contracts/test_task_calls.py::test_celerys_times_go_by_the_common_clock",),
    ),
    Mutant(
        "a worker that stops leaves what it tells just now",
        "TELL-1",
        "tasks/telling.py",
        "wait_for(lambda: not self._waiting.unfinished_tasks, within_s)",
        "wait_for(self._waiting.empty, within_s)",
        (f"{_TELLINGS}test_a_worker_that_stops_in_order_waits_until_what_is_on_its_way_is_told",),
    ),
    Mutant(
        "every server's yes to a cancel frees its slot",
        "SLOT-1",
        "tasks/runner.py",
        'self._let_go = said_yes and self._frees_slot == "immediate"',
        "self._let_go = said_yes",
        (
            f"{_LETTING_GO}test_slot_1_whatever_ends_a_run_its_server_never_runs_two_in_one_slot",
            f"{_LETTING_GO}test_what_a_cancel_frees_is_as_the_server_is_described",
            f"{_LETTING_GO}test_a_run_that_took_too_long_lingers_unless_a_yes_frees_its_slot",
        ),
    ),
    Mutant(
        "each idle fleet's leases are read",
        "SLOT-2",
        "routing/leases.py",
        '        holding = self._scripts.existing("leases", fleets)',
        "        holding = list(fleets)",
        (f"{_UPKEEP}test_however_many_fleets_are_idle_their_leases_are_not_read",),
    ),
    Mutant(
        "a report is as young as the look at it",
        "SLOT-2",
        "routing/policies/identity.py",
        "    return now_ms if report.asked_ms is None else report.asked_ms",
        "    return now_ms",
        (
            f"{_UPKEEP}test_a_report_that_waited_withholds_no_slot_for_a_job_that_has_ended_since",
            f"{_UPKEEP}test_a_report_that_waited_makes_no_ghost_of_a_job_that_began_since",
        ),
    ),
    Mutant(
        "servers that hang take every thread",
        "SLOT-2",
        "tasks/rounds.py",
        "            if server.name in self._slow and slow >= MOST_SLOW:",
        "            if slow > MOST:",
        (f"{_UPKEEP}test_servers_that_hang_do_not_hold_up_the_reports_of_others",),
    ),
    Mutant(
        "beat fills a queue that nobody works off",
        "SLOT-2",
        "tasks/beat.py",
        "        if not self._has_backlog():",
        "        if self._has_backlog() is not None:",
        (f"{_UPKEEP}test_beat_adds_nothing_to_a_queue_that_nobody_works_off",),
    ),
    Mutant(
        "a silent receiver gets as many tries at once as it is owed",
        "HOOK-1",
        "tasks/berths.py",
        "return self._hosts[host] < (MOST_OF_HOST if standing else 1)",
        "return self._hosts[host] < MOST_OF_HOST",
        (
            f"{_BERTHS}test_a_receiver_that_was_never_tried_gets_one_try_at_a_time",
            f"{_DELIVERIES}test_a_silent_receiver_of_one_tenant_is_tried_once_at_a_time",
        ),
    ),
    Mutant(
        "receivers that fail take every berth",
        "HOOK-1",
        "tasks/berths.py",
        "    if standing is False:",
        "    if standing == 2:",
        (f"{_BERTHS}test_receivers_whose_last_try_failed_share_a_small_part",),
    ),
    Mutant(
        "a tenant takes all berths of a part",
        "HOOK-1",
        "tasks/berths.py",
        "return self._of_tenants[tenant, part] < MOST[part] - self._taken[part]",
        "return self._taken[part] < MOST[part]",
        (
            f"{_BERTHS}test_silent_receivers_of_one_tenant_leave_room_for_one_that_is_new",
            f"{_BERTHS}test_silent_receivers_of_many_tenants_leave_room_for_one_that_is_new",
            f"{_BERTHS}test_no_tenant_gets_more_berths_than_it_leaves_free",
        ),
        still=f"{_BERTHS}test_a_receiver_that_was_never_tried_gets_one_try_at_a_time",
    ),
    Mutant(
        "a receiver that may not be tried hides its tenant's others",
        "HOOK-1",
        "tasks/lines.py",
        "            lines.move_to_end(host)\n        return None",
        "            return None\n        return None",
        (f"{_LINES}test_receivers_that_may_not_be_tried_now_hide_those_that_may_for_a_few_turns_at_most",),
        still=f"{_LINES}test_of_one_tenant_its_receivers_take_turns",
    ),
    Mutant(
        "what is due now waits until a pile has been read",
        "HOOK-1",
        "tasks/webhooks.py",
        "for due in (*newest, *page):",
        "for due in page:",
        (f"{_DELIVERIES}test_what_has_become_due_just_now_does_not_wait_until_a_pile_has_been_read",),
    ),
    Mutant(
        "a report costs as many looks as it names runs",
        "SLOT-2",
        "routing/reconcile/servers.py",
        "if strange >= server.slots:",
        "if strange < 0:",
        (
            "tests/faults/test_identity.py::"
            "test_foreign_a_report_that_never_ends_costs_no_more_looks_than_the_server_has_slots",
        ),
        still="tests/faults/test_identity.py::test_foreign_and_ours_are_told_apart_by_name",
    ),
    Mutant(
        "a pile of messages hides what comes after it",
        "HOOK-1",
        "tasks/webhooks.py",
        "        self._last = page[-1] if len(page) == _PAGE else None",
        "        self._last = None",
        (f"{_DELIVERIES}test_one_receivers_pile_does_not_hide_what_is_owed_to_another",),
    ),
    Mutant(
        "each host goes by its own clock",
        "R122",
        "jobs/clock.py",
        "        return round(time.monotonic() * 1000 + self._ahead_ms)",
        "        return time.time_ns() // 1_000_000",
        (f"{_CLOCK}test_a_host_whose_clock_is_wrong_goes_by_the_common_one",),
        still=f"{_CLOCK}test_until_the_common_clock_is_heard_the_hosts_own_counts",
    ),
    Mutant(
        "a common clock that was set is followed late",
        "R122",
        "jobs/clock.py",
        "            self._measured.clear()",
        "            pass",
        (f"{_CLOCK}test_a_common_clock_that_was_set_is_followed_at_once",),
        still=f"{_CLOCK}test_the_quickest_answer_is_believed",
    ),
]
