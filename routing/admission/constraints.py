"""What a job asks of a server, and whether a server meets it.

A job's constraints come as JSON, `{"gpu": ["A100", "H100"], "memory": {"min": 40}, "region": "eu"}`, and are kept as
text, a condition a line, in an order that makes equal constraints equal texts: `gpu=A100,H100`, `memory>=40`,
`region=eu`.  lua/lib/constraints.lua reads the same text in the offer; tests hold the two together.

A job's environment is one more condition, `environment=testnet`.  Jobs without it run only on servers that declare no
environment, or PRODUCTION among others.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from slotkeeper.errors import InvalidJob
from slotkeeper.jobs.values import ENVIRONMENT, PRODUCTION
from slotkeeper.registry.values import VALUE_PATTERN, Server, format_attribute, format_number

NAME_PATTERN = "[A-Za-z][A-Za-z0-9_.-]{0,63}"
_NAME, _VALUE = re.compile(NAME_PATTERN), re.compile(VALUE_PATTERN)
_MOST_CONDITIONS, _MOST_CHOICES, _MOST_ATTRIBUTES = 20, 50, 50
_VALUE_SCHEMAS: list[dict[str, Any]] = [
    {"type": "string", "pattern": f"^{VALUE_PATTERN}$"},
    {"type": "number", "exclusiveMinimum": -1e15, "exclusiveMaximum": 1e15},
]
CHOICE_SCHEMAS = [
    *_VALUE_SCHEMAS,
    {"type": "array", "items": {"anyOf": _VALUE_SCHEMAS}, "minItems": 1, "maxItems": _MOST_CHOICES},
]
"""JSON Schemas of an attribute, and of a condition that names values: one value, or several."""
CONDITION_SCHEMA: dict[str, Any] = {
    "anyOf": [
        *CHOICE_SCHEMAS,
        {
            "type": "object",
            "properties": {"min": {"type": "number"}, "max": {"type": "number"}},
            "additionalProperties": False,
            "minProperties": 1,
        },
    ]
}
"""JSON Schema of a condition: values of which one must be met, or a range."""
_ENVIRONMENT_LINE = f"{ENVIRONMENT}="
_BOUNDS = {"min": ">=", "max": "<="}
_DECIMAL = re.compile(r"-?[0-9][0-9.]*(?:[eE][-+]?[0-9]*)?")
_CONDITION = re.compile(r"([^<>=]+)([<>]?=)(.*)")


def encode_constraints(constraints: Mapping[str, Any] | None, environment: str = PRODUCTION) -> str:
    """The conditions as text; "": none.  Raises InvalidJob, which says what is wrong and how it should be written.

    environment: of the job.  PRODUCTION is no condition: all servers have it that declare no environment.
    """
    if not constraints and environment == PRODUCTION and isinstance(constraints, Mapping | None):
        return ""
    constraints = {} if constraints is None else constraints
    if not isinstance(constraints, Mapping) or len(constraints) > _MOST_CONDITIONS:
        raise InvalidJob("constraints", f"constraints must be an object of at most {_MOST_CONDITIONS} names")
    for name in constraints:
        _check_name(name, "constraints")
    if ENVIRONMENT in constraints:
        raise InvalidJob("constraints", f"constraints.{ENVIRONMENT}: set `environment` of the job instead")
    if environment != PRODUCTION:
        constraints = {**constraints, ENVIRONMENT: check_environment(environment)}
    return "\n".join(line for name in sorted(constraints) for line in _conditions(name, constraints[name]))


def check_environment(environment: Any) -> str:
    """Return the name of an environment.  Raises InvalidJob."""
    if not isinstance(environment, str) or not _VALUE.fullmatch(environment):
        raise InvalidJob(ENVIRONMENT, "environment: a name is 1 to 128 letters, digits or . _ : / + -")
    return environment


def environment_of(constraints: str) -> str:
    """Return the environment of a job with these constraints."""
    if not constraints:
        return PRODUCTION
    line = next((line for line in constraints.splitlines() if line.startswith(_ENVIRONMENT_LINE)), None)
    return PRODUCTION if line is None else line.removeprefix(_ENVIRONMENT_LINE)


def decode_constraints(constraints: str) -> dict[str, Any]:
    """Return the constraints that `encode_constraints` encodes as this text, without the environment.

    One value stands alone, several as a list.
    """
    shown: dict[str, Any] = {}
    for line in constraints.splitlines():
        name, operator, wanted = _parts(line)
        if name == ENVIRONMENT:
            continue
        if operator == "=":
            choices = wanted.split(",")
            shown[name] = choices if len(choices) > 1 else wanted
        else:
            side = next(side for side, sign in _BOUNDS.items() if sign == operator)
            shown.setdefault(name, {})[side] = float(wanted) if set(wanted) & set(".e") else int(wanted)
    return shown


def no_server_message(servers: Iterable[Server], model: str, constraints: str) -> str:
    """That none of the servers serves the model, or meets the constraints, as a part of a sentence."""
    if not any(model in server.endpoints for server in servers):
        return f"no server serves model {model!r}; `slotkeeper servers register` adds one"
    wanted = [*constraints.splitlines()] or [f"{_ENVIRONMENT_LINE}{PRODUCTION}"]
    return f"no known server of model {model!r} meets {', '.join(wanted)}"


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
    return [f"{name}{_BOUNDS[side]}{format_number(wanted[side])}" for side in ("max", "min") if side in wanted]


def parse_attributes(attributes: Mapping[str, Any], field: str = "attributes") -> dict[str, str | float]:
    """What a server declares of itself, each a text, a number, or a list of texts.  Raises InvalidJob."""
    if len(attributes) > _MOST_ATTRIBUTES:
        raise InvalidJob(field, f"{field} must be an object of at most {_MOST_ATTRIBUTES} names")
    read: dict[str, str | float] = {}
    for name, value in attributes.items():
        _check_name(name, field)
        if isinstance(value, list):
            if not 1 <= len(value) <= _MOST_CHOICES:
                raise InvalidJob(field, f"{field}.{name}: list 1 to {_MOST_CHOICES} values, or leave it out")
            read[name] = ",".join(_text(one, f"{field}.{name}") for one in value)
        else:
            text = _text(value, f"{field}.{name}")
            read[name] = text if isinstance(value, str) else float(text)
    return read


def parse_model_attributes(**declared: str | None) -> dict[str, str | float]:
    """What a server declares for one model; None: it does not say.  Raises InvalidJob, which names the field."""
    return {name: _text(value, name) for name, value in declared.items() if value is not None}


def meets(constraints: str, server: Server, model: str) -> bool:
    """Return whether jobs of `model` with these constraints may run on the server.

    A server that does not declare an attribute does not meet a condition on it.
    """
    return not unmet_conditions(constraints, server, model)


def unmet_conditions(constraints: str, server: Server, model: str) -> list[str]:
    """Return the conditions that the server does not meet."""
    lines = constraints.splitlines()
    if server.declared(model, ENVIRONMENT) is not None and environment_of(constraints) == PRODUCTION:
        lines.append(f"{_ENVIRONMENT_LINE}{PRODUCTION}")
    return [line for line in lines if not _is_met(line, server, model)]


def meets_condition(condition: str, server: Server, model: str) -> bool:
    """Return whether a server meets a condition that is not a job's, so that no environment is implied."""
    return all(_is_met(line, server, model) for line in condition.splitlines())


def eligible_servers(servers: Iterable[Server], model: str, constraints: str) -> list[Server]:
    """Return the servers that serve the model and meet the constraints, in whatever state they are."""
    return [each for each in servers if can_run(each, model, constraints)]


def can_run(server: Server, model: str, constraints: str) -> bool:
    """Return whether the server serves the model and meets the constraints, in whatever state it is."""
    return model in server.endpoints and meets(constraints, server, model)


def _is_met(condition: str, server: Server, model: str) -> bool:
    name, operator, wanted = _parts(condition)
    has = server.declared(model, name)
    if has is None:
        return False
    if operator == "=":
        return bool({*format_attribute(has).split(",")} & {*wanted.split(",")})
    number, bound = _number_in(format_attribute(has)), _number_in(wanted)
    if number is None or bound is None:
        return False
    return number >= bound if operator == ">=" else number <= bound


def _number_in(text: str) -> float | None:
    """As lua/lib/constraints.lua reads it: float() alone would take 1_000 and nan for some."""
    try:
        return float(text) if _DECIMAL.fullmatch(text) else None
    except ValueError:
        return None


def _parts(condition: str) -> tuple[str, str, str]:
    """Name, operator, and what is wanted."""
    found = _CONDITION.fullmatch(condition)
    assert found is not None, condition
    return found[1], found[2], found[3]


def _check_name(name: Any, field: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidJob(field, f"{field}: a name is 1 to 64 letters, digits or _ . - and begins with a letter")


def _text(value: Any, field: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
        return format_number(value)
    if not isinstance(value, str) or not _VALUE.fullmatch(value):
        raise InvalidJob(
            field.split(".", 1)[0], f"{field}: a value is a number, or 1 to 128 letters, digits or . _ : / + -"
        )
    return value
