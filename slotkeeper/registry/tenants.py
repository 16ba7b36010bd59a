"""Tenants and their limits.  Their keys: api_keys.py."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sqlalchemy import delete, insert, select, update

from slotkeeper.audit import commit_audited, make_entry
from slotkeeper.clock import clock
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import upsert
from slotkeeper.errors import Conflict, InvalidRequest, NotFound
from slotkeeper.registry import api_keys, catalog_changes, credit_accounts
from slotkeeper.registry.api_keys import NewKey
from slotkeeper.registry.catalog_changes import Change, Part
from slotkeeper.registry.identity import FIRST_SCOPES, LOCAL_IDENTITY, Scope, Tenant, format_scopes
from slotkeeper.registry.tables import tenants
from slotkeeper.registry.tenant_limits import INSTALLATION, NO_LIMITS, TenantLimits, change_limits, decode_limits
from slotkeeper.registry.validations import TENANT as VALIDATION_TENANT
from slotkeeper.registry.webhook_rotations import advance_rotation

MAX_NAME_LENGTH = 200
_SIGN = "!-~\u00a1-\u00ac\u00ae-\u1fff\u2070-\u2fff\u3001-\ud7ff\uf900-\ufdcf\ufdf0-\ufefe\uff00-\uffef"
PRINTABLE_PATTERN = f"[{_SIGN}]([ {_SIGN}]*[{_SIGN}])?"
"""Text that can be shown on one line as it is: nothing invisible, nothing that changes the direction of writing."""
OWN_TENANT = "me"
"""In a path, in place of its name: the tenant of the key."""
PATH_WORDS = frozenset({"keys", "usage", "credits", "credit-account"})
"""What stands after a tenant's name in a path of the API or the page."""
_NOT_ADDED = frozenset({LOCAL_IDENTITY.tenant.name, INSTALLATION})  # They can have limits, and have no keys.
_RESERVED = frozenset({LOCAL_IDENTITY.tenant.name, OWN_TENANT, VALIDATION_TENANT})


def check_tenant_name(name: str) -> str:
    """Return the name.  Raises InvalidRequest if it cannot be shown, or used in a URL."""
    if len(name) > MAX_NAME_LENGTH or not re.fullmatch(PRINTABLE_PATTERN, name):
        raise InvalidRequest(
            "tenant", f"tenant must be 1 to {MAX_NAME_LENGTH} printable characters, with no blank around them"
        )
    return name


class Tenants:
    """Reads and changes tenants.  All methods raise DatabaseUnavailable."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def list_all(self) -> list[Tenant]:
        with self.database.read() as connection:
            rows = connection.execute(select(tenants.c.name).where(tenants.c.name.not_in(_NOT_ADDED))).scalars()
            return [Tenant(name) for name in sorted(rows)]

    def created_ms(self, name: str) -> int:
        """Return when a tenant was added, or got its first limits; 0: it was not."""
        with self.database.read() as connection:
            return connection.execute(select(tenants.c.created_ms).where(tenants.c.name == name)).scalar() or 0

    def add(
        self,
        tenant: Tenant,
        now_ms: int,
        scopes: Collection[Scope] = FIRST_SCOPES,
        by: str | None = None,
        limits: TenantLimits = NO_LIMITS,
    ) -> NewKey:
        """Create a tenant with a first key, and return the key, which cannot be read again.

        Raises Conflict, InvalidRequest.  Reserved are the tenant of those who show no key, and names with a meaning.
        """
        check_tenant_name(tenant.name)
        path, _, word = tenant.name.rpartition("/")
        if path and word in PATH_WORDS:
            raise InvalidRequest(
                "tenant", f"tenant must not end with /{word}: paths of the API have this word after it"
            )
        if tenant.name in _RESERVED:
            raise Conflict(f"{tenant.name!r} means something else; take another name.")
        new = api_keys.make_key()
        row = {
            "name": tenant.name,
            "key_hash": api_keys.hash_of_no_key(new.id),
            "created_ms": now_ms,
            **_columns(limits),
        }
        entry = make_entry(
            "tenant.add",
            now_ms=now_ms,
            tenant=tenant.name,
            limits=limits.model_dump(exclude_defaults=True),
            key=new.id,
            scopes=format_scopes(scopes),
        )

        def unit(tx: Transaction) -> bool:
            catalog_changes.raise_version(tx, Change(Part.TENANT, tenant.name))
            api_keys.raise_version(tx)
            if tx.connection.execute(select(tenants.c.name).where(tenants.c.name == tenant.name)).first():
                raise Conflict(f"There is a tenant {tenant.name!r} already; remove it first, or take another name.")
            tx.connection.execute(insert(tenants), row)
            tx.connection.execute(
                insert(api_keys.api_keys), api_keys.key_row(new, tenant.name, scopes, now_ms, "first", by)
            )
            return True

        commit_audited(self.database, entry, unit)
        return new

    def change(self, name: str, changes: Mapping[str, Any], now_ms: int) -> TenantLimits:
        """Change fields of a tenant's limits; None: the field has no value any more.  Returns the limits as stored.

        Processes have them within a second.  INSTALLATION, and the tenant of those who show no key, can have limits,
        too.  Raises NotFound, InvalidRequest.
        """

        def unit(tx: Transaction) -> TenantLimits | None:
            catalog_changes.raise_version(tx, Change(Part.TENANT, name))
            if name in _NOT_ADDED:
                new = {"key_hash": api_keys.hash_of_no_key(f"limits of {name}"), "created_ms": now_ms}
                upsert(tx.connection, tenants, {"name": name}, {}, new)
            known = tx.connection.execute(select(tenants.c.limits).where(tenants.c.name == name)).scalar()
            if known is None:
                return None
            limits = change_limits(decode_limits(known), changes)
            tx.connection.execute(update(tenants).where(tenants.c.name == name).values(**_columns(limits)))
            return limits

        entry = make_entry("tenant.change", now_ms=now_ms, tenant=name, limits=dict(changes))
        limits = commit_audited(self.database, entry, unit)
        if limits is None:
            raise NotFound(f"There is no tenant {name!r}.", tenant=name)
        return limits

    def remove(self, name: str, also: Callable[[Transaction, str], object] = lambda *_: None) -> None:
        """Remove a tenant.  Its keys and its webhook secret stop working at once.

        also: removes in the same transaction what else belongs to the tenant.  Raises NotFound; Conflict: its jobs hold
        credits.
        """

        def unit(tx: Transaction) -> bool:
            catalog_changes.raise_version(tx, Change(Part.TENANT, name))
            api_keys.delete_of_tenant(tx, name)
            if not tx.connection.execute(delete(tenants).where(tenants.c.name == name)).rowcount:
                return False
            credit_accounts.remove_account(tx, name, clock.now_ms())
            advance_rotation(tx, name, now_ms=0)  # A later tenant of this name must not have the secret.
            also(tx, name)
            return True

        if not commit_audited(self.database, make_entry("tenant.remove", tenant=name), unit):
            raise NotFound(f"There is no tenant {name!r}.")


def _columns(limits: TenantLimits) -> dict[str, Any]:
    """Return the columns of limits.  Processes of the release before know whole rates alone."""
    rate = limits.rate_per_s
    return {"limits": limits.encode(), "rate_per_s": None if rate is None else max(int(rate), 1), "burst": limits.burst}
