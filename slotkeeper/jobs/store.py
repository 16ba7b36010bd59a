"""The only writer of `jobs.state`.

Every transition is one UPDATE that names the state, and for a running job the attempt, that it expects to find; its
row count is the answer.  The event and, at the end of a job, the message of its webhook stand in the same transaction.
states.TRANSITIONS has all transitions.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from sqlalchemy import Select, select

from slotkeeper.clock import clock
from slotkeeper.db import Database, Transaction, Write
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.pages import PAGE, delete_page
from slotkeeper.db.schema import storable_text
from slotkeeper.errors import IdempotencyConflict, InsufficientCredits
from slotkeeper.jobs import acceptance, batches, closed_models, credits, envelopes, events, notifications, statements
from slotkeeper.jobs.events import WriteAuditEntry
from slotkeeper.jobs.quarantine import keep_slot_for_job, quarantine_slot, quarantine_slots
from slotkeeper.jobs.queue_epochs import epoch_of_lease
from slotkeeper.jobs.rows import Row, job_from_row, job_status_from_row, queued_job_from_row, run_from_row
from slotkeeper.jobs.statements import MANY_JOBS, ONE_JOB, QUEUED_JOB_COLUMNS, REQUEUING_STATES
from slotkeeper.jobs.states import FINAL_STATES, Reason, State, find_edge
from slotkeeper.jobs.tables import idempotency_keys, jobs
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
    SignedResult,
)

_MAX_ERROR = 2000
_STATUS_COLUMNS = [jobs.c[name] for name in ("state", "attempt", "lease", "slot", "cancel_requested_ms")]


@dataclass(frozen=True, slots=True)
class Transition:
    """A transition that has been committed.

    notification_id: the row from which Celery's clients get the end; None: no client waits.
    """

    job: QueuedJob
    to: State
    attempt: int
    notification_id: str | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    """A transition to be made: its state, its reason, and the parameters of its statement."""

    state: State
    why: Reason
    now_ms: int
    params: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)  # of its event, beside the reason
    run_ended_ms: int | None = None  # see credits.settle

    @property
    def to(self) -> State:
        return find_edge(self.state, self.why).to

    @property
    def event_data(self) -> dict[str, Any]:
        return {"why": self.why, **self.data}


@dataclass(frozen=True, slots=True)
class CanceledPage:
    """What came of some jobs of a batch.

    ended: those that were waiting.  asked: those that run, and are canceled when their servers have stopped.
    is_last: the batch has no further ones.
    """

    ended: list[Transition]
    asked: list[QueuedJob]
    is_last: bool


def _no_entry(_: Transaction, /, **about: str) -> None:
    """Write no audit entry."""


class JobStore:
    """The jobs in the database.  Every method is one transaction, or one read.

    All methods raise DatabaseUnavailable; those that write also CommitUnknown.  Methods that end in `_write` return a
    `Write` for `Database.commit`, which an event loop commits together with others.
    """

    def __init__(self, database: Database, idempotency_window_s: int = 86_400) -> None:
        self.database = database
        self._window_ms = idempotency_window_s * 1000
        self._dialect = database.engine.dialect.name

    # -- accepting -------------------------------------------------------------------------------------------

    def submit(self, new: Sequence[NewJob], now_ms: int) -> list[AcceptedJob]:
        """Accept all of `new` or none of them, and return a value for each, in order.

        A job whose id, or whose (tenant, Idempotency-Key) within the window, is known already is not accepted again.
        Raises IdempotencyConflict if the id or the key came with another request; InsufficientCredits; ModelClosed.
        """
        return self.database.commit(self.submit_write(new, now_ms))

    def submit_write(self, new: Sequence[NewJob], now_ms: int) -> Write[list[AcceptedJob]]:
        """Return the write of `submit`."""
        prepared = [acceptance.prepare(job, now_ms) for job in new]
        in_batches = {job.id: (job.tenant, job.batch) for job in new if job.batch is not None}
        paid = [one for one in prepared if one.job.reserved is not None]

        def unit(tx: Transaction) -> list[AcceptedJob] | IdempotencyConflict | InsufficientCredits:
            expired_ms = self._keys_until_ms(now_ms)
            if short := acceptance.find_shortage(tx, paid, expired_ms):
                return short
            accepted = acceptance.accept(tx, prepared, expired_ms, now_ms + self._window_ms)
            if isinstance(accepted, IdempotencyConflict):
                return accepted
            if in_batches:
                is_new = {one.id for one in accepted if not one.deduplicated}
                for tenant, batch in sorted({key for job_id, key in in_batches.items() if job_id in is_new}):
                    batches.add_named(tx, tenant, batch, now_ms)
            return accepted

        return Write(unit)

    def knows_keys(self, new: Sequence[NewJob], now_ms: int) -> bool:
        """Return whether each of these jobs has an Idempotency-Key that was used within the window."""
        with self.database.read() as connection:
            return acceptance.knows_all_keys(connection, new, self._keys_until_ms(now_ms))

    def delete_expired_keys(self, now_ms: int, limit: int = PAGE) -> int:
        """Delete at most `limit` Idempotency-Keys whose window is over, and return how many."""
        is_over = idempotency_keys.c.expires_ms <= self._keys_until_ms(now_ms)
        return delete_page(self.database, idempotency_keys, is_over, limit)

    def _keys_until_ms(self, now_ms: int) -> int:
        """Return until when keys have expired, as rows have it: a window keeps its length when the clock is set."""
        return clock.ago_ms(self._window_ms, now_ms) + self._window_ms

    # -- runs ------------------------------------------------------------------------------------------------

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
        *,
        fleet: str,
        price: int | None = None,
    ) -> Write[Run | None]:
        """Return the write that gives a queued job to a worker.

        It returns None if the job is not queued, or if the lease is of an older filling of the fleet's queue.

        described_by: version of the description of how the server is called; sent_to: the server's address.  A run
        that is resumed keeps those with which it began.  worker: Celery's name of the worker, for the event.
        price: of a second of the slot, in micro-credits; it counts if it is below what the job was accepted with.
        """
        params = {"p_id": job_id, "p_server": server, "p_slot": slot, "p_lease": lease, "p_offer": offer}
        params |= {"p_described_by": described_by, "p_sent_to": sent_to, "p_price": price}
        params |= {"p_fleet": fleet, "p_epoch": (epoch := epoch_of_lease(lease))}
        # The number of an offer is unique only within its epoch.
        data = {"server": server, "slot": slot, "offer": offer, "epoch": epoch} | ({"worker": worker} if worker else {})
        change = _Change(State.QUEUED, Reason.STARTED, now_ms, params, data)

        def unit(tx: Transaction) -> Run | None:
            row = self._apply(tx, change)
            return None if row is None else run_from_row(row, server, slot)

        # Not durable: after a power cut the job is queued again, as after any crash.
        return Write(unit, durable=False)

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
        quarantine: Quarantine | None = None,
        run_ended_ms: int | None = None,
        signed: SignedResult | None = None,
    ) -> Write[Transition | None]:
        """Return the write that ends the run `attempt` for the reason `why`.  It returns None if the run is over.

        A job whose cancellation was requested, and whose run comes to no result, is canceled instead.  After a
        CommitUnknown the same write can be committed again; it returns the transition if it had been stored.

        result: JSON text, for FINISHED.  due_ms: when a delayed job may run again, for SERVER_ERROR.
        quarantine: the server may still run the job, so that its slot must not be used yet.
        run_ended_ms: when the server ended the run, until which it is charged; None: it is not.
        signed: the envelope of a result that a node returned.
        """
        if why is Reason.SERVER_ERROR and due_ms is None:
            raise ValueError("due_ms is missing: a delayed job without it would never be queued again")
        params = {"p_id": job_id, "p_attempt": attempt} | _result_params(result, error, due_ms)
        change = _Change(State.RUNNING, why, now_ms, params, _event_data(error, due_ms, now_ms), run_ended_ms)
        canceled = _canceled(change) if change.to in REQUEUING_STATES else None

        def unit(tx: Transaction) -> Transition | None:
            if quarantine is not None:
                quarantine_slot(tx, job_id, attempt, now_ms, quarantine)
            transition = self._move(tx, change)
            if transition is None and canceled is not None and self._is_cancel_requested(tx, job_id):
                transition = self._move(tx, canceled)
            if transition is None:
                return _find_own_transition(tx, change, canceled)
            if signed is not None and transition.to is State.COMPLETED:
                envelopes.add_envelope(tx, job_id, attempt, signed, now_ms)
            if quarantine is not None and quarantine.resumes and transition.to is State.QUEUED:
                keep_slot_for_job(tx, job_id, attempt)
            return transition

        return Write(unit, size=len(result or ""))

    def remote_id_write(self, job_id: str, attempt: int, remote_id: str | None, now_ms: int) -> Write[bool]:
        """Return the write that stores the server's own id of the job.  It returns False if the run is over.

        remote_id: None: the server does not have the job after all.
        """
        params = {"p_id": job_id, "p_attempt": attempt, "p_remote_id": remote_id, "p_now": now_ms}
        return Write(lambda tx: statements.SET_REMOTE_ID.execute(tx.connection, params) == 1, is_urgent=True)

    def sent_write(self, job_id: str, attempt: int, now_ms: int) -> Write[bool]:
        """Return the write that stores when a resumed run was sent again.  It returns False if the run is over."""
        params = {"p_id": job_id, "p_attempt": attempt, "p_now": now_ms}
        return Write(lambda tx: statements.SET_SENT.execute(tx.connection, params) == 1, is_urgent=True)

    # -- cancel, deadlines, retries --------------------------------------------------------------------------

    def cancel_waiting(
        self,
        job_id: str,
        now_ms: int,
        error: JobError | None = None,
        write_audit: WriteAuditEntry = _no_entry,
        quarantine: Quarantine | None = None,
    ) -> Transition | None:
        """Cancel a queued or delayed job.  Returns None if it is neither.

        quarantine: of the slot of a job that waits to be resumed, whose server may still run it.
        """

        def unit(tx: Transaction) -> Transition | None:
            # Locked, or a worker could hand a run back between the two statements.
            locked = statements.LOCK_JOB.fetch_first(tx.connection, {"p_id": job_id})
            if quarantine is not None and locked is not None and locked.slot is not None:
                quarantine_slots(tx, State.QUEUED, [locked.seq], now_ms, quarantine)
            params, data = {"p_id": job_id} | _result_params(error=error), _event_data(error)
            for state in (State.QUEUED, State.DELAYED):
                transition = self._move(tx, _Change(state, Reason.CANCEL_REQUESTED, now_ms, params, data))
                if transition is not None:
                    write_audit(tx, model=transition.job.model, tenant=transition.job.tenant)
                    return transition
            return None

        return self.database.write(unit)

    def cancel_page_of_batch(
        self,
        batch: str,
        tenant: str,
        now_ms: int,
        error: JobError,
        quarantine: Quarantine,
        limit: int = PAGE,
    ) -> "CanceledPage":
        """Cancel up to `limit` waiting jobs of a batch, the first accepted first, and then ask for running ones.

        quarantine: of the slots of jobs that wait to be resumed, whose servers may still run them.
        """
        params = {"p_batch": batch, "p_tenant": tenant}

        def unit(tx: Transaction) -> CanceledPage:
            ended: list[Transition] = []
            for state in (State.QUEUED, State.DELAYED):
                query = statements.select_of_batch(state).limit(limit - len(ended)).with_for_update()
                seqs = tx.connection.execute(query, params).scalars().all()
                ended += self._end_many(tx, state, seqs, Reason.CANCEL_REQUESTED, now_ms, error, quarantine)
            running = statements.UNASKED_OF_BATCH.limit(limit - len(ended)).with_for_update()
            asked_of = {"p_seqs": tx.connection.execute(running, params).scalars().all(), "p_now": now_ms}
            asked = tx.connection.execute(statements.REQUEST_CANCEL_OF_MANY, asked_of).all()
            is_last = len(ended) + len(asked) < limit
            return CanceledPage(ended, [queued_job_from_row(row) for row in asked], is_last)

        return self.database.write(unit)

    def hold_page_of_batch(self, batch: str, tenant: str, now_ms: int, limit: int = PAGE) -> list[QueuedJob]:
        """Put queued jobs of a batch on hold, the first accepted first, and return them.

        Not those that keep a slot, on whose servers they may still run.  Delayed jobs whose time has come are on hold
        afterwards, too.
        """
        query = statements.QUEUED_OF_BATCH.limit(limit).with_for_update()
        params = {"p_batch": batch, "p_tenant": tenant, "p_now": now_ms}

        def unit(tx: Transaction) -> list[QueuedJob]:
            due = tx.connection.execute(statements.DUE_OF_BATCH.limit(limit).with_for_update(), params).scalars().all()
            tx.connection.execute(statements.HOLD_DUE, {"p_seqs": due, "p_now": now_ms})
            seqs = tx.connection.execute(query, params).scalars().all()
            change = _Change(State.QUEUED, Reason.HELD, now_ms, {"p_seqs": seqs})
            return [queued_job_from_row(row) for row in self._apply_to_many(tx, change)]

        return self.database.write(unit)

    def request_cancel(self, job_id: str, now_ms: int, write_audit: WriteAuditEntry = _no_entry) -> bool:
        """Store that a running job is to be canceled.  Returns False if it is not running."""

        def unit(tx: Transaction) -> bool:
            row = statements.REQUEST_CANCEL.fetch_first(tx.connection, {"p_id": job_id, "p_now": now_ms})
            if row is not None and row.cancel_requested_ms == now_ms:  # It had not been requested before.
                write_audit(tx, model=row.model, tenant=row.tenant, server=row.server)
            return row is not None

        return self.database.write(unit)

    def promote_due(self, now_ms: int, limit: int = 1000) -> list[QueuedJob]:
        """Queue the delayed jobs whose time has come, earliest first, and return those that this call queued."""

        def unit(tx: Transaction) -> list[QueuedJob]:
            seqs = [row.seq for row in _lock_rows(tx, statements.DUE, now_ms, limit)]
            change = _Change(State.DELAYED, Reason.DUE, now_ms, {"p_seqs": seqs})
            found = {row.seq: queued_job_from_row(row) for row in self._apply_to_many(tx, change)}
            return [found[seq] for seq in seqs]

        return self.database.write(unit) if self._has_any(statements.ANY_DUE, now_ms) else []

    def expire_overdue(self, now_ms: int, limit: int = 1000, quarantine: Quarantine | None = None) -> list[Transition]:
        """End jobs whose deadline has passed, waiting or running, the longest overdue first.

        Returns those that this call ended, at most `limit`, all in one transaction.  An empty list: there are no more,
        or another process ends them now.
        """

        def unit(tx: Transaction) -> list[Transition]:
            overdue = defaultdict[State, list[int]](list)
            for row in _lock_rows(tx, statements.OVERDUE[self._dialect], now_ms, limit):
                overdue[State(row.state)].append(row.seq)
            return [
                ended for state, seqs in overdue.items() for ended in self._expire(tx, state, seqs, now_ms, quarantine)
            ]

        return self.database.write(unit) if self._has_any(statements.ANY_OVERDUE[self._dialect], now_ms) else []

    def revive(self, job_id: str, now_ms: int, write_audit: WriteAuditEntry = _no_entry) -> QueuedJob | None:
        """Queue a dead job again, with fresh budgets, at its own place.  Returns None if it is not dead.

        Raises ModelClosed; InsufficientCredits: it costs something, and its tenant has too few.
        """
        change = _Change(State.DEAD, Reason.REVIVED, now_ms, {"p_id": job_id})

        def unit(tx: Transaction) -> QueuedJob | InsufficientCredits | None:
            dead = statements.COST_OF_DEAD.fetch_first(tx.connection, {"p_id": job_id})
            if dead is None:
                return None
            was_paid = dead.reserved is not None
            is_paid = was_paid and credits.has_open_account(tx.connection, dead.tenant)
            if is_paid and (short := credits.find_shortage(tx, {dead.tenant: -dead.reserved})):
                return short[dead.tenant]
            if (row := self._apply(tx, change)) is None:
                return None
            closed_models.check_open(tx, job_id, row.model)
            if is_paid:
                credits.reserve(tx, row, row.seq, row.attempt, now_ms)
            elif was_paid:
                credits.make_free(tx, row.seq)
            write_audit(tx, model=row.model, tenant=row.tenant)
            return queued_job_from_row(row)

        return self.database.write(unit)

    # -- transitions -----------------------------------------------------------------------------------------

    def _apply(self, tx: Transaction, change: _Change) -> Row | None:
        """Make the transition of one job, with its event (JOB-2).  Returns None if the job is not in that state."""
        statement = ONE_JOB[change.state, change.why]
        row = statement.fetch_first(tx.connection, {**change.params, "p_now": change.now_ms})
        if row is not None:
            _add_event(tx, change, row)
        return row

    def _apply_to_many(self, tx: Transaction, change: _Change) -> Sequence[Row]:
        """The same for jobs that this transaction has locked."""
        statement = MANY_JOBS[change.state, change.why]
        rows = statement.fetch_all(tx.connection, {**change.params, "p_now": change.now_ms})
        for row in rows:
            _add_event(tx, change, row)
        return rows

    def _move(self, tx: Transaction, change: _Change) -> Transition | None:
        """Make the transition of one job, with what its end requires."""
        row = self._apply(tx, change)
        return None if row is None else _add_consequences(tx, row, change)

    def _expire(
        self, tx: Transaction, state: State, seqs: Sequence[int], now_ms: int, quarantine: Quarantine | None
    ) -> list[Transition]:
        error = JobError("deadline_passed", f"Its deadline passed while it was {state}.")
        return self._end_many(tx, state, seqs, Reason.DEADLINE_PASSED, now_ms, error, quarantine)

    def _end_many(
        self,
        tx: Transaction,
        state: State,
        seqs: Sequence[int],
        why: Reason,
        now_ms: int,
        error: JobError,
        quarantine: Quarantine | None,
    ) -> list[Transition]:
        """End jobs that this transaction has locked."""
        if state is not State.DELAYED and quarantine is not None:
            quarantine_slots(tx, state, seqs, now_ms, quarantine)
        params = {"p_seqs": seqs} | _result_params(error=error)
        ended_ms = now_ms if state is State.RUNNING else None
        change = _Change(state, why, now_ms, params, _event_data(error), ended_ms)
        return [_add_consequences(tx, row, change) for row in self._apply_to_many(tx, change)]

    def _is_cancel_requested(self, tx: Transaction, job_id: str) -> bool:
        return statements.CANCEL_REQUESTED.fetch_value(tx.connection, {"p_id": job_id}) is not None

    def _has_any(self, query: CompiledStatement, now_ms: int) -> bool:
        """Return whether there is anything to do, without taking the write lock."""
        with self.database.read() as connection:
            return query.fetch_first(connection, {"p_now": now_ms}) is not None

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job | None:
        """Return the whole job, with payload and result."""
        with self.database.read() as connection:
            row = statements.WHOLE_JOB.fetch_first(connection, {"p_id": job_id})
        return None if row is None else job_from_row(row)

    def get_state(self, job_id: str) -> State | None:
        """Return only the state of a job: cheap enough for polling."""
        with self.database.read() as connection:
            row = statements.JOB_STATE.fetch_first(connection, {"p_id": job_id})
        return None if row is None else State(row.state)

    def get_statuses(self, job_ids: Sequence[str]) -> dict[str, JobStatus]:
        """Return the status of each of these jobs, without those that do not exist."""
        query = select(*QUEUED_JOB_COLUMNS, *_STATUS_COLUMNS).where(jobs.c.id.in_(job_ids))
        with self.database.read() as connection:
            rows = connection.execute(query).all()
        return {row.id: job_status_from_row(row) for row in rows}

    def get_message_headers(self, job_id: str) -> tuple[str, int, int, str | None] | None:
        """Return (model, priority, failures, envelope), for the task message of a job."""
        with self.database.read() as connection:
            row = statements.MESSAGE_HEADERS.fetch_first(connection, {"p_id": job_id})
        return None if row is None else tuple(row)

    def list_running(self) -> list[Job]:
        """Return all running jobs, in order of acceptance."""
        with self.database.read() as connection:
            return [job_from_row(row) for row in statements.RUNNING.fetch_all(connection, {})]

    def list_queued(
        self, models: Sequence[str] | None = None, after_seq: int = 0, limit: int = 1000
    ) -> list[QueuedJob]:
        """Return queued jobs of these models, or of all, in order of acceptance, after `after_seq`.

        A model without queued jobs costs one look-up in an index; with many models, about as many rows are read as are
        returned.
        """
        with self.database.read() as connection:
            if models is None:
                rows = iter(connection.execute(statements.QUEUED_OF_ALL, {"p_after": after_seq, "p_limit": limit}))
            else:
                rows = statements.merge_queued(connection, models, after_seq, limit)
            return [queued_job_from_row(row) for row in islice(rows, limit)]

    def list_resumable(self) -> list[tuple[QueuedJob, str]]:
        """Return the queued jobs whose servers may still run them, each with the slot in which it is resumed.

        Reads only the index of these jobs.
        """
        with self.database.read() as connection:
            return [(queued_job_from_row(row), row.slot) for row in statements.RESUMABLE.fetch_all(connection, {})]

    def find_models_with_queued(self, models: Sequence[str]) -> set[str]:
        """Return those of these models that have queued jobs."""
        queries, params = statements.select_queued(models), {"p_after": 0, "p_limit": 1}
        with self.database.read() as connection:
            return {row.model for query in queries for row in connection.execute(query, params)}

    def list_events(self, job_id: str) -> list[Event]:
        """Return the job's events, oldest first."""
        with self.database.read() as connection:
            return events.list_of_job(connection, job_id)

    def longest_usual_run_ms(self, model: str) -> int | None:
        """Return the 99th percentile of the run times (ms) of the model's latest completed jobs.

        Returns None if there are none.
        """
        with self.database.read() as connection:
            rows = statements.LATEST_RUN_TIMES.fetch_all(connection, {"p_model": model})
        run_times = sorted(row.run_ms for row in rows if row.run_ms is not None)
        return run_times[-1 - len(run_times) // 100] if run_times else None


def _lock_rows(tx: Transaction, query: Select[Any], now_ms: int, limit: int) -> Sequence[Row]:
    """Lock rows until the commit, without those that another transaction has locked."""
    return tx.connection.execute(query.limit(limit).with_for_update(skip_locked=True), {"p_now": now_ms}).all()


def _canceled(change: _Change) -> _Change:
    """Return what happens instead if the job's cancellation was requested."""
    error = JobError("canceled", "Canceled; its run came to no result.")
    params = {name: change.params[name] for name in ("p_id", "p_attempt")} | _result_params(error=error)
    return replace(change, why=Reason.CANCEL_REQUESTED, data=_event_data(error), params=params, run_ended_ms=None)


def _find_own_transition(tx: Transaction, *changes: _Change | None) -> Transition | None:
    """Return the transition that an earlier commit of one of these changes made, if its answer was lost.

    Its event proves that: it holds the reason, the time and the token.
    """
    for change in changes:
        if change is None:
            continue
        job_id, attempt = change.params["p_id"], change.params["p_attempt"]
        if events.has_event(tx.connection, job_id, change.to, change.now_ms, attempt, change.event_data):
            row = statements.WHOLE_JOB.fetch_first(tx.connection, {"p_id": job_id})
            assert row is not None, "events are deleted after their job"
            notification_id = notifications.make_notification_id(row, change.to, attempt)
            return Transition(queued_job_from_row(row), change.to, attempt, notification_id)
    return None


def _add_event(tx: Transaction, change: _Change, row: Row) -> None:
    events.add_row(
        tx, events.make_row(row, change.to, change.now_ms, row.attempt, change.event_data, server=row.server)
    )


def _add_consequences(tx: Transaction, row: Row, change: _Change) -> Transition:
    """Add what a transition requires if it is an end: notifications, and what the job costs."""
    if row.reserved is not None and change.to in FINAL_STATES:
        credits.settle(tx, row, change.to, change.why, change.now_ms, change.run_ended_ms)
    notifications.add_callback_message(tx, row, change.to, change.now_ms)
    notification_id = notifications.add_result_notification(tx, row, change.to, change.now_ms)
    return Transition(queued_job_from_row(row), change.to, row.attempt, notification_id)


def _result_params(
    result: str | None = None, error: JobError | None = None, due_ms: int | None = None
) -> dict[str, Any]:
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
