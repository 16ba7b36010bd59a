"""The offer script and routing/admission/constraints.py agree on every declaration and every constraint."""

import os
import string

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis import Redis

from routing.admission.constraints import encode_constraints, meets, parse_attributes
from slotkeeper.errors import InvalidJob
from slotkeeper.registry.values import Server as CatalogServer
from tests.support.fleet_queue import FleetQueue, Server, a

ASKED_FOR = os.environ.get("SLOTKEEPER_TEST_EXAMPLES")
NAMES = ("gpu", "memory", "a.b", "x-1", "version")
MODELS = ("zimg", "org/model-7b", "m.%w+", "a+b:2", "gpu")

texts = st.text(string.ascii_letters + string.digits + "._:/+ -", min_size=1, max_size=6)
exact = st.sampled_from((0.1, 1e3, -0.5, 1e-7, 999999999999999))
numbers = st.one_of(st.integers(-20, 20), st.floats(-1e15, 1e15), exact)
odd = st.sampled_from(("0x10", "1_0", "nan", "-nan", "inf", "-inf", "infinity", "1e999"))
almost = st.sampled_from(("1e3", "1e", "1.", "1.5.1", "-1", "- 1", "1 ", "1-5"))
values = st.one_of(texts, numbers, odd, almost)
ranges = st.dictionaries(st.sampled_from(("min", "max")), numbers, min_size=1)
constraints = st.dictionaries(
    st.sampled_from(NAMES), st.one_of(values, st.lists(values, min_size=1, max_size=3), ranges), max_size=3
)
environments = st.sampled_from(("production", "testnet", "canary"))
declared = st.builds(
    lambda names, environment: names | ({"environment": environment} if environment else {}),
    st.dictionaries(st.sampled_from(NAMES), st.one_of(values, st.lists(values, min_size=1, max_size=3)), max_size=5),
    st.lists(environments, max_size=2),
)


def check(client: Redis, asked: dict, environment: str, own: dict, of_model: dict, model: str) -> None:
    try:
        constraints, attributes = encode_constraints(asked, environment), parse_attributes(own)
        attributes |= {f"{model}:{name}": value for name, value in parse_attributes(of_model).items()}
    except InvalidJob:
        return
    client.flushall()
    queue = FleetQueue(client).with_servers(Server("gpu", models=(model, "other"), attributes=attributes))
    offers = queue.enqueue(a("j", 1, model=model, constraints=constraints))
    server = CatalogServer("gpu", "zimg", 1, "online", {model: ""}, 0, attributes)
    assert bool(offers) == meets(constraints, server, model), (constraints, attributes)


def test_the_script_and_the_python_code_agree_on_whether_a_server_meets_the_constraints(client: Redis):
    @settings(
        max_examples=int(ASKED_FOR or "400"),
        derandomize=ASKED_FOR is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(asked=constraints, environment=environments, own=declared, of_model=declared, model=st.sampled_from(MODELS))
    @example({"memory": {"min": 10}}, "production", {"memory": "0x10"}, {}, "zimg")
    @example({"memory": {"min": 10}}, "production", {"memory": "1_000"}, {}, "zimg")
    @example({"memory": {"min": 10}}, "production", {"memory": "nan"}, {}, "zimg")
    @example({"memory": {"max": 1000}}, "production", {"memory": "-inf"}, {}, "zimg")
    @example({"memory": {"min": 1}}, "production", {"memory": "1e3"}, {"memory": 0}, "zimg")
    @example({}, "production", {"environment": "testnet"}, {}, "zimg")
    @example({}, "production", {"environment": "testnet"}, {"environment": ["testnet", "production"]}, "zimg")
    @example({}, "testnet", {"environment": "production"}, {}, "zimg")
    @example({}, "testnet", {}, {}, "zimg")
    def agree(asked, environment, own, of_model, model):
        check(client, asked, environment, own, of_model, model)

    agree()
