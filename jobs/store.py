"""The only writer of `jobs.state`.

Every transition is one UPDATE that names the state, and for a running job the attempt, that it expects to
find; its row count is the answer.  The event and, at the end of a job, the webhook row stand in the same
transaction.  What may follow what is read from states.TRANSITIONS and nowhere else.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Select,
    Update,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from jobs import events, history, idempotency, tellings, webhooks
from jobs.db import Database, Transaction
from jobs.errors import Conflict
from jobs.models import counters, jobs
from jobs.models import events as _events
from jobs.models import tellings as _tellings
from jobs.models import webhooks as _webhooks
from jobs.record import Accepted, Brief, Event, Job, NewJob, Past, Run, Waiting, storable
from jobs.states import ACTIVE, FINAL, TRANSITIONS, Budget, Edge, State, Why, edge

Row: TypeAlias = Any  # SQLAlchemy's Row is generic in its columns; ours are named at the statements

# A worker may die and its job go on at the server: these transitions keep what is needed to resume it.
_KEEPS_REMOTE = frozenset({Why.LEASE_EXPIRED, Why.HANDED_BACK})
# Where a run ends without a result; a job that shall be canceled does not go there.
_UNFINISHED = frozenset({State.QUEUED, State.DELAYED, State.DEAD})
_MAX_ERROR = 2000

_WAITING_COLUMNS = (
    jobs.c.id,
    jobs.c.seq,
    jobs.c.model,
    jobs.c.tier,
    jobs.c.tenant,
    jobs.c.created_ms,
    jobs.c.needs,
)
_BRIEF_COLUMNS = (*_WAITING_COLUMNS, jobs.c.state, jobs.c.attempt, jobs.c.lease, jobs.c.cancel_requested_ms)
_MOVED_COLUMNS = (
    *_WAITING_COLUMNS,
    jobs.c.attempt,
    jobs.c.failures,
    jobs.c.crashes,
    jobs.c.deadline_ms,
    jobs.c.remote_id,
    jobs.c.sent_ms,
    jobs.c.started_ms,
    jobs.c.cancel_requested_ms,
    jobs.c.callback_url,
    jobs.c.envelope,
)
_LISTED_COLUMNS = tuple(column for column in jobs.c if column.name not in {"payload", "result", "envelope"})


@dataclass(frozen=True, slots=True)
class Moved:
    """A transition that has been committed."""

    job: Waiting
    to: State
    attempt: int
    failures: int
    crashes: int
    remote_id: str | None
    webhook_id: str | None
    telling_id: str | None = None  # what those who wait outside are owed, if any do


@dataclass(frozen=True, slots=True)
class Error:
    """Why a run did not succeed: a stable word and a sentence."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class _Act:
    """A transition that is wanted of one job."""

    state: State
    why: Why
    job_id: str
    now: int
    data: dict[str, Any] = field(default_factory=dict)  # for its event
    params: dict[str, Any] = field(default_factory=dict)  # of its statement


@dataclass(frozen=True, slots=True)
class _Move:
    """One prepared transition."""

    edge: Edge
    statement: Update
    names: frozenset[str]  # of the parameters that the statement takes


def _waiting(row: Row) -> Waiting:
    return Waiting(row.id, row.seq, row.model, row.tier, row.tenant, row.created_ms, row.needs)


def _values(state: State, why: Why, to: State) -> dict[str, Any]:
    """Columns that a transition sets, beside `state`, `why` and the budget's counter."""
    stopped: dict[str, Any] = {"slot": None, "lease": None}
    forgotten: dict[str, Any] = {} if why in _KEEPS_REMOTE else {"remote_id": None, "sent_ms": None}
    if forgotten and why is not Why.SERVER_LOST:  # That one may still have the result of a run that has ended.
        forgotten["server"] = None
    error: dict[str, Any] = {"error_code": bindparam("p_error_code"), "error_message": bindparam("p_error_message")}
    match to:
        case State.RUNNING:
            return {
                "attempt": jobs.c.attempt + 1,  # LEASE-2: the token grows with every start
                "started_ms": bindparam("p_now"),
                "server": bindparam("p_server"),
                "slot": bindparam("p_slot"),
                "lease": bindparam("p_lease"),
                # A remote id means something only to the server that gave it.
                "remote_id": _if_same_server(jobs.c.remote_id),
                "sent_ms": _if_same_server(jobs.c.sent_ms),
            }
        case State.QUEUED if state is State.DEAD:
            cleared = dict.fromkeys(
                ("finished_ms", "error_code", "error_message", "deadline_ms", "cancel_requested_ms")
            )
            return stopped | forgotten | cleared | {"failures": 0, "crashes": 0}
        case State.QUEUED if state is State.DELAYED:
            return {"due_ms": None}
        case State.QUEUED:
            return stopped | forgotten | error
        case State.DELAYED:
            return stopped | forgotten | error | {"due_ms": bindparam("p_due")}
        case _:
            return error | {
                "finished_ms": bindparam("p_now"),
                "result": bindparam("p_result"),
                "due_ms": None,
                "lease": None,
            }


def _if_same_server(column: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((jobs.c.server == bindparam("p_server"), column), else_=None)


def _move(state: State, why: Why) -> _Move:
    found = edge(state, why)
    statement = update(jobs).where(jobs.c.id == bindparam("p_id"), jobs.c.state == state.value)
    if state is State.RUNNING:  # LEASE-3: only under the token of this very run
        statement = statement.where(jobs.c.attempt == bindparam("p_attempt"))
    if state is State.RUNNING and found.to in _UNFINISHED:
        statement = statement.where(jobs.c.cancel_requested_ms.is_(None))
    values = _values(state, why, found.to)
    if found.costs is not Budget.NOTHING:
        values[found.costs.value] = jobs.c[found.costs.value] + 1
    columns = (*_MOVED_COLUMNS, jobs.c.payload) if found.to is State.RUNNING else _MOVED_COLUMNS
    statement = statement.values(state=found.to.value, why=why.value, **values).returning(*columns)
    names = {name for name in statement.compile().params if name.startswith("p_")}
    return _Move(found, statement, frozenset(names))


_MOVES: dict[tuple[State, Why], _Move] = {
    (state, why): _move(state, why) for (state, why) in TRANSITIONS if state is not None
}

_NOTE_REMOTE = (
    update(jobs)
    .where(
        jobs.c.id == bindparam("p_id"),
        jobs.c.state == State.RUNNING.value,
        jobs.c.attempt == bindparam("p_attempt"),
    )
    .values(
        remote_id=bindparam("p_remote_id"),
        sent_ms=case((jobs.c.remote_id == bindparam("p_remote_id"), jobs.c.sent_ms), else_=bindparam("p_now")),
    )
)
_REQUEST_CANCEL = (
    update(jobs)
    .where(jobs.c.id == bindparam("p_id"), jobs.c.state == State.RUNNING.value)
    .values(cancel_requested_ms=func.coalesce(jobs.c.cancel_requested_ms, bindparam("p_now")))
)
_CANCEL_WANTED = select(jobs.c.cancel_requested_ms).where(jobs.c.id == bindparam("p_id"))
_BRIEF = select(jobs.c.id, jobs.c.seq, jobs.c.state).where(jobs.c.id == bindparam("p_id"))
_LISTED = select(*_LISTED_COLUMNS)
_WHOLE = select(jobs).where(jobs.c.id == bindparam("p_id"))
_HEADERS = select(jobs.c.model, jobs.c.tier, jobs.c.failures, jobs.c.envelope).where(jobs.c.id == bindparam("p_id"))
_OWED = select(_webhooks.c.id).where(_webhooks.c.job_id == bindparam("p_id"), _webhooks.c.state == "pending").limit(1)
_QUEUED_BY_MODEL = select(jobs.c.model, func.count()).where(jobs.c.state == State.QUEUED.value).group_by(jobs.c.model)
_COUNTS = select(jobs.c.state, func.count()).group_by(jobs.c.state)


class Store:
    """The record of jobs.  Every method is one transaction, or one read."""

    def __init__(self, database: Database, idempotency_window_s: int = 86_400) -> None:
        self.database = database
        self._window_ms = idempotency_window_s * 1000
        dialect = {"sqlite": sqlite, "postgresql": postgresql}[database.engine.dialect.name]
        self._insert = dialect.insert(jobs).on_conflict_do_nothing(index_elements=["id"]).returning(jobs.c.seq)

    # -- accepting -------------------------------------------------------------------------------------------

    def submit(self, new: Sequence[NewJob], now: int) -> list[Accepted]:
        """Accept all of `new` or none of them; one answer each, in order.

        A job whose id, or (tenant, Idempotency-Key) within the window, is known already is not accepted again.
        Raises IdempotencyConflict when the id or the key came with another request, RecordUnavailable.
        """
        return self.database.write(lambda tx: [self._accept(tx, job, now) for job in new])

    def knows(self, new: Sequence[NewJob], now: int) -> bool:
        """Whether each of these has an Idempotency-Key that was used within the window."""
        with self.database.read() as connection:
            return idempotency.all_known(connection, new, now)

    def _accept(self, tx: Transaction, job: NewJob, now: int) -> Accepted:
        if job.idempotency_key is not None:
            known = self._claim_key(tx, job, now)
            if known is not None:
                return known
        why = Why.SUBMITTED if job.not_before_ms is None else Why.SCHEDULED
        to = edge(None, why).to
        seq = tx.connection.execute(self._insert, _new_row(job, why, to, now)).scalar()
        if seq is None:  # the same id again: a doubled message
            count(tx, "doubled")  # It took a number all the same, which the ledger must not miss.
            return _accepted(idempotency.same_request(tx.connection, job))
        data = {"why": why, "model": job.model, "tier": job.tier, "tenant": job.tenant}
        events.append(tx, job.id, to, now, 0, data)
        return Accepted(job.id, seq, to)

    def _claim_key(self, tx: Transaction, job: NewJob, now: int) -> Accepted | None:
        """Bind the key to this job, or find the job that it is bound to (R21: in one transaction)."""
        known = idempotency.job_of(tx.connection, job, now)
        row = tx.connection.execute(_BRIEF, {"p_id": known}).first() if known is not None else None
        if row is not None:
            return _accepted(row)
        idempotency.bind(tx.connection, job, now + self._window_ms)
        return None

    # -- transitions -----------------------------------------------------------------------------------------

    def start(self, job_id: str, server: str, slot: str, lease: str, now: int, offer: int = 0) -> Run | None:
        """Give a queued job to the caller; None: it is not queued (any more)."""
        data = {"server": server, "slot": slot, "offer": offer}
        placed = {"p_server": server, "p_slot": slot, "p_lease": lease}
        act = _Act(State.QUEUED, Why.STARTED, job_id, now, data, placed)
        # A start is no promise: after a power cut the job is queued again, as it is after any crash.
        row = self.database.write(lambda tx: self._transition(tx, act), relaxed=True)
        return None if row is None else _run(row, server, slot)

    def settle(
        self,
        job_id: str,
        attempt: int,
        why: Why,
        now: int,
        *,
        result: str | None = None,
        error: Error | None = None,
        due_ms: int | None = None,
    ) -> Moved | None:
        """End the run `attempt` for the reason `why`; None: that run is over already, nothing was changed.

        A job that shall be canceled, and whose run comes to no result, is canceled, whatever `why` says.
        `result`: JSON text, for FINISHED.  `due_ms`: when a delayed job may run again, for SERVER_ERROR.
        """
        if why is Why.SERVER_ERROR and due_ms is None:
            raise ValueError("due_ms is missing: a delayed job without it would never be queued again")
        params = _fields(result, error, due_ms) | {"p_attempt": attempt}
        act = _Act(State.RUNNING, why, job_id, now, _event_data(error, due_ms, now), params)
        if edge(State.RUNNING, why).to not in _UNFINISHED:
            return self.database.write(lambda tx: self._moved(tx, act))
        error = Error("canceled", "Canceled; its run came to no result.")
        params = _fields(None, error, None) | {"p_attempt": attempt}
        canceled = replace(act, why=Why.CANCEL_REQUESTED, data=_event_data(error, None, now), params=params)
        return self.database.write(lambda tx: self._moved(tx, act) or self._moved_if_canceled(tx, canceled))

    def _moved_if_canceled(self, tx: Transaction, act: _Act) -> Moved | None:
        wanted = tx.connection.execute(_CANCEL_WANTED, {"p_id": act.job_id}).scalar()
        return None if wanted is None else self._moved(tx, act)

    def end_waiting(self, job_id: str, why: Why, now: int, error: Error | None = None) -> Moved | None:
        """End a queued or delayed job (CANCEL_REQUESTED, DEADLINE_PASSED); None: it is neither."""

        def unit(tx: Transaction) -> Moved | None:
            params, data = _fields(None, error, None), _event_data(error, None, now)
            for state in (State.QUEUED, State.DELAYED):
                moved = self._moved(tx, _Act(state, why, job_id, now, data, params))
                if moved is not None:
                    return moved
            return None

        return self.database.write(unit)

    def request_cancel(self, job_id: str, now: int) -> bool:
        """Note beside a running job that it shall be canceled.  False: it is not running."""
        return self.database.write(
            lambda tx: tx.connection.execute(_REQUEST_CANCEL, {"p_id": job_id, "p_now": now}).rowcount == 1
        )

    def note_remote(self, job_id: str, attempt: int, remote_id: str, now: int) -> bool:
        """Store the server's own id of the job, before the first poll.  False: this run is over."""
        params = {"p_id": job_id, "p_attempt": attempt, "p_remote_id": remote_id, "p_now": now}
        return self.database.write(lambda tx: tx.connection.execute(_NOTE_REMOTE, params).rowcount == 1)

    def promote_due(self, now: int, limit: int = 1000) -> list[Waiting]:
        """Queue the delayed jobs whose time has come, soonest first; answer those that this call queued."""
        due = select(jobs.c.id).where(jobs.c.due_ms <= now).order_by(jobs.c.due_ms, jobs.c.seq).limit(limit)

        def unit(tx: Transaction) -> list[Waiting]:
            moved = [
                self._transition(tx, _Act(State.DELAYED, Why.DUE, job_id, now))
                for job_id in tx.connection.execute(due).scalars().all()
            ]
            return [_waiting(row) for row in moved if row is not None]

        return self.database.write(unit)

    def revive(self, job_id: str, now: int) -> Waiting | None:
        """Queue a dead job again, with fresh budgets, at its own place; None: it is not dead."""
        act = _Act(State.DEAD, Why.REVIVED, job_id, now)
        row = self.database.write(lambda tx: self._transition(tx, act))
        return None if row is None else _waiting(row)

    def _moved(self, tx: Transaction, act: _Act) -> Moved | None:
        row = self._transition(tx, act)
        if row is None:
            return None
        to = edge(act.state, act.why).to
        webhook_id = webhooks.owe(tx, row, to, act.now)
        telling_id = tellings.owe(tx, row, to, act.now)
        return Moved(_waiting(row), to, row.attempt, row.failures, row.crashes, row.remote_id, webhook_id, telling_id)

    def _transition(self, tx: Transaction, act: _Act) -> Row | None:
        """The one place that changes a state: guarded by it, with its event beside it."""
        move = _MOVES[(act.state, act.why)]
        given = act.params | {"p_id": act.job_id, "p_now": act.now}
        row = tx.connection.execute(move.statement, {name: given[name] for name in move.names}).first()
        if row is not None:
            events.append(tx, act.job_id, move.edge.to, act.now, row.attempt, {"why": act.why, **act.data})
        return row

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job | None:
        """The whole job, with payload and result."""
        with self.database.read() as connection:
            row = connection.execute(_WHOLE, {"p_id": job_id}).first()
        return None if row is None else _job(row)

    def state_of(self, job_id: str) -> State | None:
        """Only where the job stands: cheap enough to be asked again and again."""
        with self.database.read() as connection:
            row = connection.execute(_BRIEF, {"p_id": job_id}).first()
        return None if row is None else State(row.state)

    def briefs(self, job_ids: Sequence[str]) -> dict[str, Brief]:
        """Where these jobs stand, in one look; those that there are not are left out."""
        query = select(*_BRIEF_COLUMNS).where(jobs.c.id.in_(job_ids))
        with self.database.read() as connection:
            rows = connection.execute(query).all()
        return {
            it.id: Brief(_waiting(it), State(it.state), it.attempt, it.lease, it.cancel_requested_ms is not None)
            for it in rows
        }

    def headers(self, job_id: str) -> tuple[str, int, int, str | None] | None:
        """(model, tier, failures, envelope): what a task message says about a job."""
        with self.database.read() as connection:
            row = connection.execute(_HEADERS, {"p_id": job_id}).first()
        return None if row is None else tuple(row)

    def find(
        self,
        *,
        state: State | None = None,
        model: str | None = None,
        tenant: str | None = None,
        before_seq: int | None = None,
        limit: int = 50,
    ) -> list[Job]:
        """Jobs without payload and result, newest first; `before_seq` is the cursor: the last one's `seq`."""
        query = _LISTED.order_by(jobs.c.seq.desc()).limit(limit)
        for column, value in ((jobs.c.state, state), (jobs.c.model, model), (jobs.c.tenant, tenant)):
            if value is not None:
                query = query.where(column == str(value))
        if before_seq is not None:
            query = query.where(jobs.c.seq < before_seq)
        return self._jobs(query)

    def running(self) -> list[Job]:
        """All running jobs, in order of acceptance."""
        return self._jobs(_LISTED.where(jobs.c.state == State.RUNNING.value).order_by(jobs.c.seq))

    def running_on(self, server: str) -> list[Job]:
        """The running jobs of one server, in order of acceptance."""
        return self._jobs(
            _LISTED.where(jobs.c.state == State.RUNNING.value, jobs.c.server == server).order_by(jobs.c.seq)
        )

    def queued(self, models: Sequence[str], after_seq: int = 0, limit: int = 1000) -> list[Waiting]:
        """Queued jobs of these models, in order of acceptance, from `after_seq` on."""
        query = (
            select(*_WAITING_COLUMNS)
            .where(jobs.c.state == State.QUEUED.value, jobs.c.seq > after_seq, jobs.c.model.in_(models))
            .order_by(jobs.c.seq)
            .limit(limit)
        )
        with self.database.read() as connection:
            return [_waiting(row) for row in connection.execute(query)]

    def overdue(self, now: int, limit: int = 1000) -> list[Job]:
        """Jobs that have not ended although their deadline has passed."""
        states = [state.value for state in sorted(ACTIVE)]
        return self._jobs(_LISTED.where(jobs.c.deadline_ms <= now, jobs.c.state.in_(states)).limit(limit))

    def history(self, since_ms: int, until_ms: int, limit_per_batch: int = 5000) -> Iterator[Past]:
        """Jobs accepted from `since_ms` on and before `until_ms` that have started or ended, as they came.

        Read page by page, so that millions take no more memory than one page; close the iterator, or exhaust it,
        for it keeps a connection.  Where clocks were apart by more than an hour, a job may be missed.
        """
        return history.read(self.database, since_ms, until_ms, limit_per_batch)

    def events_of(self, job_id: str) -> list[Event]:
        """The job's events, oldest first."""
        with self.database.read() as connection:
            return events.of_job(connection, job_id)

    def queued_by_model(self) -> Counter[str]:
        """How many jobs of each model are queued."""
        with self.database.read() as connection:
            return Counter(dict(tuple(row) for row in connection.execute(_QUEUED_BY_MODEL)))

    def counts(self) -> dict[State, int]:
        """How many jobs stand in each state."""
        with self.database.read() as connection:
            found = {State(state): count for state, count in connection.execute(_COUNTS)}
        return {state: found.get(state, 0) for state in State}

    def _jobs(self, query: Select[Any]) -> list[Job]:
        with self.database.read() as connection:
            return [_job(row) for row in connection.execute(query)]

    # -- removing --------------------------------------------------------------------------------------------

    def forget_keys(self, now: int) -> int:
        """Remove the Idempotency-Keys whose window is over; answers how many."""
        return self.database.write(lambda tx: idempotency.forget_expired(tx.connection, now))

    def purge(self, ended_before_ms: int, limit: int = 1000) -> int:
        """Remove jobs that ended before that time, and what hangs on them; answers how many.

        A job whose webhook is still owed stays until that is delivered or given up (HOOK-1).
        """
        owed = exists().where(_webhooks.c.job_id == jobs.c.id, _webhooks.c.state == "pending")
        old = (
            select(jobs.c.id, jobs.c.state)
            .where(jobs.c.finished_ms < ended_before_ms, jobs.c.state.in_([s.value for s in sorted(FINAL)]), ~owed)
            .limit(limit)
        )
        return self.database.write(lambda tx: _remove(tx, [tuple(row) for row in tx.connection.execute(old)]))

    def delete_dead(self, job_id: str) -> bool:
        """Remove a dead job for good.  False: it is not dead.

        Raises Conflict while its webhook is owed: the message is made from the job (HOOK-1).
        """
        dead = select(jobs.c.id, jobs.c.state).where(jobs.c.id == job_id, jobs.c.state == State.DEAD.value)

        def unit(tx: Transaction) -> bool:
            # Locked, or on PostgreSQL it could be revived and die again, owing another message, before it is removed.
            found = [tuple(row) for row in tx.connection.execute(dead.with_for_update())]
            if found and (owed := tx.connection.execute(_OWED, {"p_id": job_id}).scalar()):
                raise Conflict(
                    f"Job {job_id!r} still owes its webhook {owed!r}, which would be lost with it; "
                    "remove the job when that is delivered or given up.",
                    job_id=job_id,
                    webhook_id=owed,
                )
            return _remove(tx, found) == 1

        return self.database.write(unit)


def _remove(tx: Transaction, found: Sequence[tuple[str, str]]) -> int:
    """Delete ended jobs, counting them by state, so that the ledger (JOB-3) still balances."""
    removed = 0
    for job_id, state in found:
        gone = tx.connection.execute(delete(jobs).where(jobs.c.id == job_id, jobs.c.state == state)).rowcount
        if gone:
            for table in (_events, _webhooks, _tellings):
                tx.connection.execute(delete(table).where(table.c.job_id == job_id))
            count(tx, f"purged.{state}")
        removed += gone
    return removed


def count(tx: Transaction, name: str, by: int = 1) -> None:
    """Raise a counter of the record."""
    raised = update(counters).where(counters.c.name == name).values(value=counters.c.value + by)
    if tx.connection.execute(raised).rowcount == 0:
        tx.connection.execute(insert(counters), {"name": name, "value": by})


def _new_row(job: NewJob, why: Why, to: State, now: int) -> dict[str, Any]:
    return {
        "id": job.id,
        "model": job.model,
        "state": to.value,
        "why": why.value,
        "tier": job.tier,
        "tenant": job.tenant,
        "created_ms": now,
        "due_ms": job.not_before_ms,
        "deadline_ms": job.deadline_ms,
        "callback_url": job.callback_url,
        "source": job.source,
        "envelope": job.envelope,
        "payload": job.payload,
        "needs": job.needs,
    }


def _fields(result: str | None, error: Error | None, due_ms: int | None) -> dict[str, Any]:
    return {
        "p_result": result,
        "p_error_code": error.code if error else None,
        "p_error_message": storable(error.message, _MAX_ERROR) if error else None,
        "p_due": due_ms,
    }


def _event_data(error: Error | None, due_ms: int | None, now: int) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if error is not None:
        data["error"] = {"code": error.code, "message": storable(error.message, _MAX_ERROR)}
    if due_ms is not None:
        data["retry_in_ms"] = max(0, due_ms - now)
    return data


def _accepted(row: Row) -> Accepted:
    return Accepted(row.id, row.seq, State(row.state), deduplicated=True)


def _run(row: Row, server: str, slot: str) -> Run:
    return Run(
        job=_waiting(row),
        payload=row.payload,
        attempt=row.attempt,
        failures=row.failures,
        crashes=row.crashes,
        deadline_ms=row.deadline_ms,
        remote_id=row.remote_id,
        sent_ms=row.sent_ms,
        server=server,
        slot=slot,
        started_ms=row.started_ms,
        cancel_requested=row.cancel_requested_ms is not None,
        envelope=row.envelope,
    )


def _job(row: Row) -> Job:
    found = row._mapping
    return Job(
        **{name: found[name] for name in Job.__dataclass_fields__ if name in found and name not in {"state", "why"}},
        state=State(row.state),
        why=Why(row.why),
    )
