"""Tenants and their limits.  Their keys: api_keys.py."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sqlalchemy import delete, insert, select, update

from slotkeeper.audit import commit_audited, make_entry
from slotkeeper.db import Database, Transaction
from slotkeeper.errors import Conflict, InvalidRequest, NotFound
from slotkeeper.registry import api_keys
from slotkeeper.registry.api_keys import NewKey
from slotkeeper.registry.identity import FIRST_SCOPES, LOCAL_IDENTITY, Scope, Tenant, format_scopes
from slotkeeper.registry.tables import tenants
from slotkeeper.registry.webhook_rotations import advance_rotation

MAX_NAME_LENGTH = 200
_SIGN = "!-~\u00a1-\u00ac\u00ae-\u1fff\u2070-\u2fff\u3001-\ud7ff\uf900-\ufdcf\ufdf0-\ufefe\uff00-\uffef"
PRINTABLE_PATTERN = f"[{_SIGN}]([ {_SIGN}]*[{_SIGN}])?"
"""Text that can be shown on one line as it is: nothing invisible, nothing that changes the direction of writing."""
OWN_TENANT = "me"
"""In a path, in place of its name: the tenant of the key."""
PATH_WORDS = frozenset({"keys"})
"""What stands after a tenant's name in a path of the API or the page."""
_RESERVED = frozenset({LOCAL_IDENTITY.tenant.name, OWN_TENANT, "validation"})


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
            rows = connection.execute(select(tenants).order_by(tenants.c.name)).all()
        return [Tenant(row.name, row.rate_per_s, row.burst) for row in rows]

    def add(
        self, tenant: Tenant, now_ms: int, scopes: Collection[Scope] = FIRST_SCOPES, by: str | None = None
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
            "rate_per_s": tenant.rate_per_s,
            "burst": tenant.burst,
            "created_ms": now_ms,
        }
        entry = make_entry(
            "tenant.add",
            now_ms=now_ms,
            tenant=tenant.name,
            limits={"rate_per_s": tenant.rate_per_s, "burst": tenant.burst},
            key=new.id,
            scopes=format_scopes(scopes),
        )

        def unit(tx: Transaction) -> bool:
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

    def change(self, name: str, limits: Mapping[str, int | None]) -> None:
        """Change the limits of a tenant: `rate_per_s`, `burst`, or both; None: no limit.

        Without a rate there is no burst.  Processes have the new limits within a second.

        Raises NotFound; Conflict: a burst without a rate.
        """
        values = dict(limits)
        if "rate_per_s" in values and values["rate_per_s"] is None:
            values.setdefault("burst", None)
        query = select(tenants.c.rate_per_s, tenants.c.burst).where(tenants.c.name == name)

        def unit(tx: Transaction) -> Any:
            api_keys.raise_version(tx)
            tx.connection.execute(update(tenants).where(tenants.c.name == name).values(**values))
            row = tx.connection.execute(query).first()
            if row is not None and row.burst is not None and row.rate_per_s is None:
                raise Conflict(f"Tenant {name!r} has no rate, and a burst goes with one; set rate_per_s, too.")
            return row

        if commit_audited(self.database, make_entry("tenant.change", tenant=name, limits=values), unit) is None:
            raise NotFound(f"There is no tenant {name!r}.")

    def remove(self, name: str, also: Callable[[Transaction, str], object] = lambda *_: None) -> None:
        """Remove a tenant.  Its keys and its webhook secret stop working at once.  Raises NotFound.

        also: removes in the same transaction what else belongs to the tenant.
        """

        def unit(tx: Transaction) -> bool:
            api_keys.delete_of_tenant(tx, name)
            if not tx.connection.execute(delete(tenants).where(tenants.c.name == name)).rowcount:
                return False
            advance_rotation(tx, name, now_ms=0)  # A later tenant of this name must not have the secret.
            also(tx, name)
            return True

        if not commit_audited(self.database, make_entry("tenant.remove", tenant=name), unit):
            raise NotFound(f"There is no tenant {name!r}.")
