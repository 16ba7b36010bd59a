"""Streams of server-sent events.  A tenant follows its own jobs; an operator follows all."""

from flask import Response, request

from app.api.job_views import visible_job
from app.api.openapi import blueprint, optional_headers, problem_responses
from app.auth.access import visible_tenant
from app.context import dispatcher
from app.deferred import EventFilter, FollowEvents, defer
from app.problems import ProblemError
from app.schemas.cursors import NUMBER, PROGRESS_ID, model_filter, parse_event_id, parse_progress_id
from app.schemas.event_schemas import MAX_ID_CHARS, JobEvent, JobStreamQuery, ProgressEvent, StreamQuery
from app.schemas.job_schemas import JobPath
from app.watched import keep_watched
from slotkeeper.jobs.terms import decode_terms
from slotkeeper.outbox import event_reader
from slotkeeper.registry.identity import Scope

api = blueprint("streams", "Streams", scope=Scope.READ)


_EVENT_STREAM = "text/event-stream"
_EVENTS = {"description": "Events without an end", "content": {_EVENT_STREAM: {"schema": JobEvent.model_json_schema()}}}
_JOBS_EVENTS = {
    "description": "Events until the job's end",
    "content": {
        _EVENT_STREAM: {"schema": {"anyOf": [JobEvent.model_json_schema(), ProgressEvent.model_json_schema()]}}
    },
}
_LAST_SEEN = "The last `id` that the client has; browsers send it automatically.  Empty: the client has none."
_JOB_LAST_EVENT_ID = optional_headers(MAX_ID_CHARS, f"({PROGRESS_ID})?", shortest=0, Last_Event_ID=_LAST_SEEN)
_LAST_EVENT_ID = optional_headers(19, f"({NUMBER})?", shortest=0, Last_Event_ID=_LAST_SEEN)
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@api.get("/stream", responses={200: _EVENTS, **problem_responses(422, 429, 501)}, openapi_extensions=_LAST_EVENT_ID)
def stream_events(query: StreamQuery) -> Response:
    """Follow what happens to jobs.

    Each event has an `id`.  A client that reconnects sends the last `id` that it has, and the stream goes on after that
    event.  If events in between cannot be sent, an event `stream.gap` comes first.  Without an `id` the stream begins
    with new events.
    """
    models = frozenset(str(model_filter(model)) for model in query.model)
    event_filter = EventFilter(visible_tenant(), models, frozenset(query.type), frozenset(query.batch))
    return _stream(FollowEvents(event_filter, parse_event_id(_last_event_id(query.after))))


@api.get(
    "/queue/jobs/<job_id>/stream",
    responses={
        200: _JOBS_EVENTS,
        204: {"description": "The job has ended, and there are no further events"},
        **problem_responses(404, 409, 422, 429, 501),
    },
    openapi_extensions=_JOB_LAST_EVENT_ID,
)
def stream_job(path: JobPath, query: JobStreamQuery) -> Response:
    """Follow one job until it ends, from its first event or after the last one that the client has.

    The stream also has what the server reports meanwhile: parts of the result, and its progress.
    """
    job, (after, progress) = visible_job(path.job_id), parse_progress_id(_last_event_id(query.after))
    if job.finished_ms is not None and after is not None:
        database = dispatcher().store.database
        if not event_reader.read_page(database, after, 1, job.id).events:
            return Response(status=204)  # A browser does not reconnect after this.
    gone_s = decode_terms(job.terms).cancel_when_gone
    keep_watched(job.id, gone_s)
    return _stream(FollowEvents(EventFilter(job_id=job.id), after, progress, gone_s))


def _last_event_id(after: str | None) -> str | None:
    """Return the last event id that the client has, as it sent it."""
    return request.headers.get("Last-Event-ID") or after


def _stream(follow: FollowEvents) -> Response:
    if not defer(request.environ, follow):
        raise ProblemError(501, "no_streams", "No streams here", "Only `python -m app.server` sends streams of events.")
    return Response(status=200, content_type=_EVENT_STREAM, headers=_HEADERS)
