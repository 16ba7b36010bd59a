"""Validations: jobs with known answers.  What is done with them: routing/maintenance/validation_jobs.py."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import orjson
from sqlalchemy import Connection, delete, func, insert, select, update

from slotkeeper.audit import commit_audited, make_entry
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import storable_text, upsert
from slotkeeper.errors import NotFound
from slotkeeper.registry.tables import validation_answers, validations

Row: TypeAlias = Any
Compare: TypeAlias = Literal["equal", "subset", "close"]

TENANT = "validation"
"""The tenant of their jobs, and their source.  No tenant that is added may have this name."""
ANYTHING = "*"
"""In an expected answer: fits any value."""
LATEST = 20
"""So many answers of a server are looked at."""
_MAX_DETAIL = 500


class AnswerOutcome(StrEnum):
    """The outcome of a validation's job.  NONE: it ended without a result, which says nothing of its server."""

    AWAITED = "awaited"
    RIGHT = "right"
    WRONG = "wrong"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Validation:
    """A job with a known answer, submitted about every `every_s` seconds.

    payload, expected: JSON values.  compare: see `find_difference`.
    """

    name: str
    model: str
    payload: Mapping[str, Any]
    expected: Any
    every_s: int
    compare: Compare = "subset"
    tolerance: float = 0.0
    is_enabled: bool = True
    changed_by: str | None = None
    changed_ms: int = 0
    next_ms: int = 0


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """The latest answers of a server.  last_wrong_ms: None: none was wrong."""

    server: str
    right: int
    wrong: int
    none: int
    last_wrong_ms: int | None = None
    last_wrong: str | None = None

    @property
    def judged(self) -> int:
        return self.right + self.wrong


def find_difference(expected: Any, got: Any, compare: Compare, tolerance: float, path: str = "result") -> str | None:
    """Return where an answer differs from the expected one, as a sentence; None: it fits.

    compare: "equal"; "subset": objects may have further fields; "close": numbers may differ by `tolerance`.  Whatever
    compares, ANYTHING fits any value.
    """
    if expected == ANYTHING:
        return None
    if isinstance(expected, dict) and isinstance(got, dict):
        for name, value in expected.items():
            if name not in got:
                return f"{path} has no {name!r}"
            if found := find_difference(value, got[name], compare, tolerance, f"{path}.{name}"):
                return found
        further = got.keys() - expected.keys() if compare != "subset" else ()
        return f"{path} has {min(further)!r}, which is not expected" if further else None
    if isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            return f"{path} has {len(got)} values instead of {len(expected)}"
        pairs = enumerate(zip(expected, got, strict=True))
        differing = (find_difference(*pair, compare, tolerance, f"{path}.{n}") for n, pair in pairs)
        return next(filter(None, differing), None)
    return None if _is_same(expected, got, tolerance if compare == "close" else 0.0) else f"{path} differs"


def _is_same(expected: Any, got: Any, tolerance: float) -> bool:
    if isinstance(expected, bool) or isinstance(got, bool):
        return expected is got
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return math.isclose(expected, got, rel_tol=0.0, abs_tol=tolerance)
    return bool(expected == got)


class Validations:
    """Reads and changes validations and their answers.

    All methods raise DatabaseUnavailable; those that write also CommitUnknown.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def list_all(self) -> list[Validation]:
        """Return all validations, by name."""
        with self.database.read() as connection:
            return [_from_row(row) for row in connection.execute(select(validations).order_by(validations.c.name))]

    def set(self, given: Validation) -> None:
        """Add or replace a validation.  Its next job is submitted at once."""
        values = {
            "model": given.model,
            "payload": orjson.dumps(given.payload).decode(),
            "expected": orjson.dumps(given.expected).decode(),
            "compare": given.compare,
            "tolerance": given.tolerance,
            "every_s": given.every_s,
            "enabled": int(given.is_enabled),
            "next_ms": 0,
            "changed_by": given.changed_by,
            "changed_ms": given.changed_ms,
        }

        def unit(tx: Transaction) -> bool:
            upsert(tx.connection, validations, {"name": given.name}, values)
            return True

        entry = make_entry("validation.set", now_ms=given.changed_ms, model=given.model, validation=given.name)
        commit_audited(self.database, entry, unit)

    def remove(self, name: str) -> None:
        """Remove a validation; its answers stay.  Raises NotFound."""

        def unit(tx: Transaction) -> bool | NotFound:
            gone = tx.connection.execute(delete(validations).where(validations.c.name == name)).rowcount
            return bool(gone) or NotFound(f"There is no validation {name!r}.", validation=name)

        commit_audited(self.database, make_entry("validation.remove", validation=name), unit)

    # -- jobs ------------------------------------------------------------------------------------------------

    def claim(self, due: Validation, next_ms: int, job_id: str, now_ms: int) -> bool:
        """Note the next job of a validation.  Return False if another process has, or the validation has changed."""

        def unit(tx: Transaction) -> bool:
            as_read = (validations.c.name == due.name) & (validations.c.next_ms == due.next_ms)
            unchanged = as_read & (validations.c.changed_ms == due.changed_ms)
            if not tx.connection.execute(update(validations).where(unchanged).values(next_ms=next_ms)).rowcount:
                return False
            row = {"job_id": job_id, "validation": due.name, "model": due.model, "at_ms": now_ms}
            tx.connection.execute(insert(validation_answers), row)
            return True

        return self.database.write(unit)

    def list_awaited(self, limit: int) -> Sequence[Row]:
        """Return (job_id, validation, at_ms) of jobs whose answers are awaited, the oldest first."""
        is_awaited = validation_answers.c.outcome == AnswerOutcome.AWAITED.value
        columns = (validation_answers.c[name] for name in ("job_id", "validation", "at_ms"))
        query = select(*columns).where(is_awaited).order_by(validation_answers.c.at_ms).limit(limit)
        with self.database.read() as connection:
            return connection.execute(query).all()

    def note(
        self, job_id: str, outcome: AnswerOutcome, now_ms: int, server: str | None = None, detail: str | None = None
    ) -> bool:
        """Store the outcome of a job.  Return False if another process has."""
        values = {"outcome": outcome.value, "server": server, "at_ms": now_ms}
        values |= {"detail": None if detail is None else storable_text(detail, _MAX_DETAIL)}
        this = (validation_answers.c.job_id == job_id) & (validation_answers.c.outcome == AnswerOutcome.AWAITED.value)
        changed = update(validation_answers).where(this).values(**values)
        return self.database.write(lambda tx: tx.connection.execute(changed).rowcount == 1)

    def delete_old(self, before_ms: int) -> None:
        """Delete answers from before a time."""
        old = delete(validation_answers).where(validation_answers.c.at_ms < before_ms)
        self.database.write(lambda tx: tx.connection.execute(old), durable=False)

    # -- servers ---------------------------------------------------------------------------------------------

    def read_answers(self, since_ms: Mapping[str, int], server: str | None = None) -> list[ServerAnswers]:
        """Return the latest answers of each server, or of one, by server.

        since_ms: server -> only answers from after this time.
        """
        with self.database.read() as connection:
            rows = _latest(connection, server)
        by_server: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            if row.at_ms > since_ms.get(row.server, 0):
                by_server[row.server].append(row)
        return [_count(name, by_server[name]) for name in sorted(by_server)]


def _latest(connection: Connection, server: str | None) -> Sequence[Row]:
    """Return the latest answers of each server, the newest first."""
    newest = validation_answers.c.at_ms.desc(), validation_answers.c.job_id.desc()
    number = func.row_number().over(partition_by=validation_answers.c.server, order_by=newest).label("number")
    query = select(validation_answers, number).where(validation_answers.c.server.is_not(None))
    if server is not None:
        query = query.where(validation_answers.c.server == server)
    numbered = query.subquery()
    return connection.execute(select(numbered).where(numbered.c.number <= LATEST).order_by(numbered.c.number)).all()


def _count(server: str, rows: Sequence[Row]) -> ServerAnswers:
    outcomes = Counter(row.outcome for row in rows)
    wrong = next((row for row in rows if row.outcome == AnswerOutcome.WRONG), None)
    return ServerAnswers(
        server,
        outcomes[AnswerOutcome.RIGHT],
        outcomes[AnswerOutcome.WRONG],
        outcomes[AnswerOutcome.NONE],
        None if wrong is None else wrong.at_ms,
        None if wrong is None else wrong.detail,
    )


def _from_row(row: Row) -> Validation:
    return Validation(
        row.name,
        row.model,
        orjson.loads(row.payload),
        orjson.loads(row.expected),
        row.every_s,
        row.compare,
        row.tolerance,
        bool(row.enabled),
        row.changed_by,
        row.changed_ms,
        row.next_ms,
    )
