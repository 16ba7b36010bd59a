"""Paths that stay on their server: no way out by scheme, '//', '..', backslash or control character."""

from urllib.parse import unquote

MAX_LENGTH = 2000


def check_path(path: str) -> None:
    """Raises ValueError unless this is a plain absolute path, with or without a query.

    Percent-encoding is undone before looking, as often as it was done: some servers decode twice.
    """
    if not path.startswith("/") or "//" in path.partition("?")[0]:
        raise ValueError("a path starts with one '/', has no '//' and names no other server")
    if len(path) > MAX_LENGTH:
        raise ValueError(f"a path has at most {MAX_LENGTH} characters")
    if "#" in path or not _is_plain(_decoded(path)):
        raise ValueError("a path has no '#', no backslash and no control characters")
    if any(_climbs(segment) for segment in _decoded(path.partition("?")[0]).split("/")):
        raise ValueError("a path has no '.' or '..' segments, not even percent-encoded")


def _decoded(path: str) -> str:
    for _ in range(5):
        decoded = unquote(path)
        if decoded == path:
            return path
        path = decoded
    raise ValueError("a path is not percent-encoded many times over")


def _is_plain(text: str) -> bool:
    return "\\" not in text and all(ch >= " " and ch != "\x7f" for ch in text)


def _climbs(segment: str) -> bool:
    return segment.partition(";")[0] in (".", "..")  # "..;x" climbs too, on servlet containers
