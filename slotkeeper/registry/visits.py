"""Visits to the page that were ended before their time was over, by a log-out.

They are kept until then: a copy of the cookie would open the page for as long.
"""

from sqlalchemy import delete, insert, select

from slotkeeper.db import Database, Transaction
from slotkeeper.registry.tables import revoked_sessions


class RevokedSessions:
    """Notes and finds them.  Its methods raise RecordUnavailable: nobody knows then, and nobody is to be let in."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def revoke(self, visit_id: str, until_ms: int, now_ms: int) -> None:
        """`until_ms`: when it would have been over anyway."""

        def unit(tx: Transaction) -> None:
            known = select(revoked_sessions.c.id).where(revoked_sessions.c.id == visit_id)
            tx.connection.execute(delete(revoked_sessions).where(revoked_sessions.c.until_ms <= now_ms))
            if tx.connection.execute(known).first() is None:
                tx.connection.execute(insert(revoked_sessions), {"id": visit_id, "until_ms": until_ms})

        self.database.write(unit)

    def is_revoked(self, visit_id: str) -> bool:
        with self.database.read() as connection:
            query = select(revoked_sessions.c.id).where(revoked_sessions.c.id == visit_id)
            return connection.execute(query).first() is not None

    def list_revoked(self, now_ms: int) -> frozenset[str]:
        """Those whose time is not over."""
        with self.database.read() as connection:
            query = select(revoked_sessions.c.id).where(revoked_sessions.c.until_ms > now_ms)
            return frozenset(connection.execute(query).scalars())
