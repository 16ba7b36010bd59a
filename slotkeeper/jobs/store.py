"""The only writer of `jobs.state`.

Every transition is one UPDATE that names the state, and for a running job the attempt, that it expects to
find; its row count is the answer.  The event and, at the end of a job, the message of its webhook stand in the same
transaction.  What may follow what is read from states.TRANSITIONS and nowhere else.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

from sqlalchemy import Select, bindparam, case, func, select, text, update

from slotkeeper.db.compiled_sql import BulkInsert, CompiledStatement
from slotkeeper.db.group_commit import Database, Transaction, Write
from slotkeeper.errors import IdempotencyConflict
from slotkeeper.jobs import acceptance, closed_models, events, listings, notifications, quarantine, statements
from slotkeeper.jobs.counters import add_to_counter
from slotkeeper.jobs.statements import QUEUED_JOB_COLUMNS, REQUEUING_STATES, in_state
from slotkeeper.jobs.states import Reason, State, find_edge
from slotkeeper.jobs.tables import ACTIVE_CONDITION, EXPIRABLE_CONDITION, JOB_COLUMNS, jobs
from slotkeeper.jobs.values import (
    AcceptedJob,
    Event,
    Job,
    JobError,
    JobStatus,
    NewJob,
    Quarantine,
    QueuedJob,
    Run,
    storable_text,
    stored_error,
)

Row: TypeAlias = Any  # SQLAlchemy's Row is generic in its columns; ours are named at the statements

_MAX_ERROR = 2000
_MOST_UNHEARD = 10_000  # Each is asked again soon, unless its worker ends.

_STATUS_COLUMNS = [jobs.c[name] for name in ("state", "attempt", "lease", "slot", "cancel_requested_ms")]


@dataclass(frozen=True, slots=True)
class Transition:
    """A transition that has been committed."""

    job: QueuedJob
    to: State
    attempt: int
    notification_id: str | None = None  # what those who wait outside are owed, if any do


@dataclass(frozen=True, slots=True)
class _Change:
    """A transition that is wanted."""

    state: State
    why: Reason
    now_ms: int
    params: dict[str, Any]  # of its statement
    data: dict[str, Any] = field(default_factory=dict)  # for its event

    @property
    def told(self) -> dict[str, Any]:
        """What its event says."""
        return {"why": self.why, **self.data}


class _Coming(NamedTuple):
    """A job that is to be accepted: its row, and its event, which brings it to `to`."""

    job: NewJob
    to: State
    row: dict[str, Any]
    event: dict[str, Any]


class WriteAuditEntry(Protocol):
    """Who asks for a change has this written beside it, in its transaction, if it is made."""

    def __call__(self, tx: Transaction, /, **about: str) -> None: ...


def _no_note(_: Transaction, /, **about: str) -> None:
    """Write no audit entry."""


def _canceled(step: _Change) -> _Change:
    """What is done instead to a job that shall be canceled."""
    error = JobError("canceled", "Canceled; its run came to no result.")
    params = {name: step.params[name] for name in ("p_id", "p_attempt")} | _fields(error=error)
    return replace(step, why=Reason.CANCEL_REQUESTED, data=_event_data(error), params=params)


def _waiting(row: Row) -> QueuedJob:
    return QueuedJob(row.id, row.seq, row.model, row.priority, row.tenant, row.created_ms, row.constraints)


_NOTE_REMOTE = CompiledStatement(
    update(jobs)
    .where(jobs.c.id == bindparam("p_id"), in_state(State.RUNNING), jobs.c.attempt == bindparam("p_attempt"))
    .values(
        remote_id=bindparam("p_remote_id"),
        sent_ms=case((jobs.c.remote_id == bindparam("p_remote_id"), jobs.c.sent_ms), else_=bindparam("p_now")),
    )
)
_REQUEST_CANCEL = CompiledStatement(
    update(jobs)
    .where(jobs.c.id == bindparam("p_id"), in_state(State.RUNNING))
    .values(cancel_requested_ms=func.coalesce(jobs.c.cancel_requested_ms, bindparam("p_now")))
    .returning(jobs.c.model, jobs.c.tenant, jobs.c.server, jobs.c.cancel_requested_ms)
)
_THIS = jobs.c.id == bindparam("p_id")
_CANCEL_WANTED = CompiledStatement(select(jobs.c.cancel_requested_ms).where(_THIS))
_BRIEF = CompiledStatement(select(jobs.c.id, jobs.c.seq, jobs.c.state).where(_THIS))
_WHOLE = CompiledStatement(select(*JOB_COLUMNS).where(_THIS))
_LOCKED = CompiledStatement(select(jobs.c.seq, jobs.c.slot).where(_THIS).with_for_update())
_HEADERS = CompiledStatement(select(jobs.c.model, jobs.c.priority, jobs.c.failures, jobs.c.envelope).where(_THIS))
_DUE = select(jobs.c.seq).where(jobs.c.due_ms <= bindparam("p_now")).order_by(jobs.c.due_ms, jobs.c.seq)
# In the words of the index, or it may not be used; and without statistics SQLite takes all active jobs for few.
_PASSED = "deadline_ms <= :p_now"
_OVERDUE = {
    dialect: select(jobs.c.seq, jobs.c.state).where(text(condition)).order_by(jobs.c.deadline_ms)
    for dialect, condition in (
        ("sqlite", f"likelihood({_PASSED}, 0.0001) AND deadline_ms IS NOT NULL AND likely({ACTIVE_CONDITION})"),
        ("postgresql", f"{_PASSED} AND {EXPIRABLE_CONDITION}"),
    )
}
# Looked at again and again, mostly in vain.
_ANY_DUE = CompiledStatement(_DUE.limit(1))
_ANY_OVERDUE = {dialect: CompiledStatement(query.limit(1)) for dialect, query in _OVERDUE.items()}
_RUNNING, _TO_BE_RESUMED = CompiledStatement(listings.RUNNING), CompiledStatement(listings.TO_BE_RESUMED)
# What a new row has from what was asked for, and what it has of its own.
_ASKED = (
    *("id", "model", "priority", "tenant", "deadline_ms", "callback_url", "source", "envelope", "payload"),
    *("constraints", "traceparent", "batch"),
)
_asked_of = attrgetter(*_ASKED)
_JOBS = BulkInsert(jobs, unless=closed_models.CLOSED_COLUMN, once="id", answers="id, seq")


class JobStore:
    """The record of jobs.  Every method is one transaction, or one read."""

    def __init__(self, database: Database, idempotency_window_s: int = 86_400) -> None:
        self.database = database
        self._window_ms = idempotency_window_s * 1000
        self._unheard: dict[tuple[str, int], list[_Change]] = {}  # run -> its settles whose commit is unknown
        self._dialect = database.engine.dialect.name

    # -- accepting -------------------------------------------------------------------------------------------

    def submit(self, new: Sequence[NewJob], now_ms: int) -> list[AcceptedJob]:
        """Accept all of `new` or none of them; one answer each, in order.

        A job whose id, or (tenant, Idempotency-Key) within the window, is known already is not accepted again.
        Raises IdempotencyConflict when the id or the key came with another request, NameClosed, RecordUnavailable.
        """
        return self.database.commit(self.submit_write(new, now_ms))

    def submit_write(self, new: Sequence[NewJob], now_ms: int) -> Write[list[AcceptedJob]]:
        """The write of `submit`."""
        coming = [_coming(job, now_ms) for job in new]  # Here, where nobody is kept from writing.

        def unit(tx: Transaction) -> list[AcceptedJob] | IdempotencyConflict:
            accepted: list[AcceptedJob] = []
            for together in _together(coming):
                try:
                    accepted += self._accept(tx, together, now_ms)
                except IdempotencyConflict as conflict:
                    if accepted or conflict.facts["job_id"] in {it.job.id for it in together}:
                        raise  # What has been written of the others, or of its key, is to be undone.
                    return conflict
            return accepted

        return Write(unit)

    def knows_keys(self, new: Sequence[NewJob], now_ms: int) -> bool:
        """Whether each of these has an Idempotency-Key that was used within the window."""
        with self.database.read() as connection:
            return acceptance.knows_all_keys(connection, new, now_ms)

    def _accept(self, tx: Transaction, coming: Sequence[_Coming], now_ms: int) -> list[AcceptedJob]:
        first = coming[0].job
        if first.idempotency_key is not None and (known := self._claim_key(tx, first, now_ms)) is not None:
            return [known]
        numbers = dict(_JOBS.execute(tx.connection, [it.row for it in coming]))
        return [_accepted(tx, it, numbers.pop(it.job.id, None)) for it in coming]

    def _claim_key(self, tx: Transaction, job: NewJob, now_ms: int) -> AcceptedJob | None:
        """Bind the key to this job in its transaction, or find the job that it is bound to."""
        known = acceptance.find_job_of_key(tx.connection, job, now_ms)
        row = _BRIEF.fetch_first(tx.connection, {"p_id": known}) if known is not None else None
        if row is not None:
            return _known(row)
        acceptance.bind_key(tx.connection, job, now_ms, now_ms + self._window_ms, gone=known)
        return None

    # -- transitions -----------------------------------------------------------------------------------------

    def start_write(
        self,
        job_id: str,
        server: str,
        slot: str,
        lease: str,
        now_ms: int,
        offer: int,
        described_by: str | None = None,
        worker: str = "",
        sent_to: str | None = None,
    ) -> Write[Run | None]:
        """Return the write that gives a queued job to a worker; it returns None: the job is not queued.

        `described_by`: the version of the description by which its server is spoken to, and `sent_to`: the server's
        address, unless a run is resumed.  `worker`: Celery's name of the worker that starts it, for its event.
        """
        placed = {"p_id": job_id, "p_server": server, "p_slot": slot, "p_lease": lease, "p_offer": offer}
        placed |= {"p_described_by": described_by, "p_sent_to": sent_to}
        told = {"server": server, "slot": slot, "offer": offer} | ({"worker": worker} if worker else {})
        step = _Change(State.QUEUED, Reason.STARTED, now_ms, placed, told)
        # A start is no promise: after a power cut the job is queued again, as it is after any crash.
        return Write(
            lambda tx: self._started(tx, [step])[0], relaxed=True, alike=self._started, about=job_id, asked=step
        )

    def _started(self, tx: Transaction, steps: Sequence[_Change]) -> list[Run | None]:
        found = zip(steps, self._transitions(tx, steps), strict=True)
        return [row and _run(row, step.params["p_server"], step.params["p_slot"]) for step, row in found]

    def settle_write(
        self,
        job_id: str,
        attempt: int,
        why: Reason,
        now_ms: int,
        *,
        result: str | None = None,
        error: JobError | None = None,
        due_ms: int | None = None,
        withhold: Quarantine | None = None,
    ) -> Write[Transition | None]:
        """Return the write that ends the run `attempt` for the reason `why`; it returns None: the run is over already.

        A job that shall be canceled, and whose run comes to no result, is canceled, whatever `why` says.
        After a RecordUncertain it can be asked again, and answers as if the first time had succeeded, if it had.
        `result`: JSON text, for FINISHED.  `due_ms`: when a delayed job may run again, for SERVER_ERROR.  `withhold`:
        its server may be at the run still, so that its slot may not be used again.
        """
        if why is Reason.SERVER_ERROR and due_ms is None:
            raise ValueError("due_ms is missing: a delayed job without it would never be queued again")
        params = {"p_id": job_id, "p_attempt": attempt} | _fields(result, error, due_ms)
        step = _Change(State.RUNNING, why, now_ms, params, _event_data(error, due_ms, now_ms))
        instead = _canceled(step) if find_edge(State.RUNNING, why).to in REQUEUING_STATES else None
        run = job_id, attempt

        def unit(tx: Transaction) -> Transition | None:
            if (unheard := self._stored_unheard(tx, run)) is not None:
                return unheard
            if withhold is not None:
                quarantine.quarantine_slot(tx, job_id, attempt, now_ms, withhold)
            moved = self._moved(tx, step)
            if moved is None and instead is not None and _CANCEL_WANTED.fetch_value(tx.connection, params) is not None:
                moved = self._moved(tx, instead)
            if withhold is not None and withhold.resumes and moved is not None and moved.to is State.QUEUED:
                quarantine.keep_slot_for_job(tx, job_id, attempt)
            return moved

        return Write(
            unit,
            heard=lambda: self._unheard.pop(run, None),
            unheard=lambda: self._remember(run, step, instead),
            alike=self._settled if instead is None and withhold is None else None,
            about=job_id,
            asked=step,
            size=len(result or ""),
        )

    def _settled(self, tx: Transaction, steps: Sequence[_Change]) -> list[Transition | None] | None:
        """The ends of several runs.  None: one of them may be stored already, and each has to look."""
        is_open = any((it.params["p_id"], it.params["p_attempt"]) in self._unheard for it in steps)
        return None if is_open else self._all_moved(tx, steps)

    def _remember(self, run: tuple[str, int], *steps: _Change | None) -> None:
        known = self._unheard.get(run, [])
        self._unheard[run] = known + [it for it in steps if it is not None and it not in known]
        if len(self._unheard) > _MOST_UNHEARD:
            del self._unheard[next(iter(self._unheard))]

    def _stored_unheard(self, tx: Transaction, run: tuple[str, int]) -> Transition | None:
        """What one of our own earlier settles of this run has stored after all."""
        job_id, attempt = run
        for step in self._unheard.get(run, ()):
            to = find_edge(step.state, step.why).to
            if events.has_event(tx.connection, job_id, to, step.now_ms, attempt, step.told):
                (row,) = _WHOLE.fetch_all(tx.connection, {"p_id": job_id})
                as_it_was = row._replace(attempt=attempt)  # It owes already what it owes.
                return self._ended(Transaction(tx.connection), as_it_was, to, step.now_ms)
        return None

    def cancel_waiting(
        self,
        job_id: str,
        why: Reason,
        now_ms: int,
        error: JobError | None = None,
        note: WriteAuditEntry = _no_note,
        withhold: Quarantine | None = None,
    ) -> Transition | None:
        """End a queued or delayed job (CANCEL_REQUESTED, DEADLINE_PASSED); None: it is neither.

        `withhold`: of a job that is to be resumed, whose server may be at it still.
        """

        def unit(tx: Transaction) -> Transition | None:
            locked = _LOCKED.fetch_first(tx.connection, {"p_id": job_id})  # Else a run could be handed back in between.
            if withhold is not None and locked is not None and locked.slot is not None:
                quarantine.quarantine_slots(tx, State.QUEUED, [locked.seq], now_ms, withhold)
            params, data = {"p_id": job_id} | _fields(error=error), _event_data(error)
            for state in (State.QUEUED, State.DELAYED):
                moved = self._moved(tx, _Change(state, why, now_ms, params, data))
                if moved is not None:
                    note(tx, model=moved.job.model, tenant=moved.job.tenant)
                    return moved
            return None

        return self.database.write(unit)

    def request_cancel(self, job_id: str, now_ms: int, note: WriteAuditEntry = _no_note) -> bool:
        """Note beside a running job that it shall be canceled.  False: it is not running."""

        def unit(tx: Transaction) -> bool:
            row = _REQUEST_CANCEL.fetch_first(tx.connection, {"p_id": job_id, "p_now": now_ms})
            if row is not None and row.cancel_requested_ms == now_ms:  # Else it was asked for before.
                note(tx, model=row.model, tenant=row.tenant, server=row.server)
            return row is not None

        return self.database.write(unit)

    def remote_id_write(self, job_id: str, attempt: int, remote_id: str, now_ms: int) -> Write[bool]:
        """Return the write that stores the server's own id of the job, before the first poll.

        It returns False: this run is over.
        """
        params = {"p_id": job_id, "p_attempt": attempt, "p_remote_id": remote_id, "p_now": now_ms}
        return Write(lambda tx: _NOTE_REMOTE.execute(tx.connection, params) == 1)

    def promote_due(self, now_ms: int, limit: int = 1000) -> list[QueuedJob]:
        """Queue the delayed jobs whose time has come, soonest first; answer those that this call queued."""

        def unit(tx: Transaction) -> list[QueuedJob]:
            seqs = [row.seq for row in _locked(tx, _DUE, now_ms, limit)]
            step = _Change(State.DELAYED, Reason.DUE, now_ms, {"p_seqs": seqs})
            found = {row.seq: _waiting(row) for row in self._perform(tx, statements.MANY_JOBS, {None: step})}
            return [found[seq] for seq in seqs]

        return self.database.write(unit) if self._any(_ANY_DUE, now_ms) else []

    def expire_overdue(self, now_ms: int, limit: int = 1000, withhold: Quarantine | None = None) -> list[Transition]:
        """End jobs whose deadline has passed, waiting and running alike, the longest overdue first.

        Answers those that this call ended, at most `limit`, all in one transaction.  None: there are no more, or
        somebody else is at them just now.
        """

        def unit(tx: Transaction) -> list[Transition]:
            overdue = defaultdict[State, list[int]](list)
            for row in _locked(tx, _OVERDUE[self._dialect], now_ms, limit):
                overdue[State(row.state)].append(row.seq)
            return [it for state, seqs in overdue.items() for it in self._expire(tx, state, seqs, now_ms, withhold)]

        return self.database.write(unit) if self._any(_ANY_OVERDUE[self._dialect], now_ms) else []

    def _expire(
        self, tx: Transaction, state: State, seqs: Sequence[int], now_ms: int, withhold: Quarantine | None
    ) -> list[Transition]:
        if state is not State.DELAYED and withhold is not None:
            quarantine.quarantine_slots(tx, state, seqs, now_ms, withhold)
        error = JobError("deadline_passed", f"Its deadline passed while it was {state}.")
        params = {"p_seqs": seqs} | _fields(error=error)
        step = _Change(state, Reason.DEADLINE_PASSED, now_ms, params, _event_data(error))
        return [
            self._ended(tx, row, State.EXPIRED, now_ms) for row in self._perform(tx, statements.MANY_JOBS, {None: step})
        ]

    def _any(self, query: CompiledStatement, now_ms: int) -> bool:
        """Whether there is anything to do: a look that keeps nobody from writing."""
        with self.database.read() as connection:
            return query.fetch_first(connection, {"p_now": now_ms}) is not None

    def revive(self, job_id: str, now_ms: int, note: WriteAuditEntry = _no_note) -> QueuedJob | None:
        """Queue a dead job again, with fresh budgets, at its own place; None: it is not dead.  Raises NameClosed."""
        step = _Change(State.DEAD, Reason.REVIVED, now_ms, {"p_id": job_id})

        def unit(tx: Transaction) -> QueuedJob | None:
            if (row := self._transitions(tx, [step])[0]) is None:
                return None
            closed_models.check_open(tx, job_id, row.model)
            note(tx, model=row.model, tenant=row.tenant)
            return _waiting(row)

        return self.database.write(unit)

    def _moved(self, tx: Transaction, step: _Change) -> Transition | None:
        """Perform a transition, and what follows from it; None: the job does not stand where it begins."""
        return self._all_moved(tx, [step])[0]

    def _all_moved(self, tx: Transaction, steps: Sequence[_Change]) -> list[Transition | None]:
        found = zip(steps, self._transitions(tx, steps), strict=True)
        return [row and self._ended(tx, row, find_edge(step.state, step.why).to, step.now_ms) for step, row in found]

    def _ended(self, tx: Transaction, row: Row, to: State, now_ms: int) -> Transition:
        """A transition that has been performed; at a job's end what its clients wait for is owed from now on."""
        notifications.add_callback_message(tx, row, to, now_ms)
        return Transition(_waiting(row), to, row.attempt, notifications.add_result_notification(tx, row, to, now_ms))

    def _transitions(self, tx: Transaction, steps: Sequence[_Change]) -> list[Row | None]:
        """Perform transitions, each of a job of its own; None: that job does not stand where its transition begins."""
        if len(steps) == 1:
            return [*self._perform(tx, statements.ONE_JOB, {None: steps[0]})] or [None]
        rows: dict[str, Row] = {}
        for _, alike in groupby(steps, attrgetter("state", "why")):
            rows |= {
                row.id: row for row in self._perform(tx, statements.ONE_JOB, {it.params["p_id"]: it for it in alike})
            }
        return [rows.get(step.params["p_id"]) for step in steps]

    def _perform(self, tx: Transaction, how: statements.Moves, steps: Mapping[str | None, _Change]) -> Sequence[Row]:
        """The one place that changes states: guarded by them, with an event beside each.

        `steps`: by their jobs' ids, all out of one state for one reason; the only one by None.
        """
        step = next(iter(steps.values()))
        move = how[(step.state, step.why)]
        rows = move.jobs(tx.connection, [it.params | {"p_now": it.now_ms} for it in steps.values()])
        for row in rows:
            its = steps.get(row.id, step)
            events.add_row(tx, events.make_row(row, move.edge.to, its.now_ms, row.attempt, its.told, row.server))
        return rows

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job | None:
        """The whole job, with payload and result."""
        with self.database.read() as connection:
            row = _WHOLE.fetch_first(connection, {"p_id": job_id})
        return None if row is None else job_from_row(row)

    def get_state(self, job_id: str) -> State | None:
        """Only where the job stands: cheap enough to be asked again and again."""
        with self.database.read() as connection:
            row = _BRIEF.fetch_first(connection, {"p_id": job_id})
        return None if row is None else State(row.state)

    def get_statuses(self, job_ids: Sequence[str]) -> dict[str, JobStatus]:
        """Where these jobs stand, in one look; those that there are not are left out."""
        with self.database.read() as connection:
            rows = connection.execute(select(*QUEUED_JOB_COLUMNS, *_STATUS_COLUMNS).where(jobs.c.id.in_(job_ids))).all()
        return {
            it.id: JobStatus(
                _waiting(it), State(it.state), it.attempt, it.lease, it.slot, it.cancel_requested_ms is not None
            )
            for it in rows
        }

    def get_message_headers(self, job_id: str) -> tuple[str, int, int, str | None] | None:
        """(model, priority, failures, envelope): what a task message says about a job."""
        with self.database.read() as connection:
            row = _HEADERS.fetch_first(connection, {"p_id": job_id})
        return None if row is None else tuple(row)

    def list_running(self) -> list[Job]:
        """All running jobs, in order of acceptance."""
        with self.database.read() as connection:
            return [job_from_row(row) for row in _RUNNING.fetch_all(connection, {})]

    def list_queued(
        self, models: Sequence[str] | None = None, after_seq: int = 0, limit: int = 1000
    ) -> list[QueuedJob]:
        """Queued jobs of these models, or of all, in order of acceptance, from `after_seq` on.

        For each model one look into an index of queued jobs alone: a model without any costs nothing.
        """
        queries = [listings.QUEUED_OF_ALL] if models is None else listings.select_queued(models)
        params = {"p_after": after_seq, "p_limit": limit}
        with self.database.read() as connection:
            found = [_waiting(row) for query in queries for row in connection.execute(query, params)]
        return sorted(found, key=lambda job: job.seq)[:limit]

    def list_resumable(self) -> list[tuple[QueuedJob, str]]:
        """Return the queued jobs whose servers may still run them, each with the slot in which it is resumed.

        Reads all queued jobs: for a rebuild, not for a sweep.
        """
        with self.database.read() as connection:
            return [(_waiting(row), row.slot) for row in _TO_BE_RESUMED.fetch_all(connection, {})]

    def find_models_with_queued(self, models: Sequence[str]) -> set[str]:
        """Those of these models that have queued jobs; a look at the first of each."""
        queries = listings.select_queued(models)
        with self.database.read() as connection:
            return {row.model for query in queries for row in connection.execute(query, {"p_after": 0, "p_limit": 1})}

    def list_events(self, job_id: str) -> list[Event]:
        """The job's events, oldest first."""
        with self.database.read() as connection:
            return events.list_of_job(connection, job_id)

    def delete_expired_keys(self, now_ms: int) -> int:
        """Remove the Idempotency-Keys whose window is over; answers how many."""
        return self.database.write(lambda tx: acceptance.delete_expired_keys(tx.connection, now_ms))


def _locked(tx: Transaction, query: Select[Any], now_ms: int, limit: int) -> Sequence[Row]:
    """Rows that nobody else can change any more before we commit; those that somebody is changing are left out."""
    return tx.connection.execute(query.limit(limit).with_for_update(skip_locked=True), {"p_now": now_ms}).all()


def _coming(job: NewJob, now_ms: int) -> _Coming:
    why = Reason.SUBMITTED if job.not_before_ms is None else Reason.SCHEDULED
    to = find_edge(None, why).to
    asked = dict(zip(_ASKED, _asked_of(job), strict=True))
    own = {"state": to.value, "why": why.value, "created_ms": now_ms, "due_ms": job.not_before_ms}
    return _Coming(job, to, asked | own, events.make_row(job, to, now_ms, 0, {"why": why}))


def _together(coming: Sequence[_Coming]) -> Iterator[Sequence[_Coming]]:
    """In their order, those with an Idempotency-Key one by one: it may be that of the job before."""
    for has_key, these in groupby(coming, lambda it: it.job.idempotency_key is not None):
        group = list(these)
        yield from ([it] for it in group) if has_key else [group]


def _accepted(tx: Transaction, it: _Coming, seq: int | None) -> AcceptedJob:
    if seq is None:  # the same id again: a doubled message; or a name that is closed
        add_to_counter(tx, "doubled")  # It took a number all the same, which the ledger must not miss.
        return _known(acceptance.check_same_request(tx.connection, it.job))
    events.add_row(tx, it.event)
    is_overdue = it.job.deadline_ms is not None and it.job.deadline_ms <= it.row["created_ms"]
    return AcceptedJob(it.job.id, seq, it.to, is_overdue=is_overdue)


def _fields(result: str | None = None, error: JobError | None = None, due_ms: int | None = None) -> dict[str, Any]:
    return {
        "p_result": result,
        "p_error_code": error.code if error else None,
        "p_error_message": storable_text(error.message, _MAX_ERROR) if error else None,
        "p_due": due_ms,
    }


def _event_data(error: JobError | None, due_ms: int | None = None, now_ms: int = 0) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if error is not None:
        data["error"] = {"code": error.code, "message": storable_text(error.message, _MAX_ERROR)}
    if due_ms is not None:
        data["retry_in_ms"] = max(0, due_ms - now_ms)
    return data


def _known(row: Row) -> AcceptedJob:
    return AcceptedJob(row.id, row.seq, State(row.state), deduplicated=True)


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
        described_by=row.described_by,
        sent_to=row.sent_to,
        traceparent=row.traceparent,
        last_error=stored_error(row.error_code, row.error_message),
    )


def job_from_row(row: Row) -> Job:
    """A row of the table, or some of its columns."""
    found = row._asdict()
    return Job(
        **{name: found[name] for name in Job.__dataclass_fields__ if name in found and name not in {"state", "why"}},
        state=State(row.state),
        why=Reason(row.why),
    )
