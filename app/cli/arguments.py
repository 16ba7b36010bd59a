"""What is written as NAME=VALUE on the command line: constraints of jobs, attributes of servers."""

import math
import re
from collections.abc import Iterable
from typing import Any

import click

_CONDITION = re.compile(r"\s*([^<>=\s]+)\s*(<=|>=|=)\s*(.+?)\s*", re.DOTALL)
_LARGEST = 1e15  # beyond it numbers lose digits
_SIDES = {">=": "min", "<=": "max"}


def read_constraints(texts: Iterable[str]) -> dict[str, Any]:
    """`gpu=A100,H100` (one of these), `memory>=40`, `memory<=80`, as the API takes them.  Raises UsageError."""
    read: dict[str, Any] = {}
    for text in texts:
        name, operator, value = _parts(text, "--constraint", "such as gpu=A100,H100 or 'memory>=40'")
        if operator == "=":
            if name in read:
                raise click.UsageError(f"--constraint {text!r}: {name} is named before; write {name}=ONE,OTHER.")
            read[name] = _values(value)
            continue
        known = read.setdefault(name, {})
        if not isinstance(known, dict) or _SIDES[operator] in known:
            raise click.UsageError(f"--constraint {text!r}: {name} is bounded before; name it once.")
        known[_SIDES[operator]] = _bound(text, value)
    return read


def read_labels(texts: Iterable[str]) -> dict[str, str]:
    """Return labels `team=search` as the API takes them.  Raises UsageError."""
    labels: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or name in labels:
            raise click.UsageError(f"--label {text!r}: write each name once, as NAME=VALUE.")
        labels[name] = value
    return labels


def read_attributes(texts: Iterable[str]) -> dict[str, Any]:
    """`gpu=A100`, `memory=80`, `labels=fast,testnet`, as the API takes them.  Raises UsageError."""
    read: dict[str, Any] = {}
    for text in texts:
        name, operator, value = _parts(text, "--attribute", "such as gpu=A100 or labels=fast,testnet")
        if operator != "=" or name in read:
            raise click.UsageError(f"--attribute {text!r}: write each name once, as {name}=VALUE.")
        read[name] = _values(value)
    return read


def _parts(text: str, option: str, example: str) -> tuple[str, str, str]:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise click.UsageError(f"{option} {text!r} is not NAME=VALUE, {example}.")
    return found[1], found[2], found[3]


def _values(text: str) -> Any:
    values = [parse_number(one.strip()) for one in text.split(",")]
    return values if len(values) > 1 else values[0]


def parse_number(text: str) -> str | int | float:
    """A number if it is written as one is shown, so that 12.10 and 1.0 stay the versions that they may be."""
    try:
        number = float(text)
    except ValueError:
        return text
    if not abs(number) < _LARGEST:
        return text
    made = int(number) if number.is_integer() else number
    return made if str(made) == text else text


def _bound(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise click.UsageError(f"--constraint {text!r}: {value!r} is no number.")
    return int(number) if number.is_integer() else number
