"""Requests that a worker sent and handed over, or lost: whether their servers may still be running them.

A server that does not join a repeated request to its run could run the job twice at once.  So the worker that resumes
the run waits for evidence before it sends the request again (tasks/worker/server_call.py).  What the database knows of
that stands here.
"""

from dataclasses import dataclass

from sqlalchemy import Row, bindparam, case, literal_column, select, update

from slotkeeper.db import Database
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs

RELEASED_MS = 0
"""Instead of the time at which a request was sent: an operator says that its server has ended it."""
_RUNNING = jobs.c.state == literal_column(f"'{State.RUNNING.value}'")
# A run that is sent again gets a new time, so an older one belongs to the request of an earlier attempt.
_WAITS = jobs.c.remote_id.is_(None) & jobs.c.sent_ms.is_not(None) & (jobs.c.sent_ms < jobs.c.started_ms)
_RUNS_OF_SERVER = CompiledStatement(
    select(jobs.c.id, jobs.c.sent_ms, case((_WAITS, 1), else_=0).label("waits"))
    .where(_RUNNING, jobs.c.server == bindparam("p_server"))
    .order_by(jobs.c.sent_ms, jobs.c.seq)
)
_WAITING_SLOTS = CompiledStatement(
    select(jobs.c.slot).where(_RUNNING, jobs.c.server == bindparam("p_server"), _WAITS).order_by(jobs.c.slot)
)
_RELEASE = update(jobs).where(_RUNNING, jobs.c.server == bindparam("p_server"), _WAITS).values(sent_ms=RELEASED_MS)


@dataclass(frozen=True, slots=True)
class EarlierRequest:
    """The request of an earlier attempt.

    sent_ms: when it was sent, or RELEASED_MS.
    runs: of its server in the database, this one included.
    rank: how many other runs wait there for requests that were sent before this one.
    """

    sent_ms: int
    runs: int
    rank: int

    def is_over_by_count(self, active: int) -> bool:
        """Return whether a server with so many active runs has ended this request.

        As many requests have ended as runs are missing there, and those that were sent first go on first: so two runs
        never take the end of one request for the end of both.
        """
        return self.rank < self.runs - active


def find(database: Database, server: str, job_id: str) -> EarlierRequest | None:
    """Return the earlier request that a running job waits for; None: it waits for none."""
    with database.read() as connection:
        rows: list[Row] = list(_RUNS_OF_SERVER.fetch_all(connection, {"p_server": server}))
    waiting = [row for row in rows if row.waits]
    for rank, row in enumerate(waiting):
        if row.id == job_id:
            return EarlierRequest(row.sent_ms, len(rows), rank)
    return None


def list_slots(database: Database, server: str, slot: str | None = None) -> list[str]:
    """Return the slots of a server, or this one, whose runs wait for earlier requests."""
    with database.read() as connection:
        rows = _WAITING_SLOTS.fetch_all(connection, {"p_server": server})
    return [row.slot for row in rows if slot in (None, row.slot)]


def release(database: Database, server: str, slot: str | None = None) -> None:
    """Let the runs of a server that wait for earlier requests go on, as an operator asks."""
    statement = _RELEASE if slot is None else _RELEASE.where(jobs.c.slot == slot)
    database.write(lambda tx: tx.connection.execute(statement, {"p_server": server}))
