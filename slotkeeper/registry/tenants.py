"""Tenants: keys, limits, webhook-secret rotations, revoked sessions.

The database holds only the hash of a key.  A key is 256 random bits, so that it cannot be guessed from a plain SHA-256;
slow hashes are for passwords.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from slotkeeper.audit import commit_audited, make_entry
from slotkeeper.clock import clock
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import counters, upsert
from slotkeeper.errors import Conflict, InvalidRequest, NotFound
from slotkeeper.jobs.notifications import SECRET_OVERLAP_MS
from slotkeeper.registry.tables import revoked_sessions, tenants

_KEY_PREFIX = "sk_"
_AUDIT = "audit"
MAX_NAME_LENGTH = 200
_SIGN = "!-~\u00a1-\u00ac\u00ae-\u1fff\u2070-\u2fff\u3001-\ud7ff\uf900-\ufdcf\ufdf0-\ufefe\uff00-\uffef"
PRINTABLE_PATTERN = f"[{_SIGN}]([ {_SIGN}]*[{_SIGN}])?"
"""Text that can be shown on one line as it is: nothing invisible, nothing that changes the direction of writing."""

_NUMBER, _SINCE = "webhook_rotation.", "webhook_rotated_ms."  # counters of each tenant


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant.  rate_per_s, burst: submits per second and at once; None: no limit.

    audits: may read the audit log; an administrator may as well.
    """

    name: str
    admin: bool
    rate_per_s: int | None = None
    burst: int | None = None
    audits: bool = False


# Used while no keys are required, which is possible only on the loopback address.
LOCAL_TENANT = Tenant("default", admin=True)


def by_tenant(name: str | None) -> str:
    """Return " by tenant 'NAME'", for a sentence; "" without keys: then all requests are those of one tenant."""
    return "" if name in (None, "", LOCAL_TENANT.name) else f" by tenant {name!r}"


def check_tenant_name(name: str) -> str:
    """Return the name.  Raises InvalidRequest if it cannot be shown, or used in a URL."""
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
    """Reads and changes tenants.  All methods raise DatabaseUnavailable."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def find_by_key(self, key: str) -> Tenant | None:
        return self.find_by_hash(hash_key(key))

    def find_by_hash(self, hashed: str) -> Tenant | None:
        """Return the tenant whose present key, or former one within its overlap, has this hash."""
        former = (tenants.c.former_hash == hashed) & (tenants.c.former_until_ms > clock.now_ms())
        with self.database.read() as connection:
            row = connection.execute(select(tenants).where(tenants.c.key_hash == hashed)).first()
            if row is None:
                row = connection.execute(select(tenants).where(former)).first()
        return None if row is None else _tenant(row)

    def list_by_hash(self) -> dict[str, Tenant]:
        """Return all tenants by the hash of each valid key."""
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
        """Create a tenant, and return its key, which cannot be read again.  Raises Conflict, InvalidRequest.

        The name of LOCAL_TENANT is reserved for jobs that came without a key.
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
        entry = make_entry("tenant.add", now_ms=now_ms, tenant=tenant.name, limits=limits, rights=rights)

        def unit(tx: Transaction) -> bool:
            if tx.connection.execute(select(tenants.c.name).where(tenants.c.name == tenant.name)).first():
                raise Conflict(f"There is a tenant {tenant.name!r} already; remove it first, or take another name.")
            tx.connection.execute(insert(tenants), row)
            return True

        commit_audited(self.database, entry, unit)
        return key

    def change(self, name: str, limits: Mapping[str, int | None]) -> None:
        """Change the limits of a tenant: `rate_per_s`, `burst`, or both; None: no limit.

        Without a rate there is no burst.  Processes that cache keys use the former limits for a few seconds.

        Raises NotFound; Conflict: a burst without a rate.
        """
        values = dict(limits)
        if "rate_per_s" in values and values["rate_per_s"] is None:
            values.setdefault("burst", None)
        query = select(tenants.c.rate_per_s, tenants.c.burst).where(tenants.c.name == name)

        def unit(tx: Transaction) -> Any:
            tx.connection.execute(update(tenants).where(tenants.c.name == name).values(**values))
            row = tx.connection.execute(query).first()
            if row is not None and row.burst is not None and row.rate_per_s is None:
                raise Conflict(f"Tenant {name!r} has no rate, and a burst goes with one; set rate_per_s, too.")
            return row

        if commit_audited(self.database, make_entry("tenant.change", tenant=name, limits=values), unit) is None:
            raise NotFound(f"There is no tenant {name!r}.")

    def rotate_key(self, name: str, overlap_ms: int, now_ms: int) -> str:
        """Give a tenant a new key, and return it.  The key before stays valid for `overlap_ms`; an older one does not.

        Raises NotFound.
        """
        key = _new_key()
        until_ms = now_ms + overlap_ms
        entry = make_entry("tenant.rotate", now_ms=now_ms, tenant=name, former_until_ms=until_ms)
        # The columns on the right have their values from before the statement.
        values = {"former_hash": tenants.c.key_hash, "former_until_ms": until_ms, "key_hash": hash_key(key)}
        statement = update(tenants).where(tenants.c.name == name).values(**values)
        if not commit_audited(self.database, entry, lambda tx: tx.connection.execute(statement).rowcount):
            raise NotFound(f"There is no tenant {name!r}.")
        return key

    def remove(self, name: str, also: Callable[[Transaction, str], object] = lambda *_: None) -> None:
        """Remove a tenant.  Its key and its webhook secret stop working at once.  Raises NotFound.

        also: removes in the same transaction what else belongs to the tenant.
        """

        def unit(tx: Transaction) -> bool:
            if not tx.connection.execute(delete(tenants).where(tenants.c.name == name)).rowcount:
                return False
            advance_rotation(tx, name, now_ms=0)  # A later tenant of this name must not have the secret.
            also(tx, name)
            return True

        if not commit_audited(self.database, make_entry("tenant.remove", tenant=name), unit):
            raise NotFound(f"There is no tenant {name!r}.")


# -- rotations of webhook secrets --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SecretRotation:
    """The number of a tenant's present webhook secret, and since when (ms).  The first has number 0, since 0.

    Secrets are derived from their number and stored nowhere.  A tenant needs no key to have one.
    """

    number: int = 0
    since_ms: int = 0

    def list_valid(self, now_ms: int) -> tuple[int, ...]:
        """Return the numbers of the secrets to sign with, the present one first."""
        overlaps = self.number > 0 and now_ms < self.former_until_ms
        return (self.number, self.number - 1) if overlaps else (self.number,)

    @property
    def former_until_ms(self) -> int:
        """Until when messages are signed with the secret before, too."""
        return self.since_ms + SECRET_OVERLAP_MS


class SecretRotations:
    """Reads and advances rotations."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def get(self, tenant: str) -> SecretRotation:
        """Raises DatabaseUnavailable."""
        with self.database.read() as connection:
            return _read_rotation(connection, tenant)

    def rotate(self, tenant: str, now_ms: int) -> SecretRotation:
        """Make a new secret the present one.  A second rotation within the overlap ends the older secret at once."""
        entry = make_entry("webhook_secret.rotate", now_ms=now_ms, tenant=tenant)
        return commit_audited(self.database, entry, lambda tx: advance_rotation(tx, tenant, now_ms))


def advance_rotation(tx: Transaction, tenant: str, now_ms: int) -> SecretRotation:
    """Rotate the secret in a transaction.  now_ms=0: the former secret is not used any more."""
    after = SecretRotation(_read_rotation(tx.connection, tenant).number + 1, now_ms)
    for prefix, value in ((_NUMBER, after.number), (_SINCE, after.since_ms)):
        upsert(tx.connection, counters, {"name": f"{prefix}{tenant}"}, {"value": value})
    return after


def _read_rotation(connection: Connection, tenant: str) -> SecretRotation:
    number, since = f"{_NUMBER}{tenant}", f"{_SINCE}{tenant}"
    rows = connection.execute(select(counters.c.name, counters.c.value).where(counters.c.name.in_([number, since])))
    found = {row.name: row.value for row in rows}
    return SecretRotation(found.get(number, 0), found.get(since, 0))


# -- revoked sessions --------------------------------------------------------------------------------------------


class RevokedSessions:
    """Sessions of the page that a log-out ended before their time.  They are kept until then, for the cookie is valid.

    All methods raise DatabaseUnavailable; then no session must be accepted.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def revoke(self, session_id: str, until_ms: int, now_ms: int) -> None:
        """Revoke a session.  until_ms: its expiry."""

        def unit(tx: Transaction) -> None:
            tx.connection.execute(delete(revoked_sessions).where(revoked_sessions.c.until_ms <= now_ms))
            upsert(tx.connection, revoked_sessions, {"id": session_id}, {"until_ms": until_ms})

        self.database.write(unit)

    def is_revoked(self, session_id: str) -> bool:
        query = select(revoked_sessions.c.id).where(revoked_sessions.c.id == session_id)
        with self.database.read() as connection:
            return connection.execute(query).first() is not None

    def list_revoked(self, now_ms: int) -> frozenset[str]:
        """Return the revoked sessions that have not expired."""
        query = select(revoked_sessions.c.id).where(revoked_sessions.c.until_ms > now_ms)
        with self.database.read() as connection:
            return frozenset(connection.execute(query).scalars())
