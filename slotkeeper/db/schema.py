"""Parts of all tables: metadata, column types, the `counters` table, text that both databases store."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, Table, Text, case, text
from sqlalchemy.dialects import postgresql, sqlite

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

SERIAL = BigInteger().with_variant(Integer, "sqlite")
"""Type of a key that the database counts.  SQLite counts only a plain INTEGER, which holds 64 bits there, too."""
EMPTY_TEXT = text("''")
"""Default of a text column; Alembic takes a plain "" for no default."""

# Small numbers that must change in the transaction of what they count.
counters = Table(
    "counters",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)


KEYS_VERSION = "keys_version"
"""The counter that each change of API keys raises, see slotkeeper/registry/api_keys.py."""


def one_of_check(column: str, words: Sequence[str]) -> str:
    """Return the condition of a CHECK constraint."""
    return f"{column} IN ({', '.join(repr(str(word)) for word in words)})"


def upsert(
    connection: Connection,
    table: Table,
    key: Mapping[str, Any],
    values: Mapping[str, Any],
    new: Mapping[str, Any] | None = None,
) -> None:
    """Insert a row, or update the row that has this primary key.

    new: further columns of an inserted row, which an update leaves as they are.
    """
    row = _insert(connection, table, {**key, **values, **(new or {})})
    if values:
        connection.execute(row.on_conflict_do_update(index_elements=list(key), set_=dict(values)))
    else:
        connection.execute(row.on_conflict_do_nothing(index_elements=list(key)))


def add_to_counter(connection: Connection, name: str, by: int = 1) -> None:
    """Add to a counter, which begins at 0."""
    added = {"value": counters.c.value + by}
    row = _insert(connection, counters, {"name": name, "value": by})
    connection.execute(row.on_conflict_do_update(index_elements=["name"], set_=added))


def raise_counter_to(connection: Connection, name: str, to: int) -> None:
    """Set a counter to `to`, unless it is higher."""
    higher = {"value": case((counters.c.value < to, to), else_=counters.c.value)}
    row = _insert(connection, counters, {"name": name, "value": to})
    connection.execute(row.on_conflict_do_update(index_elements=["name"], set_=higher))


def storable_text(given: str, max_length: int) -> str:
    """Return foreign text as both databases take it: no NUL, no half of a surrogate pair, not too long."""
    return given[:max_length].replace("\0", "").encode(errors="replace").decode()


def _insert(connection: Connection, table: Table, values: Mapping[str, Any]) -> Any:
    dialect: Any = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table).values(**values)
