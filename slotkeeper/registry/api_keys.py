"""API keys: each tenant may have several, each with what it may be used for.

A key is `sk_`, its id (12 characters), 256 random bits (43) and a checksum (6), in base62.  The id names it in lists
and in the audit log.  The checksum shows a mistyped key without a look at the database.  The database holds only the
hash of a key: it cannot be guessed from a plain SHA-256; slow hashes are for passwords.

Keys of the release before are valid, too: `sk_` and 43 characters.
"""

import hashlib
import secrets
import string
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import ColumnElement, delete, func, insert, or_, select, update

from slotkeeper.audit import commit_audited, make_entry
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import KEYS_VERSION, add_to_counter, counters
from slotkeeper.errors import Conflict, InvalidRequest, NotFound
from slotkeeper.registry.identity import Identity, Scope, Tenant, format_scopes
from slotkeeper.registry.tables import api_keys, tenants
from slotkeeper.registry.tenant_limits import NO_RATE, RateLimit, decode_rate

Row: TypeAlias = Any

_PREFIX, _ID_LENGTH, _SECRET_LENGTH, _CHECKSUM_LENGTH = "sk_", 12, 43, 6
_LENGTH = len(_PREFIX) + _ID_LENGTH + _SECRET_LENGTH + _CHECKSUM_LENGTH
_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_SELECT_VERSION = select(counters.c.value).where(counters.c.name == KEYS_VERSION)
_MAX_NAME = 100
_MAX_KEYS = 1_000  # of a tenant, that are valid
_WEEK_MS = 7 * 86_400_000
_LISTED_MS = 90 * 86_400_000  # how long a key is listed after its end


class NewKey(NamedTuple):
    """A key that was just made.  It cannot be read again."""

    id: str
    key: str


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is listed.  Times in ms; last_used_ms is a minute late at most."""

    id: str
    tenant: str
    name: str
    scopes: frozenset[Scope]
    created_ms: int
    created_by: str | None
    expires_ms: int | None
    revoked_ms: int | None
    last_used_ms: int | None
    rate: RateLimit

    def is_valid(self, now_ms: int) -> bool:
        return self.revoked_ms is None and (self.expires_ms is None or now_ms < self.expires_ms)


class ValidKey(NamedTuple):
    """Whose key it is, and until when (ms); None: until it is revoked."""

    identity: Identity
    expires_ms: int | None


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def make_key() -> NewKey:
    key_id = "".join(secrets.choice(_DIGITS) for _ in range(_ID_LENGTH))
    text = _PREFIX + key_id + "".join(secrets.choice(_DIGITS) for _ in range(_SECRET_LENGTH))
    return NewKey(key_id, text + _checksum(text))


def is_mistyped(key: str) -> bool:
    """Return whether a text cannot be a key: it has the length of one, and another checksum."""
    return len(key) == _LENGTH and _checksum(key[:-_CHECKSUM_LENGTH]) != key[-_CHECKSUM_LENGTH:]


def _checksum(text: str) -> str:
    rest, digits = zlib.crc32(text.encode()), ""
    for _ in range(_CHECKSUM_LENGTH):
        rest, digit = divmod(rest, len(_DIGITS))
        digits = _DIGITS[digit] + digits
    return digits


class ApiKeys:
    """Reads and changes keys.  All methods raise DatabaseUnavailable; those that change something also CommitUnknown.

    Each change raises the version of all keys: processes compare it, and read the keys again.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def get_version(self) -> int:
        with self.database.read() as connection:
            return connection.execute(_SELECT_VERSION).scalar() or 0

    def list_valid(self, now_ms: int) -> tuple[int, dict[str, ValidKey]]:
        """Return the version, and all valid keys by their hashes."""
        query = select(*_OF_VALID_KEYS).where(_is_valid(now_ms))
        with self.database.read() as connection:
            version = connection.execute(_SELECT_VERSION).scalar() or 0
            by_name = {name: Tenant(name) for name in connection.execute(select(tenants.c.name)).scalars()}
            found = {}
            for hashed, name, key_id, scopes, limits, expires_ms in connection.execute(query):
                if (tenant := by_name.get(name)) is not None:
                    identity = Identity(tenant, key_id, _parse_scopes(scopes), decode_rate(limits))
                    found[hashed] = ValidKey(identity, expires_ms)
        return version, found

    def find(self, key: str, now_ms: int) -> Identity | None:
        """Return who a key belongs to; None: it is not valid."""
        return None if is_mistyped(key) else self._find(api_keys.c.hash == hash_key(key), now_ms)

    def find_by_id(self, tenant: str, key_id: str, now_ms: int) -> Identity | None:
        """As `find`, by a key's tenant and id."""
        return self._find(_is_key(tenant, key_id), now_ms)

    def _find(self, condition: ColumnElement[bool], now_ms: int) -> Identity | None:
        query = select(api_keys).where(condition, _is_valid(now_ms))
        with self.database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else Identity(Tenant(row.tenant), row.id, _scopes_of(row), decode_rate(row.limits))

    def list_of(self, tenant: str) -> list[ApiKey]:
        """Return all keys of a tenant, the newest first, also those that are not valid any more."""
        query = (
            select(api_keys).where(api_keys.c.tenant == tenant).order_by(api_keys.c.created_ms.desc(), api_keys.c.id)
        )
        with self.database.read() as connection:
            return [_api_key(row) for row in connection.execute(query)]

    def list_by_tenant(self, now_ms: int) -> dict[str, list[ApiKey]]:
        """Return the valid keys of each tenant that has any."""
        found: dict[str, list[ApiKey]] = {}
        with self.database.read() as connection:
            for row in connection.execute(select(api_keys).where(_is_valid(now_ms)).order_by(api_keys.c.created_ms)):
                found.setdefault(row.tenant, []).append(_api_key(row))
        return found

    def count_expiring(self, now_ms: int) -> int:
        """Return how many valid keys end within a week."""
        query = select(func.count()).where(_is_valid(now_ms), api_keys.c.expires_ms < now_ms + _WEEK_MS)
        with self.database.read() as connection:
            return connection.execute(query).scalar_one()

    def get(self, tenant: str, key_id: str) -> ApiKey:
        """Raises NotFound."""
        with self.database.read() as connection:
            row = connection.execute(select(api_keys).where(_is_key(tenant, key_id))).first()
        if row is None:
            raise _no_such_key(tenant, key_id)
        return _api_key(row)

    def add(
        self,
        tenant: str,
        scopes: Collection[Scope],
        *,
        now_ms: int,
        name: str = "",
        by: str | None = None,
        expires_ms: int | None = None,
        rate: RateLimit = NO_RATE,
    ) -> NewKey:
        """Make a key.  Raises NotFound: there is no such tenant; Conflict: it has too many; InvalidRequest."""
        new = make_key()
        entry = make_entry(
            "key.add",
            now_ms=now_ms,
            tenant=tenant,
            key=new.id,
            name=name,
            scopes=format_scopes(scopes),
            expires_ms=expires_ms,
        )
        row = key_row(new, tenant, scopes, now_ms, name, by, expires_ms, rate)

        def unit(tx: Transaction) -> bool:
            raise_version(tx)
            if not tx.connection.execute(select(tenants.c.name).where(tenants.c.name == tenant)).first():
                raise NotFound(f"There is no tenant {tenant!r}.", tenant=tenant)
            of_tenant = api_keys.c.tenant == tenant
            tx.connection.execute(delete(api_keys).where(of_tenant, _has_ended_before(now_ms - _LISTED_MS)))
            if len(tx.connection.execute(select(api_keys.c.id).where(of_tenant, _is_valid(now_ms))).all()) >= _MAX_KEYS:
                raise Conflict(f"Tenant {tenant!r} has {_MAX_KEYS} keys; revoke those that it does not use any more.")
            tx.connection.execute(insert(api_keys), row)
            return True

        commit_audited(self.database, entry, unit)
        return new

    def change(
        self, tenant: str, key_id: str, changes: Mapping[str, Any], now_ms: int, *, keeps_an_operator: bool = False
    ) -> ApiKey:
        """Change `name`, `scopes`, `expires_ms` or `rate` of a key.

        keeps_an_operator: as of `revoke`.  Raises NotFound, InvalidRequest; Conflict for the last operator.
        """
        values = dict(changes)
        if "name" in values:
            check_key_name(values["name"])
        if "scopes" in values:
            values["scopes"] = format_scopes(values["scopes"])
        if "rate" in values:
            values["limits"] = values.pop("rate").encode()
        statement = update(api_keys).where(_is_key(tenant, key_id)).values(**values).returning(api_keys)

        def unit(tx: Transaction) -> Row:
            raise_version(tx)
            before = tx.connection.execute(select(api_keys).where(_is_key(tenant, key_id))).first()
            row = tx.connection.execute(statement).first()
            if keeps_an_operator and before is not None:
                _check_operator_left(tx, before, now_ms)
            return row

        entry = make_entry("key.change", now_ms=now_ms, tenant=tenant, key=key_id, **values)
        row = commit_audited(self.database, entry, unit)
        if row is None:
            raise _no_such_key(tenant, key_id)
        return _api_key(row)

    def rotate(self, tenant: str, key_id: str, overlap_ms: int, *, now_ms: int, by: str | None = None) -> NewKey:
        """Make a key with the name, scopes and rate of another, which is valid for `overlap_ms` longer.

        Raises NotFound; Conflict: the key is not valid any more.
        """
        new, until_ms = make_key(), now_ms + overlap_ms
        entry = make_entry(
            "key.rotate", now_ms=now_ms, tenant=tenant, key=key_id, new_key=new.id, former_until_ms=until_ms
        )

        def unit(tx: Transaction) -> bool:
            raise_version(tx)
            row = tx.connection.execute(select(api_keys).where(_is_key(tenant, key_id))).first()
            if row is None:
                return False
            former = _api_key(row)
            if not former.is_valid(now_ms):
                raise Conflict(f"Key {key_id} is not valid any more; make a new one.", tenant=tenant, key=key_id)
            expires_ms = until_ms if former.expires_ms is None else min(until_ms, former.expires_ms)
            tx.connection.execute(update(api_keys).where(_is_key(tenant, key_id)).values(expires_ms=expires_ms))
            _forget_for_release_before(tx, row.hash, key_id)
            tx.connection.execute(
                insert(api_keys),
                key_row(new, tenant, former.scopes, now_ms, former.name, by, former.expires_ms, former.rate),
            )
            return True

        if not commit_audited(self.database, entry, unit):
            raise _no_such_key(tenant, key_id)
        return new

    def revoke(self, tenant: str, key_id: str, now_ms: int, *, keeps_an_operator: bool = False) -> None:
        """End a key at once, everywhere within a second.

        keeps_an_operator: do not revoke the last key that may operate.  Raises NotFound; Conflict for that key.
        """
        entry = make_entry("key.revoke", now_ms=now_ms, tenant=tenant, key=key_id)

        def unit(tx: Transaction) -> bool:
            raise_version(tx)
            row = tx.connection.execute(select(api_keys).where(_is_key(tenant, key_id))).first()
            if row is None:
                return False
            if row.revoked_ms is None:
                tx.connection.execute(update(api_keys).where(_is_key(tenant, key_id)).values(revoked_ms=now_ms))
            if keeps_an_operator:
                _check_operator_left(tx, row, now_ms)
            _forget_for_release_before(tx, row.hash, key_id)
            return True

        if not commit_audited(self.database, entry, unit):
            raise _no_such_key(tenant, key_id)

    def note_used(self, key_ids: Iterable[str], now_ms: int) -> None:
        """Note when these keys were used last."""
        statement = update(api_keys).where(api_keys.c.id.in_(sorted(key_ids))).values(last_used_ms=now_ms)
        self.database.write(lambda tx: tx.connection.execute(statement), durable=False)


def raise_version(tx: Transaction) -> None:
    """Raise the version of all keys, for a change of a key or of what belongs to it."""
    add_to_counter(tx.connection, KEYS_VERSION)


def key_row(
    new: NewKey,
    tenant: str,
    scopes: Iterable[Scope],
    now_ms: int,
    name: str = "",
    by: str | None = None,
    expires_ms: int | None = None,
    rate: RateLimit = NO_RATE,
) -> dict[str, Any]:
    """Return the row of a new key.  Raises InvalidRequest for its name."""
    return {
        "id": new.id,
        "tenant": tenant,
        "hash": hash_key(new.key),
        "scopes": format_scopes(scopes),
        "name": check_key_name(name),
        "created_ms": now_ms,
        "created_by": by,
        "expires_ms": expires_ms,
        "limits": rate.encode(),
    }


def check_key_name(name: str) -> str:
    """Return the name of a key.  Raises InvalidRequest."""
    if len(name) > _MAX_NAME or not name.isprintable():
        raise InvalidRequest("name", f"name must be at most {_MAX_NAME} printable characters")
    return name


def delete_of_tenant(tx: Transaction, tenant: str) -> None:
    """Delete all keys of a tenant that is being removed."""
    raise_version(tx)
    tx.connection.execute(delete(api_keys).where(api_keys.c.tenant == tenant))


def hash_of_no_key(key_id: str) -> str:
    """Return what stands in the tenant's column for the one key of the release before, if it has none: no hash."""
    return f"-{key_id}"


_OF_VALID_KEYS = (
    api_keys.c.hash,
    api_keys.c.tenant,
    api_keys.c.id,
    api_keys.c.scopes,
    api_keys.c.limits,
    api_keys.c.expires_ms,
)


def _is_key(tenant: str, key_id: str) -> ColumnElement[bool]:
    return (api_keys.c.tenant == tenant) & (api_keys.c.id == key_id)


def _is_valid(now_ms: int) -> ColumnElement[bool]:
    return api_keys.c.revoked_ms.is_(None) & or_(api_keys.c.expires_ms.is_(None), api_keys.c.expires_ms > now_ms)


def _has_ended_before(at_ms: int) -> ColumnElement[bool]:
    return (api_keys.c.revoked_ms < at_ms) | (api_keys.c.expires_ms < at_ms)


def _check_operator_left(tx: Transaction, changed: Row, now_ms: int) -> None:
    """Raise Conflict if no valid key may operate after a change of this one.  `changed`: its row before."""
    if Scope.OPERATE not in _scopes_of(changed):
        return
    valid = tx.connection.execute(select(api_keys).where(_is_valid(now_ms)))
    if not any(Scope.OPERATE in _scopes_of(row) for row in valid):
        raise Conflict(
            f"{changed.id} is the last key that may operate; make another first, or use the command line.",
            tenant=changed.tenant,
            key=changed.id,
        )


def _forget_for_release_before(tx: Transaction, hashed: str, key_id: str) -> None:
    """Let processes of the release before refuse a key, too, which they know by its tenant's columns."""
    present, former = tenants.c.key_hash == hashed, tenants.c.former_hash == hashed
    tx.connection.execute(update(tenants).where(present).values(key_hash=hash_of_no_key(key_id)))
    tx.connection.execute(update(tenants).where(former).values(former_hash=None, former_until_ms=None))


def _scopes_of(row: Row) -> frozenset[Scope]:
    return _parse_scopes(row.scopes)


@lru_cache(maxsize=1024)
def _parse_scopes(words: str) -> frozenset[Scope]:
    """Return stored scopes.  One of a later release is left out."""
    known = {scope.value for scope in Scope}
    return frozenset(Scope(word) for word in words.split() if word in known)


def _api_key(row: Row) -> ApiKey:
    return ApiKey(
        row.id,
        row.tenant,
        row.name,
        _scopes_of(row),
        row.created_ms,
        row.created_by,
        row.expires_ms,
        row.revoked_ms,
        row.last_used_ms,
        decode_rate(row.limits),
    )


def _no_such_key(tenant: str, key_id: str) -> NotFound:
    return NotFound(
        f"Tenant {tenant!r} has no key {key_id!r}; `slotkeeper keys list` names them.", tenant=tenant, key=key_id
    )
