"""What each transition changes in a job: one prepared UPDATE for each row of states.TRANSITIONS.

    ONE    of one job by its id, or of each of several; of a running one under the token of that very run
    MANY   of jobs that were just found, and locked, because their time has come

Each names the state that it expects to find, so that its rows are the jobs that it moved.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, Connection, Integer, Text, Update, bindparam, case, literal_column, update
from sqlalchemy.sql.dml import ReturningUpdate

from slotkeeper.db.compiled_sql import Each
from slotkeeper.jobs.states import TRANSITIONS, Budget, Edge, Reason, State, find_edge
from slotkeeper.jobs.tables import jobs

Row: TypeAlias = Any

QUEUED_JOB_COLUMNS = (
    jobs.c.id,
    jobs.c.seq,
    jobs.c.model,
    jobs.c.priority.label("priority"),
    jobs.c.tenant,
    jobs.c.created_ms,
    jobs.c.constraints.label("constraints"),
)
_ALSO_MOVED = (
    *("attempt", "failures", "crashes", "deadline_ms", "remote_id", "sent_ms", "started_ms", "cancel_requested_ms"),
    *("callback_url", "envelope", "described_by", "traceparent", "server", "sent_to"),
)
_MOVED_COLUMNS = (*QUEUED_JOB_COLUMNS, *(jobs.c[name] for name in _ALSO_MOVED))
_STARTED_COLUMNS = (jobs.c.payload, jobs.c.error_code, jobs.c.error_message)
# A worker may die and its job go on at the server: these transitions keep what is needed to resume it.
_KEEPS_REMOTE = frozenset({Reason.LEASE_EXPIRED, Reason.HANDED_BACK})
# What happens to many at the same moment.
_OF_TIME = frozenset({Reason.DUE, Reason.DEADLINE_PASSED})
# What a worker needs that resumes a run.
_OF_RUN = ("remote_id", "sent_ms", "described_by", "sent_to")
REQUEUING_STATES = frozenset({State.QUEUED, State.DELAYED, State.DEAD})
"""Where a run ends without a result; a job that shall be canceled does not go there."""


@dataclass(frozen=True, slots=True)
class TransitionStatement:
    """One transition, and what makes it: it takes parameters by name, and answers the jobs that it moved.

    ONE takes parameters of any number of jobs, each of its own.
    """

    edge: Edge
    jobs: Callable[[Connection, Sequence[Mapping[str, Any]]], Sequence[Row]]


def in_state(state: State) -> ColumnElement[bool]:
    """A job found by its key is in `state`.

    Said so that no index of states can be used: PostgreSQL would read all jobs of a state whose number, by
    statistics from before they came, is small.
    """
    return unindexed(jobs.c.state) == literal_column(f"'{state.value}'")


def unindexed(column: ColumnElement[str]) -> ColumnElement[str]:
    """The text of a column, as no index has it: it is compared in the rows that another condition finds."""
    return column.op("||")(literal_column("''"))


def _one(state: State, why: Reason) -> TransitionStatement:
    statement = update(jobs).where(jobs.c.id == bindparam("p_id"), in_state(state))
    if state is State.RUNNING:  # LEASE-3: only under the token of this very run
        statement = statement.where(jobs.c.attempt == bindparam("p_attempt"))
    if state is State.RUNNING and find_edge(state, why).to in REQUEUING_STATES:
        statement = statement.where(jobs.c.cancel_requested_ms.is_(None))
    return TransitionStatement(find_edge(state, why), Each(_moving(state, why, statement)).all)


def _many(state: State, why: Reason) -> TransitionStatement:
    these = update(jobs).where(jobs.c.seq.in_(bindparam("p_seqs", expanding=True)), in_state(state))
    statement = _moving(state, why, these)
    names = [name for name in statement.compile().params if name.startswith("p_")]

    def moved(connection: Connection, given: Sequence[Mapping[str, Any]]) -> Sequence[Row]:
        return connection.execute(statement, {name: given[0][name] for name in names}).all()

    return TransitionStatement(find_edge(state, why), moved)


def _moving(state: State, why: Reason, guarded: Update) -> ReturningUpdate[Any]:
    """The whole statement of a transition."""
    found = find_edge(state, why)
    values = _values(state, why, found.to)
    if found.costs is not Budget.NOTHING:
        values[found.costs.value] = jobs.c[found.costs.value] + 1
    columns = (*_MOVED_COLUMNS, *_STARTED_COLUMNS) if found.to is State.RUNNING else _MOVED_COLUMNS
    return guarded.values(state=found.to.value, why=why.value, **values).returning(*columns)


def _values(state: State, why: Reason, to: State) -> dict[str, Any]:
    """Columns that a transition sets, beside `state`, `why` and the budget's counter."""
    stopped: dict[str, Any] = {"slot": None, "lease": None}
    forgotten: dict[str, Any] = {} if why in _KEEPS_REMOTE else dict.fromkeys(_OF_RUN)
    if forgotten and why is not Reason.SERVER_LOST:  # That one may still have the result of a run that has ended.
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
                "described_by": case((_RESUMED, jobs.c.described_by), else_=bindparam("p_described_by", type_=Text)),
                "sent_to": case((_WAS_SENT, jobs.c.sent_to), else_=bindparam("p_sent_to", type_=Text)),
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
            ended = error | {
                "finished_ms": bindparam("p_now"),
                "result": bindparam("p_result"),
                "due_ms": None,
                "lease": None,
                "sent_to": None,  # It may hold a password.
            }
            # Where a job ended that waited to be resumed: its slot is withheld, see
            # routing/maintenance/quarantined_slots.py.
            return ended if state is State.RUNNING else ended | {"slot": None}


# What was begun is gone on with in the same words.
_RESUMED = (jobs.c.server == bindparam("p_server")) & jobs.c.remote_id.is_not(None)
# Its server may be at the run, at the address to which that was sent.
_WAS_SENT = (
    (jobs.c.server == bindparam("p_server"))
    & jobs.c.sent_to.is_not(None)
    & (jobs.c.remote_id.is_not(None) | (bindparam("p_offer", type_=Integer) == 0))
)


def _if_same_server(column: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((jobs.c.server == bindparam("p_server"), column), else_=None)


Moves: TypeAlias = Mapping[tuple[State, Reason], TransitionStatement]
ONE_JOB: Moves = {(state, why): _one(state, why) for (state, why) in TRANSITIONS if state is not None}
MANY_JOBS: Moves = {
    (state, why): _many(state, why) for (state, why) in TRANSITIONS if state is not None and why in _OF_TIME
}
