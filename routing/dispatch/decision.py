"""What the end of a run means: the reason, what the job pays, and when the slot may be used again.

Pure: no clock, no chance, no Redis, no SQL.
"""

import re
from typing import NamedTuple

from routing.config import RoutingSettings
from routing.dispatch.outcome import BAD_ANSWER, Outcome, OutcomeKind, StopReason
from routing.dispatch.verdict import HealthSignal, Verdict, judge
from slotkeeper import json_text
from slotkeeper.jobs.states import Reason, State, find_edge
from slotkeeper.jobs.values import JobError, Quarantine, Run
from slotkeeper.registry.model_config import ModelConfig

# The server has answered, and the job does not come back: the slot need not wait for the database.
_FREES_SLOT_FIRST = frozenset({Reason.FINISHED, Reason.INVALID_REQUEST})
_NUMBERS = re.compile(r"[0-9]+")


class Decision(NamedTuple):
    """How a run ends: the transition of its job, and what becomes of its slot.

    The slot is released with a cooldown of `cooldown_ms`.  Instead, if the job is queued again and `resumes`, it is
    offered for the same job; and if there is a `quarantine`, it stays taken, since the server may still run the job.
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

    @property
    def to(self) -> State:
        """The state that it leads to, unless the job shall be canceled."""
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
) -> Decision:
    """Return how a run ends that came to `outcome`.

    `canceling`: the job shall be canceled.  `keeps_result`: the server still has a result that was read.
    `retry_delay_ms`: how long the job waits until it may start again, for SERVER_ERROR.
    """
    if isinstance(outcome, StopReason):
        return _stopped(outcome, settings, now_ms)
    overdue = run.deadline_ms is not None and now_ms >= run.deadline_ms
    verdict = judge(outcome, run.failures, run.crashes, canceling, config, overdue=overdue)
    if verdict.reason is Reason.SERVER_ERROR and _is_repeated(run.last_error, outcome):
        verdict = Verdict(Reason.RETRIES_EXHAUSTED)
        outcome = outcome._replace(message=f"{outcome.message} (the same answer twice: it is not tried again)")
    retries = verdict.reason is Reason.SERVER_ERROR
    reason = outcome.code or outcome.kind.value
    return Decision(
        verdict.reason,
        result=json_text.dumps(outcome.result).decode() if outcome.kind is OutcomeKind.DONE else None,
        error=_error(outcome, verdict),
        due_ms=now_ms + retry_delay_ms if retries else None,
        signal=verdict.signal,
        cooldown_ms=_cooldown_ms(verdict, settings),
        cools_server_down=verdict.cools_server_down,
        quarantine=Quarantine(reason, now_ms + settings.withhold_max_ms) if outcome.server_still_running else None,
        frees_slot_first=server_keeps_result
        and not outcome.server_still_running
        and verdict.reason in _FREES_SLOT_FIRST,
    )


def _stopped(reason: StopReason, settings: RoutingSettings, now_ms: int) -> Decision:
    """A worker does not go on with its run.  It costs the job nothing."""
    match reason:
        case StopReason.STOPPED:  # Another worker resumes it: the server goes on, and the slot stays taken.
            until_ms = now_ms + settings.withhold_max_ms
            return Decision(
                Reason.HANDED_BACK, quarantine=Quarantine("canceled", until_ms, resumes=True), resume_in_slot=True
            )
        case StopReason.UNSENT:
            return Decision(Reason.HANDED_BACK, enqueue_again=True)
        case StopReason.LOST:
            raise ValueError("a run that is another worker's, or over, is not ended here")


def _is_repeated(last: JobError | None, outcome: Outcome) -> bool:
    """Return True if the run before ended with the same answer that cannot be read.

    Each try is a whole run on a GPU.  Places and sizes in the messages may differ.
    """
    if last is None or outcome.code != BAD_ANSWER or last.code != BAD_ANSWER:
        return False
    return _NUMBERS.sub("", last.message) == _NUMBERS.sub("", outcome.message)


def _error(outcome: Outcome, verdict: Verdict) -> JobError | None:
    if verdict.reason is Reason.FINISHED:
        return None
    message = outcome.message or f"The run ended: {outcome.kind}."
    if verdict.reason is Reason.DEADLINE_PASSED and outcome.code != "deadline_passed":
        return JobError("deadline_passed", f"The job's deadline (ttl) passed.  Its last run: {message}")
    return JobError(outcome.code or outcome.kind.value, message)


def _cooldown_ms(verdict: Verdict, settings: RoutingSettings) -> int:
    """How long the slot of a busy server is offered to nobody."""
    if verdict.reason is not Reason.SERVER_BUSY:
        return 0
    wished_ms = None if verdict.retry_after_s is None else round(verdict.retry_after_s * 1000)
    return min(settings.busy_cooldown_ms if wished_ms is None else wished_ms, settings.busy_cooldown_max_ms)
