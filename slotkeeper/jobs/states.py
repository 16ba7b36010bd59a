"""The life of a job, as data.

    submit ──▶ queued ◀──────────── due ───────────── delayed ◀── submit, with a not-before time
                │  ▲                                     ▲
          start │  │ busy, unreachable, handed back,     │ server error, retries left
                ▼  │ lease expired, server lost          │
              running ───────────────────────────────────┘
                │
                ├──▶ completed   failed   expired   canceled        (never left: JOB-1)
                └──▶ dead ── a person's retry ──▶ queued            (the dead letter queue)

queued and delayed jobs can also expire or be canceled.  What is not in TRANSITIONS cannot happen.
"""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where a job stands.  The API's `status`, the column `jobs.state` and its CHECK are these words."""

    QUEUED = "queued"
    DELAYED = "delayed"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELED = "canceled"
    DEAD = "dead"


FINAL_STATES = frozenset({State.COMPLETED, State.FAILED, State.EXPIRED, State.CANCELED, State.DEAD})
ACTIVE_STATES = frozenset(State) - FINAL_STATES


class Reason(StrEnum):
    """The reason of a transition; stored with the job and with its event."""

    SUBMITTED = "submitted"
    SCHEDULED = "scheduled"
    DUE = "due"
    STARTED = "started"
    FINISHED = "finished"
    INVALID_REQUEST = "invalid_request"
    SERVER_BUSY = "server_busy"
    SERVER_UNREACHABLE = "server_unreachable"
    SERVER_ERROR = "server_error"
    RETRIES_EXHAUSTED = "retries_exhausted"
    LEASE_EXPIRED = "lease_expired"
    SERVER_LOST = "server_lost"
    CRASHES_EXHAUSTED = "crashes_exhausted"
    HANDED_BACK = "handed_back"
    DEADLINE_PASSED = "deadline_passed"
    CANCEL_REQUESTED = "cancel_requested"
    REVIVED = "revived"


class Budget(StrEnum):
    """What a transition costs the job: the name of the counter that it raises."""

    NOTHING = "nothing"
    WAITS = "waits"  # a start that came to nothing: no attempt of the job's own
    FAILURES = "failures"  # held against max_retries
    CRASHES = "crashes"  # held against max_crashes


@dataclass(frozen=True, slots=True)
class Edge:
    """One allowed transition: where it leads, what it costs, which function of the record performs it."""

    to: State
    by: str
    costs: Budget = Budget.NOTHING


_SETTLE = "slotkeeper.jobs.store.settle_write"
_DEADLINES = "slotkeeper.jobs.store.expire_overdue"
_CANCEL = "slotkeeper.jobs.store.cancel_waiting"

TRANSITIONS: dict[tuple[State | None, Reason], Edge] = {
    (None, Reason.SUBMITTED): Edge(State.QUEUED, "slotkeeper.jobs.store.submit"),
    (None, Reason.SCHEDULED): Edge(State.DELAYED, "slotkeeper.jobs.store.submit"),
    (State.DELAYED, Reason.DUE): Edge(State.QUEUED, "slotkeeper.jobs.store.promote_due"),
    (State.QUEUED, Reason.STARTED): Edge(State.RUNNING, "slotkeeper.jobs.store.start_write"),
    (State.RUNNING, Reason.FINISHED): Edge(State.COMPLETED, _SETTLE),
    (State.RUNNING, Reason.INVALID_REQUEST): Edge(State.FAILED, _SETTLE),
    (State.RUNNING, Reason.SERVER_BUSY): Edge(State.QUEUED, _SETTLE, Budget.WAITS),
    (State.RUNNING, Reason.SERVER_UNREACHABLE): Edge(State.QUEUED, _SETTLE, Budget.WAITS),
    (State.RUNNING, Reason.HANDED_BACK): Edge(State.QUEUED, _SETTLE, Budget.WAITS),
    (State.RUNNING, Reason.SERVER_ERROR): Edge(State.DELAYED, _SETTLE, Budget.FAILURES),
    (State.RUNNING, Reason.RETRIES_EXHAUSTED): Edge(State.DEAD, _SETTLE, Budget.FAILURES),
    (State.RUNNING, Reason.SERVER_LOST): Edge(State.QUEUED, _SETTLE, Budget.CRASHES),
    (State.RUNNING, Reason.LEASE_EXPIRED): Edge(State.QUEUED, _SETTLE, Budget.CRASHES),
    (State.RUNNING, Reason.CRASHES_EXHAUSTED): Edge(State.DEAD, _SETTLE, Budget.CRASHES),
    (State.RUNNING, Reason.DEADLINE_PASSED): Edge(State.EXPIRED, _SETTLE),
    (State.RUNNING, Reason.CANCEL_REQUESTED): Edge(State.CANCELED, _SETTLE),
    (State.QUEUED, Reason.DEADLINE_PASSED): Edge(State.EXPIRED, _DEADLINES),
    (State.DELAYED, Reason.DEADLINE_PASSED): Edge(State.EXPIRED, _DEADLINES),
    (State.QUEUED, Reason.CANCEL_REQUESTED): Edge(State.CANCELED, _CANCEL),
    (State.DELAYED, Reason.CANCEL_REQUESTED): Edge(State.CANCELED, _CANCEL),
    (State.DEAD, Reason.REVIVED): Edge(State.QUEUED, "slotkeeper.jobs.store.revive"),
}


def find_edge(state: State | None, why: Reason) -> Edge:
    """The transition out of `state` for this reason.  KeyError: there is none."""
    return TRANSITIONS[(state, why)]
