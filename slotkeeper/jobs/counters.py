"""Counters of the record: what the ledger must not miss."""

from sqlalchemy import insert, update

from slotkeeper.db.group_commit import Transaction
from slotkeeper.jobs.tables import counters


def add_to_counter(tx: Transaction, name: str, by: int = 1) -> None:
    """Raise a counter of the record."""
    raised = update(counters).where(counters.c.name == name).values(value=counters.c.value + by)
    if tx.connection.execute(raised).rowcount == 0:
        tx.connection.execute(insert(counters), {"name": name, "value": by})
