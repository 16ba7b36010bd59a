"""Visits to the page: a signed cookie that says whose key was shown, and until when.

Any process of the same installation takes what another has given; the record keeps only which visits were ended by a
log-out (slotkeeper/registry/tenants.py).  In the cookie stands the key's hash and never the key: a key that is removed
ends all visits made with it.
"""

import base64
import hmac
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from slotkeeper.clock import now_ms
from slotkeeper.registry.tenants import RevokedSessions
from tasks.security.keyring import session_keys

_MAX_COOKIE_CHARS = 1000  # characters of a cookie that are looked at


@dataclass(frozen=True, slots=True)
class Session:
    """`key`: the hash of the key that was shown; "": none was.  `until_ms`: when it is over, ms since the epoch."""

    id: str
    key_hash: str
    until_ms: int


def new_session(key: str, lasts_s: int) -> Session:
    """One under a name of its own, so that nobody can have laid it out for somebody else."""
    return Session(secrets.token_urlsafe(18), key, now_ms() + lasts_s * 1000)


def encode_session(visit: Session, key: bytes) -> str:
    """The cookie."""
    body = _encode(json.dumps([visit.id, visit.key_hash, visit.until_ms]).encode())
    return f"{body}.{_sign(key, 'visit', body)}"


def decode_session(cookie: str, keys: Iterable[bytes]) -> Session | None:
    """What a cookie says; None: it is none of ours, or over."""
    body, _, signature = cookie[:_MAX_COOKIE_CHARS].partition(".")
    if not any(hmac.compare_digest(_sign(key, "visit", body).encode(), signature.encode()) for key in keys):
        return None
    visit = Session(*json.loads(base64.urlsafe_b64decode(body)))
    return visit if now_ms() < visit.until_ms else None


def cookie_name(port: int) -> str:
    """Of its own for each port: browsers do not tell ports apart, and several of us may run on one machine."""
    return f"slotkeeper_{port}"


class SessionKeys:
    """For whoever only gives turns: from a header Cookie the hash of the key whose visit it shows, "": of none.

    It knows of log-outs by what `read` has read.
    """

    def __init__(self, port: int, visits: RevokedSessions) -> None:
        self._mark = f"{cookie_name(port)}="
        self._visits = visits
        self._ended: frozenset[str] = frozenset()

    def __call__(self, header: str) -> str:
        cookies = (part.strip() for part in header.split(";"))
        shown = next((it.removeprefix(self._mark) for it in cookies if it.startswith(self._mark)), "")
        visit = decode_session(shown.strip('"'), session_keys()) if shown else None
        return visit.key_hash if visit is not None and visit.id not in self._ended else ""

    def read(self) -> None:
        """Raises DatabaseUnavailable."""
        self._ended = self._visits.list_revoked(now_ms())


def form_token(visit: Session, key: bytes) -> str:
    """What a form must bring along to be this visit's own: a page of somebody else cannot know it."""
    return _sign(key, "form", visit.id)


def is_valid_form_token(token: str, visit: Session, keys: Iterable[bytes]) -> bool:
    return any(hmac.compare_digest(form_token(visit, key).encode(), token.encode()) for key in keys)


def _sign(key: bytes, purpose: str, text: str) -> str:
    return _encode(hmac.digest(key, f"{purpose} {text}".encode(), sha256))


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode()
