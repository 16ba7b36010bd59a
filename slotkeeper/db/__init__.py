"""Connect to SQLite or PostgreSQL and commit writes in groups; an unknown COMMIT is never called a failure."""

from slotkeeper.db.database import Database
from slotkeeper.db.group_commit import Transaction, Write

__all__ = ["Database", "Transaction", "Write"]
