"""The stored offset of SQLite's shared clock: the time minus the machine's monotonic clock, in ms.

A write brings times along that were taken by the offset of that moment.  If another process has replaced the offset
since, these times are wrong by the step, and the stored times have moved: such a write is refused.
"""

from sqlalchemy import Connection, bindparam, or_, select

from slotkeeper.clock import MAX_SKEW_MS, Step, clock
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.schema import counters
from slotkeeper.errors import ClockWasSet
from slotkeeper.process import read_boot_id

PREFIX = "clock:"
STEP_PREFIX = "clock_step:"
"""What follows is the time after the step, ms; the value is by how much the clock was set."""
_VALUE = CompiledStatement(select(counters.c.value).where(counters.c.name == bindparam("p_name")))


def counter_name() -> str:
    """Return the name of the counter.  Monotonic clocks of two boots cannot be compared.

    PREFIX alone: the machine does not say which boot this is.
    """
    return f"{PREFIX}{read_boot_id()}"


def adopt(connection: Connection) -> int | None:
    """Set the process's clock to the stored offset and steps, and return the offset; None: there is none."""
    name = counter_name()
    is_step = counters.c.name.between(STEP_PREFIX, f"{STEP_PREFIX}~")
    query = select(counters.c.name, counters.c.value).where(or_(counters.c.name == name, is_step))
    found = {row.name: row.value for row in connection.execute(query)}
    offset_ms = found.pop(name, None)
    steps = [Step(int(step.removeprefix(STEP_PREFIX)), by_ms) for step, by_ms in found.items()]
    clock.steps = sorted(steps, reverse=True)
    if offset_ms is not None:
        clock.use_offset(offset_ms)
    return offset_ms


class OffsetCheck:
    """Reads the stored offset once for a transaction, if one of its writes has used an offset."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stored_ms: int | None = None
        self._is_read = False

    def refuse(self, used_ms: int | None) -> ClockWasSet | None:
        """Return why a write whose times were taken by this offset cannot be stored; None: it can."""
        if used_ms is None:
            return None
        if not self._is_read:
            self._stored_ms = _VALUE.fetch_value(self._connection, {"p_name": counter_name()})
            self._is_read = True
        if self._stored_ms is None or abs(self._stored_ms - used_ms) <= MAX_SKEW_MS:
            return None
        adopt(self._connection)
        return ClockWasSet("The clock was set at this moment, and nothing was stored; try again.")
