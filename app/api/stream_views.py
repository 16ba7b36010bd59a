"""Events as they happen, as server-sent events.  A tenant follows its own jobs, who may administer all."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from flask import Response, request
from pydantic import Field

from app.api.job_views import visible_job
from app.api.openapi import Schema, blueprint, optional_headers, problem_responses
from app.auth.access import current_tenant
from app.context import dispatcher
from app.deferred import EventFilter, FollowEvents, defer
from app.job_answers import JobEvent
from app.schemas.cursors import BATCH, NUMBER, PROGRESS_ID, model_filter, parse_event_id, parse_progress_id
from app.schemas.job_schemas import MODEL_NAME, JobPath
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.outbox import event_reader

api = blueprint("streams", "Streams")

if TYPE_CHECKING:
    EventType = str
else:
    EventType = Literal[tuple(sorted(EVENT_TYPES.values()))]
_AFTER = "The last `id` that the client has: go on behind it.  The header Last-Event-ID says the same, and comes first."
_ModelName = Annotated[str, Field(max_length=128, json_schema_extra=MODEL_NAME)]
_Batch = Annotated[str, Field(pattern=f"^{BATCH}$")]

_MAX_ID_CHARS = 59  # characters of an id in a job's stream


class JobStreamQuery(Schema):
    after: str | None = Field(
        None, max_length=_MAX_ID_CHARS, description=_AFTER, json_schema_extra={"pattern": f"^{PROGRESS_ID}$"}
    )


class StreamQuery(Schema):
    after: str | None = Field(None, max_length=19, description=_AFTER, json_schema_extra={"pattern": f"^{NUMBER}$"})
    model: list[_ModelName] = Field([], max_length=100, description="Only of these models.")
    batch: list[_Batch] = Field([], max_length=100, description="Only of jobs that came in these batches.")
    type: list[EventType] = Field([], max_length=20, description="Only of these types.")


class ProgressEvent(Schema):
    """What the job's server says while it is at it, as an event `progress`."""

    job_id: str
    attempt: int = Field(description="Which start of the job it belongs to.")
    offset: int | None = Field(
        None, description="Characters, or pieces, of this text that came before.  0: it begins, or begins anew."
    )
    text: str | None = Field(None, description="The next of the result's text.")
    pieces: list[Any] | None = Field(None, description="The next of the result's pieces.")
    progress: Any = Field(None, description="How far the server says that it is.")


_KIND = "text/event-stream"
_EVENTS = {"description": "Events without an end", "content": {_KIND: {"schema": JobEvent.model_json_schema()}}}
_JOBS_EVENTS = {
    "description": "Events until the job's end",
    "content": {_KIND: {"schema": {"anyOf": [JobEvent.model_json_schema(), ProgressEvent.model_json_schema()]}}},
}
_LAST_SEEN = "The last `id` that the client has; browsers send it by themselves.  Empty: it has none."
_JOB_LAST_EVENT_ID = optional_headers(_MAX_ID_CHARS, f"({PROGRESS_ID})?", shortest=0, Last_Event_ID=_LAST_SEEN)
_LAST = optional_headers(19, f"({NUMBER})?", shortest=0, Last_Event_ID=_LAST_SEEN)
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@api.get("/stream", responses={200: _EVENTS, **problem_responses(422, 429)}, openapi_extensions=_LAST)
def stream_events(query: StreamQuery) -> Response:
    """Follow what happens to jobs.

    Each event has an `id`, which a client that comes again names as the last it has seen; then nothing is left out, and
    where that is not possible, an event `stream.gap` comes first.  Without it the stream begins now.
    """
    mine = current_tenant()
    models = frozenset(str(model_filter(model)) for model in query.model)
    wanted = EventFilter(None if mine.admin else mine.name, models, frozenset(query.type), frozenset(query.batch))
    return _stream(FollowEvents(wanted, parse_event_id(_last_event_id(query.after))))


@api.get(
    "/queue/jobs/<job_id>/stream",
    responses={
        200: _JOBS_EVENTS,
        204: {"description": "It has ended, and nothing has happened since"},
        **problem_responses(404, 409, 422, 429),
    },
    openapi_extensions=_JOB_LAST_EVENT_ID,
)
def stream_job(path: JobPath, query: JobStreamQuery) -> Response:
    """Stream the events of one job until it ends, from its first event or after the last one that the client has.

    The stream also has what the server reports meanwhile: pieces of the result, and its progress.
    """
    job, (after, heard) = visible_job(path.job_id), parse_progress_id(_last_event_id(query.after))
    if job.finished_ms is not None and after is not None:
        database = dispatcher().store.database
        if not event_reader.read_page(database, after, 1, job.id).events:
            return Response(status=204)  # A browser does not come again after this.
    return _stream(FollowEvents(EventFilter(job_id=job.id), after, heard))


def _last_event_id(after: str | None) -> str | None:
    """What the client names as the last that it has."""
    return request.headers.get("Last-Event-ID") or after


def _stream(following: FollowEvents) -> Response:
    defer(request.environ, following)
    return Response(status=200, content_type=_KIND, headers=_HEADERS)
