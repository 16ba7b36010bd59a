"""Sessions of the page that a log-out has ended."""

from sqlalchemy import delete, select

from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import upsert
from slotkeeper.registry.tables import revoked_sessions


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
