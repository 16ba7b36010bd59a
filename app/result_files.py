"""Files in a job's result, as docs/how-to/files.md describes them.

A file is an object with `media_type` and `base64`, or a text that is a data: URL.
"""

import base64
import binascii
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MOST_FILES = 100
_MOST_VALUES = 10_000
"""Of a result that are looked at, the outermost first."""
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
"""What a browser draws and never runs: SVG may hold scripts."""


@dataclass(frozen=True, slots=True)
class File:
    """A file in a result.  `place`: where, as a JSON pointer."""

    place: str
    media_type: str
    name: str | None
    text: str
    """Base64."""

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.text) * 3 // 4 - self.text[-2:].count("=")

    @property
    def ending(self) -> str:
        """Of a file name, with its dot."""
        return _ENDINGS.get(self.media_type, ".bin")

    @property
    def is_picture(self) -> bool:
        return self.media_type in PICTURES

    def content(self) -> bytes:
        """Raises ValueError: the text is no base64."""
        try:
            return base64.b64decode(self.text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the file at {self.place or '/'} is no base64") from error


def may_hold_files(result: str) -> bool:
    """Return whether it is worth parsing a result, as JSON text, for files."""
    return '"base64"' in result or ";base64," in result


def files_in(result: Any) -> list[File]:
    """Return the first MOST_FILES files in a result, the outermost first."""
    found = list[File]()
    waiting, seen = deque([("", result)]), 0
    while waiting and seen < _MOST_VALUES and len(found) < MOST_FILES:
        seen += 1
        place, value = waiting.popleft()
        if (file := _file_of(place, value)) is not None:
            found.append(file)
        else:
            waiting.extend(_inner(place, value, _MOST_VALUES - seen - len(waiting)))
    return found


def _inner(place: str, value: Any, most: int) -> Iterator[tuple[str, Any]]:
    """Yield at most so many values in a list or an object, each with its place."""
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
    """Return a result with the size of each file in place of its base64, for people.  Changes lists and objects.

    `files`: those in it, where they have been looked for.
    """
    for file in files_in(result) if files is None else files:
        result = _shortened(result, file, file.place.split("/")[1:])
    return result


def _shortened(value: Any, file: File, steps: Sequence[str]) -> Any:
    if steps:
        name = steps[0].replace("~1", "/").replace("~0", "~")
        key: Any = int(name) if isinstance(value, list) else name
        value[key] = _shortened(value[key], file, steps[1:])
        return value
    short = f"({file.size} bytes)"
    return {**value, "base64": short} if isinstance(value, dict) else f"data:{file.media_type} {short}"
