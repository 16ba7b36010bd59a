"""The life of a job, as data.

    submit ──▶ queued ◀──────────── due ───────────── delayed ◀── submit, with a not-before time or on hold
                │  ▲ ╰───────────── held ────────────────▲
          start │  │ busy, unreachable, handed back,     │ server error, retries left
                ▼  │ lease expired, server lost          │
              running ───────────────────────────────────┘
                │
                ├──▶ completed   failed   expired   canceled        (never left: JOB-1)
                └──▶ dead ── an operator's retry ──▶ queued         (the dead letter queue)

Jobs of a batch that is paused, or not complete yet, are on hold: delayed without a time.  Queued and delayed jobs can
also expire or be canceled.  A transition that is not in TRANSITIONS cannot happen.
"""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The state of a job, as the API's `status` and the column `jobs.state` name it."""

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
    HELD = "held"
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
    """What a transition costs the job: the name of the counter that it increments."""

    NOTHING = "nothing"
    WAITS = "waits"  # a start that met no server; costs no attempt
    FAILURES = "failures"  # held against max_retries
    CRASHES = "crashes"  # held against max_crashes


@dataclass(frozen=True, slots=True)
class Edge:
    """One allowed transition: where it leads, and what it costs the job."""

    to: State
    costs: Budget = Budget.NOTHING


TRANSITIONS: dict[tuple[State | None, Reason], Edge] = {
    (None, Reason.SUBMITTED): Edge(State.QUEUED),
    (None, Reason.SCHEDULED): Edge(State.DELAYED),
    (State.QUEUED, Reason.HELD): Edge(State.DELAYED),
    (State.DELAYED, Reason.DUE): Edge(State.QUEUED),
    (State.QUEUED, Reason.STARTED): Edge(State.RUNNING),
    (State.RUNNING, Reason.FINISHED): Edge(State.COMPLETED),
    (State.RUNNING, Reason.INVALID_REQUEST): Edge(State.FAILED),
    (State.RUNNING, Reason.SERVER_BUSY): Edge(State.QUEUED, Budget.WAITS),
    (State.RUNNING, Reason.SERVER_UNREACHABLE): Edge(State.QUEUED, Budget.WAITS),
    (State.RUNNING, Reason.HANDED_BACK): Edge(State.QUEUED, Budget.WAITS),
    (State.RUNNING, Reason.SERVER_ERROR): Edge(State.DELAYED, Budget.FAILURES),
    (State.RUNNING, Reason.RETRIES_EXHAUSTED): Edge(State.DEAD, Budget.FAILURES),
    (State.RUNNING, Reason.SERVER_LOST): Edge(State.QUEUED, Budget.CRASHES),
    (State.RUNNING, Reason.LEASE_EXPIRED): Edge(State.QUEUED, Budget.CRASHES),
    (State.RUNNING, Reason.CRASHES_EXHAUSTED): Edge(State.DEAD, Budget.CRASHES),
    (State.RUNNING, Reason.DEADLINE_PASSED): Edge(State.EXPIRED),
    (State.RUNNING, Reason.CANCEL_REQUESTED): Edge(State.CANCELED),
    (State.QUEUED, Reason.DEADLINE_PASSED): Edge(State.EXPIRED),
    (State.DELAYED, Reason.DEADLINE_PASSED): Edge(State.EXPIRED),
    (State.QUEUED, Reason.CANCEL_REQUESTED): Edge(State.CANCELED),
    (State.DELAYED, Reason.CANCEL_REQUESTED): Edge(State.CANCELED),
    (State.DEAD, Reason.REVIVED): Edge(State.QUEUED),
}


END_SENTENCES: dict[Reason, str] = {
    Reason.FINISHED: "Its server returned a result.",
    Reason.INVALID_REQUEST: "Its server refused the request: the same request would be refused again.",
    Reason.RETRIES_EXHAUSTED: "Its last retry failed as well.",
    Reason.CRASHES_EXHAUSTED: "Its server or its worker was lost during the run, again and again.",
    Reason.DEADLINE_PASSED: "Its deadline (ttl) passed.",
    Reason.CANCEL_REQUESTED: "It was canceled on request.",
}
"""Why a job has ended, for people, by the reason of its last transition."""


def find_edge(state: State | None, why: Reason) -> Edge:
    """Return the transition out of `state` for this reason.  Raises KeyError if there is none."""
    return TRANSITIONS[(state, why)]
