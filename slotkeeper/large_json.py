"""Large JSON values, kept as text; members are found without parsing the whole.

Python objects for 20 MB of JSON take seconds to make and up to 20 times its memory, and all threads of the process
wait meanwhile.  Here a value is validated, and its members are found, without creating objects for it.

    python -m slotkeeper.large_json '[["result"], ["status"]]' < answer.json    # the same, in a separate process
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
"""Size in bytes above which a text is not parsed into objects."""
_MANY_PARTS = 200_000
_MOST_MEMORY = 640 << 20  # bytes, of the process that reads an answer
_INDEX = re.compile("[0-9]|[1-9][0-9]", re.ASCII)  # of an element that can be pointed to in a large list
_BEGINNING = re.compile(rb"[ \t\r\n]*(.)", re.DOTALL)

Pointer = tuple[str, ...]


class AnonymousFile:
    """A temporary file without a name, which is deleted with this object."""

    __slots__ = ("_fd", "size")

    def __init__(self) -> None:
        """Raises OSError."""
        self.size, self._fd = 0, -1
        with tempfile.TemporaryFile() as file:
            self._fd = os.dup(file.fileno())

    def append(self, piece: bytes | bytearray) -> None:
        """Append a piece.  Raises OSError if it cannot be written whole; `size` is unchanged then."""
        with memoryview(piece) as left:
            written = 0
            while written < len(piece):
                written += os.pwrite(self._fd, left[written:], self.size + written)
        self.size += written

    def read(self, begin: int, length: int) -> bytes:
        """Return bytes from the position `begin`.  Raises OSError."""
        return os.pread(self._fd, length, begin)

    def rewind(self) -> int:
        """Return the descriptor at the file's beginning, for a process that reads all of it."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        return self._fd

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def parse(text: bytes) -> Any:
    """Return the JSON value; a RawJson for a large text.  Raises ValueError, as `json_text.loads`.

    In a large text, numbers beyond doubles stay as they are.
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
    """Return the JSON value of a text that was validated before; a RawJson for a large one."""
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
    found = _find_bytes(text, token)
    return json_text.loads(found) if len(found) <= LARGE_BYTES else json_text.RawJson(found, get_member)


def _find_bytes(text: bytes, token: str) -> bytes:
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
    return bytes(raw)


def find_raw(text: bytes, pointer: Pointer) -> json_text.RawJson:
    """Return the value at a pointer as its own bytes of the text, which is JSON.  Raises KeyError."""
    for token in pointer:
        text = _find_bytes(text, token)
    return json_text.RawJson(text, get_member)


@lru_cache(maxsize=256)
def _named(token: str) -> tuple[msgspec.json.Decoder[Any], str]:
    made = msgspec.defstruct("One", [("value", msgspec.Raw, msgspec.field(name=token, default=msgspec.UNSET))])
    return msgspec.json.Decoder(made), "value"


@lru_cache(maxsize=100)
def _element(index: int) -> tuple[msgspec.json.Decoder[Any], str]:
    made = msgspec.defstruct("Some", [(f"at{n}", msgspec.Raw) for n in range(index + 1)], array_like=True)
    return msgspec.json.Decoder(made), f"at{index}"


# -- in a separate process -------------------------------------------------------------------------------------


def report_pointers(text: bytes, pointers: Iterable[Pointer]) -> bytes:
    """Return the values at these pointers, in the form that `apply_report` reads.  Raises ValueError."""
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
    """Return a text as a RawJson, with the report that another process made of it.  A file is read when it is used."""
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
    """Write the values at the named pointers of the JSON on standard input.

    Returns the exit status: 1 if it is not JSON, and then writes the fault instead.
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
    except MemoryError:  # Finding the fault creates objects, which need more memory.
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
