"""The balance of all jobs (JOB-3): accepted = those that stand in each state + those removed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import BigInteger, Text, delete, func, insert, literal_column, select, text, union_all

from jobs import events
from jobs.db import Database, Transaction
from jobs.models import counters, jobs
from jobs.states import State

_PURGED, _DOUBLED, _FOUND = "purged.", "doubled", "found."
_STANDING = select(jobs.c.state, func.count()).group_by(jobs.c.state)
_COUNTED = select(counters.c.name, counters.c.value).where(
    counters.c.name.like(f"{_PURGED}%") | (counters.c.name == _DOUBLED)
)
# How many numbers were given: one for each accepted job, and one for each doubled message.  SQLite takes a number
# back when its transaction is; PostgreSQL does not, so there it proves nothing.
_GIVEN = (
    select(literal_column("'given'", Text), literal_column("seq", BigInteger))
    .select_from(text("sqlite_sequence"))
    .where(text("name = 'jobs'"))
)


@dataclass(frozen=True, slots=True)
class Ledger:
    """`accepted`: on SQLite counted independently of the jobs that are there; on PostgreSQL their sum."""

    accepted: int
    by_state: dict[State, int]
    purged: dict[State, int]

    @property
    def balanced(self) -> bool:
        return self.accepted == sum(self.by_state.values()) + sum(self.purged.values())


def read(database: Database) -> Ledger:
    """The balance at one moment: one statement, so that no job is seen twice or missed on its way."""
    parts = [_STANDING, _COUNTED]
    if database.engine.dialect.name == "sqlite":
        parts.append(_GIVEN)
    with database.read() as connection:
        return _ledger(tuple(row) for row in connection.execute(union_all(*parts)))


def _ledger(rows: Iterable[tuple[str, int]]) -> Ledger:
    found = dict(rows)
    by_state = {state: found.get(state.value, 0) for state in State}
    purged = {state: found.get(f"{_PURGED}{state.value}", 0) for state in State}
    total = sum(by_state.values()) + sum(purged.values())
    accepted = found["given"] - found.get(_DOUBLED, 0) if "given" in found else total
    return Ledger(accepted, by_state, purged)


def note_findings(database: Database, counts: Mapping[str, int], subjects: Mapping[str, str], now: int) -> None:
    """Store what the latest audit found: its counts replace those before, and each subject gets an event.

    `counts`: check -> how many.  `subjects`: job id, or the name of a fleet or the ledger -> check.
    """

    def unit(tx: Transaction) -> None:
        tx.connection.execute(delete(counters).where(counters.c.name.like(f"{_FOUND}%")))
        tx.connection.execute(
            insert(counters), [{"name": f"{_FOUND}{check}", "value": count} for check, count in counts.items()]
        )
        for subject, check in subjects.items():
            events.note(tx, subject, "invariant.broken", now, {"check": check})

    database.write(unit)


def findings(database: Database) -> dict[str, int]:
    """What the latest audit found: check -> how many.  Empty before the first."""
    found = select(counters.c.name, counters.c.value).where(counters.c.name.like(f"{_FOUND}%"))
    with database.read() as connection:
        return {row.name.removeprefix(_FOUND): row.value for row in connection.execute(found)}
