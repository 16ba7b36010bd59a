"""Batches: jobs that were submitted together.  A tenant sees its own batches; an administrator sees all."""

from typing import Annotated, Any, Literal

from pydantic import Field

from app.api.openapi import Schema, blueprint, problem_responses, response_of
from app.auth.access import visible_tenant
from app.context import dispatcher
from app.schemas.base import From, ResponseSchema, Time
from app.schemas.cursors import BATCH, batch_filter
from routing.queries import job_list
from routing.queries.job_list import Batch
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.jobs.states import State
from tasks.services import database

api = blueprint("batches", "Batches", "/queue/batches")

_CANCEL_TIME_S = 5.0  # how long one request cancels jobs
_BATCH_SCHEMA: Any = {"pattern": f"^{BATCH}$"}


class BatchQuery(Schema):
    limit: int = Field(20, ge=1, le=50)
    cursor: str | None = Field(
        None, max_length=36, description="next_cursor of the page before.", json_schema_extra=_BATCH_SCHEMA
    )


class BatchPath(Schema):
    batch: str = Field(json_schema_extra=_BATCH_SCHEMA)


class BatchView(ResponseSchema, source=Batch):
    """The progress of a batch.  Jobs that were removed, by retention or by an operator, are not counted."""

    batch: Annotated[str, From("id")]
    tenant: str
    status: Annotated[
        Literal["active", "ended"], From(lambda batch: "ended" if batch.ended == batch.jobs else "active")
    ] = Field(description="ended: all of its jobs have ended.")
    jobs: int
    ended: int
    by_state: dict[str, int] = Field(description="Number of jobs in each state; states without jobs are left out.")
    created_at: Time
    completed_at: Annotated[Time | None, From("finished_ms")] = Field(
        description="When the last of its jobs ended; null: not all have ended."
    )


class BatchList(ResponseSchema):
    batches: list[BatchView]
    next_cursor: str | None


class BatchCancelResult(ResponseSchema):
    """What was done with the jobs that had not ended."""

    batch: str
    canceled: int = Field(description="Waiting jobs that were canceled.")
    canceling: int = Field(description="Running jobs whose servers were asked to stop.")
    remaining: int = Field(description="Waiting jobs that are left; repeat the request until it is 0.")


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


def _count_waiting(batch: Batch) -> int:
    return batch.by_state.get(State.QUEUED, 0) + batch.by_state.get(State.DELAYED, 0)


def _visible_batch(batch_id: str) -> Batch:
    """Return a batch, with only those of its jobs that this request may see.  Raises NotFound: there are none."""
    batches = job_list.read_batches(database(), [batch_id], visible_tenant()) if batch_id.isprintable() else []
    if not batches:
        raise NotFound("There is no such batch, or its jobs have been removed.", batch=batch_id)
    return batches[0]
