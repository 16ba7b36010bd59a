"""JSON pointers (RFC 6901), parsed once and resolved many times."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from slotkeeper.json_text import RawJson

Pointer = tuple[str, ...]

MISSING: Final[Any] = type("Missing", (), {"__repr__": lambda self: "MISSING", "__slots__": ()})()
MAX_LENGTH = 500


def parse(text: str) -> Pointer:
    """Parse a pointer: '/a/0/b~1c' -> ('a', '0', 'b/c').  The empty pointer is the whole document.

    Raises ValueError, whose message is for the author of the pointer.
    """
    if text and not text.startswith("/"):
        raise ValueError(f"a JSON pointer is empty or starts with '/', not {text[:40]!r}")
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a JSON pointer has at most {MAX_LENGTH} characters")
    return tuple(_unescape(token) for token in text.split("/")[1:])


def _unescape(token: str) -> str:
    if "~" in token.replace("~0", "").replace("~1", ""):
        raise ValueError(f"in a JSON pointer '~' is followed by 0 or 1, not as in {token[:40]!r}")
    return token.replace("~1", "/").replace("~0", "~")


def format_pointer(pointer: Iterable[str | int]) -> str:
    """Return the text of a pointer, the inverse of `parse`: ('a', 0, 'b/c') -> '/a/0/b~1c'."""
    return "".join("/" + str(token).replace("~", "~0").replace("/", "~1") for token in pointer)


def iter_texts(document: Any) -> Iterator[tuple[Pointer, str]]:
    """Yield every string value of a document with its pointer; keys are left out."""
    pending: list[tuple[Pointer, Any]] = [((), document)]
    while pending:
        at, node = pending.pop()
        if isinstance(node, str):
            yield at, node
        parts = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
        pending += [((*at, str(name)), part) for name, part in reversed(list(parts))]


def resolve(document: Any, pointer: Pointer) -> Any:
    """Return the value at the pointer, or MISSING.  A null is None, not MISSING."""
    if isinstance(document, RawJson):
        with suppress(KeyError):
            return document.get_known(pointer)
    for token in pointer:
        document = _step(document, token)
        if document is MISSING:
            break
    return document


def _step(node: Any, token: str) -> Any:
    if isinstance(node, dict):
        return node.get(token, MISSING)
    if isinstance(node, RawJson):
        try:
            return node.get(token)
        except KeyError:
            return MISSING
    if isinstance(node, list) and _is_index(token) and int(token) < len(node):
        return node[int(token)]
    return MISSING


def _is_index(token: str) -> bool:
    # No leading zeros, no "-" (the element after the last), and no digits that int() rejects.
    return token.isascii() and token.isdigit() and len(token) < 10 and (token == "0" or token[0] != "0")
