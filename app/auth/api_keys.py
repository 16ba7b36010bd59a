"""All API keys in memory: whose they are, and what they may be used for.

The copy is compared with the database by a version every second (SLOTKEEPER_CATALOG_REFRESH_S), so a key that
is revoked opens nothing a second later, in any process.  While the database does not answer, the last copy counts.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_network
from typing import Any

from app.auth.session_cookie import SessionKeys
from slotkeeper.clock import now_ms
from slotkeeper.db.time_limits import LOOK_S, time_limit
from slotkeeper.errors import DatabaseUnavailable, SlotkeeperError
from slotkeeper.registry.api_keys import ApiKeys, ValidKey, hash_key, is_mistyped
from slotkeeper.registry.identity import Identity

_NOTE_USE_S = 60.0
# The pause between two looks for keys that are unknown to the event loop.
_PAUSE_S = 1.0


class OwnerKind(Enum):
    OPERATOR = "operator"  # an operator's key, or the metrics key
    TENANT = "tenant"
    LOCAL = "local"  # each client, if no keys are required
    ANONYMOUS = "anonymous"  # a client without a valid key


@dataclass(frozen=True, slots=True)
class Owner:
    """The account to which memory and threads are charged: a tenant, or an address without a valid key."""

    name: str
    kind: OwnerKind

    @property
    def account(self) -> str:
        return f"address {self.name}" if self.kind is OwnerKind.ANONYMOUS else f"key {self.name}"


LOCAL_OWNER = Owner("", OwnerKind.LOCAL)


class KeyCache:
    """The keys as a process uses them.  Thread-safe."""

    def __init__(
        self,
        keys: ApiKeys,
        sessions: SessionKeys,
        refresh_s: float,
        metrics_key: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sessions`: those of the page.  `metrics_key`: "": there is none."""
        self._keys, self._sessions, self._refresh_s, self._clock = keys, sessions, refresh_s, clock
        self._metrics_owner = {hash_key(metrics_key): Owner("metrics key", OwnerKind.OPERATOR)} if metrics_key else {}
        self._valid: Mapping[str, ValidKey] = {}  # by the hash of the key
        self._version = -1
        self._checked = -math.inf
        self._lock, self._loop_lock = threading.Lock(), asyncio.Lock()
        self._looked_at = -math.inf  # of the event loop
        self._used: set[str] = set()
        self._noted_at = clock()

    # -- in threads ------------------------------------------------------------------------------------------

    def find(self, key: str) -> Identity | None:
        """Return who a key belongs to; None: it is not valid.  Raises DatabaseUnavailable if no key was ever read."""
        hashed = hash_key(key)
        if hashed not in self._valid and is_mistyped(key):
            return None
        return self.find_hashed(hashed)

    def find_hashed(self, hashed: str) -> Identity | None:
        """As `find`, by the hash of a key."""
        if self._clock() - self._checked >= self._refresh_s or hashed not in self._valid:  # It may be new.
            self.refresh()
        identity = self._identity(hashed)
        if identity is not None and identity.key_id is not None:
            self._used.add(identity.key_id)
        return identity

    def refresh(self) -> None:
        """Compare the copy with the database.  Threads that ask while another one looks share the next look.

        Raises DatabaseUnavailable if no key was ever read.
        """
        asked = self._clock()
        with self._lock:
            if self._checked > asked:
                return
            try:
                self._read()
            except DatabaseUnavailable:
                if self._version < 0:
                    raise
            else:
                self._note_used()
            self._checked = self._clock()  # Who waited meanwhile does not wait for the same once more.

    def _read(self) -> None:
        with time_limit(LOOK_S):
            self._sessions.read()
            version = self._keys.get_version()
        if version != self._version:  # Very many keys take longer than a look.
            self._version, self._valid = self._keys.list_valid(now_ms())

    def _note_used(self) -> None:
        """Store which keys were used, once a minute."""
        if self._used and self._clock() - self._noted_at >= _NOTE_USE_S:
            used, self._used, self._noted_at = self._used, set(), self._clock()
            with suppress(SlotkeeperError):
                self._keys.note_used(used, now_ms())

    def _identity(self, hashed: str) -> Identity | None:
        found = self._valid.get(hashed)
        if found is None or (found.expires_ms is not None and found.expires_ms <= now_ms()):
            return None
        return found.identity

    # -- in the event loop -----------------------------------------------------------------------------------

    async def owner_of(self, environ: Mapping[str, Any]) -> Owner:
        """Return the owner of a request.  Looks into the database if its key is unknown: it may be new."""
        hashed = self._hashed_key(environ)
        if hashed and self._owner(hashed) is None:
            await self.refresh_in_thread()
        return self._owner(hashed) or Owner(_network_of(environ["REMOTE_ADDR"]), OwnerKind.ANONYMOUS)

    def is_still_valid(self, owner: Owner, environ: Mapping[str, Any]) -> bool:
        """Return whether the key of a request is still valid for this owner, as of the last look.

        False: the key was revoked or has expired, its session has ended, or it may not operate any more.
        """
        current = self._owner(self._hashed_key(environ))
        return current is not None and (current.kind is OwnerKind.OPERATOR or owner.kind is not OwnerKind.OPERATOR)

    async def refresh_in_thread(self) -> None:
        """Look in a thread, at most once a second.  Concurrent callers share a look, which begins after their calls."""
        called_at = self._clock()
        async with self._loop_lock:
            if self._looked_at <= called_at:
                await asyncio.sleep(self._looked_at + _PAUSE_S - self._clock())
                self._looked_at = self._clock()
                with suppress(DatabaseUnavailable):
                    await asyncio.to_thread(self.refresh)

    def _owner(self, hashed: str) -> Owner | None:
        identity = self._identity(hashed)
        if identity is None:
            return self._metrics_owner.get(hashed)
        return Owner(identity.tenant.name, OwnerKind.OPERATOR if identity.operates else OwnerKind.TENANT)

    def _hashed_key(self, environ: Mapping[str, Any]) -> str:
        """Return the hash of a request's key, which is in the header or in the session; "": it has none."""
        if key := read_bearer(environ):
            return "" if is_mistyped(key) else hash_key(key)
        return self._sessions(environ["HTTP_COOKIE"]) if "HTTP_COOKIE" in environ else ""


def read_bearer(environ: Mapping[str, Any]) -> str:
    """Return the token in the header Authorization of a request; "": it has none."""
    scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _network_of(address: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address: one client has all addresses of such a network."""
    if ":" not in address:
        return address
    try:
        return str(ip_network(f"{address.partition('%')[0]}/64", strict=False))
    except ValueError:
        return address
