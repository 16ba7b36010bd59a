"""Generated loads follow their plan, and are the same for the same seed."""

from collections import Counter
from statistics import mean, pstdev

import pytest

from app.simulate import generated_load
from app.simulate.load_plan import ModelPlan, Plan, read_plan
from app.simulate.scenario import SimulationError

HOUR_MS = 3_600_000


def plan(**fields) -> Plan:
    return Plan(**fields)


def test_the_same_seed_generates_the_same_load():
    first = generated_load.generate_arrivals(plan(seed=5, duration="2h", swing=0.5, bursts_per_day=24))
    assert first == generated_load.generate_arrivals(plan(seed=5, duration="2h", swing=0.5, bursts_per_day=24))
    assert first != generated_load.generate_arrivals(plan(seed=6, duration="2h", swing=0.5, bursts_per_day=24))


def test_arrivals_are_sorted_and_within_the_duration():
    times = [
        arrival.at_ms - generated_load.BEGIN_MS
        for arrival in generated_load.generate_arrivals(plan(duration="3h", bursts_per_day=48))
    ]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 3 * HOUR_MS + 300_000


def test_arriving_work_matches_busy():
    arrivals = generated_load.generate_arrivals(plan(busy=0.8, duration="1d"))
    assert sum(arrival.run_ms for arrival in arrivals) / (16 * 24 * HOUR_MS) == pytest.approx(0.8, rel=0.03)


def test_a_rate_is_jobs_per_hour():
    assert len(generated_load.generate_arrivals(plan(rate=1000, duration="20h"))) == pytest.approx(20_000, rel=0.03)


def test_run_times_have_the_mean_and_the_spread_of_their_model():
    models = [{"name": "a", "mean": 5, "spread": 0.5}, {"name": "b", "mean": "1m", "shape": "exponential"}]
    arrivals = generated_load.generate_arrivals(plan(models=models, rate=20_000, duration="2h"))
    for name, expected, spread in (("a", 5, 0.5), ("b", 60, 1)):
        runs = [arrival.run_ms / 1000 for arrival in arrivals if arrival.model == name]
        assert mean(runs) == pytest.approx(expected, rel=0.03)
        assert pstdev(runs) / mean(runs) == pytest.approx(spread, rel=0.05)


def test_no_spread_is_a_fixed_time():
    assert {
        arrival.run_ms
        for arrival in generated_load.generate_arrivals(plan(models=[{"name": "a", "mean": 5, "spread": 0}]))
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
    arrivals = generated_load.generate_arrivals(
        plan(shares={"x": 9, "y": 1}, priorities={2: 1, 7: 4}, models=models, rate=20_000, duration="1h")
    )
    for kind, value, share in (("tenant", "x", 0.9), ("priority", 7, 0.8), ("model", "a", 0.75)):
        assert sum(getattr(arrival, kind) == value for arrival in arrivals) / len(arrivals) == pytest.approx(
            share, rel=0.05
        )


def test_the_rate_swings_over_the_day():
    arrivals = generated_load.generate_arrivals(plan(swing=1, peak="12h", rate=10_000))
    by_hour = Counter((arrival.at_ms - generated_load.BEGIN_MS) // HOUR_MS for arrival in arrivals)
    assert by_hour[12] == pytest.approx(20_000, rel=0.05)
    assert by_hour[0] < 600
    assert len(arrivals) == pytest.approx(240_000, rel=0.02)


def test_the_jobs_of_a_burst_have_one_tenant():
    bursts = [{"at": "30m", "jobs": 300, "lasts": "1m", "tenant": "noisy"}]
    arrivals = [
        arrival
        for arrival in generated_load.generate_arrivals(plan(bursts=bursts, duration="1h"))
        if arrival.tenant == "noisy"
    ]
    assert len(arrivals) == 300
    assert all(30 * 60 <= (arrival.at_ms - generated_load.BEGIN_MS) / 1000 <= 31 * 60 for arrival in arrivals)


def test_random_bursts_and_outages_have_the_planned_rate():
    few, many = (generated_load.generate_arrivals(plan(duration="10d", rate=10, bursts_per_day=n)) for n in (0, 5))
    assert (len(many) - len(few)) / 200 == pytest.approx(50, abs=20)
    assert len(generated_load.generate_outages(plan(duration="10d", outages_per_day=3))) == pytest.approx(60, abs=20)


def test_outages_and_slots_do_not_change_the_arrivals():
    servers = [{"name": "one", "slots": 40}]
    assert generated_load.generate_arrivals(plan(rate=100)) == generated_load.generate_arrivals(
        plan(rate=100, outages_per_day=9, servers=servers)
    )


def test_named_outages_are_at_their_time():
    down = [{"server": "demo-gpu1", "at": "1h", "lasts": "10m"}]
    assert [
        (outage.from_ms - generated_load.BEGIN_MS, outage.until_ms - outage.from_ms)
        for outage in generated_load.generate_outages(plan(outages=down))
    ] == [(HOUR_MS, 600_000)]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("250ms", 0.25), ("7d", 604_800), (12, 12)])
def test_a_duration_can_have_a_unit(text, seconds):
    assert plan(duration=text).duration == seconds


@pytest.mark.parametrize("name", ["load.toml", "load.json"])
def test_options_change_a_load_from_a_file(tmp_path, name):
    text = {
        "load.toml": 'busy = 1.2\n[[models]]\nname = "flux"\n',
        "load.json": '{"busy": 1.2, "models": [{"name": "flux"}]}',
    }
    (tmp_path / name).write_text(text[name])
    loaded = read_plan(tmp_path / name, {"busy": 0.5, "seed": 3})
    assert (loaded.busy, loaded.seed, loaded.models[0].name) == (0.5, 3, "flux")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("busy = -1", "busy: input should be greater than 0"),
        ("color = 1", "color: extra inputs are not permitted"),
        ("busy = ", "is not TOML"),
        ('duration = "soon"', "'soon' is not a duration"),
        ("models = []", "at least one model"),
        ('[[models]]\nname = "a"\n[[models]]\nname = "a"', "have the same name"),
        ('[[servers]]\nname = "s"\nslots = 1\nmodels = ["gone"]', "there is no model 'gone' among demo"),
        ('[[outages]]\nserver = "gone"\nat = 1', "there is no server 'gone' among"),
        (
            '[[models]]\nname = "a"\n[[models]]\nname = "b"\n[[servers]]\nname = "s"\nslots = 1\nmodels = ["a"]',
            "serves 'b'",
        ),
        ("[priorities]\n10 = 1", "priorities.10"),
        ("[tiers]\n1 = 1\n[priorities]\n1 = 1", "tiers: extra inputs are not permitted"),
        ("tenants = 0", "tenants: input should be greater than or equal to 1"),
    ],
)
def test_an_invalid_load_file_is_refused_with_its_name_and_the_field(tmp_path, text, message):
    file = tmp_path / "load.toml"
    file.write_text(text)
    with pytest.raises(SimulationError) as raised:
        read_plan(file, {})
    assert message in str(raised.value) and str(file) in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_load_file_is_refused(tmp_path):
    with pytest.raises(SimulationError, match="cannot be read"):
        read_plan(tmp_path / "load.toml", {})


def test_jobs_of_a_model_have_its_deadline():
    arrivals = generated_load.generate_arrivals(
        plan(duration=3600, models=[ModelPlan(name="chat", deadline=90), ModelPlan(name="batch")])
    )
    assert {(job.model, job.deadline_ms and job.deadline_ms - job.at_ms) for job in arrivals} == {
        ("chat", 90_000),
        ("batch", 0),
    }
