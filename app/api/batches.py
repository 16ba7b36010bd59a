"""Batches: jobs that were submitted together.  A tenant sees its own; who may administer sees all."""

from typing import Annotated, Any, Literal

from pydantic import Field

from app.api.openapi import Schema, blueprint, problem_responses, response_of
from app.auth.access import current_tenant
from app.context import dispatcher
from app.schemas.base import From, ResponseSchema, Time
from app.schemas.cursors import BATCH, batch_filter
from routing.queries import job_list
from routing.queries.job_list import Batch
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.jobs.states import State
from tasks.services import database

api = blueprint("batches", "Batches", "/queue/batches")

_CANCELS_FOR_S = 5.0  # for one request
_NAMED: Any = {"pattern": f"^{BATCH}$"}


class BatchQuery(Schema):
    limit: int = Field(20, ge=1, le=50)
    cursor: str | None = Field(
        None, max_length=36, description="next_cursor of the page before.", json_schema_extra=_NAMED
    )


class BatchPath(Schema):
    batch: str = Field(json_schema_extra=_NAMED)


class BatchView(ResponseSchema, source=Batch):
    """How a batch stands.  Jobs that have been removed, by retention or by hand, count no more."""

    batch: Annotated[str, From("id")]
    tenant: str
    status: Annotated[Literal["active", "ended"], From(lambda it: "ended" if it.ended == it.jobs else "active")] = (
        Field(description="ended: all of its jobs have.")
    )
    jobs: int
    ended: int
    by_state: dict[str, int] = Field(description="How many jobs stand in each; states without any are left out.")
    created_at: Time
    completed_at: Annotated[Time | None, From("finished_ms")] = Field(
        description="When the last of its jobs ended; null: not all have."
    )


class BatchList(ResponseSchema):
    batches: list[BatchView]
    next_cursor: str | None


class BatchCancelResult(ResponseSchema):
    """What came of its jobs that had not ended."""

    batch: str
    canceled: int = Field(description="Waiting jobs that are canceled now.")
    canceling: int = Field(description="Running jobs whose servers were asked to stop.")
    remaining: int = Field(description="Jobs that are left; ask again until it is 0.")


@api.get("", responses={200: BatchList, **problem_responses(422)})
def list_batches(query: BatchQuery) -> dict[str, Any]:
    """List batches, the newest first, with how far each has come."""
    before = batch_filter(query.cursor, "cursor")
    found = job_list.newest_batches(database(), _whose(), before, query.limit)
    cursor = found[-1].id if len(found) == query.limit else None
    return BatchList.build(batches=[BatchView.build(it) for it in found], next_cursor=cursor)


@api.get("/<batch>", responses={200: BatchView, **problem_responses(404)})
def get_batch(path: BatchPath) -> dict[str, Any]:
    """Show how far a batch has come.  Its jobs: `GET /queue/jobs?batch=…`."""
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
    """Cancel all jobs of a batch that have not ended, those that are next in turn first.

    200: no job of it begins any more.  202: it has so many jobs that some are left; ask again.  409: all its jobs have
    ended.
    """
    batch = _visible_batch(path.batch)
    if batch.ended == batch.jobs:
        raise Conflict(f"All jobs of batch {batch.id!r} have ended.", batch=batch.id)
    done = dispatcher().cancel_batch(batch.id, _whose(), _CANCELS_FOR_S)
    remaining = 0 if done.is_complete else _count_waiting(_visible_batch(batch.id))
    result = BatchCancelResult.build(batch=batch.id, canceled=done.canceled, canceling=done.asked, remaining=remaining)
    return result, 200 if done.is_complete else 202


def _count_waiting(batch: Batch) -> int:
    return batch.by_state.get(State.QUEUED, 0) + batch.by_state.get(State.DELAYED, 0)


def _visible_batch(batch: str) -> Batch:
    """Return a batch by those of its jobs that this request's tenant may see.  Raises NotFound: there are none."""
    found = job_list.read_batches(database(), [batch], _whose()) if batch.isprintable() else []
    if not found:
        raise NotFound("There is no such batch, or its jobs have been removed.", batch=batch)
    return found[0]


def _whose() -> str | None:
    """Return the tenant whose jobs this request may see; None: those of all."""
    mine = current_tenant()
    return None if mine.admin else mine.name
