"""Batches: a row each, and the lines that were received.

    open ──▶ closed ──▶ ended     lines are received one chunk after another; then its jobs run; all have ended
    named                         its jobs were submitted under its name, in one request or in several

`lines` says which line is next.  The transaction that accepts the jobs of a chunk also moves it, if it is where the
chunk begins; so a line is accepted once, however often it is sent (BATCH-1).  What came of the jobs is counted in the
table of jobs, by an index, so that no transition of a job writes to its batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

import orjson
from sqlalchemy import (
    ColumnElement,
    Integer,
    bindparam,
    case,
    delete,
    func,
    insert,
    select,
    text,
    update,
)

from slotkeeper.db import Database, Transaction, Write
from slotkeeper.db.compiled_sql import BulkInsert, CompiledStatement
from slotkeeper.errors import Conflict, IdempotencyConflict, InsufficientCredits, NotFound, TooManyRequests
from slotkeeper.jobs import acceptance, events, notifications
from slotkeeper.jobs.events import WriteAuditEntry
from slotkeeper.jobs.rows import queued_job_from_row
from slotkeeper.jobs.statements import QUEUED_JOB_COLUMNS, in_state, select_of_batch, unindexed
from slotkeeper.jobs.states import ACTIVE_STATES, FINAL_STATES, State
from slotkeeper.jobs.tables import batch_errors, batches, jobs, messages
from slotkeeper.jobs.values import AcceptedJob, NewJob, QueuedJob

Row: TypeAlias = Any
T = TypeVar("T")

ENDED_TYPE = "batch.ended"
"""The type of the event, and of the message, that all jobs of a batch have ended."""
MAX_UNFINISHED = 100
"""Batches of a tenant that have not ended."""
_RETRY_S = 60
_NO_KEY_EXPIRES = 0


class BatchState(StrEnum):
    """NAMED: of jobs that were submitted under one name; the others: of lines."""

    NAMED = "named"
    OPEN = "open"
    CLOSED = "closed"
    ENDED = "ended"


class OnError(StrEnum):
    """What becomes of a batch with lines that cannot be accepted.  SKIP: the others run; REFUSE: none does."""

    SKIP = "skip"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch.

    head: what its lines inherit.  lines: how many were received, and the number of the next.  refused: of these.
    has_held: some of its jobs may be on hold.  changed_ms: when its last line came.  cancel_ms: when its cancellation
    was requested.  ends: number of jobs in each state at its end; later, retention removes them.
    """

    tenant: str
    id: str
    state: BatchState
    created_ms: int
    changed_ms: int
    name: str | None = None
    on_error: OnError = OnError.SKIP
    head: Mapping[str, Any] = field(default_factory=dict)
    callback_url: str | None = None
    deadline_ms: int | None = None
    lines: int = 0
    refused: int = 0
    is_paused: bool = False
    has_held: bool = False
    closed_ms: int | None = None
    cancel_ms: int | None = None
    ended_ms: int | None = None
    ends: Mapping[State, int] | None = None

    @property
    def holds_lines(self) -> bool:
        """Whether new lines wait until they are released."""
        return self.is_paused or (self.on_error is OnError.REFUSE and self.state is BatchState.OPEN)

    @property
    def shown_state(self) -> str:
        """Return the state of a batch that has not ended: open, active or paused."""
        if self.is_paused:
            return "paused"
        return "open" if self.state is BatchState.OPEN else "active"

    @property
    def is_refused(self) -> bool:
        """Whether none of its jobs may run, because a line was refused."""
        return self.on_error is OnError.REFUSE and self.refused > 0


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line was refused.  field: of the line; None: it concerns the whole line."""

    line: int
    code: str
    message: str
    field: str | None = None
    custom_id: str | None = None


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch has come.  by_state: number of its jobs in each state.  completed_ms: its end; None: not yet."""

    batch: Batch
    by_state: Mapping[State, int]
    completed_ms: int | None

    @property
    def jobs(self) -> int:
        return sum(self.by_state.values())

    @property
    def is_gone(self) -> bool:
        """Whether it is named, and all its jobs were removed."""
        return self.batch.state is BatchState.NAMED and not self.by_state

    @property
    def ended(self) -> int:
        return sum(count for state, count in self.by_state.items() if state in FINAL_STATES)


class BatchMoved(Conflict):
    """The batch has changed since it was read."""


_IS_BATCH = (batches.c.tenant == bindparam("p_tenant")) & (batches.c.id == bindparam("p_batch"))
_ADD_NAMED = BulkInsert(batches, unique=("tenant", "id"))
_FIND = CompiledStatement(select(batches).where(_IS_BATCH))
_FIND_KEY = CompiledStatement(
    select(batches).where(batches.c.tenant == bindparam("p_tenant"), batches.c.key == bindparam("p_key"))
)
# The condition of the index, word for word.
_UNFINISHED = text("state IN ('open', 'closed')")
_LIST_UNFINISHED = CompiledStatement(select(batches).where(_UNFINISHED).order_by(batches.c.created_ms))
_COUNT_UNFINISHED = CompiledStatement(
    select(func.count()).select_from(batches).where(_UNFINISHED, batches.c.tenant == bindparam("p_tenant"))
)
_ADVANCE = CompiledStatement(
    update(batches)
    .where(_IS_BATCH, batches.c.lines == bindparam("p_from"), batches.c.state == BatchState.OPEN.value)
    .where(batches.c.cancel_ms.is_(None), batches.c.paused == bindparam("p_paused"))
    .values(
        lines=bindparam("p_to"),
        refused=batches.c.refused + bindparam("p_refused"),
        has_held=case((bindparam("p_held", type_=Integer) == 1, 1), else_=batches.c.has_held),
        changed_ms=bindparam("p_now"),
    )
)
_ERRORS = BulkInsert(batch_errors)
# IS NOT NULL is redundant, but SQLite uses the partial index only with its condition.
_IN_BATCH = (
    text("batch IS NOT NULL"),
    jobs.c.tenant == bindparam("p_tenant"),
    jobs.c.batch == bindparam("p_batch"),
)
_COUNT_JOBS = CompiledStatement(
    select(jobs.c.state, func.count().label("jobs")).where(*_IN_BATCH).group_by(jobs.c.state)
)
_ANY_ACTIVE = [CompiledStatement(select_of_batch(state).limit(1)) for state in sorted(ACTIVE_STATES)]
_LAST_END = CompiledStatement(select(func.max(jobs.c.finished_ms)).where(*_IN_BATCH))
_IS_HELD = in_state(State.DELAYED) & jobs.c.due_ms.is_(None)
_HELD = select_of_batch(State.DELAYED).where(jobs.c.due_ms.is_(None))


def add_named(tx: Transaction, tenant: str, batch: str, now_ms: int) -> None:
    """Add the row of a batch whose jobs are accepted under its name, unless it is there.

    Raises Conflict: it is a batch of lines.
    """
    known = _FIND.fetch_first(tx.connection, {"p_tenant": tenant, "p_batch": batch})
    if known is None:
        key, times = {"tenant": tenant, "id": batch}, {"created_ms": now_ms, "changed_ms": now_ms}
        _ADD_NAMED.execute(tx.connection, [{**key, "state": BatchState.NAMED.value, **times}])
    elif known.state != BatchState.NAMED:
        raise Conflict(f"Batch {batch!r} takes lines, at POST /batches/{batch}/lines.", batch=batch)


class Batches:
    """The batches in the database.  All methods raise DatabaseUnavailable; those that write also CommitUnknown."""

    def __init__(self, database: Database) -> None:
        self.database = database

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, tenant: str, batch: str) -> Batch | None:
        with self.database.read() as connection:
            row = _FIND.fetch_first(connection, {"p_tenant": tenant, "p_batch": batch})
        return None if row is None else _from_row(row)

    def find(self, batch: str, tenant: str | None) -> Batch | None:
        """Return a batch by its id.  tenant: None: of any tenant; several may have named one so, and one is returned.

        A batch of lines comes first.
        """
        query = select(batches).where(batches.c.id == batch)
        if tenant is not None:
            query = query.where(batches.c.tenant == tenant)
        is_named = batches.c.state == BatchState.NAMED.value
        with self.database.read() as connection:
            row = connection.execute(query.order_by(case((is_named, 1), else_=0), batches.c.tenant).limit(1)).first()
        return None if row is None else _from_row(row)

    def list_newest(self, tenant: str | None, before: str | None, limit: int) -> list[Batch]:
        """Return the newest batches of a tenant, or of all.  before: the id of the last one of the page before."""
        query = select(batches).order_by(batches.c.id.desc(), batches.c.tenant.desc()).limit(limit)
        if tenant is not None:
            query = query.where(batches.c.tenant == tenant)
        if before is not None:
            query = query.where(batches.c.id < before)
        with self.database.read() as connection:
            return [_from_row(row) for row in connection.execute(query)]

    def list_unfinished(self) -> list[Batch]:
        """Return the batches of lines that have not ended, the oldest first."""
        with self.database.read() as connection:
            return [_from_row(row) for row in _LIST_UNFINISHED.fetch_all(connection, {})]

    def read_progress(self, batch: Batch) -> BatchProgress:
        """Return how far a batch has come.  After retention has removed jobs, they count as they were at its end."""
        with self.database.read() as connection:
            by_state = _count_jobs(connection, batch)
            if batch.ends is not None and sum(by_state.values()) < sum(batch.ends.values()):
                by_state = dict(batch.ends)
            has_ended = batch.state in (BatchState.NAMED, BatchState.ENDED) and by_state.keys() <= FINAL_STATES
            completed_ms = batch.ended_ms or _LAST_END.fetch_value(connection, _params(batch)) if has_ended else None
        return BatchProgress(batch, by_state, completed_ms)

    def list_errors(self, batch: Batch, first: int, last: int, limit: int) -> list[LineError]:
        """Return why lines from `first` to `last` were refused, in the order of lines."""
        query = select(batch_errors).where(batch_errors.c.batch == batch.id).order_by(batch_errors.c.line)
        query = query.where(batch_errors.c.line >= first, batch_errors.c.line <= last).limit(limit)
        with self.database.read() as connection:
            rows = connection.execute(query).all()
        return [LineError(row.line, row.code, row.message, row.field, row.custom_id) for row in rows]

    # -- lines -----------------------------------------------------------------------------------------------

    def create(self, new: Batch, key: str | None, fingerprint: str, most: int = MAX_UNFINISHED) -> tuple[Batch, bool]:
        """Add an open batch, and return it and whether it is new.  most: batches that have not ended.

        Raises IdempotencyConflict: the key came with another head; TooManyRequests: too many have not ended.
        """
        row = {
            "tenant": new.tenant,
            "id": new.id,
            "state": BatchState.OPEN.value,
            "name": new.name,
            "key": key,
            "fingerprint": fingerprint,
            "on_error": new.on_error.value,
            "head": orjson.dumps(dict(new.head)).decode(),
            "callback_url": new.callback_url,
            "deadline_ms": new.deadline_ms,
            "created_ms": new.created_ms,
            "changed_ms": new.created_ms,
        }

        def unit(tx: Transaction) -> tuple[Batch, bool] | IdempotencyConflict | TooManyRequests:
            if key is not None:
                known = _FIND_KEY.fetch_first(tx.connection, {"p_tenant": new.tenant, "p_key": key})
                if known is not None and known.fingerprint != fingerprint:
                    return IdempotencyConflict(
                        f"This Idempotency-Key is that of batch {known.id!r}, which has another head; send the same "
                        "head again, or use a new key.",
                        batch=known.id,
                    )
                if known is not None:
                    return _from_row(known), False
            count = _COUNT_UNFINISHED.fetch_value(tx.connection, {"p_tenant": new.tenant})
            if count >= most:
                return TooManyRequests(
                    f"{count} batches of tenant {new.tenant!r} have not ended, and no more are accepted; close those "
                    "that have all their lines, or wait until some have ended.",
                    _RETRY_S,
                    tenant=new.tenant,
                )
            tx.connection.execute(insert(batches), row)
            return new, True

        return self.database.commit(Write(unit))

    def accept_lines(
        self, batch: Batch, first: int, count: int, new: Sequence[NewJob], errors: Sequence[LineError], now_ms: int
    ) -> list[AcceptedJob]:
        """Accept `count` lines from `first` on: their jobs, and why the others are refused.

        Returns the accepted jobs in order.  Raises BatchMoved, before anything was written, if the batch is not as it
        was read, or if the tenant has too few credits (InsufficientCredits); ModelClosed.
        """
        prepared = [acceptance.prepare(job, now_ms) for job in new]
        params = _params(batch) | {"p_from": first, "p_to": first + count, "p_refused": len(errors), "p_now": now_ms}
        params |= {"p_paused": int(batch.is_paused), "p_held": int(any(job.is_held for job in new))}
        rows = [{"batch": batch.id, **asdict(error)} for error in errors]

        paid = [one for one in prepared if one.job.reserved is not None]

        def unit(tx: Transaction) -> list[AcceptedJob] | BatchMoved | InsufficientCredits:
            if short := acceptance.find_shortage(tx, paid, _NO_KEY_EXPIRES):
                return short
            if not _ADVANCE.execute(tx.connection, params):
                return BatchMoved("The batch has changed meanwhile; read it, and go on with its next line.")
            for row in rows:
                tx.insert(_ERRORS, row)
            accepted = acceptance.accept(tx, prepared, _NO_KEY_EXPIRES, _NO_KEY_EXPIRES) if prepared else []
            if isinstance(accepted, IdempotencyConflict):
                raise accepted
            return accepted

        return self.database.commit(Write(unit, size=sum(len(job.payload) for job in new)))

    def close(self, batch: Batch, now_ms: int) -> bool:
        """Take no more lines.  Returns False if the batch is not open, or has received lines since it was read."""
        values = {"state": BatchState.CLOSED.value, "closed_ms": now_ms}
        return self._update(batch, values, batches.c.state == BatchState.OPEN.value, batches.c.lines == batch.lines)

    # -- control ---------------------------------------------------------------------------------------------

    def request_cancel(self, batch: Batch, now_ms: int, write_audit: WriteAuditEntry | None = None) -> None:
        """Take no more lines, and cancel all jobs from now on."""
        values = {
            "cancel_ms": func.coalesce(batches.c.cancel_ms, now_ms),
            "closed_ms": func.coalesce(batches.c.closed_ms, now_ms),
            "state": BatchState.CLOSED.value,
        }
        self._update(batch, values, _UNFINISHED, write_audit=write_audit)

    def set_paused(self, batch: Batch, is_paused: bool, write_audit: WriteAuditEntry) -> None:
        """Start no more lines, or go on, unless the batch has ended."""
        values = {"paused": int(is_paused)} | ({"has_held": 1} if is_paused else {})
        was_not = batches.c.paused == int(not is_paused)
        self._update(batch, values, _UNFINISHED, was_not, write_audit=write_audit)

    def list_held(self, batch: Batch, limit: int) -> list[QueuedJob]:
        """Return jobs on hold, the first accepted first."""
        with self.database.read() as connection:
            seqs = connection.execute(_HELD.limit(limit), _params(batch)).scalars().all()
            if not seqs:
                return []
            rows = connection.execute(select(*QUEUED_JOB_COLUMNS).where(jobs.c.seq.in_(seqs)).order_by(jobs.c.seq))
            return [queued_job_from_row(row) for row in rows]

    def release(self, batch: Batch, held: Sequence[QueuedJob], now_ms: int) -> bool:
        """Let jobs on hold be queued, unless the batch has been paused or canceled meanwhile.

        held: those that `list_held` has returned; none: there are none, which is noted.  Returns False if it has been.
        """
        seqs = [job.seq for job in held]

        def unit(tx: Transaction) -> bool:
            # Locked, so that the batch is not paused, and gets no further line, before these jobs are released.
            row = tx.connection.execute(select(batches).where(_IS_BATCH).with_for_update(), _params(batch)).first()
            if row is None or row.paused or row.cancel_ms is not None:
                return False
            if seqs:
                tx.connection.execute(update(jobs).where(jobs.c.seq.in_(seqs), _IS_HELD).values(due_ms=now_ms))
            elif row.state == BatchState.CLOSED and not tx.connection.execute(_HELD.limit(1), _params(batch)).first():
                tx.connection.execute(update(batches).where(_IS_BATCH).values(has_held=0), _params(batch))
            return True

        return self.database.write(unit)

    def end(self, batch: Batch, now_ms: int) -> bool:
        """End a closed batch, with its event and the message for its `callback_url`, if all its jobs have ended."""

        def unit(tx: Transaction) -> bool:
            params = _params(batch)
            if any(query.fetch_first(tx.connection, params) is not None for query in _ANY_ACTIVE):
                return False  # It is found by few rows.  On PostgreSQL a job may move between these statements.
            by_state = _count_jobs(tx.connection, batch)
            if not by_state.keys() <= FINAL_STATES:
                return False
            counts = {state.value: count for state, count in by_state.items()}
            values = {"state": BatchState.ENDED.value, "ended_ms": now_ms, "ends": orjson.dumps(counts).decode()}
            closed = update(batches).where(_IS_BATCH, batches.c.state == BatchState.CLOSED.value).values(**values)
            if not tx.connection.execute(closed, params).rowcount:
                return False
            data = {"lines": batch.lines, "refused": batch.refused, "by_state": counts}
            events.add_event(tx, batch.id, ENDED_TYPE, now_ms, data, tenant=batch.tenant)
            if batch.callback_url:
                notifications.add_message(tx, batch.id, 0, State.COMPLETED, ENDED_TYPE, now_ms)
            return True

        return self.database.write(unit)

    def delete_old(self, before_ms: int, limit: int = 500) -> int:
        """Delete batches that were made before a time and none of whose jobs are stored, and return how many."""
        any_job = (
            select(jobs.c.seq)
            .where(text("jobs.batch IS NOT NULL"), jobs.c.tenant == batches.c.tenant, jobs.c.batch == batches.c.id)
            .limit(1)
            .scalar_subquery()
        )
        over = unindexed(batches.c.state).in_([BatchState.NAMED.value, BatchState.ENDED.value])
        pending = (
            select(messages.c.event)
            .where(messages.c.job_id == batches.c.id, unindexed(messages.c.state) == "pending")
            .limit(1)
            .scalar_subquery()
        )
        ended_ms = func.coalesce(batches.c.ended_ms, batches.c.changed_ms)
        old = (ended_ms < before_ms) & over & any_job.is_(None) & pending.is_(None)
        with self.database.read() as connection:
            found = connection.execute(select(batches.c.tenant, batches.c.id).where(old).limit(limit)).all()
        if not found:
            return 0

        def unit(tx: Transaction) -> None:
            ids = [row.id for row in found]
            tx.connection.execute(delete(batches).where(batches.c.id.in_(ids), old))
            gone = ~select(batches.c.id).where(batches.c.id == batch_errors.c.batch).exists()
            tx.connection.execute(delete(batch_errors).where(batch_errors.c.batch.in_(ids), gone))

        self.database.write(unit)
        return len(found)

    def _update(
        self,
        batch: Batch,
        values: Mapping[str, Any],
        *conditions: ColumnElement[bool] | Any,
        write_audit: WriteAuditEntry | None = None,
    ) -> bool:
        """Change a batch, and write the audit entry, if the conditions are met."""
        statement = update(batches).where(_IS_BATCH, *conditions).values(**values)

        def unit(tx: Transaction) -> bool:
            changed = bool(tx.connection.execute(statement, _params(batch)).rowcount)
            if changed and write_audit is not None:
                write_audit(tx)
            return changed

        return self.database.write(unit)


def require(found: T | None, batch_id: str) -> T:
    """Return what was found of a batch.  Raises NotFound."""
    if found is None:
        raise NotFound("There is no such batch, or its jobs have been removed.", batch=batch_id)
    return found


def _params(batch: Batch) -> dict[str, Any]:
    return {"p_tenant": batch.tenant, "p_batch": batch.id}


def _count_jobs(connection: Any, batch: Batch) -> dict[State, int]:
    counted = {State(row.state): row.jobs for row in _COUNT_JOBS.fetch_all(connection, _params(batch))}
    return {state: counted[state] for state in State if state in counted}


def _from_row(row: Row) -> Batch:
    return Batch(
        tenant=row.tenant,
        id=row.id,
        state=BatchState(row.state),
        created_ms=row.created_ms,
        changed_ms=row.changed_ms,
        name=row.name,
        on_error=OnError(row.on_error),
        head=orjson.loads(row.head),
        callback_url=row.callback_url,
        deadline_ms=row.deadline_ms,
        lines=row.lines,
        refused=row.refused,
        is_paused=bool(row.paused),
        has_held=bool(row.has_held),
        closed_ms=row.closed_ms,
        cancel_ms=row.cancel_ms,
        ended_ms=row.ended_ms,
        ends=None if row.ends is None else {State(name): count for name, count in orjson.loads(row.ends).items()},
    )
