"""Finds files in a job's result.  docs/how-to/files.md describes their format.

A file is an object with `media_type` and `base64`, or a string that is a data: URL.
"""

import base64
import binascii
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MOST_FILES = 100
_MAX_VALUES = 10_000
"""Values of a result that are examined, the outermost first."""
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w.+=-]+)*;base64,")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,60}/[\w.+-]{1,60}")
_ENDINGS = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/gif": ".gif",
    "image/webp": ".webp",
    "image/avif": ".avif",
    "image/svg+xml": ".svg",
    "application/pdf": ".pdf",
    "application/json": ".json",
    "application/zip": ".zip",
    "audio/mpeg": ".mp3",
    "audio/ogg": ".ogg",
    "audio/wav": ".wav",
    "model/gltf-binary": ".glb",
    "text/plain": ".txt",
    "video/mp4": ".mp4",
    "video/webm": ".webm",
}
PICTURES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "image/avif"})
"""Media types that a browser displays without running scripts; SVG may contain scripts."""


@dataclass(frozen=True, slots=True)
class File:
    """A file in a result.  `place`: its location, as a JSON pointer."""

    place: str
    media_type: str
    name: str | None
    text: str
    """Base64."""

    @property
    def size(self) -> int:
        """The size of the decoded file, in bytes."""
        return len(self.text) * 3 // 4 - self.text[-2:].count("=")

    @property
    def ending(self) -> str:
        """The extension for a file name, with its dot."""
        return _ENDINGS.get(self.media_type, ".bin")

    @property
    def is_picture(self) -> bool:
        return self.media_type in PICTURES

    def content(self) -> bytes:
        """Return the decoded file.  Raises ValueError if the text is not base64."""
        try:
            return base64.b64decode(self.text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the file at {self.place or '/'} is no base64") from error


def may_hold_files(result: str) -> bool:
    """Return whether a result, as JSON text, may contain files, so that it must be parsed."""
    return '"base64"' in result or ";base64," in result


def files_in(result: Any) -> list[File]:
    """Return the first MOST_FILES files in a result, the outermost first."""
    found = list[File]()
    pending, examined = deque([("", result)]), 0
    while pending and examined < _MAX_VALUES and len(found) < MOST_FILES:
        examined += 1
        place, value = pending.popleft()
        if (file := _file_of(place, value)) is not None:
            found.append(file)
        else:
            pending.extend(_inner_values(place, value, _MAX_VALUES - examined - len(pending)))
    return found


def _inner_values(place: str, value: Any, most: int) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of at most `most` strings, lists and objects in a list or an object."""
    if not isinstance(value, dict | list):
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for (name, inner), _ in zip(pairs, range(most), strict=False):
        if isinstance(inner, str | dict | list):
            yield f"{place}/{str(name).replace('~', '~0').replace('/', '~1')}", inner


def _file_of(place: str, value: Any) -> File | None:
    if isinstance(value, str):
        head = _DATA_URL.match(value)
        return File(place, head[1].lower(), None, value[head.end() :]) if head else None
    if not isinstance(value, dict):
        return None
    media_type, text, name = value.get("media_type"), value.get("base64"), value.get("name")
    if not (isinstance(media_type, str) and isinstance(text, str) and _MEDIA_TYPE.fullmatch(media_type)):
        return None
    return File(place, media_type.lower(), name if isinstance(name, str) else None, text)


def shortened(result: Any, files: Sequence[File] | None = None) -> Any:
    """Replace the base64 of each file by its size, and return the result, for people.  Changes lists and objects.

    `files`: the files in the result; None: they are searched.
    """
    for file in files_in(result) if files is None else files:
        result = _shorten_file(result, file, file.place.split("/")[1:])
    return result


def _shorten_file(value: Any, file: File, steps: Sequence[str]) -> Any:
    if steps:
        name = steps[0].replace("~1", "/").replace("~0", "~")
        key: Any = int(name) if isinstance(value, list) else name
        value[key] = _shorten_file(value[key], file, steps[1:])
        return value
    size = f"({file.size} bytes)"
    return {**value, "base64": size} if isinstance(value, dict) else f"data:{file.media_type} {size}"
