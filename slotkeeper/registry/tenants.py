"""Who may submit, who may administer: keys, of which the record holds only the hash.

A key is 256 random bits, so a plain SHA-256 of it cannot be guessed back; slow hashes are for passwords.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, insert, select, update

from slotkeeper.audit import acts
from slotkeeper.clock import clock
from slotkeeper.db import Database, Transaction
from slotkeeper.errors import Conflict, InvalidRequest, NotFound
from slotkeeper.registry.rotations import advance_rotation
from slotkeeper.registry.tables import tenants

_KEY_PREFIX = "sk_"
_AUDIT = "audit"
MAX_NAME_LENGTH = 200
_SIGN = "!-~\u00a1-\u00ac\u00ae-\u1fff\u2070-\u2fff\u3001-\ud7ff\uf900-\ufdcf\ufdf0-\ufefe\uff00-\uffef"
PRINTABLE_PATTERN = f"[{_SIGN}]([ {_SIGN}]*[{_SIGN}])?"
"""Text that can be shown on one line as it is: nothing invisible, nothing that turns the direction of writing."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays.  `rate_per_s`, `burst`: submits per second and at once; None: no limit.

    `audits`: may see who did what; who may administer may as well.
    """

    name: str
    admin: bool
    rate_per_s: int | None = None
    burst: int | None = None
    audits: bool = False


# Used while keys are not asked for, which only a server on the loopback address may do.
LOCAL_TENANT = Tenant("default", admin=True)


def check_tenant_name(name: str) -> str:
    """Raises InvalidRequest unless `name` can be shown, and asked for in an address."""
    if len(name) > MAX_NAME_LENGTH or not re.fullmatch(PRINTABLE_PATTERN, name):
        raise InvalidRequest(
            "tenant", f"tenant must be 1 to {MAX_NAME_LENGTH} printable characters, with no blank around them"
        )
    return name


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _new_key() -> str:
    return _KEY_PREFIX + secrets.token_urlsafe(32)


def _tenant(row: Any) -> Tenant:
    return Tenant(row.name, bool(row.admin), row.rate_per_s, row.burst, _AUDIT in row.rights.split())


class Tenants:
    """Reads and changes tenants."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def find_by_key(self, key: str) -> Tenant | None:
        return self.find_by_hash(hash_key(key))

    def find_by_hash(self, hashed: str) -> Tenant | None:
        """Whose key has this hash."""
        former = (tenants.c.former_hash == hashed) & (tenants.c.former_until_ms > clock.now_ms())
        with self.database.read() as connection:
            row = connection.execute(select(tenants).where(tenants.c.key_hash == hashed)).first()
            if row is None:
                row = connection.execute(select(tenants).where(former)).first()
        return None if row is None else _tenant(row)

    def list_by_hash(self) -> dict[str, Tenant]:
        """All of them, by the hash of each valid key."""
        now_ms = clock.now_ms()
        with self.database.read() as connection:
            rows = connection.execute(select(tenants)).all()
        former = {row.former_hash: _tenant(row) for row in rows if (row.former_until_ms or 0) > now_ms}
        return former | {row.key_hash: _tenant(row) for row in rows}

    def list_all(self) -> list[Tenant]:
        with self.database.read() as connection:
            rows = connection.execute(select(tenants).order_by(tenants.c.name)).all()
        return [_tenant(row) for row in rows]

    def add(self, tenant: Tenant, now_ms: int) -> str:
        """Create a tenant and answer its key, which cannot be read again.  Raises Conflict, InvalidRequest.

        LOCAL's name is nobody's: its jobs came without a key.
        """
        check_tenant_name(tenant.name)
        if tenant.name == LOCAL_TENANT.name:
            raise Conflict(f"{LOCAL_TENANT.name!r} is the tenant of those who show no key; take another name.")
        key = _new_key()
        row = {
            "name": tenant.name,
            "key_hash": hash_key(key),
            "admin": int(tenant.admin),
            "rights": _AUDIT if tenant.audits else "",
            "rate_per_s": tenant.rate_per_s,
            "burst": tenant.burst,
            "created_ms": now_ms,
        }
        limits = {"rate_per_s": tenant.rate_per_s, "burst": tenant.burst}
        rights = {"admin": tenant.admin, "audits": tenant.audits}
        adding = acts.make_entry("tenant.add", now_ms=now_ms, tenant=tenant.name, limits=limits, rights=rights)

        def unit(tx: Transaction) -> None:
            if tx.connection.execute(select(tenants.c.name).where(tenants.c.name == tenant.name)).first():
                raise Conflict(f"There is a tenant {tenant.name!r} already; remove it first, or take another name.")
            tx.connection.execute(insert(tenants), row)
            adding.write(tx)

        self.database.write(unit)
        return key

    def change(self, name: str, limits: Mapping[str, int | None]) -> None:
        """Change the limits of a tenant: `rate_per_s`, `burst`, or both; None: no limit.

        Without a rate there is no burst.  Processes that cache keys use the former limits for a few seconds.

        Raises NotFound; Conflict: a burst without a rate.
        """
        values = dict(limits)
        if "rate_per_s" in values and values["rate_per_s"] is None:
            values.setdefault("burst", None)
        changing = acts.make_entry("tenant.change", tenant=name, limits=values)
        found = select(tenants.c.rate_per_s, tenants.c.burst).where(tenants.c.name == name)

        def unit(tx: Transaction) -> Any:
            tx.connection.execute(update(tenants).where(tenants.c.name == name).values(**values))
            row = tx.connection.execute(found).first()
            if row is not None and row.burst is not None and row.rate_per_s is None:
                raise Conflict(f"Tenant {name!r} has no rate, and a burst goes with one; set rate_per_s, too.")
            if row is not None:
                changing.write(tx)
            return row

        if self.database.write(unit) is None:
            raise NotFound(f"There is no tenant {name!r}.")

    def rotate_key(self, name: str, overlap_ms: int, now_ms: int) -> str:
        """Give a tenant a new key and return it.  The key before stays valid for `overlap_ms`; an older one does not.

        Raises NotFound.
        """
        key = _new_key()
        until_ms = now_ms + overlap_ms
        rotating = acts.make_entry("tenant.rotate", now_ms=now_ms, tenant=name, former_until_ms=until_ms)
        # On the right stand the values from before the statement.
        values = {"former_hash": tenants.c.key_hash, "former_until_ms": until_ms, "key_hash": hash_key(key)}

        def unit(tx: Transaction) -> bool:
            if not tx.connection.execute(update(tenants).where(tenants.c.name == name).values(**values)).rowcount:
                return False
            rotating.write(tx)
            return True

        if not self.database.write(unit):
            raise NotFound(f"There is no tenant {name!r}.")
        return key

    def remove(self, name: str, also: Callable[[Transaction, str], object] = lambda *_: None) -> None:
        """Forget a tenant; its key stops working at once, as does its webhook secret.  Raises NotFound.

        `also`: forgets in the same transaction what else it had.
        """
        removing = acts.make_entry("tenant.remove", tenant=name)

        def unit(tx: Transaction) -> bool:
            if not tx.connection.execute(delete(tenants).where(tenants.c.name == name)).rowcount:
                return False
            advance_rotation(tx, name, now_ms=0)  # Another tenant of this name shall not have its secret.
            also(tx, name)
            removing.write(tx)
            return True

        if not self.database.write(unit):
            raise NotFound(f"There is no tenant {name!r}.")
