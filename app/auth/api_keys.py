"""A cache of the tenants of all API keys, for the server's limits and fair queue: it knows an owner without a query.

What a request may do is decided in `app.auth.access`.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_network
from typing import Any

from app.auth.session_cookie import SessionKeys
from slotkeeper.db.time_limits import LOOK_S, time_limit
from slotkeeper.errors import SlotkeeperError
from slotkeeper.registry.tenants import Tenant, Tenants, hash_key

# The pause between two reads of all keys: at least one second, and 30 times as long as a read takes.
_MIN_PAUSE_S, _PAUSE_FACTOR = 1.0, 30


class OwnerKind(Enum):
    OPERATOR = "operator"  # an administrator's key, or the metrics key
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


class KeyCache:
    """Caches all keys.  They are read every few seconds, and when a request has a key that is not cached."""

    def __init__(self, keys: Tenants | None, sessions: SessionKeys, metrics_key: str = "") -> None:
        """`keys`: None: no keys are required.  `sessions`: those of the page.  `metrics_key`: "": there is none."""
        self._keys, self._sessions = keys, sessions
        self._metrics_owner = {hash_key(metrics_key): Owner("metrics key", OwnerKind.OPERATOR)} if metrics_key else {}
        self._owners: Mapping[str, Owner] = self._metrics_owner  # by the hash of the key
        self._read_at = self._next_at = 0.0
        self._lock = asyncio.Lock()

    async def owner_of(self, environ: Mapping[str, Any]) -> Owner:
        """Return the owner of a request.  Reads all keys again if its key is not cached: it may be new."""
        if self._keys is None:
            return Owner("", OwnerKind.LOCAL)
        hashed = self._hashed_key(environ)
        if hashed and hashed not in self._owners:
            await self.refresh()
        return self._owners.get(hashed) or Owner(_network_of(environ["REMOTE_ADDR"]), OwnerKind.ANONYMOUS)

    def is_still_valid(self, owner: Owner, environ: Mapping[str, Any]) -> bool:
        """Return whether the key of a request is still valid for this owner, as of the last read.

        False: the key was removed, its session has ended, or its tenant is not an administrator any more.
        """
        if self._keys is None:
            return True
        current = self._owners.get(self._hashed_key(environ))
        return current is not None and (current.kind is OwnerKind.OPERATOR or owner.kind is not OwnerKind.OPERATOR)

    async def refresh(self) -> None:
        """Read all keys, in a thread.  Concurrent callers share one read, which begins after their calls."""
        called_at = time.monotonic()
        async with self._lock:
            if self._keys is not None and self._read_at <= called_at:
                await asyncio.sleep(self._next_at - time.monotonic())
                self._read_at = time.monotonic()
                await asyncio.to_thread(self._read, self._keys)
                took_s = time.monotonic() - self._read_at
                self._next_at = time.monotonic() + max(_MIN_PAUSE_S, took_s * _PAUSE_FACTOR)

    def _read(self, keys: Tenants) -> None:
        """Read all keys.  If the database does not answer, the cache does not change."""
        with suppress(SlotkeeperError), time_limit(LOOK_S):
            self._sessions.read()
            owners = {hashed: _owner(tenant) for hashed, tenant in keys.list_by_hash().items()}
            self._owners = owners | self._metrics_owner

    def _hashed_key(self, environ: Mapping[str, Any]) -> str:
        """Return the hash of a request's key, which is in the header or in the session; "": it has none."""
        if key := read_bearer(environ):
            return hash_key(key)
        return self._sessions(environ["HTTP_COOKIE"]) if "HTTP_COOKIE" in environ else ""


def read_bearer(environ: Mapping[str, Any]) -> str:
    """Return the token in the header Authorization of a request; "": it has none."""
    scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _owner(tenant: Tenant) -> Owner:
    return Owner(tenant.name, OwnerKind.OPERATOR if tenant.admin else OwnerKind.TENANT)


def _network_of(address: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address: one client has all addresses of such a network."""
    if ":" not in address:
        return address
    try:
        return str(ip_network(f"{address.partition('%')[0]}/64", strict=False))
    except ValueError:
        return address
