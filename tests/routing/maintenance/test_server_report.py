"""Comparing a server's reported runs with its leases: the five cases, as pure values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.maintenance.server_report import MIN_AGE_MS, Comparison, ExpectedRun, ServerReport, compare_runs

NOTHING = Comparison()


def a_lease(job_id: str = "a", age_ms: int = MIN_AGE_MS, *names: str) -> ExpectedRun:
    return ExpectedRun(job_id, frozenset({job_id, *names}), age_ms)


def ids(*job_ids: str, active: int | None = None) -> ServerReport:
    return ServerReport(True, len(job_ids) if active is None else active, frozenset(job_ids))


def count(active: int | None) -> ServerReport:
    return ServerReport(True, active)


def test_match_a_lease_whose_job_the_server_runs_is_not_reported():
    assert compare_runs([a_lease("a"), a_lease("b")], ids("a", "b")) == NOTHING


@pytest.mark.parametrize("name", ["a", "a-2", "a.2", "its own id"])
def test_match_by_any_name_that_the_server_may_give_the_job(name):
    assert compare_runs([a_lease("a", MIN_AGE_MS, "a-2", "a.2", "its own id")], ids(name)) == NOTHING


def test_ghost_the_comparison_names_a_lease_whose_job_the_server_does_not_report():
    assert compare_runs([a_lease("a"), a_lease("b")], ids("b")).stale == ("a",)


@pytest.mark.parametrize("report", [ids(), count(0)])
@pytest.mark.parametrize(("age_ms", "stale"), [(0, ()), (MIN_AGE_MS - 1, ()), (MIN_AGE_MS, ("a",)), (10**9, ("a",))])
def test_a_lease_younger_than_five_seconds_is_not_stale(age_ms, stale, report):
    assert compare_runs([a_lease("a", age_ms)], report).stale == stale


def test_a_run_with_a_young_lease_is_not_reported_as_unknown():
    assert compare_runs([a_lease("a", 0)], ids("a")) == NOTHING


@pytest.mark.parametrize("runs", [("old-job",), ("old-job", "direct")])
def test_orphan_and_foreign_whatever_no_lease_covers_is_counted_and_named(runs):
    found = compare_runs([a_lease("a")], ids("a", *runs))
    assert (found.stale, found.unknown_runs, found.unaccounted) == ((), tuple(sorted(runs)), len(runs))


def test_a_stale_lease_and_an_unknown_run_are_both_reported():
    assert compare_runs([a_lease("a")], ids("x")) == Comparison(("a",), ("x",), 1)


@pytest.mark.parametrize("report", [ServerReport(False), ServerReport(False, 0, frozenset()), ServerReport(True)])
def test_unknown_a_server_without_a_usable_report_frees_and_occupies_no_slot(report):
    assert compare_runs([a_lease("a"), a_lease("b", 10**9)], report) == NOTHING


@pytest.mark.parametrize("active", [1, 2])
def test_a_count_above_zero_makes_no_lease_stale(active):
    assert compare_runs([a_lease("a"), a_lease("b")], count(active)) == NOTHING


def test_a_count_of_zero_frees_all_that_are_old_enough():
    assert compare_runs([a_lease("a"), a_lease("b", 0)], count(0)).stale == ("a",)


@pytest.mark.parametrize(("leases", "active", "unaccounted"), [(0, 3, 3), (1, 3, 2), (3, 3, 0), (3, 1, 0)])
def test_a_count_above_our_leases_is_foreign(leases, active, unaccounted):
    found = compare_runs([a_lease(str(n)) for n in range(leases)], count(active))
    assert (found.unknown_runs, found.unaccounted) == ((), unaccounted)


def test_ids_are_believed_before_the_count():
    assert compare_runs([a_lease("a")], ids("a", active=0)) == NOTHING
    assert compare_runs([a_lease("a")], ids(active=5)) == Comparison(("a",))


_names = st.sampled_from(["a", "b", "c", "d", "e"])
_leases = st.dictionaries(_names, st.integers(0, 2 * MIN_AGE_MS)).map(
    lambda ages: [a_lease(*item) for item in ages.items()]
)


@given(_leases, st.frozensets(_names))
def test_every_lease_and_every_run_is_exactly_one_of_the_cases(leases, running):
    found = compare_runs(leases, ServerReport(True, len(running), running))
    ours = {lease.job_id for lease in leases}
    assert set(found.stale) == {
        lease.job_id for lease in leases if lease.job_id not in running and lease.age_ms >= MIN_AGE_MS
    }
    assert set(found.unknown_runs) == running - ours
    assert found.unaccounted == len(found.unknown_runs)


@given(_leases, st.integers(0, 6))
def test_a_report_of_only_a_count_makes_leases_stale_only_if_the_count_is_zero(leases, active):
    found = compare_runs(leases, count(active))
    assert found.unaccounted == max(0, active - len(leases))
    assert not found.stale or active == 0
