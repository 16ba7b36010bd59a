"""Counts of queued jobs are read once a second while their limit is far away, and for each submit otherwise."""

import pytest

from routing.admission.waiting_counts import FAR, FRESH_MS, WaitingCounts
from tests.support.fleet_queue import START_MS

LIMIT = 2 * FAR


@pytest.fixture
def counts() -> WaitingCounts:
    known = WaitingCounts()
    known.note("zimg", 100, START_MS)
    return known


def test_a_count_far_below_its_limit_is_cached_for_one_second(counts):
    assert counts.has_room("zimg", 1, LIMIT, START_MS + FRESH_MS)
    assert not counts.has_room("zimg", 1, LIMIT, START_MS + FRESH_MS + 1)
    assert not counts.has_room("zimg", 1, LIMIT, START_MS - 1)
    assert not counts.has_room("other", 1, LIMIT, START_MS)


def test_a_count_that_may_reach_its_limit_within_a_second_is_read_again(counts):
    assert counts.has_room("zimg", 10, 110 + FAR, START_MS)
    assert not counts.has_room("zimg", 1, 110 + FAR, START_MS)


def test_submits_admitted_by_this_process_count_before_the_next_read(counts):
    assert counts.has_room("zimg", FAR - 100, LIMIT, START_MS)
    assert not counts.has_room("zimg", 1, LIMIT, START_MS)


def test_few_counts_are_kept(monkeypatch, counts):
    monkeypatch.setattr("routing.admission.waiting_counts._MAX_KNOWN", 3)
    for n in range(5):
        counts.note(n, 0, START_MS)
        assert len(counts._known) <= 3
    assert counts.has_room(4, 1, LIMIT, START_MS)
