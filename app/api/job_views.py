"""Looking at jobs, and canceling them.  A tenant sees its own; who may administer sees all."""

from typing import Any

from flask import request

from app.api.openapi import blueprint, problem_responses, response_of
from app.auth.access import current_tenant
from app.context import dispatcher
from app.deferred import WaitForJob, defer
from app.job_answers import (
    AttemptList,
    AttemptView,
    CancelResult,
    ExplanationView,
    JobDetail,
    JobList,
    JobView,
    estimate_basis,
    estimated_start_s,
    queue_position,
)
from app.request_deadline import answered_in_time
from app.schemas.cursors import batch_filter, decode_job_cursor, encode_job_cursor, label_filter, model_filter
from app.schemas.job_schemas import JobPath, ListQuery, WaitQuery
from routing.queries import explain, job_list, short_ids
from routing.queries.job_timeline import attempts_of
from routing.queries.positions import QueuePosition, read_position
from slotkeeper.errors import Conflict, JobNotFound
from slotkeeper.jobs.states import State
from slotkeeper.jobs.values import Job
from tasks.services import workers

api = blueprint("jobs", "Jobs", "/queue/jobs")


@api.get("/<job_id>", responses={200: JobDetail, **problem_responses(404, 409, 422)})
def get_job(path: JobPath, query: WaitQuery) -> dict[str, Any]:
    """Show a job, with its place while it waits and its result when it has ended.

    `wait`: answer only when it has ended, or after that many seconds.  Where too many requests wait already, it is
    answered at once: ask again.  Wherever a job's id is asked for, the first 8 characters or more of it will do, or
    the last 8, if they mean one job; otherwise it is 409, and `candidates` lists some of the jobs.
    """
    job = visible_job(path.job_id)
    if query.wait and job.finished_ms is None:
        defer(request.environ, WaitForJob(job.id, query.wait))
    return JobDetail.build(job, **queue_position(job.state, _position_of(job)))


@api.get("", responses={200: JobList, **problem_responses(422)})
def list_jobs(query: ListQuery) -> dict[str, Any]:
    """List jobs, the newest first."""
    mine = current_tenant()
    found = job_list.find_jobs(
        dispatcher().store.database,
        state=query.status,
        model=model_filter(query.model),
        tenant=None if mine.admin else mine.name,
        batch=batch_filter(query.batch),
        labels=[label_filter(label) for label in query.label],
        before_seq=decode_job_cursor(query.cursor),
        limit=query.limit,
    )
    return JobList.build(jobs=[JobView.build(job) for job in found], next_cursor=encode_job_cursor(found, query.limit))


@api.post(
    "/<job_id>/cancel",
    responses={
        200: CancelResult,
        202: response_of(CancelResult, "Asked its server"),
        **problem_responses(404, 409, 415),
    },
)
@answered_in_time
def cancel_job(path: JobPath) -> tuple[dict[str, Any], int]:
    """Cancel a job.

    200: it was waiting, or canceled before, and is canceled.  202: it is running, and is canceled as soon as its server
    has stopped it.  409: it has ended otherwise.
    """
    job = visible_job(path.job_id)
    if dispatcher().cancel(job.id) is State.RUNNING:
        return CancelResult.build(job_id=job.id, status="canceling"), 202
    return CancelResult.build(job_id=job.id, status="canceled"), 200


@api.get("/<job_id>/attempts", responses={200: AttemptList, **problem_responses(404, 409)})
def list_attempts(path: JobPath) -> dict[str, Any]:
    """List the attempts of a job with their outcomes, the oldest first."""
    job = visible_job(path.job_id)
    found = attempts_of(dispatcher().store.list_events(job.id))
    return AttemptList.build(job_id=job.id, attempts=[AttemptView.build(it) for it in found])


@api.get("/<job_id>/explain", responses={200: ExplanationView, **problem_responses(404, 409)})
def explain_job(path: JobPath) -> dict[str, Any]:
    """Say what a job waits for, in one sentence and in parts, and when it should start.

    `code` is one of: turn, slots_busy, tenant_slots, tenant_paused, model_paused, model_breaker_open, model_probing,
    server_breaker_open, server_away, server_silent, server_cooling, slot_withheld, server_unavailable,
    constraints_unmet, no_server, no_worker, retry, not_before, not_in_room, run_waits, redis_away.
    """
    job = visible_job(path.job_id)
    found = explain.explain_job(dispatcher(), workers(), job)
    return ExplanationView.build(
        found,
        job_id=job.id,
        status=job.state,
        estimated_start_s=estimated_start_s(found.estimate),
        estimate_basis=estimate_basis(found.estimate),
    )


def visible_job(job_id: str) -> Job:
    """Return a job that this request's tenant may see, by its id, its beginning or its end.

    Raises JobNotFound, also for another's; Conflict: several of its own begin or end so.
    """
    store, mine = dispatcher().store, current_tenant()
    job = store.get(job_id) if job_id.isprintable() else None
    if job is None and (whole := _resolve_short_id(job_id, None if mine.admin else mine.name)) is not None:
        job = store.get(whole)
    if job is None or not (mine.admin or job.tenant == mine.name):
        raise JobNotFound("There is no such job, or it has been removed.", job_id=job_id)
    return job


def _resolve_short_id(short: str, whose: str | None) -> str | None:
    """Return the id of the only job, of `whose` or of all, that begins or ends so; None: there is none."""
    found = short_ids.find(dispatcher().store.database, short, whose)
    if len(found.ids) > 1:
        meant = ", ".join(found.ids) + (" and others" if found.more else "")
        raise Conflict(f"{short!r} may be {meant}: give more of the id.", candidates=found.ids)
    return found.ids[0] if found.ids else None


def _position_of(job: Job) -> QueuePosition:
    if job.state is not State.QUEUED:
        return QueuePosition()
    return read_position(dispatcher(), workers(), job.queued)
