"""The end of a run, whoever brings it: the worker that watched it, or the server that pushes it."""

from jobs.record import now_ms
from jobs.states import Why
from jobs.store import Error
from routing import exact
from routing.dispatcher import Settled, Task
from routing.outcome import Kind, Outcome
from routing.policies.verdict import Verdict, judge
from tasks.wiring import dispatcher


def settle(task: Task, outcome: Outcome, *, canceling: bool, taker: str = "") -> Settled:
    """Judge what came of a run, and store that.  `taker`: as in Dispatcher.settle.

    Raises RecordUnavailable.
    """
    run = task.run
    config = dispatcher().fleet.model(run.job.model).config
    overdue = run.deadline_ms is not None and now_ms() >= run.deadline_ms
    verdict = judge(outcome, run.failures, run.crashes, canceling, config, overdue=overdue)
    return dispatcher().settle(
        task,
        verdict,
        result=exact.dumps(outcome.result).decode() if outcome.kind is Kind.DONE else None,
        error=_error(outcome, verdict),
        wish_s=outcome.retry_after_s,
        taker=taker,
        lingers=(outcome.code or outcome.kind.value) if outcome.lingers else "",
    )


def _error(outcome: Outcome, verdict: Verdict) -> Error | None:
    if verdict.why is Why.FINISHED:
        return None
    return Error(outcome.code or outcome.kind.value, outcome.message or f"The run ended: {outcome.kind}.")
