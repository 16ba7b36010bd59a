"""Guards of what is shown and told: streams, templates and webhooks, where two things happen at once."""

from tests.faults.mutant import Mutant

RECORD = "tests/contracts/test_record_receivers.py::"
STREAMS = "tests/unit/web/test_streams.py::"

SEEN = [
    Mutant(
        "a stream outlives its key",
        "tenants",
        "app/server/application.py",
        "if not self._owners.is_still_valid(request.owner, request.environ):",
        "if False:",
        (f"{STREAMS}test_a_stream_ends_when_its_key_is_removed_and_no_other_does",),
        still=f"{STREAMS}test_a_tenant_follows_its_own_jobs_and_an_administrator_all",
    ),
    Mutant(
        "who administers no more goes on following all",
        "tenants",
        "app/auth/api_keys.py",
        "return found is not None and (found.kind is OwnerKind.OPERATOR or owner.kind is not OwnerKind.OPERATOR)",
        "return found is not None",
        (f"{STREAMS}test_who_may_stay_is_known_by_the_keys_that_were_read_last",),
        still=f"{STREAMS}test_a_stream_ends_when_its_key_is_removed_and_no_other_does",
    ),
    Mutant(
        "the cursor skips what somebody wants who has just joined",
        "HOOK-1",
        "slotkeeper/outbox/fan_out.py",
        "return self._database.write(lambda tx: _skip(tx, here))",
        "return self._database.write(lambda tx: first if _moves(tx, here, first) else None)",
        (f"{RECORD}test_who_joins_the_others_while_a_new_one_has_the_cursor_skip_misses_nothing",),
        still=f"{RECORD}test_a_revived_job_is_told_of_again",
    ),
    Mutant(
        "who falls behind forgets a replay that has begun",
        "HOOK-1",
        "slotkeeper/outbox/fan_out.py",
        "which = receivers.c.id.in_(late) & receivers.c.behind.is_(None)",
        "which = receivers.c.id.in_(late)",
        (f"{RECORD}test_a_replay_that_begins_while_its_receiver_falls_behind_is_not_forgotten",),
        still=f"{RECORD}test_all_since_a_time_is_told_once_more",
        postgres=True,
    ),
    Mutant(
        "one tenant's replays take all of a step",
        "bounds",
        "slotkeeper/outbox/fan_out.py",
        "            if time.monotonic() >= until:\n                break\n        return made",
        "        return made",
        (f"{RECORD}test_one_tenants_replays_take_a_small_part_of_a_step",),
        still=f"{RECORD}test_all_since_a_time_is_told_once_more",
    ),
    Mutant(
        "an address that is gone disables the one that has taken its place",
        "HOOK-1",
        "slotkeeper/outbox/subscriptions.py",
        "receivers.c.id == receiver_id, receivers.c.url == url).values(url=url)",
        "receivers.c.id == receiver_id).values(url=url)",
        (f"{RECORD}test_an_address_that_is_gone_disables_no_other",),
        still=f"{RECORD}test_all_since_a_time_is_told_once_more",
    ),
]
