"""Bytes, images and files as JSON: {"media_type": ..., "size": ..., "base64": ..., "name": ...}.

`size` is in bytes, `name` is there for a file.  docs/how-to/files.md describes the form.
"""

import base64
import io
import mimetypes
from pathlib import Path, PurePath
from typing import Any

ANY_BYTES = "application/octet-stream"
_BEGINNINGS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"glTF", "model/gltf-binary"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"\x1aE\xdf\xa3", "video/webm"),
    (b"PK\x03\x04", "application/zip"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}


def written_file(value: Any) -> dict[str, Any]:
    """Return the JSON form of bytes, of an image with `save`, of a path, or of an open file, which is closed.

    An image is saved in its own format, or as PNG.  Raises TypeError for any other value; OSError.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return _described(bytes(value))
    if isinstance(value, Path):
        return _described(value.read_bytes(), value.name)
    if callable(getattr(value, "save", None)) and hasattr(value, "mode") and hasattr(value, "format"):
        return _described(_saved(value))
    if callable(getattr(value, "read", None)):
        return _described(_read(value), _name_of(value))
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def _saved(image: Any) -> bytes:
    """Return a PIL image as a file.  Its format is None where it was made, and not read from a file."""
    file = io.BytesIO()
    image.save(file, format=image.format or "PNG")
    return file.getvalue()


def _read(file: Any) -> bytes:
    with file:
        if file.seekable():  # it may stand where its last write ended
            file.seek(0)
        content = file.read()
    return content.encode() if isinstance(content, str) else bytes(content)


def _name_of(file: Any) -> str | None:
    name = getattr(file, "name", None)
    return PurePath(name).name if isinstance(name, str) else None


def _described(content: bytes, name: str | None = None) -> dict[str, Any]:
    guessed = mimetypes.guess_type(name)[0] if name else None
    found: dict[str, Any] = {"media_type": guessed or _media_type(content), "size": len(content)}
    if name:
        found["name"] = name
    return found | {"base64": base64.b64encode(content).decode()}


def _media_type(content: bytes) -> str:
    if content[:4] == b"RIFF":
        return _RIFF.get(content[8:12], ANY_BYTES)
    if content[4:8] == b"ftyp":
        return "video/mp4"
    return next((media_type for begin, media_type in _BEGINNINGS if content.startswith(begin)), ANY_BYTES)
