"""A request as WSGI has it, and the application's answer to it."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson
from httptools import parse_url

from app.later import GOES_ON, Following, UntilEnded
from app.reading import WHOLE

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Headers = list[tuple[bytes, bytes]]
_Writing = Callable[[bytes], None]

_UNPREFIXED = frozenset({"CONTENT_TYPE", "CONTENT_LENGTH"})
_ONCE = frozenset({"HTTP_HOST", "CONTENT_LENGTH", "CONTENT_TYPE"})
_BODILESS = frozenset({204, 304})


class BadHead(ValueError):
    """No request can be made of this head; the text says why."""


@dataclass(slots=True)
class Answer:
    """What goes back."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    goes_on: UntilEnded | Following | None = None

    @staticmethod
    def problem(status: int, code: str, detail: str, path: str = "", retry_after_s: int | None = None) -> "Answer":
        """One that the application is not asked for; in its words (app.errors)."""
        title = HTTPStatus(status).phrase
        body = {"type": f"urn:slotkeeper:problem:{code}", "title": title, "status": status}
        body |= {"detail": detail, "instance": path, "code": code}
        headers = [("Content-Type", "application/problem+json")]
        if retry_after_s is not None:
            headers.append(("Retry-After", str(retry_after_s)))
        return Answer(status, headers, orjson.dumps(body))

    def encode(self, method: str, version: str, *, close: bool) -> bytes:
        """For the wire."""
        lines = self._first_lines()
        bodiless = self.status in _BODILESS
        if not bodiless:
            length = next((value for name, value in self.headers if name.lower() == "content-length"), None)
            lines.append(f"Content-Length: {len(self.body) if method != 'HEAD' or length is None else length}")
        if close:
            lines.append("Connection: close")
        elif version == "1.0":
            lines.append("Connection: keep-alive")
        head = _head(lines)
        return head if bodiless or method == "HEAD" else head + self.body

    def encode_head(self, version: str) -> bytes:
        """For the wire, before a body that has no end yet."""
        lines = self._first_lines()
        if version != "1.0":
            lines.append("Transfer-Encoding: chunked")
        return _head([*lines, "Connection: close"])

    def _first_lines(self) -> list[str]:
        lines = [f"HTTP/1.1 {self.status} {_phrase(self.status)}", _date(int(time.time()))]
        return lines + [f"{name}: {_one_line(value)}" for name, value in self.headers if name.lower() not in _OURS]


_OURS = frozenset({"content-length", "connection", "transfer-encoding", "date"})


def _head(lines: list[str]) -> bytes:
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def _one_line(value: str) -> str:
    """Whatever the application puts into a header, it begins no other."""
    return value if value.isprintable() else "".join(sign if sign.isprintable() else " " for sign in value)


@lru_cache(maxsize=2)
def _date(seconds: int) -> str:
    return f"Date: {formatdate(seconds, usegmt=True)}"


@lru_cache(maxsize=128)
def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def environ_of(method: str, version: str, target: bytes, headers: Headers, peer: tuple[str, int]) -> dict[str, Any]:
    """The WSGI environment, but for the body.  Raises BadHead."""
    if version not in ("1.0", "1.1"):
        raise BadHead("the version is neither HTTP/1.1 nor HTTP/1.0")
    path, query, host = _parts(method, target)
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "SERVER_PROTOCOL": f"HTTP/{version}",
        "REMOTE_ADDR": peer[0],
        "REMOTE_PORT": str(peer[1]),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "wsgi.input_terminated": True,
    }
    for name, value in headers:
        _add(environ, name, value)
    if version == "1.1" and "HTTP_HOST" not in environ:
        raise BadHead("the header Host is missing")
    if environ.get("HTTP_TRANSFER_ENCODING", "chunked").lower() != "chunked":
        raise BadHead("the body is coded in another way than chunked")
    if version == "1.0" and "HTTP_TRANSFER_ENCODING" in environ:
        raise BadHead("there are chunks, which HTTP/1.0 does not know")
    if host:  # of an address in full; it counts, whatever the header says
        environ["HTTP_HOST"] = host
    host, _, port = environ.get("HTTP_HOST", "localhost").partition(":")
    environ["SERVER_NAME"], environ["SERVER_PORT"] = host or "localhost", port or "80"
    return environ


def _add(environ: dict[str, Any], name: bytes, value: bytes) -> None:
    if b"_" in name:
        return  # It would pass for the same name with a hyphen, which somebody before us may have checked.
    key = name.decode("latin-1").upper().replace("-", "_")
    key = key if key in _UNPREFIXED else f"HTTP_{key}"
    text = value.decode("latin-1")
    if key not in environ:
        environ[key] = text
    elif key in _ONCE:
        raise BadHead(f"the header {name.decode('latin-1')} stands twice")
    else:
        environ[key] += (";" if key == "HTTP_COOKIE" else ",") + text


def _parts(method: str, target: bytes) -> tuple[str, str, str]:
    """Path, decoded as WSGI wants it, query, and the host that an address in full names."""
    if target == b"*" and method == "OPTIONS":
        return "*", "", ""
    host = ""
    if target.startswith(b"/"):
        path, _, query = target.partition(b"#")[0].partition(b"?")
    else:
        try:
            url = parse_url(target)
        except Exception:  # httptools has its own, and raises others too.
            raise BadHead("the address is none") from None
        if not url.host or url.userinfo or url.schema.lower() not in (b"http", b"https"):
            raise BadHead("the address names no host, or more than that")
        path, query = url.path or b"/", url.query or b""
        name = url.host.decode("latin-1")
        host = (f"[{name}]" if ":" in name else name) + (f":{url.port}" if url.port else "")
    return unquote_to_bytes(path).decode("latin-1"), query.decode("latin-1"), host


def answer(application: Application, environ: Mapping[str, Any], body: bytes, *, whole: bool) -> Answer:
    """The application's answer.  `whole`: `body` is all there is; else it is left out and refused by its length."""
    given = {**environ, "wsgi.input": BytesIO(body), WHOLE: whole}
    told: list[Any] = []

    def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> _Writing:
        told[:] = [int(status[:3]), headers]
        return _no_writing

    result = application(given, start)
    try:
        content = b"".join(result)
    finally:
        if hasattr(result, "close"):
            result.close()
    return Answer(told[0], told[1], content, given.get(GOES_ON))


def _no_writing(_: bytes) -> None:
    raise NotImplementedError("the application gives its answer as an iterable")
