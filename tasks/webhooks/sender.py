"""Sign one message and send it to one checked URL, within one deadline.

`WebhookSender` takes plain values.  `SigningSender` gives it the URL and the signing secrets of a subscription.
"""

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
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, RemoteDisconnected
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

from slotkeeper.clock import now_ms
from slotkeeper.outbox.subscriptions import Subscription
from slotkeeper.outbox.webhook_messages import Message
from slotkeeper.process import package_version
from slotkeeper.registry.webhook_rotations import SecretRotations
from tasks.security import vault
from tasks.security.keyring import webhook_secrets
from tasks.security.url_guard import _PUBLIC_ONLY_HINT, ALLOW_VARIABLE, Network, _opened_networks, _policy, examine_url

log = logging.getLogger(__name__)
MAX_RESPONSE_BYTES = 64 << 10
"""Bytes that are read of a response, its headers included."""
MAX_QUOTED_BYTES = 256
"""Bytes of a response's body that are kept for the delivery log.  The status alone decides about success."""
_BODY_WAIT_S = 0.5
"""How long the sender waits for the body after the headers."""
MAX_RETRY_AFTER_S = 3600.0
"""The longest pause that a receiver may ask for."""
_SECRET_UNREADABLE = "Its signing secret cannot be opened with this installation's secret; rotate it."


@dataclass(frozen=True, slots=True)
class SendResult:
    """The result of sending one message.

    status: HTTP; None: there was no response.
    error: "", or one sentence that contains of the URL only scheme://host.
    permanent: the URL will never accept the message.
    answer: the beginning of the response's body.  It is not shown to tenants if `inside` is true.
    inside: the response came from a network that only the operator's setting makes reachable.
    retry_after_s: the pause that the receiver has asked for.
    """

    ok: bool
    status: int | None
    error: str
    permanent: bool
    answer: str = field(default="", compare=False)
    inside: bool = field(default=False, compare=False)
    retry_after_s: float = field(default=0.0, compare=False)


class WebhookSender:
    """Signs messages as Standard Webhooks specifies, and sends them.  Thread-safe."""

    def __init__(self, allow: Sequence[Network] = (), timeout_s: float = 10.0) -> None:
        """Create a sender.

        allow: networks that may be reached although they are not public (`parse_networks`).
        timeout_s: limit for one message, from the DNS lookup to the headers of the response.

        Raises ValueError if either cannot be used.
        """
        if timeout_s <= 0:
            raise ValueError("timeout_s must be above 0")
        self._allow = tuple(allow)
        self._timeout_s = timeout_s
        self._tls = _tls()
        _opened_networks(self._allow)  # raises ValueError for a network that cannot be allowed

    def send(
        self, url: str, message_id: str, body: bytes, now: datetime, secrets: Sequence[str], trace: str | None = None
    ) -> SendResult:
        """POST `body` once, and return the result; failures to deliver are not raised.

        message_id: the same at every attempt, so that the receiver recognizes a repeated message.
        body: JSON in UTF-8.
        now: an aware datetime, in any time zone.
        secrets: base64 of at least 24 bytes, with or without "whsec_"; the message is signed with each of them.
        trace: a traceparent.

        Raises ValueError for a naive `now`, a body that is not UTF-8, an id that is not valid in a header, no secret,
        or a secret that cannot be used.
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
        except (OSError, HTTPException) as error:
            return SendResult(False, None, f"{origin}: {_describe_failure(error, self._timeout_s)}", permanent=False)

    def _post(self, target: Target, origin: str, path: str, body: bytes, headers: dict[str, str]) -> SendResult:
        deadline = _Deadline(self._timeout_s)
        with closing(self._open(target, deadline)) as sock:
            http = self._client(target)
            http.sock = cast(Any, _DeadlineSocket(sock, deadline))
            http.request("POST", path, body, headers)
            response = http.getresponse()
            deadline.shorten(_BODY_WAIT_S)
            result = _result_of_status(origin, response.status)
            retry_after_s = _retry_after_s(response.status, response.headers.get("Retry-After"))
            return replace(
                result, answer=_read_beginning(response), inside=self._is_internal(sock), retry_after_s=retry_after_s
            )

    def _is_internal(self, sock: socket.socket) -> bool:
        """Return whether only the operator's setting makes the peer's address reachable."""
        address = ip_address(sock.getpeername()[0].partition("%")[0])
        return any(address in network for network in self._allow)

    def _client(self, target: Target) -> HTTPConnection:
        """Return the HTTP client, which takes the Host header from the URL; the caller gives it a connected socket."""
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
        """Wrap a connected socket in TLS, and verify the certificate against the name in the URL."""
        with closing(sock):  # wrap_socket takes over the descriptor, so after it this closes nothing.
            sock.settimeout(deadline.left())
            return self._tls.wrap_socket(sock, server_hostname=_host(target))


class SigningSender:
    """Sends messages of the outbox, each signed with the secrets of its subscription.

    A webhook has its own secrets.  A job's `callback_url` has the secrets of the job's tenant.
    """

    def __init__(self, sender: WebhookSender, rotations: SecretRotations) -> None:
        self._sender, self._rotations = sender, rotations

    def __call__(self, receiver: Subscription, message: Message, body: bytes, trace: str | None) -> SendResult:
        """Send a message once, and return the result.  `trace`: a traceparent.

        If no secret can be decrypted, the result is a failure that may be repeated.  Raises DatabaseUnavailable.
        """
        secrets = self._list_secrets(receiver, message, now_ms())
        if not secrets:
            return SendResult(False, None, _SECRET_UNREADABLE, permanent=False)
        return self._sender.send(receiver.url, message.id, body, datetime.now(UTC), secrets, trace)

    def _list_secrets(self, receiver: Subscription, message: Message, now_ms: int) -> list[str]:
        if message.of_job:
            return webhook_secrets(receiver.tenant, self._rotations.get(receiver.tenant), now_ms)
        opened = [vault.signing_secret(receiver.id, sealed) for sealed in receiver.list_sealed_secrets(now_ms)]
        return [secret for secret in opened if secret is not None]


class _Deadline:
    """One deadline for all steps, because a separate timeout for each step would add up."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds until the deadline, above 0.  Raises TimeoutError if it has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def shorten(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now, if that is earlier."""
        self._end = min(self._end, time.monotonic() + seconds)

    def look_up(self, *args: Any) -> list[Any]:
        """Call socket.getaddrinfo with these arguments.  Raises TimeoutError at the deadline.

        getaddrinfo has no timeout, so it runs in a thread that is abandoned at the deadline and ends by itself.
        """
        found: Future[list[Any]] = Future()
        Thread(target=_complete, args=(found, socket.getaddrinfo, args), daemon=True).start()
        return found.result(timeout=self.left())


def _complete(future: "Future[Any]", call: Callable[..., Any], args: Iterable[Any]) -> None:
    try:
        future.set_result(call(*args))
    except Exception as error:
        future.set_exception(error)


class _DeadlineSocket:
    """The part of the socket interface that http.client uses, with one deadline for all reads and writes.

    A socket's own timeout starts again at each byte, so a receiver that sends one byte a second would never exceed it.
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
        """Do nothing: the function that opened the socket closes it."""


class _BoundedReader(io.RawIOBase):
    """Reads at most MAX_RESPONSE_BYTES, until the deadline."""

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
    at = now.astimezone(UTC)  # The library replaces any other time zone by UTC, and would sign a wrong time.
    return {
        "content-type": "application/json",
        "user-agent": f"Slotkeeper/{package_version()}",
        "connection": "close",
        "webhook-id": message_id,
        "webhook-timestamp": str(floor(at.timestamp())),
        "webhook-signature": " ".join(_signer(secret).sign(message_id, at, body.decode()) for secret in secrets),
    }


def _signer(secret: str) -> Webhook:
    text = secret.removeprefix("whsec_")
    # The library would silently drop characters that are not base64, and sign with the rest.
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
    """Return a context that trusts certifi's bundle and the system's authorities.

    SSL_CERT_FILE adds a private authority.
    """
    context = ssl.create_default_context(cafile=certifi.where())
    context.load_default_certs()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _host(target: Target) -> str:
    # The dot at the end of "example.com." concerns DNS alone; certificates and the Host header do not have it.
    return target.host.rstrip(".")


def _origin(target: Target) -> str:
    return f"{target.scheme}://{f'[{target.host}]' if ':' in target.host else target.host}"


def _path(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _refused_result(origin: str, refused: BlockedAddressError) -> SendResult:
    # Only the log contains the address: the result must not reveal to a tenant where an internal name points.
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


def _read_beginning(response: HTTPResponse) -> str:
    """Return the beginning of the body by one read; "" if that fails."""
    try:
        return response.read1(MAX_QUOTED_BYTES).decode(errors="replace")
    except (OSError, HTTPException, ValueError):
        return ""


def _retry_after_s(status: int, retry_after: str | None) -> float:
    """Return the seconds of a Retry-After header; 0 if it is a date, or if the status does not ask for a pause."""
    if status not in (429, 503) or retry_after is None or not re.fullmatch(r"[0-9]{1,9}", retry_after.strip()):
        return 0.0
    return min(float(retry_after), MAX_RETRY_AFTER_S)


def _describe_failure(error: Exception, timeout_s: float) -> str:
    """Return the error as a sentence that quotes nothing of the response, which may come from an internal network."""
    match error:
        case TimeoutError():
            return f"no answer within {timeout_s:g} s."
        case RemoteDisconnected() | ConnectionResetError() | BrokenPipeError():
            return "the connection was closed without an answer."
        case ssl.SSLCertVerificationError():
            return f"the certificate is refused: {error.verify_message}."
        case ssl.SSLError():
            return f"TLS failed: {error.reason or type(error).__name__}."
        case socket.gaierror():
            return "the name is not known."
        case HTTPException():
            return "the answer is not HTTP."
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return f"the connection failed: {getattr(cause, 'strerror', None) or type(cause).__name__}."
