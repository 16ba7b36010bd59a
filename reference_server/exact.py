"""JSON whose whole numbers stay what they are; orjson reads those beyond 64 bits as doubles, and writes none."""

import json
import re
from math import isfinite
from typing import Any, NoReturn

import orjson

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


def dumps(value: Any) -> bytes:
    """Compact JSON, also of numpy's arrays.  Raises TypeError for what has no place there, ValueError."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        if "64-bit" not in str(error):
            raise
        return orjson.dumps(_written(value), option=orjson.OPT_SERIALIZE_NUMPY)


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
