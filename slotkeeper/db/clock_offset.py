"""The stored offset of SQLite's shared clock: the time minus the machine's monotonic clock, in ms.

A write brings times along that were taken by the offset of that moment.  If another process has replaced the offset
since, these times are wrong by the step, and the stored times have moved: such a write is refused.
"""

from sqlalchemy import Connection, bindparam, select

from slotkeeper.clock import MAX_SKEW_MS, clock
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.schema import counters
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.process import read_boot_id

PREFIX = "clock:"
_VALUE = CompiledStatement(select(counters.c.value).where(counters.c.name == bindparam("p_name")))


def counter_name() -> str:
    """Return the name of the counter.  Monotonic clocks of two boots cannot be compared.

    PREFIX alone: the machine does not say which boot this is.
    """
    return f"{PREFIX}{read_boot_id()}"


class OffsetCheck:
    """Reads the stored offset once for a transaction, if one of its writes has used an offset."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stored_ms: int | None = None
        self._is_read = False

    def refuse(self, used_ms: int | None) -> DatabaseUnavailable | None:
        """Return why a write whose times were taken by this offset cannot be stored; None: it can."""
        if used_ms is None:
            return None
        if not self._is_read:
            self._stored_ms = _VALUE.fetch_value(self._connection, {"p_name": counter_name()})
            self._is_read = True
        if self._stored_ms is None or abs(self._stored_ms - used_ms) <= MAX_SKEW_MS:
            return None
        clock.use_offset(self._stored_ms)
        return DatabaseUnavailable("The clock was set at this moment, and nothing was stored; try again.")
