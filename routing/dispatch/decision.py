"""Decide how a run ends: its transition, its cost, and when its slot may be used again.

What an outcome costs; the budgets are separate:

the server is busy          nothing; the slot has a short cooldown
it cannot be reached        nothing; the server has a cooldown, longer each time
it answered wrongly         one of max_retries
it died under the job       one of max_crashes
the request is wrong        the job fails at once

Pure: no clock, no randomness, no Redis, no SQL.
"""

import re
from typing import Literal, NamedTuple

from routing.config import RoutingSettings
from routing.dispatch.outcome import BAD_ANSWER, STREAM_UNENDED, Outcome, OutcomeKind, StopReason
from slotkeeper import json_text
from slotkeeper.jobs.states import Reason, State, find_edge
from slotkeeper.jobs.values import JobError, Quarantine, Run, SignedResult
from slotkeeper.registry.model_config import ModelConfig

# As routing.queue.leases has it, which imports Redis.
HealthSignal = Literal["ok", "refused", "failed", "busy", "retry_after", ""]

# The server has answered, and the job does not come back: the slot need not wait for the database.
_FREES_SLOT_FIRST = frozenset({Reason.FINISHED, Reason.INVALID_REQUEST})
_FAILURES = frozenset({Reason.SERVER_ERROR, Reason.RETRIES_EXHAUSTED, Reason.SERVER_LOST, Reason.CRASHES_EXHAUSTED})
# The server did what was asked, or was asked to stop: what it ran for was the customer's.
_ENDED_BY_SERVER = frozenset({OutcomeKind.DONE, OutcomeKind.FAILED, OutcomeKind.CANCELED})
_NUMBERS = re.compile(r"[0-9]+")


class Decision(NamedTuple):
    """How a run ends: the transition of its job, and what happens to its slot.

    Of the slot, the first that applies: if the job is queued again and `resume_in_slot`, it is offered to the same job;
    with a `quarantine` it stays taken, since the server may still run the job; else it is freed with a cooldown of
    `cooldown_ms`.
    """

    reason: Reason
    result: str | None = None  # JSON text, for FINISHED
    error: JobError | None = None
    due_ms: int | None = None  # when a delayed job may run again, for SERVER_ERROR
    signal: HealthSignal = ""  # what the run says of its server and model
    cooldown_ms: int = 0
    cools_server_down: bool = False  # The server has a cooldown too.
    quarantine: Quarantine | None = None
    resume_in_slot: bool = False
    enqueue_again: bool = False  # The lease may be another run's by now: the job is enqueued again.
    frees_slot_first: bool = False  # The slot may be used again before the end is stored.
    run_ended_ms: int | None = None  # when the server ended the run, which is charged up to then; None: it is not
    signed: SignedResult | None = None  # the envelope of a node's result, for FINISHED

    @property
    def to(self) -> State:
        """The state that it leads to, unless the job is to be canceled."""
        return find_edge(State.RUNNING, self.reason).to


def decide(
    run: Run,
    outcome: Outcome | StopReason,
    config: ModelConfig,
    settings: RoutingSettings,
    now_ms: int,
    *,
    canceling: bool,
    server_keeps_result: bool = True,
    retry_delay_ms: int = 0,
    max_result_bytes: int | None = None,
) -> Decision:
    """Return how a run ends that came to `outcome`.

    canceling: the job is to be canceled.  server_keeps_result: the server still has a result that was read.
    retry_delay_ms: how long the job waits until it may start again, for SERVER_ERROR.  max_result_bytes: of its tenant;
    a larger result fails the job, which would get the same again.
    """
    if isinstance(outcome, StopReason):
        return _decide_stop(outcome, settings, now_ms)
    result = json_text.dumps(outcome.result) if outcome.kind is OutcomeKind.DONE else None
    if result is not None and max_result_bytes is not None and len(result) > max_result_bytes:
        message = f"The result has {len(result)} bytes, and its tenant may have {max_result_bytes}."
        outcome, result = Outcome(OutcomeKind.FAILED, code="result_too_large", message=message), None
    reason = _reason_of(run, outcome, config, now_ms, canceling)
    if reason is Reason.SERVER_ERROR and _is_repeated(run.last_error, outcome):
        reason = Reason.RETRIES_EXHAUSTED
        outcome = outcome._replace(message=f"{outcome.message} (the same answer twice: it is not tried again)")
    quarantine = None
    if outcome.server_still_running:
        quarantine = Quarantine(outcome.code or outcome.kind.value, now_ms + settings.withhold_max_ms)
    return Decision(
        reason,
        result=None if result is None else result.decode(),
        error=_error(outcome, reason),
        due_ms=now_ms + retry_delay_ms if reason is Reason.SERVER_ERROR else None,
        signal=signal_of(reason, outcome.retry_after_s),
        cooldown_ms=_busy_cooldown_ms(outcome, settings) if reason is Reason.SERVER_BUSY else 0,
        cools_server_down=reason is Reason.SERVER_UNREACHABLE,
        quarantine=quarantine,
        frees_slot_first=server_keeps_result and quarantine is None and reason in _FREES_SLOT_FIRST,
        run_ended_ms=now_ms if outcome.kind in _ENDED_BY_SERVER else None,
        signed=outcome.envelope if isinstance(outcome.envelope, SignedResult) else None,
    )


def _decide_stop(stop: StopReason, settings: RoutingSettings, now_ms: int) -> Decision:
    """Decide the end of a run that its worker gives up.  It costs the job nothing."""
    match stop:
        case StopReason.STOPPED:  # Another worker resumes it: the server goes on, and the slot stays taken.
            until_ms = now_ms + settings.withhold_max_ms
            return Decision(
                Reason.HANDED_BACK, quarantine=Quarantine("canceled", until_ms, resumes=True), resume_in_slot=True
            )
        case StopReason.UNSENT:
            return Decision(Reason.HANDED_BACK, enqueue_again=True)
        case StopReason.LOST:
            raise ValueError("a run that is another worker's, or over, is not ended here")


def _reason_of(run: Run, outcome: Outcome, config: ModelConfig, now_ms: int, canceling: bool) -> Reason:
    """Return why a run ends.  PENDING and UNKNOWN end no run: the worker waits until they become something else."""
    match outcome.kind:
        case OutcomeKind.DONE:
            return Reason.FINISHED
        case OutcomeKind.FAILED:
            return Reason.INVALID_REQUEST
        case OutcomeKind.OVERDUE:
            return Reason.DEADLINE_PASSED
        case _ if run.is_overdue(now_ms):  # No time is left to try again.
            return Reason.DEADLINE_PASSED
        case OutcomeKind.CANCELED if canceling:
            return Reason.CANCEL_REQUESTED
        case OutcomeKind.BUSY:
            return Reason.SERVER_BUSY
        case OutcomeKind.UNREACHABLE:
            return Reason.SERVER_UNREACHABLE
        case OutcomeKind.LOST:
            return crash_reason(run.crashes, config)
        case OutcomeKind.RETRY | OutcomeKind.CANCELED:
            return Reason.RETRIES_EXHAUSTED if run.failures >= config.max_retries else Reason.SERVER_ERROR
        case _:
            raise ValueError(f"{outcome.kind} is not the end of a run")


def crash_reason(crashes: int, config: ModelConfig, lost: Reason = Reason.SERVER_LOST) -> Reason:
    """Return `lost`, or that this was the last of the model's `max_crashes`: the job may be what kills its servers.

    crashes: those before this run.
    """
    return Reason.CRASHES_EXHAUSTED if crashes + 1 >= config.max_crashes else lost


def signal_of(reason: Reason, retry_after_s: float | None = None) -> HealthSignal:
    """Return what the end of a run says of its server and model.

    "refused": the job is at fault; "retry_after": the server is busy and named a time; "": nothing.
    """
    match reason:
        case Reason.FINISHED:
            return "ok"
        case Reason.INVALID_REQUEST:
            return "refused"
        case Reason.SERVER_BUSY:
            return "busy" if retry_after_s is None else "retry_after"
        case _:
            return "failed" if reason in _FAILURES else ""


def _is_repeated(last: JobError | None, outcome: Outcome) -> bool:
    """Return whether the run before ended with the same unreadable answer.

    Each try is a whole run on a GPU.  Places and sizes in the messages may differ, and so may the last event of a
    stream without an end.
    """
    if last is None or outcome.code != last.code or outcome.code not in (BAD_ANSWER, STREAM_UNENDED):
        return False
    return outcome.code == STREAM_UNENDED or _NUMBERS.sub("", last.message) == _NUMBERS.sub("", outcome.message)


def _error(outcome: Outcome, reason: Reason) -> JobError | None:
    if reason is Reason.FINISHED:
        return None
    message = outcome.message or f"The run ended: {outcome.kind}."
    if reason is Reason.DEADLINE_PASSED and outcome.code != "deadline_passed":
        return JobError("deadline_passed", f"The job's deadline (ttl) passed.  Its last run: {message}")
    return JobError(outcome.code or outcome.kind.value, message)


def _busy_cooldown_ms(outcome: Outcome, settings: RoutingSettings) -> int:
    """Return how long the slot of a busy server is not offered: as long as it asked for, within the settings."""
    if outcome.retry_after_s is None:
        return min(settings.busy_cooldown_ms, settings.busy_cooldown_max_ms)
    return min(round(outcome.retry_after_s * 1000), settings.busy_cooldown_max_ms)
