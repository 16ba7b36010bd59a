"""Events of a stream, and the queries that select them."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from app.schemas.base import MODEL_NAME, From, ResponseSchema, Schema, Time
from app.schemas.cursors import BATCH, NUMBER, PROGRESS_ID
from slotkeeper.jobs.batches import ENDED_TYPE
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.outbox.event_reader import OutboxEvent

_AFTER = "The last `id` that the client has: the stream goes on after it.  The header Last-Event-ID takes precedence."


MAX_ID_CHARS = 59  # characters of an id in a job's stream


_ModelName = Annotated[str, Field(max_length=128, json_schema_extra=MODEL_NAME)]


_Batch = Annotated[str, Field(pattern=f"^{BATCH}$")]


if TYPE_CHECKING:
    EventType = str
    WebhookEventType = str
else:
    EventType = Literal[tuple(sorted(EVENT_TYPES.values()))]
    WebhookEventType = Literal[tuple(sorted([*EVENT_TYPES.values(), ENDED_TYPE]))]


class JobEvent(ResponseSchema, source=OutboxEvent):
    job_id: Annotated[str, From("event.job_id")]
    model: str
    tenant: str
    priority: int
    server: str | None = Field(description="Server of that attempt; null before the first.")
    attempt: Annotated[int, From("event.attempt")] = Field(description="Number of attempts so far.")
    why: Annotated[str, From(lambda entry: entry.event.data.get("why"))] = Field(
        description="Reason of the transition."
    )
    at: Annotated[Time, From("event.at_ms")]
    retry_in_ms: Annotated[int | None, From(lambda entry: entry.event.data.get("retry_in_ms"))] = Field(
        None, description="Only if the job waits for its next attempt: the time until then, in ms."
    )


def event_data(entry: OutboxEvent) -> dict[str, Any]:
    """Return JobEvent, without `retry_in_ms` if it is None."""
    data = JobEvent.build(entry)
    if data["retry_in_ms"] is None:
        del data["retry_in_ms"]
    return data


class JobStreamQuery(Schema):
    after: str | None = Field(
        None, max_length=MAX_ID_CHARS, description=_AFTER, json_schema_extra={"pattern": f"^{PROGRESS_ID}$"}
    )


class StreamQuery(Schema):
    after: str | None = Field(None, max_length=19, description=_AFTER, json_schema_extra={"pattern": f"^{NUMBER}$"})
    model: list[_ModelName] = Field([], max_length=100, description="Only events of these models.")
    batch: list[_Batch] = Field([], max_length=100, description="Only events of jobs in these batches.")
    type: list[EventType] = Field([], max_length=20, description="Only events of these types.")


class ProgressEvent(Schema):
    """What the job's server reports while it runs the job, as an event `progress`."""

    job_id: str
    attempt: int = Field(description="The attempt that it belongs to.")
    offset: int | None = Field(
        None, description="Characters, or pieces, of the result that came before.  0: the result begins, or restarts."
    )
    text: str | None = Field(None, description="The next part of the result's text.")
    pieces: list[Any] | None = Field(None, description="The next pieces of the result.")
    progress: Any = Field(None, description="The progress that the server reports.")
