"""Work of maintenance on any number of rows, in pages: each is a short transaction, so that other writers go on."""

import time
from collections.abc import Callable

from sqlalchemy import ColumnElement, Table, bindparam, delete, select

from slotkeeper.db.database import Database

PAGE = 500
"""Rows of one transaction."""


def run_pages(page: Callable[[], int], within_s: float = float("inf")) -> int:
    """Call `page`, which returns how many rows it has done, until that is 0 or the time is over; return the sum."""
    until, done = time.monotonic() + within_s, 0
    while count := page():
        done += count
        if time.monotonic() >= until:
            break
    return done


def delete_page(database: Database, table: Table, condition: ColumnElement[bool], limit: int = PAGE) -> int:
    """Delete at most `limit` rows for which the condition holds, and return how many were found.

    The rows are found outside of the transaction, so that the search blocks no writer, and by their primary key.
    Raises DatabaseUnavailable.
    """
    key = table.primary_key.columns
    with database.read() as connection:
        rows = connection.execute(select(*key).where(condition).limit(limit)).all()
    if rows:
        found = [{f"key_{column.name}": row[n] for n, column in enumerate(key)} for row in rows]
        # A row may have changed since it was found.  One statement for each: SQLite finds no list of pairs by index.
        page = delete(table).where(*[column == bindparam(f"key_{column.name}") for column in key], condition)
        database.write(lambda tx: tx.connection.execute(page, found), durable=False)
    return len(rows)
