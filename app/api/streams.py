"""Events as they happen, as server-sent events.  A tenant follows its own jobs, who may administer all."""

from flask import Response, request

from app.api.jobs import own_job
from app.auth import tenant
from app.context import dispatcher
from app.later import Following, Wanted, leave
from app.openapi import blueprint, headers, problems
from app.paging import last_seen, limits
from app.schemas import JobPath, JobStreamQuery, StreamEvent, StreamQuery
from jobs import tail

api = blueprint("streams", "Streams")

_KIND = "text/event-stream"
_EVENTS = {"description": "Events without an end", "content": {_KIND: {"schema": StreamEvent.model_json_schema()}}}
_LAST = headers(19, Last_Event_ID="The last `id` that the client has; browsers send it by themselves.")
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
