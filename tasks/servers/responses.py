"""The result of one HTTP exchange before it is judged: a Response, or NoResponse with the reason."""

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
_ORJSON_MAX_DEPTH = 254  # levels that orjson writes; it reads 1024
MAX_DEPTH = 200
"""Levels of lists and objects in a value that is kept of a response: it is later written inside other objects."""
DECODED_CODINGS = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})
"""Content codings that the HTTP client decodes, although it requests none."""
_BEFORE_JSON = b"\xef\xbb\xbf \t\r\n"
_JSON_STARTS = (b"{", b"[", b'"')
_MIN_PARTIAL_SECRET = 4  # characters of a secret
_MAX_EXAMINED_CHARS = 64 * 1024  # characters of an error text that are processed


class FailureReason(StrEnum):
    """Why an exchange failed.  Only after CONNECT and UNSENDABLE is it certain that nothing was sent."""

    CONNECT = "connect"  # no connection was established: refused, unknown host, time-out, TLS
    TIMEOUT = "timeout"  # the request may have been sent, and no complete response was received in time
    RESET = "reset"  # the request may have been sent, and the connection failed or the response was not HTTP
    TOO_LARGE = "too_large"  # the response was longer than allowed
    TOO_MANY_PIECES = "too_many_pieces"  # the body of the response had more pieces than allowed
    DAMAGED = "damaged"  # the body of the response is compressed, and cannot be decompressed
    UNSENDABLE = "unsendable"  # nothing was sent: the URL or the headers are not valid in HTTP


MAX_RESPONSE_BYTES = 64 << 20
"""Size limit of one response of a server."""
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
    """An exchange without a complete response."""

    reason: FailureReason

    @property
    def message(self) -> str:
        """Return a message for users, without URLs and headers: they may contain secrets."""
        return MESSAGES[self.reason]


class Response:
    """A complete response.  Its body is parsed at first use, at most once."""

    __slots__ = ("_fault", "_json", "body", "file", "headers", "status")

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes, file: AnonymousFile | None = None) -> None:
        """Create a response.

        headers: by names in lower case.  file: contains the whole body; `body` is then its beginning.
        """
        self.status, self.headers, self.body, self.file = status, headers, body, file
        self._json: Any = self  # self: not parsed yet
        self._fault: str | None = None  # None: not determined yet

    @property
    def size(self) -> int:
        """Return the number of bytes of the body."""
        return len(self.body) if self.file is None else self.file.size

    def set_json(self, value: Any, fault: str) -> None:
        """Set the JSON value, or NOT_JSON and the fault, that another process determined."""
        self._json, self._fault = value, fault

    @property
    def json(self) -> Any:
        """Return the body's JSON value, regardless of its content type; NOT_JSON if it is not JSON, such as NaN."""
        if self._json is self:
            self._json = parse_json(self._full_body)
        return self._json

    def raw_value(self, pointer: Pointer) -> json_text.RawJson:
        """Return the value at a pointer, which exists, as the bytes that the server sent."""
        return large_json.find_raw(self._full_body, pointer)

    @property
    def fault(self) -> str:
        """Return why the body is not JSON, as one clause that names the place; "": it is JSON.

        It quotes the body: redact it.
        """
        if self.json is not NOT_JSON:
            return ""
        if self._fault is None:
            coding = self.headers.get("content-encoding", "identity").lower()
            self._fault = describe_fault(self._full_body)
            if self._fault and coding not in DECODED_CODINGS:
                self._fault = f"its body is encoded as {coding!r}, but the request accepts only 'identity'"
        return self._fault or "it cannot be read"

    @property
    def is_faulty_json(self) -> bool:
        """Return whether the body begins like JSON, but is not JSON.

        The server itself wrote it, and will write it again.  A web page, an empty body or a plain text may be from
        another program, such as a proxy, and differ the next time.
        """
        return self.json is NOT_JSON and self.body.lstrip(_BEFORE_JSON)[:1] in _JSON_STARTS

    @property
    def cannot_be_too_deep(self) -> bool:
        """Return whether its JSON value is certainly not too deep: it has at most MAX_DEPTH opening brackets."""
        if isinstance(self.json, json_text.RawJson):  # It is stored as text, unchanged.
            return True
        return self.body.count(b"[") + self.body.count(b"{") <= MAX_DEPTH

    @property
    def is_too_deep_to_read(self) -> bool:
        """Return whether the body is not JSON because it has more levels than the parser reads."""
        return self.json is NOT_JSON and large_json.is_nested_too_deeply(self.body)

    @property
    def text(self) -> str:
        """Return the body as text; invalid UTF-8 is replaced."""
        return self._full_body.decode("utf-8", "replace")

    @property
    def _full_body(self) -> bytes:
        return self.body if self.file is None else self.file.read(0, self.file.size)

    @property
    def beginning(self) -> str:
        """Return the beginning of the body as text, for patterns and messages."""
        return self.body[: 4 * TEXT_LIMIT].decode("utf-8", "replace")[:TEXT_LIMIT]


def has_explicit_length(headers: Mapping[str, str]) -> bool:
    """Return whether the headers define where the body ends, so that a cut body can be recognized."""
    return "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()


def parse_json(body: bytes) -> Any:
    """Return the JSON value, or NOT_JSON.  NaN, Infinity and numbers beyond doubles are not JSON."""
    try:
        return large_json.parse(body)
    except ValueError:
        return NOT_JSON


def is_too_deep(value: Any) -> bool:
    """Return whether a parsed JSON value has more than MAX_DEPTH levels.  orjson counts them as it writes it."""
    for _ in range(_ORJSON_MAX_DEPTH - MAX_DEPTH):
        value = [value]
    try:
        json_text.dumps(value)
    except (TypeError, RecursionError):
        return True
    return False


def id_text(value: Any) -> str | None:
    """Return an id from a response, a string or an integer, as text; None: the value cannot be an id."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    text = str(value)
    if not 0 < len(text) <= MAX_ID or not text.isprintable() or text in (".", ".."):
        return None
    return text


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """Return the seconds of a Retry-After header (a number or an HTTP date), 0 to 3600; None: there is none."""
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
    """Return a message for users: one line, at most 500 characters, without control characters and secrets."""
    is_cut = len(text) >= TEXT_LIMIT  # below, or when it was read
    text = "".join(_printable(ch) for ch in text[:_MAX_EXAMINED_CHARS])
    for secret in sorted(_secret_forms(secrets), key=len, reverse=True):
        text = text.replace(secret, "***")  # before the text is cut, or half a secret could remain
        if is_cut:
            text = _drop_partial_secret(text, secret)
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def _drop_partial_secret(text: str, secret: str) -> str:
    """Return a cut text without the beginning of a secret at its end."""
    length = next((n for n in range(len(secret) - 1, _MIN_PARTIAL_SECRET - 1, -1) if text.endswith(secret[:n])), 0)
    return f"{text[:-length]}***" if length else text


def _secret_forms(secrets: Iterable[str]) -> set[str]:
    """Return the forms of the secrets in a text: unchanged, and escaped as in JSON."""
    return {form for secret in secrets for form in (secret, orjson.dumps(secret).decode()[1:-1])}


def _printable(ch: str) -> str:
    if ch in "\n\r\t":
        return " "
    return "" if unicodedata.category(ch)[0] == "C" else ch


log = structlog.get_logger(__name__)

_PARSE_TIMEOUT_S = 30.0


async def parse_in_subprocess(body: bytes | AnonymousFile, pointers: Collection[Pointer]) -> tuple[Any, str]:
    """Parse a response in another process, and return its JSON value and "", or NOT_JSON and the fault.

    The values at these pointers are looked up there, so that this process need not parse the text.
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
        log.warning("large_answer_not_parsed")
        return NOT_JSON, f"it could not be read within {_PARSE_TIMEOUT_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode == 0:
        return large_json.apply_report(body, output), ""
    return NOT_JSON, output.decode() or "it cannot be read"
