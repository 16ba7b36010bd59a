"""Measure the database's clock: PostgreSQL's own, or the offset that SQLite's processes agreed on.

The processes of an SQLite database are on one machine and share its monotonic clock, so the database holds how far the
time is ahead of that.  A step of the machine's time of day, or of what one process takes for it, then neither ends a
run nor postpones a retry; only a step that lasts is followed, and then the times that were counted in seconds move with
the clock.  PostgreSQL's clock is followed at once, and nothing moves: its host keeps the time by NTP.
"""

import time
from contextlib import suppress

import structlog
from sqlalchemy import Connection, delete, func, select, update
from sqlalchemy.dialects.sqlite import insert

from slotkeeper.clock import MAX_SKEW_MS, clock
from slotkeeper.db import clock_offset
from slotkeeper.db.database import Database
from slotkeeper.db.group_commit import Transaction
from slotkeeper.db.moved_times import move_times
from slotkeeper.db.schema import counters
from slotkeeper.errors import DatabaseUnavailable

log = structlog.get_logger(__name__)

_FOLLOW_AFTER_S = 60.0
_POSTGRESQL_MS = select(func.extract("epoch", func.clock_timestamp()) * 1000)


class ClockSynchronizer:
    """Adjusts slotkeeper.clock to the database's clock."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._is_postgresql = database.engine.dialect.name == "postgresql"
        self._counter = clock_offset.counter_name()
        self._differs_since: float | None = None

    def synchronize(self, connection: Connection) -> None:
        """Measure the clock once, by one statement on this connection.  Raises SQLAlchemy's errors."""
        if self._is_postgresql:
            asked_s = time.monotonic()
            at_ms = float(connection.execute(_POSTGRESQL_MS).scalar_one())
            clock.adjust(at_ms, asked_s, time.monotonic())
        elif self._counter != clock_offset.PREFIX:  # Without a boot id, each process uses the time of day.
            self._compare(clock_offset.adopt(connection))

    def _compare(self, offset_ms: int | None) -> None:
        """Store the present offset if none is stored, or if the time of day differs from it for long."""
        now_s = time.monotonic()
        own_ms = time.time_ns() // 1_000_000 - round(now_s * 1000)
        if offset_ms is None:
            self._store(own_ms)
            return
        if abs(own_ms - offset_ms) <= MAX_SKEW_MS:
            self._differs_since = None
        elif self._differs_since is None:
            self._differs_since = now_s
        elif now_s - self._differs_since >= _FOLLOW_AFTER_S:
            self._replace(offset_ms, own_ms)

    def _store(self, offset_ms: int) -> None:
        """Store the offset, unless another process has done so, and delete those of earlier boots."""

        def unit(tx: Transaction) -> None:
            others = (
                counters.c.name.between(clock_offset.PREFIX, f"{clock_offset.PREFIX}~"),
                counters.c.name != self._counter,
            )
            tx.connection.execute(delete(counters).where(*others))
            row = insert(counters).values(name=self._counter, value=offset_ms)
            tx.connection.execute(row.on_conflict_do_nothing())

        with suppress(DatabaseUnavailable):
            self._database.write(unit)

    def _replace(self, before_ms: int, offset_ms: int) -> None:
        """Replace the offset and move the times that follow the clock, unless another process has done so."""
        by_ms = offset_ms - before_ms
        own = update(counters).where(counters.c.name == self._counter, counters.c.value == before_ms)

        def unit(tx: Transaction) -> int | None:
            if tx.connection.execute(own.values(value=offset_ms)).rowcount == 0:
                return None
            at_ms = offset_ms + round(time.monotonic() * 1000)
            step = insert(counters).values(name=f"{clock_offset.STEP_PREFIX}{at_ms}", value=by_ms)
            tx.connection.execute(step.on_conflict_do_nothing())
            return move_times(tx.connection, by_ms)

        with suppress(DatabaseUnavailable):
            moved = self._database.write(unit)
            if moved is not None:
                log.warning("clock_was_set", by_ms=by_ms, times_moved=moved)
        self._differs_since = None
