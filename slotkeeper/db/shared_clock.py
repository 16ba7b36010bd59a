"""The common clock of a record on SQLite: all processes count on from one moment that they have agreed on.

They are on one machine and share its steady clock, so the record keeps how far the time is ahead of that.  A step of
the machine's time of day, or of what one process takes for it, then neither ends a run nor puts a retry off; only one
that lasts is followed.
"""

import time
from contextlib import suppress

from sqlalchemy import delete, update
from sqlalchemy.dialects.sqlite import insert

from slotkeeper.clock import MAX_SKEW_MS, clock
from slotkeeper.db.database import Database
from slotkeeper.db.group_commit import Transaction
from slotkeeper.db.schema import counters
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.process import read_boot_id

_FOLLOWED_AFTER_S = 60.0
_PREFIX = "clock:"


class ClockSynchronizer:
    """Agrees with the other processes, and tells slotkeeper.clock."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.name = f"{_PREFIX}{read_boot_id()}"
        """Of the counter that says how far the time is ahead of the steady clock, in ms."""
        self._apart_since: float | None = None

    def synchronize(self, ahead_ms: int | None) -> None:
        """Go by what the counter says; None: there is none, say it first.

        After a minute in which the time of day is another, follow that.
        """
        if self.name == _PREFIX:
            return
        steady_s = time.monotonic()
        here_ms = time.time_ns() // 1_000_000 - round(steady_s * 1000)
        if ahead_ms is None:
            self._say(here_ms)
            return
        clock.adjust(ahead_ms + steady_s * 1000, steady_s, steady_s)
        if abs(here_ms - ahead_ms) <= MAX_SKEW_MS:
            self._apart_since = None
        elif self._apart_since is None:
            self._apart_since = steady_s
        elif steady_s - self._apart_since >= _FOLLOWED_AFTER_S:
            self._follow(ahead_ms, here_ms)

    def _say(self, ahead_ms: int) -> None:
        def unit(tx: Transaction) -> None:
            of_others = counters.c.name.between(_PREFIX, f"{_PREFIX}~"), counters.c.name != self.name
            tx.connection.execute(delete(counters).where(*of_others))
            row = insert(counters).values(name=self.name, value=ahead_ms)
            tx.connection.execute(row.on_conflict_do_nothing())

        with suppress(DatabaseUnavailable):
            self._database.write(unit)

    def _follow(self, before_ms: int, ahead_ms: int) -> None:
        """Unless another process has done so."""
        row = update(counters).where(counters.c.name == self.name, counters.c.value == before_ms)
        with suppress(DatabaseUnavailable):
            self._database.write(lambda tx: tx.connection.execute(row.values(value=ahead_ms)))
        self._apart_since = None
