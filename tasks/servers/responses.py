"""What came back over the wire, before it is judged: an Answer, or a Broken exchange."""

import asyncio
import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple

import orjson
import structlog

from slotkeeper import json_text, large_json
from slotkeeper.json_fault import describe_fault
from slotkeeper.large_json import AnonymousFile
from tasks.servers.patterns import TEXT_LIMIT
from tasks.servers.pointers import Pointer

NOT_JSON: Final[Any] = type("NotJson", (), {"__repr__": lambda self: "NOT_JSON", "__slots__": ()})()
MAX_MESSAGE = 500  # characters
MAX_RETRY_AFTER_S = 3600.0
MAX_ID = 256  # characters
_ORJSON_MAX_DEPTH = 254  # levels, by orjson, which reads 1024
MAX_DEPTH = 200
"""Levels of lists and objects in what is kept of an answer: what is written of it later stands deeper still."""
DECODED_CODINGS = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})
"""Content codings that the HTTP client decodes, though it asks for none."""
_BEFORE_JSON = b"\xef\xbb\xbf \t\r\n"
_JSON_STARTS = (b"{", b"[", b'"')
_MIN_PARTIAL_SECRET = 4  # characters of a secret
_MAX_EXAMINED_CHARS = 64 * 1024  # characters of an error text that are looked at, at most


class FailureReason(StrEnum):
    """How an exchange broke off.  Only CONNECT and UNSENDABLE promise that nothing was sent."""

    CONNECT = "connect"  # no connection was established: refused, no such host, time-out, TLS
    TIMEOUT = "timeout"  # the request may have been sent, and no whole answer came in time
    RESET = "reset"  # the request may have been sent, and the connection broke or spoke no HTTP
    TOO_LARGE = "too_large"  # the answer was longer than allowed
    TOO_MANY_PIECES = "too_many_pieces"  # the answer's body came in more pieces than allowed
    DAMAGED = "damaged"  # the answer's body is compressed, and cannot be decompressed
    UNSENDABLE = "unsendable"  # nothing was sent: no HTTP request can be made of this


MAX_RESPONSE_BYTES = 64 << 20
"""Of one answer of a server."""
MESSAGES = {
    FailureReason.CONNECT: "no connection to the server could be made",
    FailureReason.TIMEOUT: "the server gave no whole answer in time",
    FailureReason.RESET: "the connection broke before the whole answer was there",
    FailureReason.TOO_LARGE: f"the server's answer is larger than {MAX_RESPONSE_BYTES >> 20} MiB: have the server "
    "store large results, and answer with their URL",
    FailureReason.TOO_MANY_PIECES: "the server's answer came in too many pieces: have the server send larger ones",
    FailureReason.DAMAGED: "the server compressed its answer, and the compressed data are damaged",
    FailureReason.UNSENDABLE: "no HTTP request can be made of the address or the headers",
}


class NoResponse(NamedTuple):
    """An exchange without a (whole) answer."""

    reason: FailureReason

    @property
    def message(self) -> str:
        """Says nothing about addresses or headers: they may hold secrets."""
        return MESSAGES[self.reason]


class Response:
    """A whole answer.  Its body is parsed at most once, and only if somebody asks."""

    __slots__ = ("_fault", "_json", "body", "file", "headers", "status")

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes, file: AnonymousFile | None = None) -> None:
        """`headers` is looked up with the names as they stand in the HTTP specifications.

        With a `file`, that has all of the body, and `body` is its beginning.
        """
        self.status, self.headers, self.body, self.file = status, headers, body, file
        self._json: Any = self  # itself: not parsed yet
        self._fault: str | None = None  # None: not looked for yet

    @property
    def size(self) -> int:
        """Bytes of its body."""
        return len(self.body) if self.file is None else self.file.size

    def set_json(self, value: Any, fault: str) -> None:
        """Set its JSON value, or NOT_JSON and the fault, as another process has found them."""
        self._json, self._fault = value, fault

    @property
    def json(self) -> Any:
        """The body's JSON value, whatever its content type says, or NOT_JSON (also for NaN)."""
        if self._json is self:
            self._json = parse_json(self._full_body)
        return self._json

    @property
    def fault(self) -> str:
        """Why the body is not JSON, as one clause that names the place; "" if it is JSON.

        It quotes the body: redact it.
        """
        if self.json is not NOT_JSON:
            return ""
        if self._fault is None:
            coding = self.headers.get("Content-Encoding", "identity").lower()
            self._fault = describe_fault(self._full_body)
            if self._fault and coding not in DECODED_CODINGS:
                self._fault = f"its body is encoded as {coding!r}, but the request accepts only 'identity'"
        return self._fault or "it cannot be read"

    @property
    def is_faulty_json(self) -> bool:
        """Return True if the body was meant as JSON, by its first character, and is not.

        Its server wrote that by itself and will write it again.  A web page, an empty body or a plain text may come
        from something else, such as a proxy, and differ the next time.
        """
        return self.json is NOT_JSON and self.body.lstrip(_BEFORE_JSON)[:1] in _JSON_STARTS

    @property
    def cannot_be_too_deep(self) -> bool:
        """Whether nothing in its JSON value can be too deep: so few lists and objects begin in it, or in its texts."""
        if isinstance(self.json, json_text.RawJson):  # It is written as it came.
            return True
        return self.body.count(b"[") + self.body.count(b"{") <= MAX_DEPTH

    @property
    def is_too_deep_to_read(self) -> bool:
        """Whether it is no JSON because its lists and objects have more levels than are read."""
        return self.json is NOT_JSON and large_json.is_nested_too_deeply(self.body)

    @property
    def text(self) -> str:
        """The body as text; what is not UTF-8 is replaced."""
        return self._full_body.decode("utf-8", "replace")

    @property
    def _full_body(self) -> bytes:
        return self.body if self.file is None else self.file.read(0, self.file.size)

    @property
    def beginning(self) -> str:
        """The beginning of the body as text, for patterns and messages."""
        return self.body[: 4 * TEXT_LIMIT].decode("utf-8", "replace")[:TEXT_LIMIT]


def parse_json(body: bytes) -> Any:
    """The JSON value, or NOT_JSON.  NaN, Infinity and numbers beyond doubles are not JSON."""
    try:
        return large_json.parse(body)
    except ValueError:
        return NOT_JSON


def is_too_deep(value: Any) -> bool:
    """Whether a parsed JSON value has more than MAX_DEPTH levels.  As quick as writing it: orjson counts them."""
    for _ in range(_ORJSON_MAX_DEPTH - MAX_DEPTH):
        value = [value]
    try:
        json_text.dumps(value)
    except (TypeError, RecursionError):
        return True
    return False


def id_text(value: Any) -> str | None:
    """An id as servers give them, a text or a whole number, as text; None if it cannot be one."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    text = str(value)
    if not 0 < len(text) <= MAX_ID or not text.isprintable() or text in (".", ".."):
        return None
    return text


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """Seconds from a Retry-After header (a number or an HTTP date), 0 to 3600, or None."""
    if not header:
        return None
    text = header.strip()
    wanted_s = float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", text) else _seconds_until(text, now_s)
    return None if wanted_s is None else min(max(wanted_s, 0.0), MAX_RETRY_AFTER_S)


def _seconds_until(http_date: str, now_s: float) -> float | None:
    try:
        then: datetime = parsedate_to_datetime(http_date)
        return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp() - now_s
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """A message for people: one line, no control characters, no secrets, at most 500 characters."""
    is_cut = len(text) >= TEXT_LIMIT  # here, or where it was read
    text = "".join(_printable(ch) for ch in text[:_MAX_EXAMINED_CHARS])
    for secret in sorted(_secret_forms(secrets), key=len, reverse=True):
        text = text.replace(secret, "***")  # before cutting, or half a secret could stay
        if is_cut:
            text = _drop_partial_secret(text, secret)
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def _drop_partial_secret(text: str, secret: str) -> str:
    """A text that was cut, without the beginning of a secret at its end."""
    length = next((n for n in range(len(secret) - 1, _MIN_PARTIAL_SECRET - 1, -1) if text.endswith(secret[:n])), 0)
    return f"{text[:-length]}***" if length else text


def _secret_forms(secrets: Iterable[str]) -> set[str]:
    """Secrets as they may stand in a text: as they are, and as JSON has them."""
    return {form for secret in secrets for form in (secret, orjson.dumps(secret).decode()[1:-1])}


def _printable(ch: str) -> str:
    if ch in "\n\r\t":
        return " "
    return "" if unicodedata.category(ch)[0] == "C" else ch


log = structlog.get_logger(__name__)

_PARSE_TIMEOUT_S = 30.0


async def parse_in_subprocess(body: bytes | AnonymousFile, pointers: Collection[Pointer]) -> tuple[Any, str]:
    """Return the JSON value of an answer, which is known where these pointers lead, and "".

    If it cannot be read: NOT_JSON, and why.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "slotkeeper.large_json",
        orjson.dumps([list(pointer) for pointer in pointers]).decode(),
    ]
    source, sent = (body.rewind(), None) if isinstance(body, AnonymousFile) else (asyncio.subprocess.PIPE, body)
    process = await asyncio.create_subprocess_exec(*command, stdin=source, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(_PARSE_TIMEOUT_S):
            output, _ = await process.communicate(sent)
    except TimeoutError:
        log.warning("answer_not_inspected")
        return NOT_JSON, f"it could not be read within {_PARSE_TIMEOUT_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode == 0:
        return large_json.apply_report(body, output), ""
    return NOT_JSON, output.decode() or "it cannot be read"
