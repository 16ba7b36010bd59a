"""Parse NAME=VALUE arguments: constraints and labels of jobs, attributes of servers."""

import math
import re
from collections.abc import Iterable
from typing import Any

import click

_CONDITION = re.compile(r"\s*([^<>=\s]+)\s*(<=|>=|=)\s*(.+?)\s*", re.DOTALL)
_MAX_NUMBER = 1e15  # A float cannot hold all digits of a larger number.
_BOUNDS = {">=": "min", "<=": "max"}


def read_constraints(texts: Iterable[str]) -> dict[str, Any]:
    """Return constraints in the form of the API.  Raises UsageError.

    texts: such as `gpu=A100,H100` (one of these), `memory>=40`, `memory<=80`.
    """
    constraints: dict[str, Any] = {}
    for text in texts:
        name, operator, value = _parse_condition(text, "--constraint", "such as gpu=A100,H100 or 'memory>=40'")
        if operator == "=":
            if name in constraints:
                raise click.UsageError(f"--constraint {text!r}: {name} is given twice; write {name}=ONE,OTHER.")
            constraints[name] = _parse_values(value)
            continue
        bounds = constraints.setdefault(name, {})
        if not isinstance(bounds, dict) or _BOUNDS[operator] in bounds:
            raise click.UsageError(f"--constraint {text!r}: {name} already has this bound; give it once.")
        bounds[_BOUNDS[operator]] = _parse_bound(text, value)
    return constraints


def read_labels(texts: Iterable[str]) -> dict[str, str]:
    """Return labels, such as `team=search`, in the form of the API.  Raises UsageError."""
    labels: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or name in labels:
            raise click.UsageError(f"--label {text!r}: write each name once, as NAME=VALUE.")
        labels[name] = value
    return labels


def read_attributes(texts: Iterable[str]) -> dict[str, Any]:
    """Return attributes in the form of the API.  Raises UsageError.

    texts: such as `gpu=A100`, `memory=80`, `labels=fast,testnet`.
    """
    attributes: dict[str, Any] = {}
    for text in texts:
        name, operator, value = _parse_condition(text, "--attribute", "such as gpu=A100 or labels=fast,testnet")
        if operator != "=" or name in attributes:
            raise click.UsageError(f"--attribute {text!r}: write each name once, as {name}=VALUE.")
        attributes[name] = _parse_values(value)
    return attributes


def _parse_condition(text: str, option: str, example: str) -> tuple[str, str, str]:
    """Return (name, operator, value).  Raises UsageError, which names the option and shows the example."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise click.UsageError(f"{option} {text!r} is not NAME=VALUE, {example}.")
    return match[1], match[2], match[3]


def _parse_values(text: str) -> Any:
    """Return a value, or a list of values if there are commas."""
    values = [parse_number(part.strip()) for part in text.split(",")]
    return values if len(values) > 1 else values[0]


def parse_number(text: str) -> str | int | float:
    """Return a number if Python prints it in the same way; otherwise the text, since 12.10 and 1.0 may be versions."""
    try:
        number = float(text)
    except ValueError:
        return text
    if not abs(number) < _MAX_NUMBER:
        return text
    value = int(number) if number.is_integer() else number
    return value if str(value) == text else text


def _parse_bound(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise click.UsageError(f"--constraint {text!r}: {value!r} is not a number.")
    return int(number) if number.is_integer() else number
