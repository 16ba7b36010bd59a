"""What a job needs of a server, and whether a server meets it.

A job's constraints come as JSON, `{"gpu": ["A100", "H100"], "memory": {"min": 40}, "region": "eu"}`, and are kept as
text, a condition a line, in an order that makes equal needs equal texts: `gpu=A100,H100`, `memory>=40`, `region=eu`.
lua/lib/placement.lua reads the same text in the offer; tests hold the two together.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jobs.errors import InvalidJob
from jobs.record import Server

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+ -]{0,127}")
_MOST_CONDITIONS, _MOST_CHOICES = 20, 50
_BOUNDS = {"min": ">=", "max": "<="}
_CONDITION = re.compile(r"([^<>=]+)([<>]?=)(.*)")


def read_needs(constraints: Mapping[str, Any] | None) -> str:
    """The conditions as text; "": none.  Raises InvalidJob, which says what is wrong and how it should be written."""
    if constraints is None:
        return ""
    if not isinstance(constraints, Mapping) or len(constraints) > _MOST_CONDITIONS:
        raise InvalidJob("constraints", f"constraints must be an object of at most {_MOST_CONDITIONS} names")
    conditions: list[str] = []
    for name in sorted(constraints):
        _check_name(name, "constraints")
        conditions += _conditions(name, constraints[name])
    return "\n".join(conditions)


def _conditions(name: str, wanted: Any) -> list[str]:
    if isinstance(wanted, Mapping):
        return _range(name, wanted)
    choices = wanted if isinstance(wanted, list) else [wanted]
    if not 1 <= len(choices) <= _MOST_CHOICES:
        raise InvalidJob("constraints", f"constraints.{name}: name 1 to {_MOST_CHOICES} values, one must be met")
    return [f"{name}={','.join(sorted({_text(choice, f'constraints.{name}') for choice in choices}))}"]


def _range(name: str, wanted: Mapping[str, Any]) -> list[str]:
    if not wanted or not wanted.keys() <= _BOUNDS.keys():
        raise InvalidJob("constraints", f"constraints.{name}: a range is {{'min': …, 'max': …}}, or one of them")
    for bound in wanted.values():
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not abs(bound) < 1e15:
            raise InvalidJob("constraints", f"constraints.{name}: min and max must be numbers")
    if "min" in wanted and "max" in wanted and wanted["min"] > wanted["max"]:
        raise InvalidJob(
            "constraints", f"constraints.{name}: no server can be at least {wanted['min']} and at most {wanted['max']}"
        )
    return [f"{name}{_BOUNDS[side]}{_number(wanted[side])}" for side in ("max", "min") if side in wanted]


def read_attributes(attributes: Mapping[str, Any], field: str = "attributes") -> dict[str, str | float]:
    """What a server declares of itself, each a text, a number, or a list of texts.  Raises InvalidJob."""
    read: dict[str, str | float] = {}
    for name, value in attributes.items():
        _check_name(name, field)
        if isinstance(value, list):
            read[name] = ",".join(_text(one, f"{field}.{name}") for one in value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            read[name] = float(_number(value))
        else:
            read[name] = _text(value, f"{field}.{name}")
    return read


def meets(needs: str, server: Server, model: str) -> bool:
    """Whether jobs of `model` with these needs may run there.  What a server does not declare it does not meet."""
    return not unmet(needs, server, model)


def unmet(needs: str, server: Server, model: str) -> list[str]:
    """The conditions that the server does not meet."""
    return [line for line in needs.splitlines() if not _is_met(line, server, model)]


def eligible(servers: Iterable[Server], model: str, needs: str) -> list[Server]:
    """The servers that serve the model and meet the needs, in whatever state they are."""
    return [it for it in servers if model in it.endpoints and meets(needs, it, model)]


def _is_met(condition: str, server: Server, model: str) -> bool:
    found = _CONDITION.fullmatch(condition)
    assert found is not None, condition
    name, operator, wanted = found.groups()
    has = server.attributes.get(f"{model}:{name}", server.attributes.get(name))
    if has is None:
        return False
    if operator == "=":
        return bool({*attribute_text(has).split(",")} & {*wanted.split(",")})
    try:
        return float(has) >= float(wanted) if operator == ">=" else float(has) <= float(wanted)
    except ValueError:
        return False


def attribute_text(value: str | float) -> str:
    """An attribute as the scripts compare it: whole numbers without a point."""
    return value if isinstance(value, str) else _number(value)


def _check_name(name: Any, field: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidJob(field, f"{field}: a name is 1 to 64 letters, digits or _ . - and begins with a letter")


def _text(value: Any, field: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
        return _number(value)
    if not isinstance(value, str) or not _VALUE.fullmatch(value):
        raise InvalidJob(
            field.split(".", 1)[0], f"{field}: a value is a number, or 1 to 128 letters, digits or . _ : / + -"
        )
    return value


def _number(value: int | float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
