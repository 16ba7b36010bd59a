"""Generated loads: what the plan says, and the same again by the same seed."""

from collections import Counter
from statistics import mean, pstdev

import pytest

from app.simulate import generated_load
from app.simulate.load_plan import ModelPlan, Plan, read_plan
from app.simulate.scenario import SimulationError

HOUR_MS = 3_600_000


def plan(**fields) -> Plan:
    return Plan(**fields)


def test_a_seed_makes_the_same_load_and_another_seed_another():
    first = generated_load.generate_arrivals(plan(seed=5, duration="2h", swing=0.5, bursts_per_day=24))
    assert first == generated_load.generate_arrivals(plan(seed=5, duration="2h", swing=0.5, bursts_per_day=24))
    assert first != generated_load.generate_arrivals(plan(seed=6, duration="2h", swing=0.5, bursts_per_day=24))


def test_arrivals_stand_in_order_within_the_time():
    times = [
        arrival.at_ms - generated_load.BEGIN_MS
        for arrival in generated_load.generate_arrivals(plan(duration="3h", bursts_per_day=48))
    ]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 3 * HOUR_MS + 300_000


def test_work_arrives_as_busy_as_was_asked_for():
    found = generated_load.generate_arrivals(plan(busy=0.8, duration="1d"))
    assert sum(arrival.run_ms for arrival in found) / (16 * 24 * HOUR_MS) == pytest.approx(0.8, rel=0.03)


def test_a_rate_is_jobs_per_hour():
    assert len(generated_load.generate_arrivals(plan(rate=1000, duration="20h"))) == pytest.approx(20_000, rel=0.03)


def test_run_times_have_the_mean_and_the_spread_of_their_model():
    models = [{"name": "a", "mean": 5, "spread": 0.5}, {"name": "b", "mean": "1m", "shape": "exponential"}]
    found = generated_load.generate_arrivals(plan(models=models, rate=20_000, duration="2h"))
    for name, expected, spread in (("a", 5, 0.5), ("b", 60, 1)):
        runs = [arrival.run_ms / 1000 for arrival in found if arrival.model == name]
        assert mean(runs) == pytest.approx(expected, rel=0.03)
        assert pstdev(runs) / mean(runs) == pytest.approx(spread, rel=0.05)


def test_no_spread_is_a_fixed_time():
    assert {
        it.run_ms for it in generated_load.generate_arrivals(plan(models=[{"name": "a", "mean": 5, "spread": 0}]))
    } == {5000}


def test_tenants_are_unequal_by_zipfs_law():
    counts = Counter(
        arrival.tenant
        for arrival in generated_load.generate_arrivals(plan(tenants=100, zipf=1, rate=50_000, duration="1h"))
    )
    assert counts["tenant001"] / counts["tenant010"] == pytest.approx(10, rel=0.1)
    assert len(counts) == 100


def test_shares_of_tenants_priorities_and_models_can_be_named():
    models = [{"name": "a", "share": 3}, {"name": "b"}]
    found = generated_load.generate_arrivals(
        plan(shares={"x": 9, "y": 1}, priorities={2: 1, 7: 4}, models=models, rate=20_000, duration="1h")
    )
    for kind, value, share in (("tenant", "x", 0.9), ("priority", 7, 0.8), ("model", "a", 0.75)):
        assert sum(getattr(it, kind) == value for it in found) / len(found) == pytest.approx(share, rel=0.05)


def test_the_rate_swings_over_the_day():
    found = generated_load.generate_arrivals(plan(swing=1, peak="12h", rate=10_000))
    by_hour = Counter((arrival.at_ms - generated_load.BEGIN_MS) // HOUR_MS for arrival in found)
    assert by_hour[12] == pytest.approx(20_000, rel=0.05)
    assert by_hour[0] < 600
    assert len(found) == pytest.approx(240_000, rel=0.02)


def test_a_burst_is_one_tenants():
    bursts = [{"at": "30m", "jobs": 300, "lasts": "1m", "tenant": "noisy"}]
    found = [it for it in generated_load.generate_arrivals(plan(bursts=bursts, duration="1h")) if it.tenant == "noisy"]
    assert len(found) == 300
    assert all(30 * 60 <= (it.at_ms - generated_load.BEGIN_MS) / 1000 <= 31 * 60 for it in found)


def test_bursts_and_outages_come_about_as_often_as_asked_for():
    few, many = (generated_load.generate_arrivals(plan(duration="10d", rate=10, bursts_per_day=n)) for n in (0, 5))
    assert (len(many) - len(few)) / 200 == pytest.approx(50, abs=20)
    assert len(generated_load.generate_outages(plan(duration="10d", outages_per_day=3))) == pytest.approx(60, abs=20)


def test_outages_and_other_slots_leave_the_arrivals_as_they_were():
    servers = [{"name": "one", "slots": 40}]
    assert generated_load.generate_arrivals(plan(rate=100)) == generated_load.generate_arrivals(
        plan(rate=100, outages_per_day=9, servers=servers)
    )


def test_named_outages_are_at_their_time():
    down = [{"server": "demo-gpu1", "at": "1h", "lasts": "10m"}]
    assert [
        (it.from_ms - generated_load.BEGIN_MS, it.until_ms - it.from_ms)
        for it in generated_load.generate_outages(plan(outages=down))
    ] == [(HOUR_MS, 600_000)]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("250ms", 0.25), ("7d", 604_800), (12, 12)])
def test_lengths_of_time_are_written_with_their_unit(text, seconds):
    assert plan(duration=text).duration == seconds


@pytest.mark.parametrize("name", ["load.toml", "load.json"])
def test_a_file_describes_a_load_and_options_change_it(tmp_path, name):
    text = {
        "load.toml": 'busy = 1.2\n[[models]]\nname = "flux"\n',
        "load.json": '{"busy": 1.2, "models": [{"name": "flux"}]}',
    }
    (tmp_path / name).write_text(text[name])
    found = read_plan(tmp_path / name, {"busy": 0.5, "seed": 3})
    assert (found.busy, found.seed, found.models[0].name) == (0.5, 3, "flux")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("busy = -1", "busy: input should be greater than 0"),
        ("color = 1", "color: extra inputs are not permitted"),
        ("busy = ", "is not TOML"),
        ('duration = "soon"', "'soon' is no length of time"),
        ("models = []", "at least one model"),
        ('[[models]]\nname = "a"\n[[models]]\nname = "a"', "have the same name"),
        ('[[servers]]\nname = "s"\nslots = 1\nmodels = ["gone"]', "there is no model 'gone' among demo"),
        ('[[outages]]\nserver = "gone"\nat = 1', "there is no server 'gone' among"),
        (
            '[[models]]\nname = "a"\n[[models]]\nname = "b"\n[[servers]]\nname = "s"\nslots = 1\nmodels = ["a"]',
            "serves 'b'",
        ),
        ("[priorities]\n10 = 1", "priorities.10"),
        ("[priorities]\n10 = 1", "priorities.10"),
        ("[tiers]\n1 = 1\n[priorities]\n1 = 1", "tiers: extra inputs are not permitted"),
        ("tenants = 0", "tenants: input should be greater than or equal to 1"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_name_and_the_field(tmp_path, text, says):
    file = tmp_path / "load.toml"
    file.write_text(text)
    with pytest.raises(SimulationError) as refused:
        read_plan(file, {})
    assert says in str(refused.value) and str(file) in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(SimulationError, match="cannot be read"):
        read_plan(tmp_path / "load.toml", {})


def test_jobs_of_a_model_have_its_deadline():
    found = generated_load.generate_arrivals(
        plan(duration=3600, models=[ModelPlan(name="chat", deadline=90), ModelPlan(name="batch")])
    )
    assert {(job.model, job.deadline_ms and job.deadline_ms - job.at_ms) for job in found} == {
        ("chat", 90_000),
        ("batch", 0),
    }
