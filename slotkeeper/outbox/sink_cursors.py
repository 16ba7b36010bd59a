"""How far each sink has received the events: a durable cursor with one holder.

One process at a time relays events to a sink.  It acquires the sink's cursor for a limited time, and extends the hold
while it works.  Only the holder advances the cursor, and only from the position that it knows.
"""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, bindparam, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from slotkeeper.db import Database
from slotkeeper.jobs.tables import events
from slotkeeper.outbox.event_reader import EventReader, get_last_id
from slotkeeper.outbox.tables import relays

_TIME_OF_NEXT = select(events.c.at_ms).where(events.c.id > bindparam("p_position")).order_by(events.c.id).limit(1)


@dataclass(frozen=True, slots=True)
class SinkLag:
    """How far a sink is behind.

    position: the last event that the sink has.  events: how many later events there are, at most.
    seconds: the age of the oldest event that the sink does not have; 0 if it has all.
    held: a process relays to the sink.
    """

    sink: str
    position: int
    events: int
    seconds: float
    held: bool


class SinkCursors:
    """The cursors of all sinks.  All methods raise DatabaseUnavailable."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def acquire(self, sink: str, holder: str, now_ms: int, until: int, backlog: int | None = None) -> int | None:
        """Become or stay the holder of the sink's cursor until `until` (ms), and return its position.

        backlog: how many of the newest events a new sink receives; None: all that are stored.
        Returns None if another process holds the cursor.
        """
        is_free = or_(relays.c.holder.is_(None), relays.c.holder == holder, relays.c.until_ms < now_ms)
        taken = update(relays).where(relays.c.sink == sink, is_free).values(holder=holder, until_ms=until)

        position = self.database.write(
            lambda tx: tx.connection.execute(taken.returning(relays.c.position)).scalar(), durable=False
        )
        if position is None and not self._exists(sink):
            return self._add(sink, holder, until, backlog)
        return position

    def _exists(self, sink: str) -> bool:
        with self.database.read() as connection:
            return connection.execute(select(relays.c.sink).where(relays.c.sink == sink)).first() is not None

    def _add(self, sink: str, holder: str, until: int, backlog: int | None) -> int | None:
        """Store the cursor of a new sink, and return its position; None if another process has just stored it."""
        # Behind the last event before which no transaction is still to commit one, or the sink would miss that one.
        position = 0 if backlog is None else max(EventReader(self.database).skip_to_end() - backlog, 0)
        row = {"sink": sink, "position": position, "holder": holder, "until_ms": until}
        try:
            self.database.write(lambda tx: tx.connection.execute(insert(relays), row), durable=False)
        except IntegrityError:
            return None
        return position

    def advance(self, sink: str, holder: str, before: int, after: int, until: int) -> bool:
        """Move the cursor from `before` to `after`, and extend the hold until `until` (ms).

        Returns False, and changes nothing, if `holder` does not hold the cursor or it is not at `before`.
        """
        where = self._is_held_by(sink, holder) & (relays.c.position == before)
        moved = update(relays).where(where).values(position=after, until_ms=until)
        # Not durable: after a power cut some events are published again.
        return self.database.write(lambda tx: tx.connection.execute(moved).rowcount == 1, durable=False)

    def release(self, sink: str, holder: str) -> None:
        """End the hold, so that another process can acquire the cursor at once."""
        released = update(relays).where(self._is_held_by(sink, holder)).values(holder=None, until_ms=0)
        self.database.write(lambda tx: tx.connection.execute(released), durable=False)

    def find_slowest(self, sinks: list[str]) -> int | None:
        """Return the number up to which all these sinks have the events; 0 if one has never been relayed to.

        Returns None if `sinks` is empty.
        """
        if not sinks:
            return None
        with self.database.read() as connection:
            found = connection.execute(select(relays.c.sink, relays.c.position).where(relays.c.sink.in_(sinks))).all()
        positions = {row.sink: int(row.position) for row in found}
        return min(positions.get(sink, 0) for sink in sinks)

    def list_lags(self, sinks: list[str], now_ms: int) -> list[SinkLag]:
        """Return the lag of each of these sinks, with one index lookup per sink."""
        found = []
        with self.database.read() as connection:
            last = get_last_id(connection)
            positions = {row.sink: row for row in connection.execute(select(relays).where(relays.c.sink.in_(sinks)))}
            for sink in sinks:
                row = positions.get(sink)
                position = row.position if row is not None else 0
                at_ms = connection.execute(_TIME_OF_NEXT, {"p_position": position}).scalar()
                held = row is not None and row.holder is not None and row.until_ms >= now_ms
                seconds = 0.0 if at_ms is None else max(now_ms - at_ms, 0) / 1000
                found.append(SinkLag(sink, position, max(last - position, 0), seconds, held))
        return found

    @staticmethod
    def _is_held_by(sink: str, holder: str) -> ColumnElement[bool]:
        return (relays.c.sink == sink) & (relays.c.holder == holder)
