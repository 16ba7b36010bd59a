"""Rotations of the secrets with which tenants verify their webhooks."""

from dataclasses import dataclass

from sqlalchemy import Connection, select

from slotkeeper.audit import commit_audited, make_entry
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import counters, upsert
from slotkeeper.jobs.notifications import SECRET_OVERLAP_MS

_NUMBER, _SINCE = "webhook_rotation.", "webhook_rotated_ms."  # counters of each tenant


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
