"""Request and response bodies for batches."""

import re
from copy import copy
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from app.schemas.base import BodySchema, From, ResponseSchema, Schema, Time
from app.schemas.cursors import BATCH
from routing.admission.job_request import JobRequest
from routing.dispatch.batch_lines import INHERITED
from slotkeeper.errors import InvalidRequest
from slotkeeper.jobs.batch_ids import MAX_LINES
from slotkeeper.jobs.batches import BatchProgress, BatchState, LineError
from slotkeeper.jobs.states import State
from slotkeeper.registry.tenants import PRINTABLE_PATTERN

_BATCH_SCHEMA: Any = {"pattern": f"^{BATCH}$"}
_NAME_SCHEMA: Any = {"pattern": f"^{PRINTABLE_PATTERN}$"}
_WINDOW = re.compile(r"([1-9][0-9]{0,6})(s|m|h|d)", re.ASCII)
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_WINDOW_S = 14 * 86_400


class _OwnFields(Schema):
    """What a batch has itself."""

    name: str | None = Field(
        None, min_length=1, max_length=200, description="A name for people.", json_schema_extra=_NAME_SCHEMA
    )
    on_error: Literal["skip", "refuse"] = Field(
        "skip",
        description="What becomes of a batch with lines that cannot be accepted.  `skip`: the others run.  `refuse`: "
        "nothing runs before all lines were accepted, and nothing at all if one was not.",
    )
    window: str | None = Field(
        None,
        description="Time within which the batch should end, such as `24h`, at most `14d`: jobs that have not started "
        "by then expire, and the priority is 9 if none is given.",
        json_schema_extra={"pattern": f"^{_WINDOW.pattern}$"},
    )
    callback_url: str | None = Field(
        None, description="The address that receives a signed POST when all jobs of the batch have ended."
    )


def _optional(name: str) -> Any:
    """Return a field of a job's request as one that may be left out."""
    field = copy(JobRequest.model_fields[name])
    field.default = None
    return field.annotation | None, field  # type: ignore[operator]


BatchHead: type[Any] = create_model(
    "BatchHead",
    __base__=(_OwnFields, BodySchema),
    __doc__="What a batch has itself, and what its lines have unless they say otherwise.",
    **{name: _optional(name) for name in INHERITED},
)


class BatchHeadQuery(_OwnFields):
    """The head of a batch whose lines are the body."""

    model: str | None = Field(None, max_length=128, description="The model of lines that name none.")
    priority: int | None = Field(None, ge=1, le=9)
    environment: str | None = Field(None, max_length=128)


def window_ms(window: str | None) -> int | None:
    """Return a window in ms.  Raises InvalidRequest."""
    if window is None:
        return None
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNIT_S[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise InvalidRequest("window", "window must be a number and s, m, h or d, such as 24h, and at most 14d")
    return seconds * 1000


class BatchQuery(Schema):
    limit: int = Field(20, ge=1, le=50)
    cursor: str | None = Field(
        None, max_length=36, description="next_cursor of the page before.", json_schema_extra=_BATCH_SCHEMA
    )


class BatchPath(Schema):
    batch: str = Field(json_schema_extra=_BATCH_SCHEMA)


class LinesQuery(Schema):
    first: int = Field(0, ge=0, le=MAX_LINES, alias="from", description="Number of the first line of the body.")


class CloseBody(BodySchema):
    lines: int = Field(ge=0, le=MAX_LINES, description="How many lines the batch has.")


class ErrorsQuery(Schema):
    first: int = Field(0, ge=0, le=MAX_LINES, alias="from", description="Number of the first line.")
    limit: int = Field(100, ge=1, le=1000)


class ResultsQuery(Schema):
    first: int = Field(0, ge=0, le=MAX_LINES, alias="from", description="Number of the first line.")
    limit: int = Field(1000, ge=1, le=1000)
    ended: bool = Field(False, description="Only lines whose jobs have ended, and lines that were refused.")


def _status(progress: BatchProgress) -> str:
    if progress.completed_ms is not None:
        return "ended"
    return "open" if progress.batch.state is BatchState.OPEN else "active"


class BatchView(ResponseSchema, source=BatchProgress):
    """The progress of a batch."""

    batch: Annotated[str, From("batch.id")]
    name: Annotated[str | None, From("batch.name")]
    tenant: Annotated[str, From("batch.tenant")]
    status: Annotated[Literal["open", "active", "ended"], From(_status)] = Field(
        description="open: more lines may come.  ended: all of its jobs have ended."
    )
    on_error: Annotated[Literal["skip", "refuse"], From(lambda progress: progress.batch.on_error.value)]
    paused: Annotated[bool, From("batch.is_paused")]
    next_line: Annotated[int | None, From(lambda progress: next_line(progress))] = Field(
        description="Number of lines received, and so of the line to send next.  null: it was not made by "
        "POST /batches."
    )
    refused: Annotated[int, From("batch.refused")] = Field(description="Lines that could not be accepted.")
    jobs: int
    ended: int
    by_state: dict[str, int] = Field(description="Number of jobs in each state; states without jobs are left out.")
    created_at: Annotated[Time, From("batch.created_ms")]
    closed_at: Annotated[Time | None, From("batch.closed_ms")] = Field(description="Since when it takes no more lines.")
    canceled_at: Annotated[Time | None, From("batch.cancel_ms")] = Field(
        description="When its cancellation was requested."
    )
    deadline: Annotated[Time | None, From("batch.deadline_ms")]
    completed_at: Annotated[Time | None, From("completed_ms")] = Field(
        description="When the last of its jobs ended; null: not all have ended."
    )


def next_line(progress: BatchProgress) -> int | None:
    return None if progress.batch.state is BatchState.NAMED else progress.batch.lines


class BatchList(ResponseSchema):
    batches: list[BatchView]
    next_cursor: str | None


class ChunkResult(ResponseSchema):
    """What came of some lines."""

    next_line: int = Field(
        description="The line to go on with; it may be one of these, if so many were too many at once."
    )
    accepted: int = Field(description="Lines that became jobs.")
    refused: int = Field(description="Lines that could not be accepted: `GET /batches/{batch}/errors` says why.")
    known: int = Field(description="Lines that had been received before.")


class LineErrorView(ResponseSchema, source=LineError):
    line: int = Field(description="Counted from 0, without empty lines.")
    custom_id: str | None
    code: str
    field: str | None
    message: str


class LineErrorList(ResponseSchema):
    errors: list[LineErrorView]
    next_line: int | None = Field(description="`from` of the next page; null: this is the last one.")


class BatchCost(ResponseSchema):
    """What the jobs of a batch cost, in micro-credits; 0: nothing."""

    batch: str
    held: int = Field(description="For jobs that have not ended.")
    charged: int = Field(description="Of jobs that have ended, without refunds.")
    slot_ms: int = Field(description="The slot time that was charged.")


class BatchCancelResult(ResponseSchema):
    """What was done with the jobs that had not ended."""

    batch: str
    canceled: int = Field(description="Waiting jobs that were canceled.")
    canceling: int = Field(description="Running jobs whose servers were asked to stop.")
    remaining: int = Field(description="Waiting jobs that are left; repeat the request until it is 0.")


def count_waiting(progress: BatchProgress) -> int:
    return progress.by_state.get(State.QUEUED, 0) + progress.by_state.get(State.DELAYED, 0)
