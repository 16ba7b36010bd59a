"""Constraints are parsed, stored as text, decoded, and compared with the declaration of a server."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.admission.constraints import (
    decode_constraints,
    encode_constraints,
    meets,
    parse_attributes,
    parse_model_attributes,
)
from slotkeeper.errors import InvalidJob
from slotkeeper.registry.values import Server

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,10}", fullmatch=True)
NUMBERS = st.one_of(st.integers(-(10**14), 10**14), st.floats(-1e14, 1e14, allow_nan=False))
VALUES = st.one_of(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/+ -]{0,10}", fullmatch=True), NUMBERS)
RANGES = st.tuples(NUMBERS, NUMBERS).map(lambda ends: {"min": min(ends), "max": max(ends)})
HALVES = st.builds(lambda side, number: {side: number}, st.sampled_from(["min", "max"]), NUMBERS)
WANTED = st.one_of(VALUES, st.lists(VALUES, min_size=1, max_size=5), RANGES, HALVES)
CONSTRAINTS = st.dictionaries(NAMES, WANTED, max_size=6)


@given(CONSTRAINTS)
def test_decoded_constraints_are_encoded_to_the_same_text(asked: dict[str, Any]) -> None:
    constraints = encode_constraints(asked)
    assert encode_constraints(decode_constraints(constraints)) == constraints


def test_constraints_are_shown_as_people_write_them() -> None:
    asked = {"gpu": ["H100", "A100"], "memory": {"min": 40, "max": 80.5}, "region": "eu", "cores": 8}
    assert decode_constraints(encode_constraints(asked)) == {
        "cores": "8",
        "gpu": ["A100", "H100"],
        "memory": {"min": 40, "max": 80.5},
        "region": "eu",
    }
    assert decode_constraints("") == {}


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        "gpu",
        {"": "x"},
        {"7": "x"},
        {7: "x", "gpu": "y"},
        {"gpu:x": "y"},
        {"gpu": None},
        {"gpu": True},
        {"gpu": []},
        {"gpu": ["A,B"]},
        {"gpu": "a=b"},
        {"gpu": "x\ny"},
        {"gpu": [["A100"]]},
        {"gpu": ["x"] * 51},
        {"memory": float("nan")},
        {"memory": 10**400},
        {"memory": {}},
        {"memory": {"min": "40"}},
        {"memory": {"min": float("nan")}},
        {"memory": {"min": 10**400}},
        {"memory": {"least": 40}},
        {"memory": {"min": 80, "max": 40}},
        {f"n{n}": 1 for n in range(21)},
    ],
)
def test_invalid_constraints_are_refused_with_the_name_of_the_field(wrong: Any) -> None:
    with pytest.raises(InvalidJob) as refused:
        encode_constraints(wrong)
    assert refused.value.field == "constraints"
    assert "constraints" in refused.value.detail


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpu": None},
        {"gpu": True},
        {"gpu": {}},
        {"gpu": []},
        {"gpu": ""},
        {"gpu": ["x"] * 51},
        {"memory": float("inf")},
        {"memory": 10**400},
        {"zimg:model_version": "2"},
        {f"n{n}": 1 for n in range(51)},
    ],
)
def test_attributes_that_cannot_be_compared_are_refused_with_the_name_of_the_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse_attributes(wrong)
    assert refused.value.field == "attributes"


def _server(attributes: dict[str, Any], of_model: dict[str, str]) -> Server:
    special = {f"zimg:{name}": value for name, value in parse_model_attributes(**of_model).items()}
    return Server("gpu1", "zimg", 1, "online", {"zimg": "http://x"}, 0, parse_attributes(attributes) | special)


@pytest.mark.parametrize(
    "constraints, met",
    [
        ({"gpu": "A100"}, True),
        ({"gpu": ["A100", "H100"]}, True),
        ({"gpu": "H100"}, False),
        ({"labels": "testnet"}, True),
        ({"labels": "mainnet"}, False),
        ({"memory": {"min": 40, "max": 80}}, True),
        ({"memory": 80}, True),
        ({"memory": "80"}, True),
        ({"memory": {"min": 80.5}}, False),
        ({"gpu": {"min": 1}}, False),
        ({"region": "eu"}, False),
        ({"model_version": "2.1"}, True),
        ({"model_version": 2.1}, True),
        ({"model_version": "1.0"}, False),
        ({"runtime": "trt"}, True),
        ({"runtime": "onnx"}, False),
    ],
)
def test_a_server_meets_constraints_by_its_attributes_and_its_attributes_for_the_model(
    constraints: dict[str, Any], met: bool
) -> None:
    declared = {"gpu": "A100", "memory": 80, "labels": ["fast", "testnet"], "model_version": "1.0"}
    server = _server(declared, {"model_version": "2.1", "runtime": "trt"})
    assert meets(encode_constraints(constraints), server, "zimg") is met
