"""API keys for tests."""

from collections.abc import Iterable

from slotkeeper.clock import now_ms
from slotkeeper.db import Database
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.api_keys import ApiKeys, ValidKey, hash_key
from slotkeeper.registry.identity import FIRST_SCOPES, Identity, Scope, Tenant
from slotkeeper.registry.tenants import Tenants


def add_key(database: Database, tenant: str, *scopes: Scope) -> str:
    """Return a key of a tenant, which is added if it is new."""
    if all(known.name != tenant for known in Tenants(database).list_all()):
        return Tenants(database).add(Tenant(tenant), now_ms(), scopes or FIRST_SCOPES).key
    return ApiKeys(database).add(tenant, scopes or FIRST_SCOPES, now_ms=now_ms()).key


def identity_of(database: Database, key: str) -> Identity | None:
    """Return who a key belongs to, as the database says now."""
    found = ApiKeys(database).list_valid(now_ms())[1].get(hash_key(key))
    return None if found is None else found.identity


class FakeKeys:
    """The keys of a database that counts its reads, and may be away."""

    def __init__(self, **tenants: Iterable[Scope]) -> None:
        """The key of a tenant is sk_ and its name."""
        self.scopes = {tenant: frozenset(scopes) for tenant, scopes in tenants.items()}
        self.expires_ms: dict[str, int] = {}
        self.version = self.looks = self.reads = 0
        self.is_away = False
        self.used: list[str] = []

    def change(self, tenant: str, scopes: Iterable[Scope] | None) -> None:
        """Give a tenant's key other scopes; None: revoke it."""
        self.version += 1
        self.scopes.pop(tenant, None)
        if scopes is not None:
            self.scopes[tenant] = frozenset(scopes)

    def get_version(self) -> int:
        self.looks += 1
        if self.is_away:
            raise DatabaseUnavailable("away")
        return self.version

    def list_valid(self, at_ms: int) -> tuple[int, dict[str, ValidKey]]:
        self.reads += 1
        return self.version, {
            hash_key(f"sk_{tenant}"): ValidKey(Identity(Tenant(tenant), tenant, scopes), self.expires_ms.get(tenant))
            for tenant, scopes in self.scopes.items()
        }

    def note_used(self, key_ids: Iterable[str], at_ms: int) -> None:
        self.used += sorted(key_ids)
