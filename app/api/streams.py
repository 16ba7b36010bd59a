"""Events as they happen, as server-sent events.  A tenant follows its own jobs, who may administer all."""

from typing import TYPE_CHECKING, Annotated, Literal

from flask import Response, request
from pydantic import Field

from app.api.jobs import own_job
from app.auth import tenant
from app.context import dispatcher
from app.later import Following, Wanted, leave
from app.openapi import Model, blueprint, headers, problems
from app.paging import NUMBER, last_seen, limits
from app.schemas import MODEL_NAME, JobPath, Time
from jobs import tail
from jobs.events import TYPES

api = blueprint("streams", "Streams")

if TYPE_CHECKING:
    EventType = str
else:
    EventType = Literal[tuple(sorted(TYPES.values()))]
_AFTER = "The last `id` that the client has: go on behind it.  The header Last-Event-ID says the same, and comes first."
_ModelName = Annotated[str, Field(max_length=128, json_schema_extra=MODEL_NAME)]


class JobStreamQuery(Model):
    after: str | None = Field(None, max_length=19, description=_AFTER, json_schema_extra={"pattern": f"^{NUMBER}$"})


class StreamQuery(JobStreamQuery):
    model: list[_ModelName] = Field([], max_length=100, description="Only of these models.")
    type: list[EventType] = Field([], max_length=20, description="Only of these types.")


class StreamEvent(Model):
    job_id: str
    model: str
    tenant: str
    tier: int
    server: str | None = Field(description="Of that attempt; null before the first.")
    attempt: int = Field(description="Starts so far.")
    why: str = Field(description="As of a job.")
    at: Time
    retry_in_ms: int | None = Field(None, description="Only of a job that waits for its next attempt.")


_KIND = "text/event-stream"
_EVENTS = {"description": "Events without an end", "content": {_KIND: {"schema": StreamEvent.model_json_schema()}}}
_LAST = headers(19, NUMBER, Last_Event_ID="The last `id` that the client has; browsers send it by themselves.")
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@api.get("/stream", responses={200: _EVENTS, **problems(422, 429)}, openapi_extensions=_LAST)
def stream_events(query: StreamQuery) -> Response:
    """Follow what happens to jobs.

    Each event has an `id`, which a client that comes again names as the last it has seen; then nothing is left out, and
    where that is not possible, an event `stream.gap` comes first.  Without it the stream begins now.
    """
    mine = tenant()
    models = frozenset(str(limits(model)) for model in query.model)
    wanted = Wanted(None if mine.admin else mine.name, models, frozenset(query.type))
    return _stream(Following(wanted, _after(query)))


@api.get(
    "/queue/jobs/<job_id>/stream",
    responses={
        200: _EVENTS,
        204: {"description": "It has ended, and nothing has happened since"},
        **problems(404, 422, 429),
    },
    openapi_extensions=_LAST,
)
def stream_job(path: JobPath, query: JobStreamQuery) -> Response:
    """Follow one job, from its beginning or from the event that the client has seen last, to its end."""
    job, after = own_job(path.job_id), _after(query)
    if job.finished_ms is not None and after is not None:
        database = dispatcher().store.database
        if not tail.page(database, after, 1, job.id).entries:
            return Response(status=204)  # A browser does not come again after this.
    return _stream(Following(Wanted(job_id=job.id), after))


def _after(query: JobStreamQuery) -> int | None:
    return last_seen(request.headers.get("Last-Event-ID") or query.after)


def _stream(following: Following) -> Response:
    leave(request.environ, following)
    return Response(status=200, content_type=_KIND, headers=_HEADERS)
