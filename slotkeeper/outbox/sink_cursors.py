"""How far each sink of events has come: a durable cursor, and who moves it.

One process at a time relays to a sink: it holds the cursor for a while, and goes on holding it for as long as it works.
The cursor is moved by its holder alone, and only from where that believes it to be.
"""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, bindparam, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from slotkeeper.db import Database, Transaction
from slotkeeper.jobs.tables import events
from slotkeeper.outbox.tables import relays

_LAST = select(func.max(events.c.id))
_FIRST_BEHIND = select(events.c.at_ms).where(events.c.id > bindparam("p_position")).order_by(events.c.id).limit(1)


@dataclass(frozen=True, slots=True)
class SinkLag:
    """How far a sink is behind.  `seconds`: the age of the oldest event that it has not got; 0: it has all."""

    sink: str
    position: int
    events: int
    seconds: float
    held: bool
    """Somebody relays to it."""


class SinkCursors:
    """Reads and moves the cursors.  Raises RecordUnavailable."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def acquire(self, sink: str, holder: str, now_ms: int, until: int, keeps: int | None = None) -> int | None:
        """Become, or stay, who relays to it until `until`; answers its position.  None: somebody else is.

        `keeps`: a new sink begins with so many of the newest events; None: with the oldest.
        """
        is_free = or_(relays.c.holder.is_(None), relays.c.holder == holder, relays.c.until_ms < now_ms)
        taken = update(relays).where(relays.c.sink == sink, is_free).values(holder=holder, until_ms=until)

        def unit(tx: Transaction) -> int | None:
            found = tx.connection.execute(taken.returning(relays.c.position)).scalar()
            if found is None and not tx.connection.execute(select(relays).where(relays.c.sink == sink)).first():
                newest = 0 if keeps is None else tx.connection.execute(_LAST).scalar() or 0
                found = max(newest - (keeps or 0), 0)
                row = {"sink": sink, "position": found, "holder": holder, "until_ms": until}
                tx.connection.execute(insert(relays), row)
            return found

        try:
            return self.database.write(unit, durable=False)
        except IntegrityError:  # Somebody was quicker, at the very first.
            return None

    def advance(self, sink: str, holder: str, before: int, after: int, until: int) -> bool:
        """All events up to `after` are with it.  False: somebody else holds it, or has moved it; nothing is changed."""
        where = self._held(sink, holder) & (relays.c.position == before)
        moved = update(relays).where(where).values(position=after, until_ms=until)
        # Relaxed: after a power cut some are published once more.
        return self.database.write(lambda tx: tx.connection.execute(moved).rowcount == 1, durable=False)

    def release(self, sink: str, holder: str) -> None:
        """Somebody else may relay at once."""
        gone = update(relays).where(self._held(sink, holder)).values(holder=None, until_ms=0)
        self.database.write(lambda tx: tx.connection.execute(gone), durable=False)

    def find_slowest(self, sinks: list[str]) -> int | None:
        """Up to which event all of these have got them; one that never began has none.  None: there are no sinks."""
        if not sinks:
            return None
        with self.database.read() as connection:
            found = connection.execute(select(relays.c.sink, relays.c.position).where(relays.c.sink.in_(sinks))).all()
        positions = {row.sink: int(row.position) for row in found}
        return min(positions.get(sink, 0) for sink in sinks)

    def list_lags(self, sinks: list[str], now_ms: int) -> list[SinkLag]:
        """How far each of these is behind; two looks into an index for each."""
        found = []
        with self.database.read() as connection:
            last = connection.execute(_LAST).scalar() or 0
            positions = {row.sink: row for row in connection.execute(select(relays).where(relays.c.sink.in_(sinks)))}
            for sink in sinks:
                row = positions.get(sink)
                position = row.position if row is not None else 0
                at_ms = connection.execute(_FIRST_BEHIND, {"p_position": position}).scalar()
                held = row is not None and row.holder is not None and row.until_ms >= now_ms
                seconds = 0.0 if at_ms is None else max(now_ms - at_ms, 0) / 1000
                found.append(SinkLag(sink, position, max(last - position, 0), seconds, held))
        return found

    @staticmethod
    def _held(sink: str, holder: str) -> ColumnElement[bool]:
        return (relays.c.sink == sink) & (relays.c.holder == holder)
