"""A job that can hardly start in time is refused now, instead of expiring later."""

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
        earliest_ms = known.outlook.earliest_ms(model, position, now_ms)
        if earliest_ms is not None and earliest_ms > ttl_ms:
            raise _refusal(index, position.ahead, ttl_ms, earliest_ms)

    return RedisCheck(questions.job_status_command(known.queues, model.fleet, as_last, as_last=True), judge)


def _refusal(index: int, ahead: int, ttl_ms: int, earliest_ms: int) -> InvalidJob:
    refusal = InvalidJob(
        "ttl",
        f"{ahead} jobs come before it, so it probably cannot start within {ttl_ms / 1000:g} s: "
        f"{earliest_ms / 1000:.1f} s at best; give it a longer ttl, a higher priority, or try later",
    )
    refusal.facts.update(index=index, ahead=ahead, earliest_start_s=round(earliest_ms / 1000, 1))
    return refusal


GATE = Limit("deadline", Phase.READ, _check)
