"""Cache the tenants of all API keys, for the server's limits and turns.  Authorization is in `app.auth.access`."""

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

_MIN_PAUSE_S, _PAUSE_FACTOR = 1.0, 30  # between two readings: at least so long, and so many times as long as one takes


class OwnerKind(Enum):
    OPERATOR = "operator"  # of a key that may administer
    TENANT = "tenant"
    LOCAL = "local"  # everybody, while no keys are asked for
    ANONYMOUS = "stranger"  # of no valid key


@dataclass(frozen=True, slots=True)
class Owner:
    """Who pays for room and turns: a tenant, or an address that has shown no valid key."""

    name: str
    kind: OwnerKind

    @property
    def account(self) -> str:
        return f"address {self.name}" if self.kind is OwnerKind.ANONYMOUS else f"key {self.name}"


class KeyCache:
    """Knows all keys, which are read every few seconds, and where a request shows one that is new here."""

    def __init__(self, keys: Tenants | None, visits: SessionKeys, metrics_key: str = "") -> None:
        """`keys`: None where requests need none.  `visits`: those to the page.  `metrics_key`: of no tenant, or ""."""
        self._keys, self._visits = keys, visits
        self._own = {hash_key(metrics_key): Owner("metrics key", OwnerKind.OPERATOR)} if metrics_key else {}
        self._owners: Mapping[str, Owner] = self._own  # by hash of their key
        self._read_at = self._next_at = 0.0
        self._lock = asyncio.Lock()

    async def owner_of(self, environ: Mapping[str, Any]) -> Owner:
        """Return whose request it is.  A key that is not known here may be new: all are read again."""
        if self._keys is None:
            return Owner("", OwnerKind.LOCAL)
        shown = self._shown(environ)
        if shown and shown not in self._owners:
            await self.refresh()
        return self._owners.get(shown) or Owner(_network_of(environ["REMOTE_ADDR"]), OwnerKind.ANONYMOUS)

    def is_still_valid(self, owner: Owner, environ: Mapping[str, Any]) -> bool:
        """Whether the key that a request has shown is, by the last reading, still a key of such an owner.

        Not so where it was removed, its visit is over, or its tenant administers no more.
        """
        if self._keys is None:
            return True
        found = self._owners.get(self._shown(environ))
        return found is not None and (found.kind is OwnerKind.OPERATOR or owner.kind is not OwnerKind.OPERATOR)

    async def refresh(self) -> None:
        """Read all keys, in a thread.  Those who ask while others wait for a reading share the next."""
        asked = time.monotonic()
        async with self._lock:
            if self._keys is not None and self._read_at <= asked:
                await asyncio.sleep(self._next_at - time.monotonic())
                self._read_at = time.monotonic()
                await asyncio.to_thread(self._read, self._keys)
                took_s = time.monotonic() - self._read_at
                self._next_at = time.monotonic() + max(_MIN_PAUSE_S, took_s * _PAUSE_FACTOR)

    def _read(self, keys: Tenants) -> None:
        """A database that does not answer leaves what is known."""
        with suppress(SlotkeeperError), time_limit(LOOK_S):
            self._visits.read()
            self._owners = {hashed: _owner(tenant) for hashed, tenant in keys.list_by_hash().items()} | self._own

    def _shown(self, environ: Mapping[str, Any]) -> str:
        """Return the hash of the key that is shown, or "" where none is."""
        scheme, _, key = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            return hash_key(key.strip())
        return self._visits(environ["HTTP_COOKIE"]) if "HTTP_COOKIE" in environ else ""


def _owner(tenant: Tenant) -> Owner:
    return Owner(tenant.name, OwnerKind.OPERATOR if tenant.admin else OwnerKind.TENANT)


def _network_of(address: str) -> str:
    """Return an address of IPv4, or the /64 of one of IPv6, whose owner has all addresses of that network."""
    if ":" not in address:
        return address
    try:
        return str(ip_network(f"{address.partition('%')[0]}/64", strict=False))
    except ValueError:
        return address
