"""A request as WSGI has it, and Flask's response."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson

from app.deferred import DEFERRED, FollowEvents, WaitForJob
from app.request_json import BODY_COMPLETE

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Headers = list[tuple[bytes, bytes]]

LONGEST_HEAD = 32 << 10
_LONGEST_TARGET, _MOST_HEADERS = 16 << 10, 100
_UNPREFIXED = {b"content-type": "CONTENT_TYPE", b"content-length": "CONTENT_LENGTH"}
_BODILESS = (204, 304)


@dataclass(slots=True)
class Response:
    status: int
    headers: Headers
    body: bytes
    goes_on: WaitForJob | FollowEvents | None = None


class Refusal(Exception):
    """A response that Flask is not asked for, in its words (app.problems)."""

    def __init__(self, status: int, code: str, detail: str, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.status, self.title, self.retry_after_s = status, HTTPStatus(status).phrase, retry_after_s
        kind = f"urn:slotkeeper:problem:{code}"
        self._problem = {"type": kind, "title": self.title, "status": status, "detail": detail, "code": code}

    def response(self, path: str = "") -> Response:
        body = orjson.dumps(self._problem | {"instance": path})
        headers = [(b"content-type", b"application/problem+json"), (b"content-length", b"%d" % len(body))]
        again = [] if self.retry_after_s is None else [(b"retry-after", b"%d" % self.retry_after_s)]
        return Response(self.status, headers + again, body)

    def as_http(self) -> bytes:
        """Return the bytes that end a connection with this."""
        found = self.response()
        lines = [b"%b: %b" % header for header in (*found.headers, (b"connection", b"close"))]
        return b"\r\n".join([f"HTTP/1.1 {self.status} {self.title}".encode(), *lines, b"", found.body])


LARGE_HEAD = 431, "head_too_large", f"A head may have {_MOST_HEADERS} headers, and {LONGEST_HEAD} bytes."


def validate_head(version: str, target: bytes, headers: Headers) -> int:
    """Return the length of the body, or 0 where it comes in chunks.  Raises Refusal for what the parser lets pass."""
    if len(target) > _LONGEST_TARGET:
        raise Refusal(414, "address_too_long", f"An address may have {_LONGEST_TARGET} bytes.")
    if len(headers) > _MOST_HEADERS or sum(len(name) + len(value) for name, value in headers) > LONGEST_HEAD:
        raise Refusal(*LARGE_HEAD)
    names = [name for name, _ in headers]
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    wrong = {
        "the version is neither HTTP/1.1 nor HTTP/1.0": version not in ("1.0", "1.1"),
        "the address is no path": not target.startswith(b"/"),
        "Host is missing, or stands twice": names.count(b"host") != 1 and (version == "1.1" or b"host" in names),
        "Content-Type stands twice": names.count(b"content-type") > 1,
        "the body is not in chunks of HTTP/1.1": bool(codings) and (codings != [b"chunked"] or version == "1.0"),
    }
    if any(wrong.values()):
        raise Refusal(400, "malformed_request", f"In this request {next(it for it in wrong if wrong[it])}.")
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


def build_environ(scope: Any) -> dict[str, Any]:
    """The WSGI environment, but for the body."""
    client, server = scope["client"] or ("", 0), scope["server"]
    environ: dict[str, Any] = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(scope["raw_path"]).decode("latin-1"),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        "SERVER_NAME": server[0],
        "SERVER_PORT": str(server[1]),
        "REMOTE_ADDR": client[0],
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scope["scheme"],
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "wsgi.input_terminated": True,
    }
    for name, value in scope["headers"]:
        if b"_" in name:
            continue  # It would pass for the same name with a hyphen, which a proxy may have checked.
        key = _UNPREFIXED.get(name) or "HTTP_" + name.decode("latin-1").upper().replace("-", "_")
        text = value.decode("latin-1")
        environ[key] = f"{environ[key]}{';' if name == b'cookie' else ','}{text}" if key in environ else text
    return environ


def call_wsgi(wsgi: Wsgi, environ: dict[str, Any], body: bytes, *, whole: bool) -> Response:
    """Ask Flask.  `whole`: `body` is all there is; else it is left out, and refused by its length."""
    given = {**environ, "wsgi.input": BytesIO(body), BODY_COMPLETE: whole}
    started: list[Any] = []
    result = wsgi(given, lambda status, headers, exc_info=None: started.extend((int(status[:3]), headers)))
    try:
        content = b"".join(result)
    finally:
        if hasattr(result, "close"):
            result.close()
    *_, status, told = started
    is_head = environ["REQUEST_METHOD"] == "HEAD"
    headers = [_encode_header(*header) for header in told if is_head or header[0].lower() != "content-length"]
    if not is_head and status not in _BODILESS:
        headers.append((b"content-length", b"%d" % len(content)))
    return Response(status, headers, content, given.get(DEFERRED))


def _encode_header(name: str, value: str) -> tuple[bytes, bytes]:
    """A header for the wire.  Whatever the application puts into its value, it begins no other header."""
    text = value if value.isprintable() else "".join(sign if sign.isprintable() else " " for sign in value)
    return name.encode("latin-1"), text.encode("latin-1", "replace")
