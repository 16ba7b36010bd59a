"""Names of models under which the record takes no jobs.

A name is closed while its model is removed, when that is gone, or when it was given to the model before another.  The
statement that accepts a job asks in the same breath, so that no job comes in behind the back of who closes a name: on
PostgreSQL that one holds the table of jobs meanwhile, on SQLite there is one writer anyway.
"""

from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, select, update

from database.db import Transaction
from foundation.errors import Conflict
from jobs.models import closed_models, jobs

IS_CLOSED = f"(SELECT name FROM {closed_models} WHERE name = given.model) IS NOT NULL"
"""Asked by the INSERT of jobs, each of which is called `given`: one look by the name, however many are closed."""


class Because(StrEnum):
    REMOVING = "removing"  # what waits is worked off, and then it goes
    REMOVED = "removed"
    RENAMED = "renamed"


class NameClosed(Conflict):
    """No jobs are accepted under this name."""

    code = "model_closed"


@dataclass(frozen=True, slots=True)
class ClosedName:
    """Since when, by whom and why.  `now_called`, `until_ms`: of a former name, whose it is, and until when submits
    under it are taken for that; None: for good."""

    name: str
    because: Because
    changed_ms: int
    changed_by: str | None = None
    now_called: str | None = None
    until_ms: int | None = None

    def stands_for(self, now_ms: int) -> str | None:
        """The model that a submit under this name means; None: none any more."""
        if self.because is not Because.RENAMED or (self.until_ms is not None and now_ms >= self.until_ms):
            return None
        return self.now_called

    def refusal(self) -> str:
        """What a submit under this name is told, with what to do."""
        match self.because:
            case Because.REMOVING:
                return f"Model {self.name!r} is being removed: it takes no new jobs, and goes when the last has ended."
            case Because.RENAMED:
                return f"Model {self.name!r} is called {self.now_called!r} now; submit under that name."
        return f"Model {self.name!r} was removed; POST /admin/register adds it anew."


def all_of(connection: Connection) -> dict[str, ClosedName]:
    rows = connection.execute(select(closed_models)).all()
    return {
        row.name: ClosedName(
            row.name, Because(row.because), row.changed_ms, row.changed_by, row.now_called, row.until_ms
        )
        for row in rows
    }


def find(tx: Transaction, name: str) -> ClosedName | None:
    return all_of(tx.connection).get(name)


def revived(tx: Transaction, job_id: str, model: str) -> str:
    """The name under which a dead job that was just queued goes on.  Raises NameClosed, which undoes it.

    After it was queued: whoever closes a name waits for that, or has done before.
    """
    closed = find(tx, model)
    if closed is None:
        return model
    if closed.because is not Because.RENAMED or closed.now_called is None:
        raise NameClosed(
            f"{closed.refusal()}  Job {job_id!r} stays dead; it can be queued again when there is a model "
            "of this name, or be submitted anew for another.",
            model=model,
            job_id=job_id,
        )
    tx.connection.execute(update(jobs).where(jobs.c.id == job_id).values(model=closed.now_called))
    return closed.now_called
