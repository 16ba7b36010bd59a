"""Batches: jobs that were submitted together.  A tenant sees its own batches; an administrator sees all."""

from typing import Any

from app.api.openapi import blueprint, problem_responses, response_of
from app.auth.access import visible_tenant
from app.context import dispatcher
from app.schemas.cursors import batch_filter
from app.schemas.job_schemas import BatchCancelResult, BatchList, BatchPath, BatchQuery, BatchView, _count_waiting
from routing.queries import job_list
from routing.queries.job_list import Batch
from slotkeeper.errors import Conflict, NotFound
from tasks.services import database

api = blueprint("batches", "Batches", "/queue/batches")

_CANCEL_TIME_S = 5.0  # how long one request cancels jobs


@api.get("", responses={200: BatchList, **problem_responses(422)})
def list_batches(query: BatchQuery) -> dict[str, Any]:
    """List batches, the newest first, with the progress of each."""
    before = batch_filter(query.cursor, "cursor")
    batches = job_list.newest_batches(database(), visible_tenant(), before, query.limit)
    cursor = batches[-1].id if len(batches) == query.limit else None
    return BatchList.build(batches=[BatchView.build(batch) for batch in batches], next_cursor=cursor)


@api.get("/<batch>", responses={200: BatchView, **problem_responses(404)})
def get_batch(path: BatchPath) -> dict[str, Any]:
    """Show the progress of a batch.  `GET /queue/jobs?batch=…` lists its jobs."""
    return BatchView.build(_visible_batch(path.batch))


@api.post(
    "/<batch>/cancel",
    responses={
        200: BatchCancelResult,
        202: response_of(BatchCancelResult, "Some jobs are left"),
        **problem_responses(404, 409, 415),
    },
)
def cancel_batch(path: BatchPath) -> tuple[dict[str, Any], int]:
    """Cancel all jobs of a batch that have not ended, first those that would start next.

    200: no job of the batch will start.  202: the batch has so many jobs that some are left; repeat the request.
    409: all jobs of the batch have ended.
    """
    batch = _visible_batch(path.batch)
    if batch.ended == batch.jobs:
        raise Conflict(f"All jobs of batch {batch.id!r} have ended.", batch=batch.id)
    done = dispatcher().cancel_batch(batch.id, visible_tenant(), _CANCEL_TIME_S)
    remaining = 0 if done.is_complete else _count_waiting(_visible_batch(batch.id))
    result = BatchCancelResult.build(batch=batch.id, canceled=done.canceled, canceling=done.asked, remaining=remaining)
    return result, 200 if done.is_complete else 202


def _visible_batch(batch_id: str) -> Batch:
    """Return a batch, with only those of its jobs that this request may see.  Raises NotFound: there are none."""
    batches = job_list.read_batches(database(), [batch_id], visible_tenant()) if batch_id.isprintable() else []
    if not batches:
        raise NotFound("There is no such batch, or its jobs have been removed.", batch=batch_id)
    return batches[0]
