"""The dead letter queue: jobs that are not retried until an operator decides."""

from typing import Any

from app.api.catalog_changes import admin_blueprint
from app.api.job_views import visible_job
from app.api.openapi import problem_responses
from app.context import dispatcher
from app.request_deadline import answered_in_time
from app.schemas.cursors import decode_job_cursor, encode_job_cursor, model_filter
from app.schemas.job_schemas import DlqQuery, JobList, JobPath, JobView, RetryAllQuery, RetryAllResult
from routing.queries import job_list
from slotkeeper.errors import Conflict, JobNotFound
from slotkeeper.jobs.states import State
from slotkeeper.outbox import retention

api = admin_blueprint("dlq", "Dead letter queue", "/admin/dlq")


_MAX_RETRIED = 500  # jobs that one request queues again


@api.get("", responses={200: JobList, **problem_responses(422)})
def list_dead(query: DlqQuery) -> dict[str, Any]:
    """List dead jobs, the newest first, each with its last error.

    `GET /queue/jobs/{job_id}/attempts` lists all attempts of a job.
    """
    found = job_list.find_jobs(
        dispatcher().store.database,
        state=State.DEAD,
        model=model_filter(query.model),
        before_seq=decode_job_cursor(query.cursor),
        limit=query.limit,
    )
    return JobList.build(jobs=[JobView.build(job) for job in found], next_cursor=encode_job_cursor(found, query.limit))


@api.post("/<job_id>/retry", responses={200: JobView, **problem_responses(404, 409, 415)})
@answered_in_time
def retry_dead(path: JobPath) -> dict[str, Any]:
    """Queue a dead job again, in the order of its acceptance and with new budgets of retries and crashes."""
    job = visible_job(path.job_id)
    dispatcher().revive(job.id)
    return JobView.build(visible_job(job.id))


@api.post("/retry-all", responses={200: RetryAllResult, **problem_responses(415, 422)})
def retry_all_dead(query: RetryAllQuery) -> dict[str, Any]:
    """Queue dead jobs again, of all models or of one, up to 500.  `more`: repeat the request for the others.

    Jobs of models that were removed stay dead, and are counted in `left_out`.
    """
    found, left_out = job_list.find_retryable(
        dispatcher().store.database, model_filter(query.model), limit=_MAX_RETRIED + 1
    )
    oldest_first = found[:_MAX_RETRIED][::-1]
    retried = sum(_try_revive(job.id) for job in oldest_first)
    return RetryAllResult.build(retried=retried, more=len(found) > _MAX_RETRIED, left_out=left_out)


@api.delete("/<job:job_id>", responses={204: None, **problem_responses(404, 409, 415)})
def delete_dead(path: JobPath) -> tuple[str, int]:
    """Remove a dead job permanently.  The ledger still counts it."""
    job = visible_job(path.job_id)
    if not retention.delete_dead_job(dispatcher().store.database, job.id):
        raise Conflict(f"Job {job.id!r} is {job.state}; only a dead job can be removed.", status=job.state)
    return "", 204


def _try_revive(job_id: str) -> bool:
    """Queue a dead job again.  Return False if it was retried or deleted meanwhile, or its model was removed."""
    try:
        dispatcher().revive(job_id)
    except (Conflict, JobNotFound):
        return False
    return True
