"""Sessions of the page: a signed cookie with the hash of the key of the log-in, and the time when it expires.

All processes of an installation accept the same cookies.  The database has only the sessions that were ended by a
log-out (slotkeeper/registry/sessions.py).  The cookie has the hash of the key and never the key itself.  Removing a key
ends all sessions that began with it.
"""

import secrets
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from hashlib import sha256
from typing import Any

from itsdangerous import BadData, Signer, URLSafeSerializer

from slotkeeper.clock import now_ms
from slotkeeper.registry.sessions import RevokedSessions
from tasks.security.keyring import session_keys

_MAX_COOKIE_CHARS = 1000  # The rest of a cookie is not read.
_SIGNER: dict[str, Any] = {"digest_method": sha256}


@dataclass(frozen=True, slots=True)
class Session:
    """A session of the page.

    key_hash: the hash of the key of the log-in; "": there was no log-in.  until_ms: when it ends, ms since the epoch.
    """

    id: str
    key_hash: str
    until_ms: int


def new_session(key_hash: str, lasts_s: int) -> Session:
    """Return a session with a new random id, so that no other client can have chosen it (session fixation)."""
    return Session(secrets.token_urlsafe(18), key_hash, now_ms() + lasts_s * 1000)


def encode_session(session: Session, key: bytes) -> str:
    """Return the value of the cookie.  `key`: it signs the cookie."""
    return str(_serializer([key]).dumps(astuple(session)))


def decode_session(cookie: str, keys: Iterable[bytes]) -> Session | None:
    """Return the session in a cookie; None: its signature is not valid, or it has ended."""
    try:
        session = Session(*_serializer(keys).loads(cookie[:_MAX_COOKIE_CHARS]))
    except BadData:
        return None
    return session if now_ms() < session.until_ms else None


def _serializer(keys: Iterable[bytes]) -> URLSafeSerializer:
    # Without a time: the time in the session is by Slotkeeper's clock, which is the same on all hosts.
    return URLSafeSerializer(list(keys), salt="session", signer_kwargs=_SIGNER)


def cookie_name(port: int) -> str:
    """Return the cookie's name.  It has the port: browsers share cookies between the ports of one machine."""
    return f"slotkeeper_{port}"


class SessionKeys:
    """Returns the hash of the key whose session a header Cookie has; "": it has none.

    It is for the server's limits, not for authorization.  It rejects the sessions that had been revoked at the last
    `read`.
    """

    def __init__(self, port: int, revoked_sessions: RevokedSessions) -> None:
        self._prefix = f"{cookie_name(port)}="
        self._revoked_sessions = revoked_sessions
        self._revoked_ids: frozenset[str] = frozenset()

    def __call__(self, header: str) -> str:
        cookies = (part.strip() for part in header.split(";"))
        value = next((text.removeprefix(self._prefix) for text in cookies if text.startswith(self._prefix)), "")
        session = decode_session(value.strip('"'), session_keys()) if value else None
        return session.key_hash if session is not None and session.id not in self._revoked_ids else ""

    def read(self) -> None:
        """Read the revoked sessions.  Raises DatabaseUnavailable."""
        self._revoked_ids = self._revoked_sessions.list_revoked(now_ms())


def form_token(session: Session, key: bytes) -> str:
    """Return the token that each form of a session must have.  Pages of other sites cannot know it (CSRF)."""
    return _form_signer([key]).get_signature(session.id).decode()


def is_valid_form_token(token: str, session: Session, keys: Iterable[bytes]) -> bool:
    return _form_signer(keys).verify_signature(session.id, token)


def _form_signer(keys: Iterable[bytes]) -> Signer:
    return Signer(list(keys), salt="form", **_SIGNER)
