"""Alembic's entry: connects, sets timeouts, runs the steps in one transaction.

The URL comes from migrations.migrate, from `-x url=…`, or from SLOTKEEPER_DATABASE_URL.  Nothing here keeps two
processes apart; migrations.migrate does.
"""

import os
from typing import Any

from alembic import context
from sqlalchemy import Connection, Engine, NullPool, create_engine, event

import slotkeeper.jobs.tables
import slotkeeper.outbox.tables
import slotkeeper.registry.tables  # noqa: F401  All tables are in one MetaData.
from slotkeeper.db.schema import metadata

# A migration that waits for a lock makes every later query wait behind it: better to give up and be run again.
_POSTGRESQL_TIMEOUTS = ("SET lock_timeout = '5s'", "SET statement_timeout = '60s'")
_SQLITE_BUSY_TIMEOUT_S = 10

_OPTIONS: dict[str, Any] = {
    "target_metadata": metadata,
    "render_as_batch": True,  # SQLite alters a table by copying it; on PostgreSQL a batch is a plain ALTER.
    "transactional_ddl": True,  # On SQLite too, because _begin says BEGIN: a step that fails leaves no trace.
    "compare_type": True,
    "compare_server_default": True,
}


def _url() -> str:
    given = context.config.attributes.get("url") or context.get_x_argument(as_dictionary=True).get("url")
    url = given or os.environ.get("SLOTKEEPER_DATABASE_URL")
    if not url:
        raise SystemExit("Which database?  Give -x url=… or set SLOTKEEPER_DATABASE_URL.")
    return url


def _engine(url: str) -> Engine:
    if not url.startswith("sqlite"):
        return create_engine(url, poolclass=NullPool)
    engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": _SQLITE_BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: object) -> None:
    # Foreign keys stay off here: with them on, copying a table would delete the rows that point to it.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _online() -> None:
    engine = _engine(_url())
    with engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            for statement in _POSTGRESQL_TIMEOUTS:
                connection.exec_driver_sql(statement)
            connection.commit()
        context.configure(connection=connection, **_OPTIONS)
        with context.begin_transaction():
            context.run_migrations()


def _offline() -> None:
    """Write the SQL out instead of running it (`alembic upgrade --sql`)."""
    context.configure(url=_url(), literal_binds=True, **_OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    _offline()
else:
    _online()
