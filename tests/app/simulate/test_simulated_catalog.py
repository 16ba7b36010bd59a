"""The catalog of a simulation, and the changes of a what-if variant."""

import pytest

from app.simulate import simulated_catalog
from app.simulate.load_plan import Plan
from app.simulate.scenario import SimulationError
from app.simulate.simulated_catalog import Variant
from tests.app.simulate.scenarios import a_catalog, at


def slots(catalog) -> dict[str, int]:
    return {server.name: server.slots for server in catalog.servers.values()}


def test_by_default_each_model_has_two_servers_and_a_separate_fleet():
    catalog = simulated_catalog.from_plan(Plan(models=[{"name": "a"}, {"name": "b"}]))
    assert slots(catalog) == {"a-gpu1": 8, "a-gpu2": 8, "b-gpu1": 8, "b-gpu2": 8}
    assert catalog.fleets() == ["a", "b"]


def test_models_that_share_a_server_directly_or_indirectly_are_one_fleet():
    servers = [
        {"name": "s1", "slots": 1, "models": ["a", "b"]},
        {"name": "s2", "slots": 1, "models": ["c", "d"]},
        {"name": "s3", "slots": 1, "models": ["d", "b"]},
        {"name": "s4", "slots": 1, "models": ["e"]},
    ]
    catalog = simulated_catalog.from_plan(Plan(models=[{"name": name} for name in "abcde"], servers=servers))
    assert catalog.fleets() == ["a", "e"]
    assert catalog.models_of("a") == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16", {"gpu1": 8, "gpu2": 8}),
        ("5", {"gpu1": 3, "gpu2": 2}),
        ("2", {"gpu1": 1, "gpu2": 1}),
        ("gpu2=7", {"gpu1": 4, "gpu2": 7}),
    ],
)
def test_slots_are_spread_over_the_servers_or_given_to_one(text, expected):
    assert slots(simulated_catalog.apply_variant(a_catalog(4, servers=2), Variant(slots=text))) == expected


def test_slots_are_spread_in_proportion():
    uneven = simulated_catalog.apply_variant(a_catalog(4, servers=3), Variant(slots="gpu1=1,gpu2=9"))
    assert slots(simulated_catalog.apply_variant(uneven, Variant(slots="28"))) == {"gpu1": 2, "gpu2": 18, "gpu3": 8}
    assert slots(simulated_catalog.apply_variant(uneven, Variant(slots="3"))) == {"gpu1": 1, "gpu2": 1, "gpu3": 1}


def test_a_policy_and_settings_change_the_models():
    catalog = a_catalog(models=("a", "b"), policy="fifo", max_retries=2)
    changed = simulated_catalog.apply_variant(
        catalog, Variant(policy="aging", settings=["*.tier_head_start=30", 'a.weights={"x": 2}'])
    )
    assert [model.config.policy for model in changed.models.values()] == ["aging", "aging"]
    assert [model.config.tier_head_start for model in changed.models.values()] == [30, 30]
    assert [model.config.weights for model in changed.models.values()] == [{"x": 2}, {}]
    assert {model.config.max_retries for model in changed.models.values()} == {2}
    assert catalog.models["a"].config.policy == "fifo"


def test_a_speed_up_shortens_run_times_of_all_or_of_one_model():
    arrivals = [at(0, 10, model="a"), at(0, 10, model="b")]
    assert [arrival.run_ms for arrival in simulated_catalog.scale_run_times(arrivals, ("a", "b"), ["2", "b=2.5"])] == [
        5000,
        2000,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (Variant(slots="none"), "write the number of slots"),
        (Variant(slots="0"), "write the number of slots"),
        (Variant(slots="gone=1"), "no server 'gone' among gpu1, gpu2"),
        (Variant(slots="1"), "2 servers"),
        (Variant(policy="random"), "policy: input should be 'fifo'"),
        (Variant(settings=["zimg.color=1"]), "no field 'color'"),
        (Variant(settings=["gone.policy=fifo"]), "no model 'gone'"),
        (Variant(settings=["policy=fifo"]), "MODEL.FIELD=VALUE"),
        (Variant(settings=["zimg.tier_head_start=-1"]), "tier_head_start"),
        (Variant(settings=['zimg.weights={"a": 0}']), "weights.a"),
    ],
)
def test_an_invalid_variant_is_refused_in_one_sentence(changes, message):
    with pytest.raises(SimulationError) as raised:
        simulated_catalog.apply_variant(a_catalog(servers=2), changes)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["fast", "0", "-1", "gone=2", "nan", "inf"])
def test_an_invalid_speed_up_is_refused(text):
    with pytest.raises(SimulationError, match="--speed-up"):
        simulated_catalog.scale_run_times([at(0)], ["zimg"], [text])
