"""Parse arguments: NAME=VALUE, JSON, and the options of `submit` that follow from JobRequest."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from routing.admission.job_request import Given


_CONDITION = re.compile(r"\s*([^<>=\s]+)\s*(<=|>=|=)\s*(.+?)\s*", re.DOTALL)
_MAX_NUMBER = 1e15  # A float cannot hold all digits of a larger number.
_BOUNDS = {">=": "min", "<=": "max"}
_TYPES: Mapping[str, click.ParamType] = {
    "cancel_when_gone": click.FloatRange(5, 3600),
    "expected_output": click.IntRange(min=1),
    "priority": click.IntRange(1, 9),
    "ttl": click.FloatRange(min=0, min_open=True),
}


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


# The functions that parse repeatable options.
_READERS: Mapping[str, Callable[[Iterable[str]], dict[str, Any]]] = {
    "constraints": read_constraints,
    "labels": read_labels,
    "on_failure": lambda texts: dict(map(read_setting, texts)),
}


class RequestCommand(click.Command):
    """A command with an option for each field of a request that declares one, before its own options."""

    _has_request_options = False

    def takes(self, name: str) -> bool:
        """Return whether the command has an option for this field."""
        return True

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self._has_request_options:
            from routing.admission.job_request import REQUEST_FIELDS

            arguments = [param for param in self.params if isinstance(param, click.Argument)]
            own = [param for param in self.params if not isinstance(param, click.Argument)]
            request_options = [
                _option(name, given) for name, given in REQUEST_FIELDS.items() if given.option and self.takes(name)
            ]
            self.params, self._has_request_options = [*arguments, *request_options, *own], True
        return super().get_params(ctx)


class BatchCommand(RequestCommand):
    """The same with the fields that the lines of a batch inherit."""

    def takes(self, name: str) -> bool:
        from routing.dispatch.batch_lines import INHERITED

        return name in INHERITED


def _option(name: str, given: "Given") -> click.Option:
    return click.Option(
        [given.option, name],
        metavar=given.metavar,
        help=given.help,
        multiple=name in _READERS,
        type=_TYPES.get(name, click.STRING),
    )


def read_request(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that were given as options.  Raises UsageError."""
    fields = {name: _READERS[name](value) if name in _READERS else value for name, value in options.items()}
    return {name: value for name, value in fields.items() if value not in (None, {})}


def read_json(text: str, what: str) -> Any:
    """Parse a JSON argument: the text, - for standard input, or @FILE.  Raises UsageError."""
    if text == "-":
        text = sys.stdin.read()
    elif text.startswith("@"):
        try:
            with open(text[1:], encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"{what}: {text[1:]} cannot be read: {error}") from None
    try:
        return json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{what} is not JSON ({error}): {text[:80]}") from None


def read_setting(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE, whose value is JSON, @FILE, or a word without quotes.  Raises UsageError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"{text!r} is not NAME=VALUE.")
    if value.startswith("@"):
        return name, read_json(value, name)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
