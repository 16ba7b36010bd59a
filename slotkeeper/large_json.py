"""Large JSON values that are kept as the text in which they came, and read only where somebody points.

Python's objects for 20 MB of JSON take seconds to make and up to 20 times its memory, and all threads of the process
wait meanwhile.  Here a value is validated, and its members are found, without any of them being made.

    python -m slotkeeper.large_json '[["result"], ["status"]]' < answer.json    # the same, in a process of its own
"""

import os
import re
import resource
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

import msgspec
import orjson

from slotkeeper import json_text
from slotkeeper.json_fault import describe_fault

LARGE_BYTES = 256 * 1024
"""Bytes of a text above which it is not made into objects."""
_MANY_PARTS = 200_000
_MOST_MEMORY = 640 << 20  # bytes, of the process that reads an answer
_INDEX = re.compile("[0-9]|[1-9][0-9]", re.ASCII)  # of an element that can be pointed to in a large list
_BEGINNING = re.compile(rb"[ \t\r\n]*(.)", re.DOTALL)

Pointer = tuple[str, ...]


class AnonymousFile:
    """A file without a name, which is gone with this object."""

    __slots__ = ("_fd", "size")

    def __init__(self) -> None:
        """Raises OSError."""
        self.size, self._fd = 0, -1
        with tempfile.TemporaryFile() as file:
            self._fd = os.dup(file.fileno())

    def append(self, piece: bytes | bytearray) -> None:
        """Raises OSError: not all of it can be written, and `size` is what it was."""
        with memoryview(piece) as left:
            written = 0
            while written < len(piece):
                written += os.pwrite(self._fd, left[written:], self.size + written)
        self.size += written

    def read(self, begin: int, length: int) -> bytes:
        """Raises OSError."""
        return os.pread(self._fd, length, begin)

    def rewind(self) -> int:
        """Return the descriptor, for a process that reads all of it."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        return self._fd

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def parse(text: bytes) -> Any:
    """Return the JSON value: of a large text an `exact.Unparsed`.  Raises ValueError, as `exact.loads`.

    In a large text a number beyond doubles stays as it is.
    """
    if len(text) <= LARGE_BYTES:
        return json_text.loads(text)
    text.decode()
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return json_text.RawJson(text, get_member)


def parse_stored(text: str) -> Any:
    """Return the JSON value of a text that was accepted before; of a large one an `exact.Unparsed`."""
    return json_text.loads(text) if len(text) <= LARGE_BYTES else json_text.RawJson(text.encode(), get_member)


def is_expensive_to_parse(text: str) -> bool:
    """Return whether making objects of a JSON text would take long, and much memory."""
    return len(text) > LARGE_BYTES and text.count("[") + text.count("{") + text.count(",") > _MANY_PARTS


def is_nested_too_deeply(text: bytes) -> bool:
    """Return whether a text, or its beginning, is nested too deeply to be read."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except RecursionError:
        return True
    except msgspec.DecodeError:
        return False
    return False


def get_member(text: bytes, token: str) -> Any:
    """Return the member of an object, or an element of a list, by a token of a JSON pointer.  Raises KeyError."""
    first = _BEGINNING.match(text)
    kind = b"" if first is None else first[1]
    if kind not in b"{[" or (kind == b"[" and not _INDEX.fullmatch(token)):
        raise KeyError(token)
    decoder, field = _element(int(token)) if kind == b"[" else _named(token)
    try:
        raw = getattr(decoder.decode(text), field)
    except msgspec.DecodeError:  # The list is shorter.
        raise KeyError(token) from None
    if raw is msgspec.UNSET:
        raise KeyError(token)
    found = bytes(raw)
    return json_text.loads(found) if len(found) <= LARGE_BYTES else json_text.RawJson(found, get_member)


@lru_cache(maxsize=256)
def _named(token: str) -> tuple[msgspec.json.Decoder[Any], str]:
    made = msgspec.defstruct("One", [("value", msgspec.Raw, msgspec.field(name=token, default=msgspec.UNSET))])
    return msgspec.json.Decoder(made), "value"


@lru_cache(maxsize=100)
def _element(index: int) -> tuple[msgspec.json.Decoder[Any], str]:
    made = msgspec.defstruct("Some", [(f"at{n}", msgspec.Raw) for n in range(index + 1)], array_like=True)
    return msgspec.json.Decoder(made), f"at{index}"


# -- in a process of its own -----------------------------------------------------------------------------------


def report_pointers(text: bytes, pointers: Iterable[Pointer]) -> bytes:
    """Return what stands at these pointers, for `heard`.  Raises ValueError."""
    value = parse(text)
    found: list[list[Any]] = []
    for pointer in pointers:
        at = _resolved(value, pointer)
        if isinstance(at, json_text.RawJson):
            found.append([pointer, "at", text.find(at.text), len(at.text)])
        elif at is not _NOTHING:
            found.append([pointer, "is", json_text.dumps(at).decode()])
    return orjson.dumps(found)


def apply_report(text: bytes | AnonymousFile, answer: bytes) -> Any:
    """Return the value of a text about which another process has `told` this.  Of a file it is read when it is used."""
    found: dict[Pointer, Any] = {}
    for pointer, how, *what in orjson.loads(answer):
        found[tuple(pointer)] = (
            json_text.loads(what[0]) if how == "is" else json_text.RawJson(_part(text, *what), get_member)
        )
    size = text.size if isinstance(text, AnonymousFile) else len(text)
    return json_text.RawJson(_part(text, 0, size), get_member, found)


def _part(text: bytes | AnonymousFile, begin: int, length: int) -> bytes | json_text.FilePart:
    if isinstance(text, AnonymousFile):
        return json_text.FilePart(length, partial(text.read, begin))
    return text[begin : begin + length]


_NOTHING = object()


def _resolved(value: Any, pointer: Pointer) -> Any:
    for token in pointer:
        try:
            value = value.get(token) if isinstance(value, json_text.RawJson) else _in(value, token)
        except (KeyError, IndexError, ValueError):
            return _NOTHING
    return value


def _in(value: Any, token: str) -> Any:
    if isinstance(value, Mapping):
        return value[token]
    if isinstance(value, list):
        return value[int(token)]
    raise KeyError(token)


def main() -> int:
    """Write what stands at the named pointers of the JSON on standard input.

    Returns the exit status: 1, with the fault in place of that, if it is not JSON.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    pointers = [tuple(pointer) for pointer in orjson.loads(sys.argv[1])]
    try:
        text = sys.stdin.buffer.read()
        sys.stdout.buffer.write(report_pointers(text, pointers))
    except ValueError as error:
        sys.stdout.write(_describe(text, error))
        return 1
    except MemoryError:
        sys.stdout.write("it is too large to be read")
        return 1
    return 0


def _describe(text: bytes, error: ValueError) -> str:
    try:
        return describe_fault(text) or str(error)
    except MemoryError:  # The objects before the fault take more than reading without them.
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
