"""What tenants have used, by UTC day and model: time of slots, runs, and jobs accepted and ended.

A run counts on the day of its end, also one that failed.  The counter of events (routing/queries/job_counters.py) adds
to the rows in the transaction that moves its position, so each run is counted once.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from slotkeeper.db import Database, Transaction
from slotkeeper.db.time_limits import LOOK_S, time_limit
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.tables import usage_days

DAY_MS = 86_400_000
KEPT_DAYS = 400
"""How long a day is kept."""
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_SUMS = ("slot_ms", "runs", "accepted", "completed", "ended")


class UsageKey(NamedTuple):
    """day: since 1970-01-01, UTC."""

    tenant: str
    day: int
    model: str


@dataclass(slots=True)
class Usage:
    """slot_ms: time for which runs held a slot.  ended: jobs that ended without completing."""

    slot_ms: int = 0
    runs: int = 0
    accepted: int = 0
    completed: int = 0
    ended: int = 0

    def add(self, other: "Usage") -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_NOTHING = Usage()


class SlotTime(NamedTuple):
    """Slot time of a tenant in ms, of this UTC day and of this month."""

    day_ms: int
    month_ms: int


def add_usage(tx: Transaction, used: Mapping[UsageKey, Usage]) -> None:
    """Add to the rows, in one order in all processes."""
    used = {key: usage for key, usage in used.items() if usage != _NOTHING}
    if not used:
        return
    new: Any = _INSERT[tx.connection.dialect.name](usage_days)
    sums = {name: usage_days.c[name] + new.excluded[name] for name in _SUMS}
    statement = new.on_conflict_do_update(index_elements=["tenant", "day", "model"], set_=sums)
    rows = [key._asdict() | asdict(used[key]) for key in sorted(used)]
    tx.connection.execute(statement, rows)


def read_usage(database: Database, tenant: str, first_day: int, last_day: int) -> dict[UsageKey, Usage]:
    """Return what a tenant has used on these days, the oldest first.  Raises DatabaseUnavailable."""
    query = (
        select(usage_days)
        .where(usage_days.c.tenant == tenant, usage_days.c.day.between(first_day, last_day))
        .order_by(usage_days.c.day, usage_days.c.model)
    )
    with database.read() as connection:
        return {
            UsageKey(row.tenant, row.day, row.model): Usage(*(getattr(row, name) for name in _SUMS))
            for row in connection.execute(query)
        }


def delete_old_days(database: Database, now_ms: int) -> None:
    """Delete the days that are not kept any more.  Raises DatabaseUnavailable."""
    old = delete(usage_days).where(usage_days.c.day < now_ms // DAY_MS - KEPT_DAYS)
    database.write(lambda tx: tx.connection.execute(old), durable=False)


class SlotTimes:
    """The slot time of tenants, as it was at most `refresh_s` ago.  Thread-safe."""

    def __init__(self, database: Database, refresh_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._database, self._refresh_s, self._clock = database, refresh_s, clock
        self._known: dict[str, tuple[float, int, SlotTime]] = {}  # tenant -> when it was read, and on which day
        self._lock = threading.Lock()

    def of(self, tenant: str, now_ms: int) -> SlotTime:
        """Return the slot time of a tenant.  While the database is away: the last that was read."""
        today, asked = now_ms // DAY_MS, self._clock()
        with self._lock:
            read_at, day, known = self._known.get(tenant, (0.0, -1, SlotTime(0, 0)))
            if day == today and asked - read_at < self._refresh_s:
                return known
        try:
            with time_limit(LOOK_S):
                known = self._read(tenant, today, now_ms)
        except DatabaseUnavailable:
            return known
        with self._lock:
            self._known[tenant] = asked, today, known
        return known

    def _read(self, tenant: str, today: int, now_ms: int) -> SlotTime:
        by_day = (
            select(usage_days.c.day, func.sum(usage_days.c.slot_ms))
            .where(usage_days.c.tenant == tenant, usage_days.c.day >= month_start_ms(now_ms) // DAY_MS)
            .group_by(usage_days.c.day)
        )
        with self._database.read() as connection:
            days = {day: int(slot_ms) for day, slot_ms in connection.execute(by_day)}
        return SlotTime(days.get(today, 0), sum(days.values()))


def month_start_ms(now_ms: int) -> int:
    """Return when the present month began, UTC (ms since the epoch)."""
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    return round(now.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp() * 1000)


def month_end_ms(now_ms: int) -> int:
    """Return when the next month begins, UTC."""
    return month_start_ms(month_start_ms(now_ms) + 32 * DAY_MS)
