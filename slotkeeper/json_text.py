"""JSON that keeps integers beyond 64 bits exact.

orjson reads integers beyond 64 bits as doubles, so a text that may hold one is read by the standard library.  Both read
and write integers of up to 4,300 digits, Python's limit against conversions that take quadratic time.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

import orjson

MAX_DIGITS = 4_300
"""Digits of the longest integer; Python's own limit."""
TOO_MANY_DIGITS = f"a whole number has more than {MAX_DIGITS:,} digits; send it as a text"


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file that is read each time it is used."""

    size: int  # bytes
    read: Callable[[int], bytes]  # Returns this many bytes from its beginning.


class RawJson:
    """A large JSON value, kept as text (slotkeeper/large_json.py)."""

    __slots__ = ("_found", "_member", "_text")

    def __init__(
        self,
        text: bytes | FilePart,
        member: Callable[[bytes, str], Any],
        found: Mapping[tuple[str, ...], Any] | None = None,
    ) -> None:
        """found: the values at some pointers; None: `member` looks each of them up."""
        self._text, self._member, self._found = text, member, found

    @property
    def text(self) -> bytes:
        """The whole text.  Raises OSError if it cannot be read."""
        return self.read_start(self.size)

    @property
    def size(self) -> int:
        """Size of the text in bytes."""
        return self._text.size if isinstance(self._text, FilePart) else len(self._text)

    def read_start(self, size: int) -> bytes:
        """Return the first `size` bytes of the text.  Raises OSError."""
        return self._text.read(min(size, self.size)) if isinstance(self._text, FilePart) else self._text[:size]

    def get(self, token: str) -> Any:
        """Return the member at one token of a JSON pointer.  Raises KeyError."""
        return self._member(self.text, token)

    def get_known(self, pointer: tuple[str, ...]) -> Any:
        """Return the value at a pointer that was looked up before.  Raises KeyError for any other pointer."""
        if self._found is None:
            raise KeyError(pointer)
        return self._found[pointer]


_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_SURE_DIGITS = 18  # that surely are within 64 bits
_ONLY_DIGITS = bytes(ord("0") if chr(sign).isdigit() and sign < 128 else ord(" ") for sign in range(256))


def may_hold_big_integers(text: bytes) -> bool:
    """Return whether the text has enough digits in a row for a big integer, also inside a string."""
    return b"0" * (_SURE_DIGITS + 1) in text.translate(_ONLY_DIGITS)


def loads(text: bytes | str) -> Any:
    """Return the JSON value.  Raises ValueError, also for NaN, infinities and numbers beyond doubles."""
    raw = text.encode() if isinstance(text, str) else text
    if not may_hold_big_integers(raw):
        return orjson.loads(raw)
    try:
        value = _decoder.decode(raw.decode())
        dumps(value)  # This decoder accepts halves of surrogate pairs, which no encoder can write.
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except TypeError as error:
        raise ValueError(str(error)) from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(TOO_MANY_DIGITS if "digits" in str(error) else str(error)) from None
    return value


def dumps(value: Any, *, indent: bool = False) -> bytes:
    """Return JSON, compact or indented by two spaces.  Raises TypeError, ValueError, RecursionError."""
    if isinstance(value, RawJson):
        return value.text
    option = orjson.OPT_PASSTHROUGH_DATACLASS | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        return orjson.dumps(value, default=_raw_fragment, option=option)
    except TypeError:  # orjson writes no integer beyond 64 bits.
        return orjson.dumps(_with_fragments(value), default=_raw_fragment, option=option)


def _raw_fragment(value: Any) -> orjson.Fragment:
    if isinstance(value, RawJson):
        return orjson.Fragment(value.text)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _with_fragments(value: Any) -> Any:
    """Return the value with its integers beyond 64 bits as text that orjson writes unchanged."""
    if isinstance(value, int) and not isinstance(value, bool) and not _LEAST <= value <= _MOST:
        return orjson.Fragment(str(value))
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{value} is no JSON")
    if isinstance(value, Mapping):
        return {key: _with_fragments(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_fragments(item) for item in value]
    return value


def _double(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:40]} is beyond doubles")
    return number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_decoder = json.JSONDecoder(parse_float=_double, parse_constant=_no_number)
