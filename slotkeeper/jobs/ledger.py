"""The ledger of all jobs (JOB-3): accepted = jobs in each state + deleted jobs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    CompoundSelect,
    Select,
    Text,
    cast,
    delete,
    func,
    insert,
    literal_column,
    select,
    text,
    union_all,
)

from slotkeeper.db import Database, Transaction
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.schema import counters
from slotkeeper.jobs import events
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import QUEUED_CONDITION, accepted, jobs

DIFFERENCE = "ledger_difference"
"""The finding of a check of invariants that holds Ledger.difference."""

_PURGED, _DOUBLED, _FOUND = "purged.", "doubled", "found."
_QUEUED_BY_MODEL = CompiledStatement(
    select(jobs.c.model, func.count()).where(text(QUEUED_CONDITION)).group_by(jobs.c.model)
)
_BY_STATE = select(jobs.c.state, func.count()).group_by(jobs.c.state)
_BUT_COMPLETED = _BY_STATE.where(jobs.c.state.in_([state.value for state in State if state is not State.COMPLETED]))
_COUNTED = select(counters.c.name, counters.c.value).where(
    counters.c.name.like(f"{_PURGED}%") | (counters.c.name == _DOUBLED)
)
# The number of accepted jobs, counted independently of the rows.  SQLite: the last acceptance number, which counts each
# accepted job and each doubled message; a rollback takes numbers back.  On PostgreSQL it does not, so a trigger counts.
_ACCEPTED = {
    "sqlite": select(literal_column("'given'", Text), literal_column("seq", BigInteger))
    .select_from(text("sqlite_sequence"))
    .where(text("name = 'jobs'")),
    "postgresql": select(
        literal_column("'accepted'", Text), cast(func.coalesce(func.sum(accepted.c.jobs), 0), BigInteger)
    ),
}
_MOST_PARTS = 1000
_FOLDED_AT_ONCE = 10_000
_PARTS = select(func.count()).select_from(accepted)
# One statement: readers see the parts or their sum.  Of two at the same time the second does nothing.
_FOLD = text(
    "WITH parts AS (DELETE FROM accepted WHERE (SELECT pg_try_advisory_xact_lock(5571702)) "
    "AND ctid = ANY(ARRAY(SELECT ctid FROM accepted LIMIT :p_limit)) RETURNING jobs), "
    "folded AS (INSERT INTO accepted (jobs) SELECT sum(jobs) FROM parts HAVING count(*) > 0) "
    "SELECT count(*) FROM parts"
)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The numbers of all jobs.  accepted: counted independently of the rows, so that a lost row is noticed."""

    accepted: int
    by_state: dict[State, int]
    purged: dict[State, int]

    @property
    def difference(self) -> int:
        """Accepted jobs that are in no state and were not deleted; negative: more jobs than were accepted."""
        return self.accepted - sum(self.by_state.values()) - sum(self.purged.values())

    @property
    def balanced(self) -> bool:
        return self.difference == 0


def read(database: Database) -> Ledger:
    """Return the ledger at one moment, by one statement, so that no job is counted twice or missed in a transition."""
    return _read(database, _BY_STATE)


def count_by_state(database: Database) -> dict[State, int]:
    """Return the number of jobs in each state, at one moment.

    Completed jobs, which may be millions, are not counted but computed from the others.  So only `read` notices a lost
    row.
    """
    found = _read(database, _BUT_COMPLETED)
    completed = found.accepted - sum(found.by_state.values()) - sum(found.purged.values())
    return found.by_state | {State.COMPLETED: max(completed, 0)}


def _read(database: Database, counts: Select[Any]) -> Ledger:
    parts: CompoundSelect[Any] = union_all(counts, _COUNTED, _ACCEPTED[database.engine.dialect.name])
    with database.read() as connection:
        return _ledger(tuple(row) for row in connection.execute(parts))


def fold(database: Database, most: int = _MOST_PARTS, page: int = _FOLDED_AT_ONCE) -> None:
    """Replace rows of `accepted` by their sum, `page` rows at once, while there are more than `most`.

    SQLite has none.
    """
    while _count_parts(database) > most:
        if database.write(lambda tx: tx.connection.execute(_FOLD, {"p_limit": page}).scalar_one()) <= 1:
            break  # Nothing is left to be added, or another process does it.


def _count_parts(database: Database) -> int:
    with database.read() as connection:
        return int(connection.execute(_PARTS).scalar_one())


def _ledger(rows: Iterable[tuple[str, int]]) -> Ledger:
    found = dict(rows)
    by_state = {state: found.get(state.value, 0) for state in State}
    purged = {state: found.get(f"{_PURGED}{state.value}", 0) for state in State}
    given = found.get("given", 0) - found.get(_DOUBLED, 0)
    return Ledger(found.get("accepted", given), by_state, purged)


def store_findings(
    database: Database, counts: Mapping[str, int], findings: Iterable[tuple[str, str]], now_ms: int
) -> None:
    """Store the findings of a check of invariants: the counts replace earlier ones, each finding gets an event.

    counts: check -> number of findings.  findings: (job id, or name of a fleet or of the ledger; check).
    """

    def unit(tx: Transaction) -> None:
        tx.connection.execute(delete(counters).where(counters.c.name.like(f"{_FOUND}%")))
        tx.connection.execute(
            insert(counters), [{"name": f"{_FOUND}{check}", "value": count} for check, count in counts.items()]
        )
        for subject, check in findings:
            events.add_event(tx, subject, "invariant.broken", now_ms, {"check": check})

    database.write(unit)


def read_findings(database: Database) -> dict[str, int]:
    """Return the findings of the latest check of invariants: check -> number.  Empty before the first check."""
    found = select(counters.c.name, counters.c.value).where(counters.c.name.like(f"{_FOUND}%"))
    with database.read() as connection:
        return {row.name.removeprefix(_FOUND): row.value for row in connection.execute(found)}


def queued_by_model(database: Database) -> Counter[str]:
    """Return the number of queued jobs of each model.  Raises DatabaseUnavailable."""
    with database.read() as connection:
        return Counter(dict(_QUEUED_BY_MODEL.fetch_all(connection, {})))
