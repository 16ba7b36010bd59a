"""Converts a request to WSGI, and Flask's response to one of the server."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson

from app.deferred import DEFERRED, FollowEvents, WaitForJob
from app.request_json import BODY_COMPLETE

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Headers = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 32 << 10
_MAX_TARGET_BYTES, _MAX_HEADERS = 16 << 10, 100
_UNPREFIXED = {b"content-type": "CONTENT_TYPE", b"content-length": "CONTENT_LENGTH"}
_BODILESS = (204, 304)
LARGE_HEAD = 431, "head_too_large", f"A head may have at most {_MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes."


@dataclass(slots=True)
class Response:
    status: int
    headers: Headers
    body: bytes
    deferred: WaitForJob | FollowEvents | None = None


class Refusal(Exception):
    """A problem response that is sent without calling Flask, in the format of app.problems."""

    def __init__(self, status: int, code: str, detail: str, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.status, self.title, self.retry_after_s = status, HTTPStatus(status).phrase, retry_after_s
        kind = f"urn:slotkeeper:problem:{code}"
        self._problem = {"type": kind, "title": self.title, "status": status, "detail": detail, "code": code}

    def response(self, path: str = "") -> Response:
        body = orjson.dumps(self._problem | {"instance": path})
        headers = [(b"content-type", b"application/problem+json"), (b"content-length", b"%d" % len(body))]
        retry_headers = [] if self.retry_after_s is None else [(b"retry-after", b"%d" % self.retry_after_s)]
        return Response(self.status, headers + retry_headers, body)

    def as_http(self) -> bytes:
        """Return the bytes of an HTTP response that closes the connection."""
        response = self.response()
        lines = [b"%b: %b" % header for header in (*response.headers, (b"connection", b"close"))]
        return b"\r\n".join([f"HTTP/1.1 {self.status} {self.title}".encode(), *lines, b"", response.body])


def validate_head(version: str, target: bytes, headers: Headers) -> int:
    """Return the length of the body; 0 for a chunked body.  Raises Refusal for errors that the parser accepts."""
    if len(target) > _MAX_TARGET_BYTES:
        raise Refusal(414, "address_too_long", f"An address may have at most {_MAX_TARGET_BYTES} bytes.")
    if len(headers) > _MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        raise Refusal(*LARGE_HEAD)
    names = [name for name, _ in headers]
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    faults = {
        "the version is neither HTTP/1.1 nor HTTP/1.0": version not in ("1.0", "1.1"),
        "the address is not a path": not target.startswith(b"/"),
        "Host is missing or repeated": names.count(b"host") != 1 and (version == "1.1" or b"host" in names),
        "Content-Type is repeated": names.count(b"content-type") > 1,
        "Transfer-Encoding is not `chunked` of HTTP/1.1": bool(codings)
        and (codings != [b"chunked"] or version == "1.0"),
    }
    if any(faults.values()):
        fault = next(fault for fault, is_present in faults.items() if is_present)
        raise Refusal(400, "malformed_request", f"In this request {fault}.")
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


def build_environ(scope: Any) -> dict[str, Any]:
    """Return the WSGI environment of a request, without the body."""
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
            continue  # WSGI cannot distinguish it from the name with a hyphen, which a proxy may have checked.
        key = _variable(name)
        text = value.decode("latin-1")
        environ[key] = f"{environ[key]}{';' if name == b'cookie' else ','}{text}" if key in environ else text
    return environ


@lru_cache(maxsize=256)
def _variable(name: bytes) -> str:
    """Return the variable of a header in the WSGI environment."""
    return _UNPREFIXED.get(name) or "HTTP_" + name.decode("latin-1").upper().replace("-", "_")


def call_wsgi(wsgi: Wsgi, environ: dict[str, Any], body: bytes, *, has_body: bool) -> Response:
    """Call Flask.  Without `has_body`, `body` is empty, and Flask refuses the request by its length."""
    wsgi_environ = {**environ, "wsgi.input": BytesIO(body), BODY_COMPLETE: has_body}
    started: list[Any] = []
    result = wsgi(wsgi_environ, lambda status, headers, exc_info=None: started.extend((int(status[:3]), headers)))
    try:
        content = b"".join(result)
    finally:
        if hasattr(result, "close"):
            result.close()
    *_, status, wsgi_headers = started
    is_head = environ["REQUEST_METHOD"] == "HEAD"
    headers = [_encode_header(*header) for header in wsgi_headers if is_head or header[0].lower() != "content-length"]
    if not is_head and status not in _BODILESS:
        headers.append((b"content-length", b"%d" % len(content)))
    return Response(status, headers, content, wsgi_environ.get(DEFERRED))


def _encode_header(name: str, value: str) -> tuple[bytes, bytes]:
    """Encode a header.  Control characters become spaces, so that a value cannot start another header."""
    text = value if value.isprintable() else "".join(char if char.isprintable() else " " for char in value)
    return name.encode("latin-1"), text.encode("latin-1", "replace")
