"""JSON whose whole numbers stay what they are; orjson reads those beyond 64 bits as doubles, and writes none."""

import json
import re
from math import isfinite
from typing import Any, NoReturn

import orjson

from slotkeeper.serve.json_results import written_file

_LONG = re.compile(rb"[0-9]{19}")  # Fewer digits surely are within 64 bits.
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def loads(text: bytes) -> Any:
    """The value.  Raises ValueError, also for NaN and for numbers beyond doubles or Python's longest whole number."""
    if not _LONG.search(text):
        return orjson.loads(text)
    try:
        return json.loads(text.decode(), parse_float=_double, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class NotJsonSerializable(ValueError):
    """A value has no form in JSON.  A second run would return such a value again."""


def dumps(value: Any) -> bytes:
    """Return compact JSON, also of numpy's arrays, and of bytes, images and files.

    Raises Unwritable; OSError for a file that cannot be read now.
    """
    try:
        return _dumps(value)
    except TypeError as error:
        if "64-bit" not in str(error):
            raise _unwritable(error) from error
    try:
        return _dumps(_written(value))
    except TypeError as error:
        raise _unwritable(error) from error


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, default=written_file, option=orjson.OPT_SERIALIZE_NUMPY)


def _unwritable(error: TypeError) -> NotJsonSerializable | OSError:
    cause = error.__cause__  # why an image or a file has no JSON form
    if isinstance(cause, OSError):
        return cause
    said = str(cause or error) if cause is None or isinstance(cause, TypeError) else f"{type(cause).__name__}: {cause}"
    return NotJsonSerializable(
        f"the result cannot be written as JSON ({said}); return JSON values, bytes, an image or a file"
    )


def _written(value: Any) -> Any:
    """The same, with long whole numbers as text that is JSON already."""
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        return orjson.Fragment(str(value))
    if isinstance(value, dict):
        return {key: _written(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    return value


def _double(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError("a number is beyond doubles")
    return number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
