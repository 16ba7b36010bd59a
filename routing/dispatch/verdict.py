"""What an outcome means for the job, its slot and its server: the separate budgets, in one table.

the server is busy          costs nothing; the slot has a short cooldown
it cannot be reached        costs the job nothing; the server has a cooldown, longer each time
it answered wrongly         costs one of max_retries
it died under the job       costs one of max_crashes
the request is wrong        final at once
"""

from typing import Literal, NamedTuple

from routing.dispatch.outcome import Outcome, OutcomeKind
from slotkeeper.jobs.states import Reason
from slotkeeper.registry.model_config import ModelConfig

# As routing.queue.leases has it, which needs Redis.
HealthSignal = Literal["ok", "refused", "failed", "busy", "told", ""]

_FAILURES = frozenset({Reason.SERVER_ERROR, Reason.RETRIES_EXHAUSTED, Reason.SERVER_LOST, Reason.CRASHES_EXHAUSTED})


class Verdict(NamedTuple):
    """`blames_server`: the server, not the job, is to blame, and has a cooldown.  `retry_after_s`: that of the slot."""

    reason: Reason
    retry_after_s: float | None = None
    cools_server_down: bool = False

    @property
    def signal(self) -> HealthSignal:
        """What the run tells of its server and model.

        "refused": the job is at fault; "told": the server is busy and said when to come back; "": nothing.
        """
        if self.reason is Reason.FINISHED:
            return "ok"
        if self.reason is Reason.INVALID_REQUEST:
            return "refused"
        if self.reason is Reason.SERVER_BUSY:
            return "busy" if self.retry_after_s is None else "told"
        return "failed" if self.reason in _FAILURES else ""


def judge(
    outcome: Outcome, failures: int, crashes: int, canceling: bool, config: ModelConfig, *, overdue: bool = False
) -> Verdict:
    """The verdict on a run's last outcome; `failures` and `crashes` count those before this run.

    PENDING and UNKNOWN are no verdicts: the worker holds on until they become something else.
    """
    match outcome.kind:
        case OutcomeKind.DONE:
            return Verdict(Reason.FINISHED)
        case OutcomeKind.FAILED:
            return Verdict(Reason.INVALID_REQUEST)
        case _ if overdue:  # Whatever went wrong, there is no time left to try again.
            return Verdict(Reason.DEADLINE_PASSED)
        case OutcomeKind.CANCELED if canceling:
            return Verdict(Reason.CANCEL_REQUESTED)
        case OutcomeKind.BUSY:
            return Verdict(Reason.SERVER_BUSY, retry_after_s=outcome.retry_after_s)
        case OutcomeKind.UNREACHABLE:
            return Verdict(Reason.SERVER_UNREACHABLE, cools_server_down=True)
        case OutcomeKind.LOST:
            return Verdict(crash_reason(crashes, config))
        case OutcomeKind.RETRY | OutcomeKind.CANCELED:
            return Verdict(Reason.RETRIES_EXHAUSTED if failures >= config.max_retries else Reason.SERVER_ERROR)
        case _:
            raise ValueError(f"{outcome.kind} is not the end of a run")


def crash_reason(crashes: int, config: ModelConfig, lost: Reason = Reason.SERVER_LOST) -> Reason:
    """Back to its place, or, after `max_crashes` deaths under it, to the dead: it may be what kills them."""
    return Reason.CRASHES_EXHAUSTED if crashes + 1 >= config.max_crashes else lost
