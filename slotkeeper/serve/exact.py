"""A JSON parser and serializer without loss of large integers.

orjson parses an integer beyond 64 bits as a double, and refuses to write one.  So text with such
integers is parsed by the standard library's json, and `dumps` inserts them as text.
"""

import json
import re
from math import isfinite
from typing import Any, NoReturn

import orjson

from slotkeeper.serve.json_results import written_file

_LONG_NUMBER = re.compile(rb"[0-9]{19}")  # an integer with fewer digits fits into 64 bits
_INT64_MIN, _UINT64_MAX = -(1 << 63), (1 << 64) - 1


def loads(text: bytes) -> Any:
    """Parse JSON and return the value.

    Raises ValueError if the text is not JSON, contains NaN or an infinity, or contains a number that is too large for a
    double or for Python's limit of integer digits.
    """
    if not _LONG_NUMBER.search(text):
        return orjson.loads(text)
    try:
        return json.loads(text.decode(), parse_float=_finite_float, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class NotJsonSerializable(ValueError):
    """The value cannot be written as JSON.  A retry would not help: a second run would return such a value again."""


def dumps(value: Any) -> bytes:
    """Return a value as compact JSON.  Supports numpy arrays, bytes, images and files too.

    Raises NotJsonSerializable for any other value; OSError if a file cannot be read.
    """
    try:
        return _dumps(value)
    except TypeError as error:
        if "64-bit" not in str(error):
            raise _serialization_error(error) from error
    try:
        return _dumps(_wrap_large_integers(value))
    except TypeError as error:
        raise _serialization_error(error) from error


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, default=written_file, option=orjson.OPT_SERIALIZE_NUMPY)


def _serialization_error(error: TypeError) -> NotJsonSerializable | OSError:
    cause = error.__cause__  # orjson chains the exception that `written_file` raised
    if isinstance(cause, OSError):
        return cause
    reason = (
        str(cause or error) if cause is None or isinstance(cause, TypeError) else f"{type(cause).__name__}: {cause}"
    )
    return NotJsonSerializable(
        f"the result cannot be written as JSON ({reason}); return JSON values, bytes, an image or a file"
    )


def _wrap_large_integers(value: Any) -> Any:
    """Return a copy in which integers beyond 64 bits are `orjson.Fragment`, which orjson writes unchanged."""
    if isinstance(value, int) and not _INT64_MIN <= value <= _UINT64_MAX:
        return orjson.Fragment(str(value))
    if isinstance(value, dict):
        return {key: _wrap_large_integers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_wrap_large_integers(item) for item in value]
    return value


def _finite_float(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError("a number is beyond doubles")
    return number


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
