"""What an outcome means for the job, its slot and its server: the separate budgets, in one table.

the server is busy          costs nothing; the slot has a short cooldown
it cannot be reached        costs the job nothing; the server has a cooldown, longer each time
it answered wrongly         costs one of max_retries
it died under the job       costs one of max_crashes
the request is wrong        final at once
"""

from typing import Literal, NamedTuple

from routing.dispatch.outcome import Kind, Outcome
from slotkeeper.jobs.states import Reason
from slotkeeper.registry.model_config import ModelConfig

_FAILURES = frozenset({Reason.SERVER_ERROR, Reason.RETRIES_EXHAUSTED, Reason.SERVER_LOST, Reason.CRASHES_EXHAUSTED})


class Verdict(NamedTuple):
    """`blames_server`: the server, not the job, is to blame, and has a cooldown.  `retry_after_s`: that of the slot."""

    why: Reason
    retry_after_s: float | None = None
    blames_server: bool = False

    @property
    def outcome(self) -> Literal["ok", "refused", "failed", "busy", ""]:
        """What the run tells of its server and model.

        "refused": the job is at fault; "": nothing, or when to come back has been said already.
        """
        if self.why is Reason.FINISHED:
            return "ok"
        if self.why is Reason.INVALID_REQUEST:
            return "refused"
        if self.why is Reason.SERVER_BUSY and self.retry_after_s is None:
            return "busy"
        return "failed" if self.why in _FAILURES else ""


def judge(
    outcome: Outcome, failures: int, crashes: int, canceling: bool, config: ModelConfig, *, overdue: bool = False
) -> Verdict:
    """The verdict on a run's last outcome; `failures` and `crashes` count those before this run.

    PENDING and UNKNOWN are no verdicts: the worker holds on until they become something else.
    """
    match outcome.kind:
        case Kind.DONE:
            return Verdict(Reason.FINISHED)
        case Kind.FAILED:
            return Verdict(Reason.INVALID_REQUEST)
        case _ if overdue:  # Whatever went wrong, there is no time left to try again.
            return Verdict(Reason.DEADLINE_PASSED)
        case Kind.CANCELED if canceling:
            return Verdict(Reason.CANCEL_REQUESTED)
        case Kind.BUSY:
            return Verdict(Reason.SERVER_BUSY, retry_after_s=outcome.retry_after_s)
        case Kind.UNREACHABLE:
            return Verdict(Reason.SERVER_UNREACHABLE, blames_server=True)
        case Kind.LOST:
            return Verdict(crashed(crashes, config))
        case Kind.RETRY | Kind.CANCELED:
            return Verdict(Reason.RETRIES_EXHAUSTED if failures >= config.max_retries else Reason.SERVER_ERROR)
        case _:
            raise ValueError(f"{outcome.kind} is not the end of a run")


def crashed(crashes: int, config: ModelConfig, lost: Reason = Reason.SERVER_LOST) -> Reason:
    """Back to its place, or, after `max_crashes` deaths under it, to the dead: it may be what kills them."""
    return Reason.CRASHES_EXHAUSTED if crashes + 1 >= config.max_crashes else lost
