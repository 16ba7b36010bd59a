"""Statistics of outcomes, and their plots."""

import sys
import xml.etree.ElementTree as xml
from dataclasses import replace

import pytest

from app.simulate import Outage, Outcome, jain, plots, summarize
from app.simulate.outcome_statistics import entitlement, overtaken, percentile, slot_seconds, swaps, tenant_classes
from app.simulate.scenario import Job, SimulationError
from app.simulate.terminal_report import duration, duration_pair, sparkline
from tests.app.simulate.scenarios import SECOND, T0, a_catalog, a_scenario, poisson

SVG = "{http://www.w3.org/2000/svg}"


def a_job(number: int, arrival: float, start: float, run: float = 10, **more) -> Job:
    times = [T0 + int(s * SECOND) for s in (arrival, start, start + run)]
    return replace(Job(number, "zimg", "t", 5, times[0], times[1], times[2], "gpu1-slot0", number), **more)


def an_outcome(*jobs: Job, hours: float = 1, **more) -> Outcome:
    catalog = more.pop("catalog", a_catalog())
    return Outcome(a_scenario([], catalog, end_ms=T0 + int(hours * 3_600_000), **more), jobs)


def test_jains_index_of_equal_and_unequal_values():
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([1, 2]) == pytest.approx(0.9)
    assert jain([1]) is None and jain([]) is None and jain([0, 0]) is None


def test_percentiles_lie_between_values():
    assert [percentile([1, 2, 3, 4, 5], share) for share in (0, 0.5, 0.9, 1)] == [1, 3, 4.6, 5]
    assert percentile([], 0.5) == 0


def test_a_job_is_overtaken_by_jobs_that_are_accepted_later_and_start_earlier():
    jobs = [a_job(1, 0, 50, turn=3), a_job(2, 7, 10, turn=1), a_job(3, 30, 40, turn=2), a_job(4, 60, 60, turn=4)]
    assert overtaken(jobs) == {1: 30}


def test_jobs_of_other_models_do_not_overtake():
    assert overtaken([a_job(1, 0, 50, turn=2), a_job(2, 7, 10, turn=1, model="flux")]) == {}


def test_slot_seconds_count_the_time_between_two_times():
    jobs = [a_job(1, 0, 0), a_job(2, 0, 10, tenant="u")]
    assert slot_seconds(jobs, T0 + 5000, T0 + 12_000) == {"t": 5, "u": 2}


def test_a_change_of_model_is_a_swap():
    models = ["a", "a", "b", "a"]
    assert swaps([a_job(n, 0, n * 10, model=model) for n, model in enumerate(models, 1)]) == 2
    assert swaps([a_job(1, 0, 0, model="a"), a_job(2, 0, 10, model="b", slot="gpu2-slot0")]) == 0


def test_tenants_are_classed_by_their_demand():
    jobs = [a_job(1, 0, 0, 60, tenant="big"), a_job(2, 0, 0, 35, tenant="middle"), a_job(3, 0, 0, 5, tenant="small")]
    assert tenant_classes(jobs) == {"big": "heavy", "middle": "medium", "small": "light"}


def test_use_is_the_share_of_the_slots_time_without_outages():
    outcome = an_outcome(a_job(1, 0, 0, 900), a_job(2, 0, 3000, 900), catalog=a_catalog(2))
    assert summarize(outcome).use == pytest.approx(1500 / 7200)
    out = [Outage("gpu1", T0 + 1_800_000, T0 + 9_000_000)]
    assert summarize(an_outcome(*outcome.jobs, catalog=a_catalog(2), outages=out)).use == pytest.approx(1500 / 3600)


def test_entitlement_counts_tenants_with_a_backlog_by_their_weights():
    waiting = [a_job(n, 0, 20_000, tenant=tenant) for n, tenant in enumerate("abc", 1)]
    finished = [a_job(10 + n, 0, n * 10, tenant="a" if n % 4 else "b") for n in range(360)]
    catalog = a_catalog(policy="fair", weights={"a": 3.0})
    entitlements = entitlement(an_outcome(*waiting[:2], *finished, catalog=catalog))
    assert {tenant: got / due for (_, tenant), (got, due) in entitlements.items()} == pytest.approx(
        {"a": 1, "b": 1}, rel=0.01
    )
    starved = entitlement(an_outcome(*waiting, *finished, catalog=catalog))
    assert starved["zimg", "c"][0] == 0
    assert starved["zimg", "c"][1] == pytest.approx(720, rel=0.01)


def test_a_tenant_without_a_backlog_is_entitled_to_nothing():
    jobs = [a_job(n, n * 10, n * 10, tenant="ab"[n % 2]) for n in range(1, 300)]
    assert entitlement(an_outcome(*jobs)) == {}
    assert summarize(an_outcome(*jobs)).jain is None


def test_waits_are_grouped_by_priority_model_and_class_of_tenant():
    jobs = [
        a_job(1, 0, 10, priority=1),
        a_job(2, 0, 30, priority=9),
        a_job(3, 0, 50, priority=9, start_ms=None, end_ms=None),
    ]
    summary = summarize(an_outcome(*jobs))
    assert (summary.waits.jobs, summary.waits.never, summary.waits.mean, summary.waits.longest) == (3, 1, 20, 30)
    assert (summary.priorities[1].p50, summary.priorities[9].jobs, summary.priorities[9].never) == (10, 2, 1)


def test_time_series_have_slices():
    jobs = [a_job(n, 0, n * 36) for n in range(100)]
    series = summarize(an_outcome(*jobs)).series
    assert {len(values) for values in (series.hours, series.use, series.waiting, series.wait_p90)} == {96}
    assert series.hours[-1] == 1
    assert series.waiting[0] == 98 and series.waiting[-1] == 0
    assert series.wait_p90[1] is None
    assert sum(series.use) / 96 == pytest.approx(1000 / 3600)


def test_statistics_without_jobs_are_zero():
    summary = summarize(an_outcome())
    assert (summary.waits.jobs, summary.waits.longest, summary.use, summary.jain) == (0, 0, 0, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.123, "0.12 s"),
        (19.4, "19 s"),
        (119, "119 s"),
        (120, "2.0 min"),
        (34_200, "9.5 h"),
        (90_000, "25 h"),
        (864_000, "10 d"),
    ],
)
def test_a_duration_is_shown_in_a_suitable_unit(seconds, text):
    assert duration(seconds) == text


def test_a_pair_of_similar_durations_names_the_unit_once():
    assert (duration_pair(0.5, 12), duration_pair(30, 600)) == ("0.5 / 12 s", "30 s / 10 min")


def test_a_sparkline_shows_the_maximum_of_each_block():
    assert sparkline([0, 8, 1, None, None, None], 8, width=3) == "█▂ "
    assert sparkline([0.0, 0.0], 0, width=2) == "▁▁"


# -- plots -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [0.5, 6, 24, 24 * 7, 24 * 90])
def test_plots_are_svg_with_axes_and_a_line_for_each_variant(tmp_path, hours):
    jobs = [a_job(n, n * hours * 36, n * hours * 37) for n in range(100)]
    outcomes = [an_outcome(*jobs, hours=hours, name=name) for name in ("_fifo", "<b>$&")]
    written = plots.write(tmp_path / "new", [summarize(outcome) for outcome in outcomes], outcomes)
    assert [path.name for path in written] == ["waits.svg", "waiting.svg", "use.svg", "distribution.svg"]
    for path in written:
        texts = [element.text or "" for element in xml.fromstring(path.read_text()).iter(f"{SVG}text")]
        assert [text for text in texts if "<b>$&" in text] and [text for text in texts if "_fifo" in text]
        assert path.stem == "distribution" or {"hours", "minutes", "days"} & set(texts)


def test_the_same_outcome_gives_the_same_plots(tmp_path):
    outcome = an_outcome(a_job(1, 0, 3600))
    first, second = (plots.write(tmp_path / name, [summarize(outcome)], [outcome]) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_without_matplotlib_the_error_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SimulationError, match=r"pip install 'slotkeeper\[plots\]'"):
        plots.write(tmp_path, [summarize(an_outcome())], [an_outcome()])


def test_plots_without_jobs_are_valid(tmp_path):
    outcome = an_outcome()
    for path in plots.write(tmp_path, [summarize(outcome)], [outcome]):
        xml.fromstring(path.read_text())


def test_an_unwritable_folder_for_plots_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SimulationError, match="cannot be written"):
        plots.write(tmp_path / "file", [summarize(an_outcome())], [an_outcome()])


def test_a_real_outcome_adds_up(play):
    outcome = play(a_scenario(poisson(8, 2000, 0.5, 10, tenants=5, priorities=3), a_catalog(6)))
    summary = summarize(outcome)
    assert (
        sum(waits.jobs for waits in summary.priorities.values())
        == sum(waits.jobs for waits in summary.tenants.values())
        == 2000
    )
    assert summary.use == pytest.approx(sum(summary.series.use) / 96, rel=0.01)
    assert summary.waits.p50 <= summary.waits.p90 <= summary.waits.p99 <= summary.waits.longest
