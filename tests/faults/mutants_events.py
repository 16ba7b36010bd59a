"""Guards of events and acts: what is kept of them, and how they reach their sinks."""

from tests.faults.mutant import Mutant

_ACTS = "tests/contracts/test_record_acts.py::"
_TAIL = "tests/contracts/test_record_tail.py::"
_RELAY = "tests/faults/test_relay.py::"
_KEPT = f"{_ACTS}test_acts_are_found_by_whom_and_what_they_concern_and_when"
_RELAYED = f"{_RELAY}test_a_run_that_is_tried_again_is_a_failure_by_its_alias_with_attempt_and_retry_in_ms"

EVENTS = [
    Mutant(
        "nobody knows that events were removed",
        "a gap is told",
        "slotkeeper/outbox/ageing.py",
        "    raise_counter_to(tx, REMOVED_COUNTER, ids[-1])  # Whoever reads on from before it is told.\n",
        "",
        (f"{_TAIL}test_what_lies_behind_is_complete_until_some_of_it_is_removed",),
        still=_KEPT,
    ),
    Mutant(
        "removing older events hides that newer ones were",
        "a gap is told",
        "slotkeeper/outbox/ageing.py",
        "case((counters.c.value < to, to), else_=counters.c.value)",
        "to",
        (f"{_TAIL}test_removing_older_events_later_lowers_nothing",),
        still=_KEPT,
    ),
    Mutant(
        "events are removed before a sink has got them",
        "no event is lost",
        "slotkeeper/outbox/ageing.py",
        "_ANY if last is None else last",
        "_ANY",
        (f"{_ACTS}test_what_no_sink_has_got_yet_is_not_removed",),
        still=_KEPT,
    ),
    Mutant(
        "the trail of a job that is here is removed",
        "events outlive their job",
        "slotkeeper/outbox/ageing.py",
        "            and row.job is None\n",
        "",
        (f"{_ACTS}test_acts_and_events_are_removed_when_their_time_has_come_and_their_jobs_are_gone",),
        still=_KEPT,
    ),
    Mutant(
        "an act may be changed",
        "acts stay",
        "migrations/versions/0010_acts.py",
        '"CREATE TRIGGER acts_are_not_changed BEFORE UPDATE ON events WHEN OLD.actor IS NOT NULL "',
        '"CREATE TRIGGER acts_are_not_changed BEFORE UPDATE ON events WHEN OLD.id < 0 "',
        (f"{_ACTS}test_the_database_refuses_to_change_or_remove_an_act",),
        still=_KEPT,
    ),
    Mutant(
        "what finds nothing is noted as an act",
        "acts are what was done",
        "slotkeeper/registry/catalog.py",
        "            if found:\n                entry.write(tx)\n",
        "            entry.write(tx)\n",
        (f"{_ACTS}test_what_is_refused_or_finds_nothing_is_no_act",),
        still=_KEPT,
    ),
    Mutant(
        "two relay at once",
        "one relay",
        "slotkeeper/outbox/sink_cursors.py",
        "is_free = or_(relays.c.holder.is_(None), relays.c.holder == holder, relays.c.until_ms < now_ms)",
        "is_free = relays.c.sink == sink",
        (f"{_RELAY}test_one_relay_at_a_time_and_the_next_when_its_time_is_over",),
        still=_RELAYED,
    ),
    Mutant(
        "a relay that was taken over from moves the cursor",
        "one relay",
        "slotkeeper/outbox/sink_cursors.py",
        "where = self._held(sink, holder) & (relays.c.position == before)",
        "where = relays.c.sink == sink",
        (f"{_RELAY}test_a_relay_that_was_taken_over_from_moves_nothing_and_adds_nothing",),
        still=_RELAYED,
    ),
    Mutant(
        "a sink that gives up is given as much again",
        "no event is lost",
        "tasks/relay/relay.py",
        "            self._at_once = smaller\n            raise\n",
        "            raise\n",
        (f"{_RELAY}test_a_slow_sink_is_given_as_much_as_it_takes_in_its_time",),
        still=_RELAYED,
    ),
    Mutant(
        "a slow sink is given as much again",
        "one relay",
        "tasks/relay/relay.py",
        "self._at_once = smaller if took_long else",
        "self._at_once =",
        (f"{_RELAY}test_a_slow_sink_is_given_as_much_as_it_takes_in_its_time",),
        still=_RELAYED,
    ),
    Mutant(
        "the stream takes events wherever it ends",
        "no event is lost",
        "tasks/relay/lua/relay.lua",
        "if now ~= last then return now end\n",
        "",
        (f"{_RELAY}test_a_stream_that_lost_its_last_moments_gets_them_again",),
        still=_RELAYED,
    ),
    Mutant(
        "a stream of another record is gone on with",
        "no event is lost",
        "tasks/relay/sinks/redis_stream.py",
        "            return found.number <= position\n",
        "            return True\n",
        (f"{_RELAY}test_a_stream_of_another_record_is_set_aside",),
        still=_RELAYED,
    ),
    Mutant(
        "what a sink has not confirmed is not published again",
        "no event is lost",
        "tasks/relay/relay.py",
        "        self._tail = None  # Unless all goes well it is asked anew how far the sink has come.\n",
        "",
        (f"{_RELAY}test_what_a_sink_has_not_confirmed_is_published_again",),
        still=_RELAYED,
    ),
]
