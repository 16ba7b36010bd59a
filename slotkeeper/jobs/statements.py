"""The SQL of jobs: one guarded UPDATE for each transition, and reads that an index answers.

Each row of `states.TRANSITIONS` has its statement:

    ONE_JOB      one job by its id; a running one under the fencing token of its run
    MANY_JOBS    jobs that this transaction has found and locked, because their time has come

Each names the state that it expects to find, so that it returns the jobs that it moved.

Reads of many jobs are written so that an index gives the rows in order, and no more than are asked for.  They stay fast
with old statistics, from before a backlog came or before jobs were many.
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from operator import attrgetter
from typing import Any, TypeAlias

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Executable,
    Integer,
    Select,
    Text,
    Update,
    and_,
    bindparam,
    case,
    func,
    literal,
    literal_column,
    select,
    text,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.jobs import queue_epochs
from slotkeeper.jobs.states import TRANSITIONS, Budget, Reason, State, find_edge
from slotkeeper.jobs.tables import (
    ACTIVE_CONDITION,
    EXPIRABLE_CONDITION,
    JOB_COLUMNS,
    QUEUED_CONDITION,
    RESUMABLE_CONDITION,
    jobs,
)

Row: TypeAlias = Any  # the columns that the statement names

QUEUED_JOB_COLUMNS = (
    jobs.c.id,
    jobs.c.seq,
    jobs.c.model,
    jobs.c.priority.label("priority"),
    jobs.c.tenant,
    jobs.c.created_ms,
    jobs.c.constraints.label("constraints"),
    jobs.c.deadline_ms,
)
REQUEUING_STATES = frozenset({State.QUEUED, State.DELAYED, State.DEAD})
"""Where a job may run again.  After a run, a job whose cancellation was requested gets none of these states."""

_MOVED_COLUMNS = (
    *QUEUED_JOB_COLUMNS,
    *(
        jobs.c[name]
        for name in (
            *("attempt", "failures", "crashes", "remote_id", "sent_ms", "started_ms"),
            *("cancel_requested_ms", "callback_url", "envelope", "described_by", "traceparent", "server", "sent_to"),
            *("reserved", "price"),
        )
    ),
)
_STARTED_COLUMNS = (jobs.c.payload, jobs.c.error_code, jobs.c.error_message, jobs.c.terms)
# A worker may die while its job goes on at the server: these transitions keep what is needed to resume it.
_KEEPS_REMOTE = frozenset({Reason.LEASE_EXPIRED, Reason.HANDED_BACK})
_OF_MANY = frozenset({Reason.DUE, Reason.DEADLINE_PASSED, Reason.CANCEL_REQUESTED, Reason.HELD})
_RESUME_COLUMNS = ("remote_id", "sent_ms", "described_by", "sent_to")


def in_state(state: State) -> ColumnElement[bool]:
    """Return the condition that a job, found by its key, is in `state`.

    No index of states can be used for it.  PostgreSQL would otherwise read all jobs of a state that has few of them by
    statistics from before they came.
    """
    return unindexed(jobs.c.state) == literal_column(f"'{state.value}'")


def unindexed(column: ColumnElement[str]) -> ColumnElement[str]:
    """Return a text column in a form that no index has: it is compared in rows that another condition finds."""
    return column.op("||")(literal_column("''"))


# -- transitions -------------------------------------------------------------------------------------------------


class ManyJobsUpdate:
    """A transition of jobs by their acceptance numbers.  SQLAlchemy executes it: the list of numbers varies."""

    def __init__(self, statement: ReturningUpdate[Any]) -> None:
        self._statement = statement
        self._names = [name for name in statement.compile().params if name.startswith("p_")]

    def fetch_all(self, connection: Connection, values: Mapping[str, Any]) -> Sequence[Row]:
        return connection.execute(self._statement, {name: values[name] for name in self._names}).all()


def _update_one(state: State, why: Reason) -> CompiledStatement:
    statement = update(jobs).where(jobs.c.id == bindparam("p_id"), in_state(state))
    if why is Reason.STARTED:  # QUEUE-2: only from the newest filling of the fleet's queue
        statement = statement.where(queue_epochs.is_current())
    if state is State.RUNNING:  # LEASE-3: only under the token of this very run
        statement = statement.where(jobs.c.attempt == bindparam("p_attempt"))
    if state is State.RUNNING and find_edge(state, why).to in REQUEUING_STATES:
        statement = statement.where(jobs.c.cancel_requested_ms.is_(None))
    return CompiledStatement(_set_values(state, why, statement))


def _update_many(state: State, why: Reason) -> ManyJobsUpdate:
    statement = update(jobs).where(jobs.c.seq.in_(bindparam("p_seqs", expanding=True)), in_state(state))
    return ManyJobsUpdate(_set_values(state, why, statement))


def _set_values(state: State, why: Reason, guarded: Update) -> ReturningUpdate[Any]:
    """Return the whole statement of a transition."""
    edge = find_edge(state, why)
    values = _values(state, why, edge.to)
    if edge.costs is not Budget.NOTHING:
        values[edge.costs.value] = jobs.c[edge.costs.value] + 1
    columns = (*_MOVED_COLUMNS, *_STARTED_COLUMNS) if edge.to is State.RUNNING else _MOVED_COLUMNS
    return guarded.values(state=edge.to.value, why=why.value, **values).returning(*columns)


def _values(state: State, why: Reason, to: State) -> dict[str, Any]:
    """Return the columns that a transition sets, beside `state`, `why` and the counter of the budget."""
    stopped: dict[str, Any] = {"slot": None, "lease": None}
    forgotten: dict[str, Any] = {} if why in _KEEPS_REMOTE else dict.fromkeys(_RESUME_COLUMNS)
    if forgotten and why is not Reason.SERVER_LOST:  # That server may still have the result of a run that has ended.
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
                "sent_ms": case((_MAY_BE_AT_SERVER, jobs.c.sent_ms), else_=None),
                "described_by": case((_IS_RESUMED, jobs.c.described_by), else_=bindparam("p_described_by", type_=Text)),
                "sent_to": case((_WAS_SENT, jobs.c.sent_to), else_=bindparam("p_sent_to", type_=Text)),
                "price": case((jobs.c.price > _PRICE, _PRICE), else_=jobs.c.price),
            }
        case State.QUEUED if state is State.DEAD:
            cleared = dict.fromkeys(
                ("finished_ms", "error_code", "error_message", "deadline_ms", "cancel_requested_ms")
            )
            return stopped | forgotten | cleared | {"failures": 0, "crashes": 0, "reserved": -jobs.c.reserved}
        case State.QUEUED if state is State.DELAYED:
            return {"due_ms": None}
        case State.QUEUED:
            kept: dict[str, Any] = {"sent_ms": func.coalesce(jobs.c.sent_ms, jobs.c.started_ms)}
            return stopped | (forgotten or kept) | error
        case State.DELAYED if state is State.QUEUED:
            return {"due_ms": None}
        case State.DELAYED:
            return stopped | forgotten | error | {"due_ms": bindparam("p_due")}
        case _:
            ended = error | {
                "finished_ms": bindparam("p_now"),
                "result": bindparam("p_result"),
                "due_ms": None,
                "lease": None,
                "sent_to": None,  # It may hold a password.
                "reserved": -jobs.c.reserved,  # Settled, once.
            }
            # The slot of a job that waited to be resumed is quarantined (routing/maintenance/quarantined_slots.py).
            return ended if state is State.RUNNING else ended | {"slot": None}


_PRICE = bindparam("p_price", type_=BigInteger)
# A resumed run is continued by the description with which it began.
_IS_RESUMED = (jobs.c.server == bindparam("p_server")) & jobs.c.remote_id.is_not(None)
_MAY_BE_AT_SERVER = (jobs.c.server == bindparam("p_server")) & (
    jobs.c.remote_id.is_not(None) | (bindparam("p_offer", type_=Integer) == 0)
)
# The server may be running the job, under the address to which it was sent.
_WAS_SENT = _MAY_BE_AT_SERVER & jobs.c.sent_to.is_not(None)


def _if_same_server(column: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((jobs.c.server == bindparam("p_server"), column), else_=None)


ONE_JOB = {(state, why): _update_one(state, why) for (state, why) in TRANSITIONS if state is not None}
MANY_JOBS = {
    (state, why): _update_many(state, why)
    for (state, why) in TRANSITIONS
    if state is not None and why in _OF_MANY and (state, why) != (State.RUNNING, Reason.CANCEL_REQUESTED)
}

# -- changes that are no transition ------------------------------------------------------------------------------

_THIS = jobs.c.id == bindparam("p_id")
_THIS_RUN = (_THIS, in_state(State.RUNNING), jobs.c.attempt == bindparam("p_attempt"))

SET_REMOTE_ID = CompiledStatement(
    update(jobs)
    .where(*_THIS_RUN)
    .values(
        remote_id=bindparam("p_remote_id"),
        sent_ms=case((jobs.c.remote_id == bindparam("p_remote_id"), jobs.c.sent_ms), else_=bindparam("p_now")),
    )
)
SET_SENT = CompiledStatement(update(jobs).where(*_THIS_RUN).values(sent_ms=bindparam("p_now")))
REQUEST_CANCEL = CompiledStatement(
    update(jobs)
    .where(_THIS, in_state(State.RUNNING))
    .values(cancel_requested_ms=func.coalesce(jobs.c.cancel_requested_ms, bindparam("p_now")))
    .returning(jobs.c.model, jobs.c.tenant, jobs.c.server, jobs.c.cancel_requested_ms)
)
REQUEST_CANCEL_OF_MANY = (
    update(jobs)
    .where(jobs.c.seq.in_(bindparam("p_seqs", expanding=True)), in_state(State.RUNNING))
    .where(jobs.c.cancel_requested_ms.is_(None))
    .values(cancel_requested_ms=bindparam("p_now"))
    .returning(*QUEUED_JOB_COLUMNS)
)

# -- reads -------------------------------------------------------------------------------------------------------

_MODELS_AT_ONCE = 100  # SQLite joins at most 500 queries.
_MAX_SEQ = 2**63 - 1
_MORE_THAN_SHARE = 10  # rows of each model that are read at first, beyond its share of those that are asked for

WHOLE_JOB = CompiledStatement(select(*JOB_COLUMNS).where(_THIS))
JOB_STATE = CompiledStatement(select(jobs.c.id, jobs.c.seq, jobs.c.state).where(_THIS))
CANCEL_REQUESTED = CompiledStatement(select(jobs.c.cancel_requested_ms).where(_THIS))
COST_OF_DEAD = CompiledStatement(select(jobs.c.tenant, jobs.c.reserved).where(_THIS, in_state(State.DEAD)))
LOCK_JOB = CompiledStatement(select(jobs.c.seq, jobs.c.slot).where(_THIS).with_for_update())
MESSAGE_HEADERS = CompiledStatement(
    select(jobs.c.model, jobs.c.priority, jobs.c.failures, jobs.c.envelope).where(_THIS)
)

DUE = select(jobs.c.seq).where(jobs.c.due_ms <= bindparam("p_now")).order_by(jobs.c.due_ms, jobs.c.seq)
ANY_DUE = CompiledStatement(DUE.limit(1))
# The condition must be the index's, word for word, or it may not be used; and without statistics SQLite takes the
# number of active jobs for small.
_PASSED = "deadline_ms <= :p_now"
OVERDUE = {
    dialect: select(jobs.c.seq, jobs.c.state).where(text(condition)).order_by(jobs.c.deadline_ms)
    for dialect, condition in (
        ("sqlite", f"likelihood({_PASSED}, 0.0001) AND deadline_ms IS NOT NULL AND likely({ACTIVE_CONDITION})"),
        ("postgresql", f"{_PASSED} AND {EXPIRABLE_CONDITION}"),
    )
}
ANY_OVERDUE = {dialect: CompiledStatement(query.limit(1)) for dialect, query in OVERDUE.items()}


def select_of_batch(state: State, after: Any = 0) -> Select[Any]:
    """Return a query for the acceptance numbers after `after` of the jobs of a batch in a state, in order.

    A range of the index that has all four columns, which SQLite uses only with its condition.  With equal columns
    PostgreSQL might read another index.
    """
    key = (jobs.c.tenant, jobs.c.batch, jobs.c.state, jobs.c.seq)
    batch = (bindparam("p_tenant", type_=Text), bindparam("p_batch", type_=Text), literal(state.value))
    in_range = and_(tuple_(*key) > tuple_(*batch, after), tuple_(*key) < tuple_(*batch, _MAX_SEQ))
    return select(jobs.c.seq).where(text("batch IS NOT NULL"), in_range).order_by(*key)


QUEUED_OF_BATCH = select_of_batch(State.QUEUED).where(jobs.c.slot.is_(None))
UNASKED_OF_BATCH = select_of_batch(State.RUNNING).where(jobs.c.cancel_requested_ms.is_(None))
DUE_OF_BATCH = select_of_batch(State.DELAYED).where(jobs.c.due_ms <= bindparam("p_now"))
HOLD_DUE = (
    update(jobs)
    .where(jobs.c.seq.in_(bindparam("p_seqs", expanding=True)), in_state(State.DELAYED))
    .where(jobs.c.due_ms <= bindparam("p_now"))
    .values(due_ms=None)
)

JOB_LIST = select(*(column for column in JOB_COLUMNS if column.name not in {"payload", "result", "envelope"}))
"""Jobs without what they carry."""
RUNNING = CompiledStatement(JOB_LIST.where(jobs.c.state == State.RUNNING.value).order_by(jobs.c.seq))
RESUMABLE = CompiledStatement(
    select(*QUEUED_JOB_COLUMNS, jobs.c.slot).where(text(RESUMABLE_CONDITION)).order_by(jobs.c.seq)
)
_FIRST = select(*QUEUED_JOB_COLUMNS).limit(bindparam("p_limit", type_=Integer))
_QUEUED_OF_MODEL = _FIRST.where(text(QUEUED_CONDITION), jobs.c.seq > bindparam("p_after")).order_by(jobs.c.seq)


def select_queued(models: Sequence[str]) -> Sequence[Executable]:
    """Return queries for the first queued jobs of each model: each is a look-up in an index of queued jobs alone."""
    firsts = [select(_QUEUED_OF_MODEL.where(jobs.c.model == model).subquery()) for model in models]
    return [union_all(*firsts[n : n + _MODELS_AT_ONCE]) for n in range(0, len(firsts), _MODELS_AT_ONCE)]


def merge_queued(connection: Connection, models: Sequence[str], after_seq: int, limit: int) -> Iterator[Row]:
    """Yield queued jobs of several models in order of acceptance; each model is read in pages, as far as needed."""
    first = min(limit // max(len(models), 1) + _MORE_THAN_SHARE, limit)
    params = {"p_after": after_seq, "p_limit": first}
    pages: dict[str, list[Row]] = {model: [] for model in models}
    for query in select_queued(models):
        for row in connection.execute(query, params).all():
            pages[row.model].append(row)

    def read(model: str) -> Iterator[Row]:
        page, size = pages[model], first
        yield from page
        (query,) = select_queued([model])
        while len(page) == size:
            size = min(2 * size, limit)
            page = list(connection.execute(query, {"p_after": page[-1].seq, "p_limit": size}).all())
            yield from page

    return merge(*map(read, pages), key=attrgetter("seq"))


def key_range(column: ColumnElement[str], value: str, after: Any, before: int | None = None) -> ColumnElement[bool]:
    """Return the condition that `column` has this value, and `seq` lies between `after` and `before`, both exclusive.

    To be read in order of (column, seq): then the index of that column is used.  Written as `column = value`, reading
    all jobs in order of `seq` may look as good to the database.
    """
    return seq_range((column, jobs.c.seq), (value,), after, before)


def seq_range(
    key: Sequence[ColumnElement[Any]], values: Sequence[str], after: Any, before: int | None
) -> ColumnElement[bool]:
    """Return the condition that the columns of an index have these values, and the last one, a `seq`, is in range."""
    row, words = tuple_(*key), [literal(value) for value in values]
    return and_(row > tuple_(*words, after), row < tuple_(*words, _MAX_SEQ if before is None else before))


QUEUED_OF_ALL = _FIRST.where(key_range(jobs.c.state, State.QUEUED.value, bindparam("p_after"))).order_by(
    jobs.c.state, jobs.c.seq
)

_LATEST_ENDS, _LATEST_OF_MODEL = 2_000, 200
_LATEST = (
    select(
        *(jobs.c.model, jobs.c.state),
        # Without the time for which a resumed run waited for the end of its earlier request.
        (jobs.c.finished_ms - func.coalesce(jobs.c.sent_ms, jobs.c.started_ms)).label("run_ms"),
        jobs.c.finished_ms,
    )
    .where(jobs.c.finished_ms.is_not(None))
    .order_by(jobs.c.finished_ms.desc())
    .limit(_LATEST_ENDS)
    .subquery()
)
LATEST_RUN_TIMES = CompiledStatement(
    select(_LATEST.c.run_ms)
    .where(_LATEST.c.model == bindparam("p_model"), _LATEST.c.state == State.COMPLETED.value)
    .order_by(_LATEST.c.finished_ms.desc())
    .limit(_LATEST_OF_MODEL)
)
