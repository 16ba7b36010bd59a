"""Call back when anything was committed: one cheap poll for all that wait.

Relays, streams and the webhook process would otherwise query the outbox several times a second, mostly for nothing.
The poll (SQLite: `PRAGMA data_version`; PostgreSQL: the transaction snapshot) costs a tenth of such a query.
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

POLL_S = 0.25
# Two polls with the same snapshot see the same rows.
_SNAPSHOT = CompiledStatement(select(cast(func.txid_current_snapshot(), Text)))


class ChangeDetector:
    """Reports whether any process has committed since the last call.  Not thread-safe."""

    def __init__(self, database: Database) -> None:
        self._poll = _DataVersion(database) if database.engine.dialect.name == "sqlite" else _Snapshot(database)
        self._last: object = None

    def has_changed(self) -> bool:
        """Return True if there was a commit since the last call, and at the first call.

        Raises DatabaseUnavailable; the next call then returns True.
        """
        before, self._last = self._last, None
        self._last = self._poll()
        return before is None or before != self._last


class _Snapshot:
    """PostgreSQL's transaction snapshot."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __call__(self) -> object:
        with self._database.read() as connection:
            return _SNAPSHOT.fetch_value(connection, {})


class _DataVersion:
    """SQLite's number that changes with each commit of another connection."""

    def __init__(self, database: Database) -> None:
        self._engine = database.engine.execution_options(**sqlite.NO_BEGIN)
        self._connection: Connection | None = None  # always the same: the number is its own

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
    """A thread that polls for commits and runs the registered callbacks after each."""

    def __init__(self, database: Database) -> None:
        self._detector = ChangeDetector(database)
        self._callbacks: list[Callable[[], object]] = []
        self._stopped = threading.Event()
        self._is_started = False

    def on_change(self, callback: Callable[[], object]) -> None:
        """Register a callback.  It runs in the listener's thread and must not block."""
        self._callbacks.append(callback)

    def start(self) -> None:
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._run, name="change-listener", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            if self._may_have_changed():
                for callback in self._callbacks:
                    self._run_callback(callback)

    def _run_callback(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception:  # The others are called, and the thread goes on.
            log.exception("change_callback_failed")

    def _may_have_changed(self) -> bool:
        """Return True also if the poll failed unexpectedly: a useless query is cheaper than a missed event."""
        try:
            return self._detector.has_changed()
        except DatabaseUnavailable:  # The first poll after it returns True.
            return False
        except Exception:
            log.exception("change_listener_failed")
            return True
