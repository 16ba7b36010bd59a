"""The end of a run, whoever brings it: the worker that watched it, or the server that pushes it."""

from typing import NamedTuple

from dispatch.dispatcher import ActiveRun, Settled
from dispatch.outcome import Kind, Outcome
from dispatch.verdict import Verdict, judge
from foundation import exact
from jobs.record import Run, now_ms
from jobs.states import Why
from jobs.store import Error
from registry.config import ModelConfig
from tasks.descriptions import keeps_results
from tasks.servers import FILED_FROM
from tasks.wiring import dispatcher

# The server has answered and let go, and the job does not come back: the slot need not wait for the record.
_PASSES_ON = frozenset({Why.FINISHED, Why.INVALID_REQUEST})


class End(NamedTuple):
    """What came of a run, judged."""

    verdict: Verdict
    result: str | None
    error: Error | None
    retry_after_s: float | None
    lingers: str
    is_kept: bool = True  # its server has the result still

    @property
    def passes_on(self) -> bool:
        """Whether the slot may be used again before the end is in the record."""
        return self.is_kept and not self.lingers and self.verdict.why in _PASSES_ON


def judged(run: Run, outcome: Outcome, config: ModelConfig, *, canceling: bool) -> End:
    """The end of a run; `canceling`: the job shall be canceled."""
    overdue = run.deadline_ms is not None and now_ms() >= run.deadline_ms
    verdict = judge(outcome, run.failures, run.crashes, canceling, config, overdue=overdue)
    return End(
        verdict,
        result=exact.dumps(outcome.result).decode() if outcome.kind is Kind.DONE else None,
        error=_error(outcome, verdict),
        retry_after_s=outcome.retry_after_s,
        lingers=(outcome.code or outcome.kind.value) if outcome.lingers else "",
        is_kept=keeps_results(run.described_by),
    )


def is_large(outcome: Outcome) -> bool:
    """Whether its result is so large that it was kept in a file."""
    return isinstance(outcome.result, exact.Unparsed) and outcome.result.size > FILED_FROM


def not_ended(error: Exception) -> Outcome:
    """Return the outcome of a run whose end an error of ours kept from being stored: the job goes back to its place.

    The slot has a cooldown, longer each time, so that an error which comes again does not keep the server busy.
    """
    message = f"The worker could not store the end of the run ({type(error).__name__}); the job is run again."
    return Outcome(Kind.BUSY, code="internal_error", message=message)


def settle(active: ActiveRun, outcome: Outcome, *, canceling: bool, claimant: str = "") -> Settled:
    """Judge what came of a run, and store that; its slot is free after it.  `claimant`: as in Dispatcher.settle.

    Raises RecordUnavailable.
    """
    end = judged(active.run, outcome, dispatcher().catalog.model(active.run.job.model).config, canceling=canceling)
    return store(active, end, claimant=claimant)


def store(active: ActiveRun, end: End, *, claimant: str = "") -> Settled:
    """Raises RecordUnavailable."""
    return dispatcher().settle(
        active,
        end.verdict,
        result=end.result,
        error=end.error,
        retry_after_s=end.retry_after_s,
        claimant=claimant,
        lingers=end.lingers,
    )


def _error(outcome: Outcome, verdict: Verdict) -> Error | None:
    if verdict.why is Why.FINISHED:
        return None
    return Error(outcome.code or outcome.kind.value, outcome.message or f"The run ended: {outcome.kind}.")
