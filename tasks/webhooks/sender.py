"""Sign one message and send it to one checked URL, within one deadline."""

import base64
import io
import logging
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, RemoteDisconnected
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from math import floor
from threading import Thread
from typing import Any, cast
from urllib.parse import urlsplit

import certifi
from ssrfguard import (
    BlockedAddressError,
    Target,
    connect,
    resolve,
)
from standardwebhooks import Webhook

from tasks.security.url_guard import _PUBLIC_ONLY_HINT, ALLOW_VARIABLE, Network, _opened_networks, _policy, examine_url

log = logging.getLogger(__name__)
MAX_RESPONSE_BYTES = 64 << 10
"""Bytes taken of an answer, its headers included."""
MAX_QUOTED_BYTES = 256
"""Bytes of its body that are told: what comes at once, for the status says all that counts."""
_BODY_WAIT_S = 0.5
"""How long is waited for them."""
MAX_RETRY_AFTER_S = 3600.0
"""For so long a receiver may ask to be left alone."""


@dataclass(frozen=True, slots=True)
class SendResult:
    """What came of one message.

    `status`: the HTTP status, None when there was no answer.  `error`: empty, or one sentence that names
    no more of the URL than scheme://host.  `permanent`: the same message will never get through.
    `answer`: what its body begins with; not for strangers where it came from `inside`, a network that the operator
    has opened.  `retry_after_s`: for how long the receiver asks to be left alone.
    """

    ok: bool
    status: int | None
    error: str
    permanent: bool
    answer: str = field(default="", compare=False)
    inside: bool = field(default=False, compare=False)
    retry_after_s: float = field(default=0.0, compare=False)


class WebhookSender:
    """Signs (Standard Webhooks) and sends.  May be shared between threads.

    `allow`: see parse_allow.  `timeout_s`: for one message in all, from the look-up of the name to the status line
    of the answer.  ValueError when one of them cannot be used.
    """

    def __init__(self, allow: Sequence[Network] = (), timeout_s: float = 10.0) -> None:
        if timeout_s <= 0:
            raise ValueError("timeout_s must be above 0")
        self._allow = tuple(allow)
        self._timeout_s = timeout_s
        self._tls = _tls()
        _opened_networks(self._allow)

    def send(
        self, url: str, message_id: str, body: bytes, now: datetime, secrets: Sequence[str], trace: str | None = None
    ) -> SendResult:
        """POST `body` (JSON in UTF-8) once.  `now`: aware, in any zone.  `trace`: a traceparent.

        `secrets`: base64 of at least 24 bytes, with or without "whsec_"; the message is signed with each of them.
        A receiver tells a repeated message by `message_id`, which must be the same at every try.
        ValueError only for a naive `now`, a body that is not UTF-8, an id that no header can hold, no secret or one
        that cannot be used.
        """
        target = examine_url(url, self._allow)
        if isinstance(target, str):
            return SendResult(False, None, target, permanent=True)
        origin = _origin(target)
        headers = _headers(message_id, body, now, secrets) | ({"traceparent": trace} if trace else {})
        try:
            return self._post(target, origin, _path(url), body, headers)
        except BlockedAddressError as refused:
            return _refused_result(origin, refused)
        except (OSError, HTTPException) as failed:
            return SendResult(False, None, f"{origin}: {_failure_sentence(failed, self._timeout_s)}", permanent=False)

    def _post(self, target: Target, origin: str, path: str, body: bytes, headers: dict[str, str]) -> SendResult:
        deadline = _Deadline(self._timeout_s)
        with closing(self._open(target, deadline)) as sock:
            http = self._client(target)
            http.sock = cast(Any, _DeadlineSocket(sock, deadline))
            http.request("POST", path, body, headers)
            answer = http.getresponse()
            deadline.shorten(_BODY_WAIT_S)
            judged = _result_of_status(origin, answer.status)
            retry_after_s = _retry_after_s(answer.status, answer.headers.get("Retry-After"))
            return replace(
                judged, answer=_read_beginning(answer), inside=self._is_internal(sock), retry_after_s=retry_after_s
            )

    def _is_internal(self, sock: socket.socket) -> bool:
        """Whether the other end is where only the operator lets us go."""
        address = ip_address(sock.getpeername()[0].partition("%")[0])
        return any(address in network for network in self._allow)

    def _client(self, target: Target) -> HTTPConnection:
        """Writes the Host header from the name in the URL; it never connects, its socket is given."""
        if target.scheme == "https":
            return HTTPSConnection(_host(target), target.port, context=self._tls)
        return HTTPConnection(_host(target), target.port)

    def _open(self, target: Target, deadline: "_Deadline") -> socket.socket:
        policy = _policy(self._allow, target.port)
        addresses = resolve(target, policy=policy, resolver=deadline.look_up)
        sock = connect(
            addresses,
            policy=policy,
            timeout=deadline.left() / min(len(addresses), policy.max_connection_attempts),
            # Headers and body are two writes; the second would wait for the first's acknowledgement.
            socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
        )
        return self._wrap_tls(sock, target, deadline) if target.scheme == "https" else sock

    def _wrap_tls(self, sock: socket.socket, target: Target, deadline: "_Deadline") -> socket.socket:
        """TLS, with the certificate checked against the name in the URL, not against the address."""
        with closing(sock):  # wrap_socket takes the descriptor over: after it there is nothing to close
            sock.settimeout(deadline.left())
            return self._tls.wrap_socket(sock, server_hostname=_host(target))


class _Deadline:
    """One end for everything that waits; a time-out of its own for each step would add up."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, above 0.  TimeoutError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def shorten(self, seconds: float) -> None:
        self._end = min(self._end, time.monotonic() + seconds)

    def look_up(self, *args: Any) -> list[Any]:
        """socket.getaddrinfo, which has no time-out: the thread is left behind and ends by itself."""
        answer: Future[list[Any]] = Future()
        Thread(target=_complete, args=(answer, socket.getaddrinfo, args), daemon=True).start()
        return answer.result(timeout=self.left())


def _complete(answer: "Future[Any]", call: Callable[..., Any], args: Iterable[Any]) -> None:
    try:
        answer.set_result(call(*args))
    except Exception as error:
        answer.set_exception(error)


class _DeadlineSocket:
    """All that http.client asks of a socket.  Every wait gets only the time that is left.

    A time-out of the socket itself counts from each byte, so one byte a second would hold it for ever.
    """

    def __init__(self, sock: socket.socket, deadline: _Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._sock.settimeout(self._deadline.left())
            rest = rest[self._sock.send(rest) :]

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_BoundedReader(self._sock, self._deadline))

    def close(self) -> None:
        """Nothing: who opened the socket closes it."""


class _BoundedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: _Deadline) -> None:
        self._sock, self._deadline, self._remaining = sock, deadline, MAX_RESPONSE_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._remaining <= 0:
            raise HTTPException("endless headers")
        self._sock.settimeout(self._deadline.left())
        taken = self._sock.recv_into(buffer)
        self._remaining -= taken
        return taken


def _headers(message_id: str, body: bytes, now: datetime, secrets: Sequence[str]) -> dict[str, str]:
    if now.tzinfo is None:
        raise ValueError("now must be an aware datetime")
    if not secrets:
        raise ValueError("a message must be signed")
    at = now.astimezone(UTC)  # the library overwrites any other zone and signs a wrong time
    return {
        "content-type": "application/json",
        "user-agent": f"Slotkeeper/{_version()}",
        "connection": "close",
        "webhook-id": message_id,
        "webhook-timestamp": str(floor(at.timestamp())),
        "webhook-signature": " ".join(_signer(secret).sign(message_id, at, body.decode()) for secret in secrets),
    }


def _signer(secret: str) -> Webhook:
    """The library drops what is no base64 without a word and would sign with what is left."""
    text = secret.removeprefix("whsec_")
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        key = b""
    if len(key) < 24:
        raise ValueError(
            "the webhook secret must be the base64 of at least 24 bytes, with or without whsec_ before it; "
            "one is made by: openssl rand -base64 32"
        )
    return Webhook(key)


def _tls() -> ssl.SSLContext:
    """Trusts what the system trusts (SSL_CERT_FILE adds a private authority) and certifi's bundle."""
    context = ssl.create_default_context(cafile=certifi.where())
    context.load_default_certs()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _host(target: Target) -> str:
    """The dot at the end of "example.com." steers the look-up alone; no certificate or Host has it."""
    return target.host.rstrip(".")


def _origin(target: Target) -> str:
    return f"{target.scheme}://{f'[{target.host}]' if ':' in target.host else target.host}"


def _path(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _refused_result(origin: str, refused: BlockedAddressError) -> SendResult:
    """The log tells the operator the address; the caller does not learn what a name inside points to."""
    log.warning("webhook to %s refused: %s", origin, refused)
    sentence = f"{origin} leads to an address that is not public: {_PUBLIC_ONLY_HINT}{ALLOW_VARIABLE}."
    return SendResult(False, None, sentence, permanent=True)


def _result_of_status(origin: str, status: int) -> SendResult:
    if 200 <= status < 300:
        return SendResult(True, status, "", permanent=False)
    remedy = ""
    if 300 <= status < 400:
        remedy = ", a redirect; redirects are not followed, so give the final address"
    if status == 410:
        remedy = ", gone for good"
    return SendResult(False, status, f"{origin} answered {status}{remedy}.", permanent=status == 410)


def _read_beginning(answer: HTTPResponse) -> str:
    """What its body begins with, as far as that comes at once: one look, and whatever it finds will do."""
    try:
        return answer.read1(MAX_QUOTED_BYTES).decode(errors="replace")
    except (OSError, HTTPException, ValueError):
        return ""


def _retry_after_s(status: int, retry_after: str | None) -> float:
    """What Retry-After asks for, where it is said in seconds and means that we come too often."""
    if status not in (429, 503) or retry_after is None or not re.fullmatch(r"[0-9]{1,9}", retry_after.strip()):
        return 0.0
    return min(float(retry_after), MAX_RETRY_AFTER_S)


def _failure_sentence(failed: Exception, timeout_s: float) -> str:
    """One sentence.  Nothing of the answer is quoted in it: it could be read back from inside."""
    match failed:
        case TimeoutError():
            return f"no answer within {timeout_s:g} s."
        case RemoteDisconnected() | ConnectionResetError() | BrokenPipeError():
            return "the connection was closed without an answer."
        case ssl.SSLCertVerificationError():
            return f"the certificate is refused: {failed.verify_message}."
        case ssl.SSLError():
            return f"TLS failed: {failed.reason or type(failed).__name__}."
        case socket.gaierror():
            return "the name is not known."
        case HTTPException():
            return "the answer is not HTTP."
    cause = failed.__cause__ if isinstance(failed.__cause__, OSError) else failed
    return f"the connection failed: {getattr(cause, 'strerror', None) or type(cause).__name__}."


@lru_cache(maxsize=1)
def _version() -> str:
    try:
        return version("slotkeeper")
    except PackageNotFoundError:  # run from a checkout
        return "dev"
