"""Names of models under which the database accepts no jobs.

A name is closed while its model drains before a removal, and after the removal until a model of that name is registered
again.  The INSERT of a job reads this table, so no job is accepted while a name is being closed: on PostgreSQL the
closing transaction locks the table of jobs, on SQLite there is one writer.
"""

from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, Text, delete, insert, literal_column, select, text

from slotkeeper.db import Transaction
from slotkeeper.errors import Conflict
from slotkeeper.jobs.tables import closed_models, jobs

CLOSED_COLUMN = literal_column(
    # The concatenation lets SQLite use the index, which it does not for a column of the inserted row alone.
    f"(SELECT {closed_models}.name FROM {closed_models} WHERE {closed_models}.name = {jobs}.model || '')",
    Text,
).label("closed_name")
"""Column of RETURNING of the INSERT of jobs: the model's name if it is closed, else NULL."""


class ClosingReason(StrEnum):
    REMOVING = "removing"  # the model drains, and is removed when its last job has ended
    REMOVED = "removed"


class ModelClosed(Conflict):
    """No jobs are accepted under this name."""

    code = "model_closed"


@dataclass(frozen=True, slots=True)
class ClosedModel:
    """A closed name: why, since when and by whom."""

    name: str
    because: ClosingReason
    changed_ms: int
    changed_by: str | None = None

    def explain(self) -> str:
        """Return the refusal of a submit under this name, with the remedy."""
        if self.because is ClosingReason.REMOVING:
            return f"Model {self.name!r} is being removed: it takes no new jobs, and goes when the last has ended."
        return f"Model {self.name!r} was removed; POST /admin/register adds it anew."


def list_closed(connection: Connection) -> dict[str, ClosedModel]:
    rows = connection.execute(select(closed_models)).all()
    return {row.name: ClosedModel(row.name, ClosingReason(row.because), row.changed_ms, row.changed_by) for row in rows}


def find(tx: Transaction, name: str) -> ClosedModel | None:
    return list_closed(tx.connection).get(name)


def lock_jobs(tx: Transaction) -> None:
    """Wait for transactions that write jobs, and keep others from doing so until this one has ended."""
    if tx.connection.dialect.name == "postgresql":
        tx.connection.execute(text("LOCK TABLE jobs IN SHARE ROW EXCLUSIVE MODE"))


def close(tx: Transaction, closed: ClosedModel) -> None:
    """Close a name, or change why it is closed.  The caller has called `lock_jobs`."""
    reopen(tx, closed.name)
    values = {name: getattr(closed, name) for name in closed.__slots__} | {"because": closed.because.value}
    tx.connection.execute(insert(closed_models), values)


def reopen(tx: Transaction, name: str, because: ClosingReason | None = None) -> bool:
    """Open a name again.  Returns False if it was not closed, or not for this reason."""
    closed = closed_models.c.name == name
    if because is not None:
        closed &= closed_models.c.because == because.value
    return tx.connection.execute(delete(closed_models).where(closed)).rowcount == 1


def check_open(tx: Transaction, job_id: str, model: str) -> None:
    """Raise ModelClosed, which rolls the transaction back, if a dead job was queued under a closed name.

    Called after the job was queued: a transaction that closes the name waits for this one, or has committed before.
    """
    closed = find(tx, model)
    if closed is not None:
        raise ModelClosed(
            f"{closed.explain()}  Job {job_id!r} stays dead; it can be queued again when there is a model "
            "of this name, or be submitted anew for another.",
            model=model,
            job_id=job_id,
        )
