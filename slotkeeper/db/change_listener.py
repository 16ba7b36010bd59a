"""Whether anything has been written to the record: a look that costs a tenth of one that finds out what it was.

Who would look again and again, and mostly in vain, is woken by a `Lookout` instead.
"""

import threading
from collections.abc import Callable

import structlog
from sqlalchemy import Connection, Text, cast, func, select
from sqlalchemy.exc import SQLAlchemyError

from slotkeeper.db import sqlite
from slotkeeper.db.compiled_sql import CompiledStatement, execute_raw
from slotkeeper.db.database import Database
from slotkeeper.errors import DatabaseUnavailable

log = structlog.get_logger(__name__)

EVERY_S = 0.25
# Which transactions have ended: two looks with the same answer see the same rows.
_SNAPSHOT = CompiledStatement(select(cast(func.txid_current_snapshot(), Text)))


class ChangeDetector:
    """Tells whether something was written since the last look.  For one thread."""

    def __init__(self, database: Database) -> None:
        self._look = _Versions(database) if database.engine.dialect.name == "sqlite" else _Snapshots(database)
        self._seen: object = None

    def has_changed(self) -> bool:
        """Whether anybody has committed since the last time; True at the first.

        Raises RecordUnavailable; the next time it is True.
        """
        before, self._seen = self._seen, None
        self._seen = self._look()
        return before is None or before != self._seen


class _Snapshots:
    """What a look at PostgreSQL sees."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __call__(self) -> object:
        with self._database.read() as connection:
            return _SNAPSHOT.fetch_value(connection, {})


class _Versions:
    """SQLite's number of what a connection sees: another one whenever somebody else has committed."""

    def __init__(self, database: Database) -> None:
        self._engine = database.engine.execution_options(**sqlite.NO_BEGIN)
        self._connection: Connection | None = None  # The same each time, for the number is its own.

    def __call__(self) -> object:
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
            return execute_raw(self._connection, "PRAGMA data_version", (), lambda cursor: cursor.fetchone()[0])
        except SQLAlchemyError as error:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            raise DatabaseUnavailable(f"The database did not answer ({error}); try again.") from error


class ChangeListener:
    """Looks in a thread of its own, and wakes those who have asked for it when something was written."""

    def __init__(self, database: Database) -> None:
        self._news = ChangeDetector(database)
        self._wakes: list[Callable[[], object]] = []
        self._ended = threading.Event()
        self._begun = False

    def on_change(self, call: Callable[[], object]) -> None:
        """Have this called, which must not wait for anything, when something was written."""
        self._wakes.append(call)

    def start(self) -> None:
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._keep_looking, name="lookout", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _keep_looking(self) -> None:
        while not self._ended.wait(EVERY_S):
            if self._is_worth_a_look():
                for call in self._wakes:
                    call()

    def _is_worth_a_look(self) -> bool:
        """Where it is not known, it may be."""
        try:
            return self._news.has_changed()
        except DatabaseUnavailable:  # It is when the record is back.
            return False
        except Exception:
            log.exception("change_listener_failed")
            return True
