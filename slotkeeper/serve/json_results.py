"""The JSON format of bytes, images and files: {"media_type": ..., "size": ..., "base64": ..., "name": ...}.

`size` is in bytes; only files have a `name`.  docs/how-to/files.md describes this format.
"""

import base64
import io
import mimetypes
from pathlib import Path, PurePath
from typing import Any

ANY_BYTES = "application/octet-stream"
# First bytes of a file ("magic numbers") and its media type.
_SIGNATURES = (
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
    """Return the JSON format of bytes, a PIL image, a path, or an open file, which is then closed.

    An image is saved in its own format, or as PNG if it has none.
    Raises TypeError for any other value; OSError if a file cannot be read.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return _to_json(bytes(value))
    if isinstance(value, Path):
        return _to_json(value.read_bytes(), value.name)
    if callable(getattr(value, "save", None)) and hasattr(value, "mode") and hasattr(value, "format"):
        return _to_json(_image_bytes(value))
    if callable(getattr(value, "read", None)):
        return _to_json(_file_bytes(value), _file_name(value))
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def _image_bytes(image: Any) -> bytes:
    """Return the bytes of a PIL image as a file.  `image.format` is None unless the image was read from a file."""
    file = io.BytesIO()
    image.save(file, format=image.format or "PNG")
    return file.getvalue()


def _file_bytes(file: Any) -> bytes:
    with file:
        if file.seekable():  # after a write the position is at the end
            file.seek(0)
        content = file.read()
    return content.encode() if isinstance(content, str) else bytes(content)


def _file_name(file: Any) -> str | None:
    name = getattr(file, "name", None)
    return PurePath(name).name if isinstance(name, str) else None


def _to_json(content: bytes, name: str | None = None) -> dict[str, Any]:
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
    return next((media_type for signature, media_type in _SIGNATURES if content.startswith(signature)), ANY_BYTES)
