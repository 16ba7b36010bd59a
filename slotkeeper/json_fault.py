"""Say why a text is not JSON, and where: for people who must repair the program that wrote it."""

import re

import orjson

from slotkeeper.json_text import MAX_DIGITS, TOO_MANY_DIGITS

_MAX_NUMBER = 30  # characters
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TITLE = re.compile(r"<title[^<>]{0,100}>([^<]{1,300})<", re.IGNORECASE)
_TITLE_WITHIN, _MAX_TITLE = 2048, 200  # characters
_CONSTANT = re.compile(r"[-+]?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
# Digits that orjson takes for infinity, but json_text.loads for an integer.
_BIG_INTEGER = re.compile(rb"(?<![0-9.eE])[0-9]{300,}(?![0-9.eE])")
_NUMBER = re.compile(r"-?[0-9][0-9.eE+-]*")
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?P<half>[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def describe_fault(text: bytes) -> str:
    """Return one clause that names the first fault of a text and its place, counted in characters from 1.

    "" if it has none.  Takes about as long as parsing it.
    """
    if not text.strip():
        return "it is empty"
    if text.startswith(_BYTE_ORDER_MARK):
        return "it begins with a byte order mark (EF BB BF), which JSON does not allow"
    try:
        characters = text.decode()
    except UnicodeDecodeError as error:
        return f"byte {text[error.start]:02X} at position {error.start + 1} is not UTF-8"
    if characters.lstrip().startswith("<"):
        return _describe_page(characters)
    try:
        orjson.loads(_BIG_INTEGER.sub(_shrink, text))
    except orjson.JSONDecodeError as error:
        return _describe_place(characters, error)
    return ""


def _shrink(integer: re.Match[bytes]) -> bytes:
    """Return a short integer of the same width, unless it is too long for json_text.loads."""
    digits = integer[0]
    return digits if len(digits) > MAX_DIGITS else b"1".ljust(len(digits))


def _describe_page(page: str) -> str:
    # Only the beginning: a server could send a page that takes the search minutes, and all threads wait for it.
    found = _TITLE.search(page[:_TITLE_WITHIN])
    title = " ".join(found[1].split())[:_MAX_TITLE] if found else ""
    return f"it is an HTML or XML page ({title!r})" if title else "it is an HTML or XML page"


def _describe_place(text: str, error: orjson.JSONDecodeError) -> str:
    at = error.pos
    # For a sign without digits orjson points behind the sign.
    start = at - 1 if at and text[at - 1] in "+-" else at
    if constant := _CONSTANT.match(text, start):
        return f"{constant[0]} at character {start + 1} is not a JSON value: send null or a text in its place"
    if "infinity" in error.msg and (number := _NUMBER.match(text, at)):
        if number[0].isdigit():
            return f"{TOO_MANY_DIGITS} (character {at + 1})"
        return f"the number {_shorten(number[0])} at character {at + 1} is beyond the range of a double"
    if "surrogate" in error.msg and (half := _find_lone_surrogate(text, at)):
        return f"{half[0]} at character {half.start() + 1} is one half of a surrogate pair: the other is missing"
    if at >= len(text.rstrip()):
        return f"it ends at character {at}, before its JSON is complete"
    return f"{error.msg} at character {at + 1}"


def _find_lone_surrogate(text: str, start: int) -> re.Match[str] | None:
    return next((escape for escape in _ESCAPE.finditer(text, start) if escape["half"]), None)


def _shorten(number: str) -> str:
    return number if len(number) <= _MAX_NUMBER else f"{number[: _MAX_NUMBER - 1]}…"
