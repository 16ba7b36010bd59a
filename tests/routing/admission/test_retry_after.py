"""The time after which a client may retry a submit to a full queue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.admission.submit_limits import retry_after_s


@pytest.mark.parametrize(
    ("over", "slots", "run_ms", "seconds"),
    [(1, 4, 1000.0, 1), (10, 4, 1000.0, 3), (100, 1, 10_000.0, 1000), (10**9, 1, 1e6, 3600), (0, 4, 1000.0, 1)],
)
def test_retry_after_is_the_time_in_which_the_slots_run_the_excess_jobs(over, slots, run_ms, seconds):
    assert retry_after_s(over, slots, run_ms) == seconds


def test_retry_after_is_a_guess_while_nothing_was_measured_or_no_slot_is_usable():
    assert retry_after_s(5, 0, 1000.0) == retry_after_s(5, 4, None) == 30


@given(st.integers(0, 1 << 60), st.integers(0, 10_000), st.none() | st.floats(0, 1e9))
def test_retry_after_is_always_1_to_3600_seconds(over, slots, run_ms):
    assert 1 <= retry_after_s(over, slots, run_ms) <= 3600
