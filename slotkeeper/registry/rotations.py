"""Which webhook secret of a tenant is the present one.

Secrets are derived and stand nowhere; the record keeps their number and when it was last raised, as counters.  A
tenant needs no key to have one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select

from slotkeeper.audit import acts
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import counters

OVERLAP_MS = 24 * 3600 * 1000
"""For so long messages are signed with the former secret, too."""

_NUMBER, _SINCE = "webhook_rotation.", "webhook_rotated_ms."


@dataclass(frozen=True, slots=True)
class SecretRotation:
    """The present secret's number, and since when it is that (ms); of the first, number 0, that is 0."""

    number: int = 0
    since_ms: int = 0

    def list_valid(self, now_ms: int) -> tuple[int, ...]:
        """The numbers to sign with, the present one first."""
        overlaps = self.number > 0 and now_ms < self.former_until_ms
        return (self.number, self.number - 1) if overlaps else (self.number,)

    @property
    def former_until_ms(self) -> int:
        """Until when the secret before is signed with."""
        return self.since_ms + OVERLAP_MS


class SecretRotations:
    """Reads and raises the numbers."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def get(self, tenant: str) -> SecretRotation:
        """Raises RecordUnavailable."""
        with self.database.read() as connection:
            return _rotation(tenant, _found(connection, tenant))

    def rotate(self, tenant: str, now_ms: int) -> SecretRotation:
        """Make a new secret the present one.  A second time within the overlap ends the one before at once."""
        rotating = acts.make_entry("webhook_secret.rotate", now_ms=now_ms, tenant=tenant)

        def unit(tx: Transaction) -> SecretRotation:
            rotating.write(tx)
            return advance_rotation(tx, tenant, now_ms)

        return self.database.write(unit)


def advance_rotation(tx: Transaction, tenant: str, now_ms: int) -> SecretRotation:
    """As `rotate`, in a transaction with something else; `now_ms` 0: the former secret is not signed with any more."""
    before = _rotation(tenant, _found(tx.connection, tenant))
    after = SecretRotation(before.number + 1, now_ms)
    rows = _rows(tenant, after)
    tx.connection.execute(delete(counters).where(counters.c.name.in_(rows)))
    tx.connection.execute(insert(counters), [{"name": name, "value": value} for name, value in rows.items()])
    return after


def _found(connection: Connection, tenant: str) -> dict[str, int]:
    wanted = select(counters.c.name, counters.c.value).where(counters.c.name.in_(_rows(tenant, SecretRotation())))
    return {row.name: row.value for row in connection.execute(wanted)}


def _rows(tenant: str, rotation: SecretRotation) -> dict[str, int]:
    return {f"{_NUMBER}{tenant}": rotation.number, f"{_SINCE}{tenant}": rotation.since_ms}


def _rotation(tenant: str, found: Mapping[str, int]) -> SecretRotation:
    return SecretRotation(found.get(f"{_NUMBER}{tenant}", 0), found.get(f"{_SINCE}{tenant}", 0))
