"""Events that are relayed to brokers and streams."""

from tests.nightly.mutants.operators import Mutant, drop, lua_swap, swap

MUTANTS = [
    Mutant(
        "a relay rests while events are pending",
        "tasks.relay.relay:Relay._is_idle",
        swap("self._has_listener and self._reader is not None and not self._reader.has_gap", "self._has_listener"),
        kills=["test_a_relay_is_idle_only_while_it_holds_the_cursor_and_no_event_waits_for_a_transaction"],
        breaks="no lost event",
        still="test_an_idle_relay_publishes_new_events",
    ),
    Mutant(
        "a stream takes events wherever it ends",
        "lua:relay",
        lua_swap("if number ~= last then return number end", ""),
        kills=["test_a_stream_that_lost_its_last_events_gets_them_again"],
        breaks="no lost event",
        still="test_a_run_that_is_tried_again_is_a_failure_by_its_alias_with_attempt_and_retry_in_ms",
    ),
    Mutant(
        "events that a sink has not confirmed are not published again",
        "tasks.relay.relay:Relay.relay_batch",
        drop("self._reader = None"),
        kills=["test_events_that_a_sink_has_not_confirmed_are_published_again"],
        breaks="no lost event",
        still="test_a_run_that_is_tried_again_is_a_failure_by_its_alias_with_attempt_and_retry_in_ms",
    ),
]
