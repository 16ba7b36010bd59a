"""A job whose estimated start is far behind its deadline is refused now, instead of expiring later.

The estimate is rough (see routing/queries/positions.py), so only a job is refused that would have to start in less than
half of the estimated time.
"""

from collections.abc import Iterable

from routing.admission import questions
from routing.admission.gates.gate import AdmissionRequest, Limit, LimitContext, Phase, RedisCheck
from routing.admission.questions import JobStatus
from slotkeeper.errors import InvalidJob
from slotkeeper.jobs.values import NewJob, QueuedJob


def _check(submit: AdmissionRequest, known: LimitContext) -> Iterable[RedisCheck[JobStatus]]:
    for index, job in enumerate(submit.jobs):
        if job.deadline_ms is not None and job.not_before_ms is None:
            yield _question(submit, known, index, job, job.deadline_ms - submit.now_ms)


def _question(
    submit: AdmissionRequest, known: LimitContext, index: int, job: NewJob, ttl_ms: int
) -> RedisCheck[JobStatus]:
    model, now_ms = known.catalog.resolve(job.model), submit.now_ms
    as_last = QueuedJob(job.id, 0, job.model, job.priority, job.tenant, now_ms, job.constraints)

    def judge(facts: JobStatus) -> None:
        position = facts.position
        if position is None or not position.ahead:
            return
        wait_ms = position.estimated_wait_ms(known.catalog.get().count_slots(model.name))
        if wait_ms is not None and wait_ms > 2 * ttl_ms:
            raise _refusal(index, position.ahead, ttl_ms, wait_ms)

    return RedisCheck(questions.job_status_command(known.queues, model.fleet, as_last, as_last=True), judge)


def _refusal(index: int, ahead: int, ttl_ms: int, wait_ms: int) -> InvalidJob:
    refusal = InvalidJob(
        "ttl",
        f"{ahead} jobs come before it, so it probably cannot start within {ttl_ms / 1000:g} s: "
        f"the estimate is {wait_ms / 1000:.1f} s; give it a longer ttl, a higher priority, or try later",
    )
    refusal.facts.update(index=index, ahead=ahead, estimated_start_s=round(wait_ms / 1000, 1))
    return refusal


GATE = Limit("deadline", Phase.READ, _check)
