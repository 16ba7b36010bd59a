"""Batches: send their lines, see how far they have come, read their results, stop them.

A tenant sees its own batches; an operator sees all.
"""

import hashlib
from typing import Any

import orjson
from flask import Response, g, request
from pydantic import ValidationError

from app.api.openapi import blueprint, optional_headers, problem_responses, response_of
from app.api.submit_views import show_rates
from app.auth.access import current_identity, scope, visible_tenant
from app.context import context, dispatcher
from app.problems import ProblemError, validation_error
from app.request_deadline import answered_in_time
from app.request_json import NDJSON, read_lines
from app.schemas.batch_schemas import (
    BatchCancelResult,
    BatchCost,
    BatchHead,
    BatchHeadQuery,
    BatchList,
    BatchPath,
    BatchQuery,
    BatchView,
    ChunkResult,
    CloseBody,
    ErrorsQuery,
    LineErrorList,
    LineErrorView,
    LinesQuery,
    ResultsQuery,
    count_waiting,
    window_ms,
)
from app.schemas.cursors import batch_filter
from routing.admission.submission import check_idempotency_key, prepare_job
from routing.dispatch import batch_control, batch_lines
from routing.dispatch.batch_lines import INHERITED
from routing.queries.batch_results import read_results
from slotkeeper.clock import now_ms
from slotkeeper.errors import Conflict, InvalidJob
from slotkeeper.jobs import credits
from slotkeeper.jobs.batch_ids import MAX_LINES, new_batch_id
from slotkeeper.jobs.batches import MAX_UNFINISHED, Batch, BatchState, OnError, require
from slotkeeper.jobs.values import PRIORITY_LEAST_URGENT
from slotkeeper.registry.identity import Scope
from tasks.services import batches, database

api = blueprint("batches", "Batches", "/batches", scope=Scope.READ)
queue_api = blueprint("queue_batches", "Batches", "/queue/batches", scope=Scope.READ)
"""The same views under the path that they had first."""
api.after_request(show_rates)
_CONTROL_TIME_S = 4.0  # how long one request cancels, holds or releases jobs
_MAX_PAGE_BYTES = 16 << 20  # of results
_MAX_SHOWN_LINES = 1000
_LINES_BODY: Any = {
    "content": {NDJSON: {"schema": {"type": "string", "description": "One job per line, as of POST /queue/submit."}}}
}
_HEAD_BODY: Any = {
    "content": {
        "application/json": {"schema": BatchHead.model_json_schema()},
        NDJSON: {"schema": {"type": "string", "description": "Lines; then the head is in the query."}},
    }
}
_KEY = optional_headers(
    Idempotency_Key="Names this batch: sent again, it is the same batch, and its lines go on where they stopped."
)
_PROBE: dict[str, Any] = {"payload": {}}


@api.post(
    "",
    responses={
        201: BatchView,
        200: response_of(BatchView, "It was created before"),
        **problem_responses(402, 409, 413, 415, 422, 429),
    },
    request_body=_HEAD_BODY,
    openapi_extensions=_KEY,
)
@scope(Scope.SUBMIT)
@answered_in_time
def create_batch(query: BatchHeadQuery) -> tuple[dict[str, Any], int, dict[str, str]]:
    """Create a batch, whose lines are sent afterwards, or, as NDJSON, with this request.

    With lines, the response comes when all were received, and the batch takes no more.  A request that breaks off, or
    is refused, has sent the lines before `next_line`; the same request with the same Idempotency-Key goes on there.
    At most 100,000 lines.
    """
    head = _read_head(query)
    new = _new_batch(head)
    most = dispatcher().catalog.get().limits_of(new.tenant).max_open_batches or MAX_UNFINISHED
    batch, is_new = batches().create(new, _idempotency_key(), _fingerprint(head), most)
    view = BatchView.build(batches().read_progress(batch))
    return view, 201 if is_new else 200, {"Location": f"/batches/{batch.id}"}


@api.post(
    "/<batch>/lines",
    responses={200: ChunkResult, **problem_responses(402, 404, 409, 411, 413, 415, 422, 429)},
    request_body=_LINES_BODY,
)
@scope(Scope.SUBMIT)
@answered_in_time
def add_lines(path: BatchPath, query: LinesQuery) -> dict[str, Any]:
    """Send some lines of a batch, at most 1000.  `from`: the number of the first one.

    Lines that were received before are passed over, so a request whose response was lost can be sent again.  A line
    that cannot be accepted is kept as an error and does not stop the others.  429: nothing was stored; try again.
    409 `lines_missing`: send the lines from `next_line` on first.  402: the tenant has too few credits for these lines;
    nothing was stored.
    """
    batch = visible_batch(path.batch)
    settings = context().settings
    values = read_lines(request, settings.max_batch_bytes, settings.max_body_bytes)
    receipt = batch_lines.add_lines(
        dispatcher(), batches(), batch, query.first, values, current_identity(), request.headers.get("traceparent")
    )
    g.rates = receipt.rates
    return ChunkResult.build(
        next_line=receipt.batch.lines, accepted=receipt.accepted, refused=receipt.refused, known=receipt.known
    )


@api.post("/<batch>/close", responses={200: BatchView, **problem_responses(404, 409, 415, 422)})
@scope(Scope.SUBMIT)
def close_batch(path: BatchPath, body: CloseBody) -> dict[str, Any]:
    """Take no more lines.  A batch with `on_error` `refuse` now starts, or, if a line was refused, is canceled."""
    closed = batch_control.close(dispatcher(), batches(), visible_batch(path.batch), body.lines, _CONTROL_TIME_S)
    return BatchView.build(batches().read_progress(closed))


@queue_api.get("", responses={200: BatchList, **problem_responses(422)}, operation_id="list_queue_batches")
@api.get("", responses={200: BatchList, **problem_responses(422)})
def list_batches(query: BatchQuery) -> dict[str, Any]:
    """List batches, the newest first, with the progress of each."""
    before = batch_filter(query.cursor, "cursor")
    found = batches().list_newest(visible_tenant(), before, query.limit)
    cursor = found[-1].id if len(found) == query.limit else None
    progress = [one for one in map(batches().read_progress, found) if not one.is_gone]
    return BatchList.build(batches=[BatchView.build(one) for one in progress], next_cursor=cursor)


@queue_api.get("/<batch>", responses={200: BatchView, **problem_responses(404)}, operation_id="get_queue_batch")
@api.get("/<batch>", responses={200: BatchView, **problem_responses(404)})
def get_batch(path: BatchPath) -> dict[str, Any]:
    """Show the progress of a batch.  `GET /queue/jobs?batch=…` lists its jobs."""
    progress = batches().read_progress(visible_batch(path.batch))
    return BatchView.build(require(None if progress.is_gone else progress, path.batch))


@api.get("/<batch>/errors", responses={200: LineErrorList, **problem_responses(404, 422)})
def list_batch_errors(path: BatchPath, query: ErrorsQuery) -> dict[str, Any]:
    """List the lines that could not be accepted, and why."""
    found = batches().list_errors(visible_batch(path.batch), query.first, MAX_LINES, query.limit)
    following = found[-1].line + 1 if len(found) == query.limit else None
    return LineErrorList.build(errors=[LineErrorView.build(error) for error in found], next_line=following)


@api.get("/<batch>/cost", responses={200: BatchCost, **problem_responses(404)})
def get_batch_cost(path: BatchPath) -> dict[str, Any]:
    """Show what the jobs of a batch that are stored cost, in micro-credits."""
    batch = visible_batch(path.batch)
    sums = credits.read_cost_of_batch(database(), batch.tenant, batch.id)
    return BatchCost.build(batch=batch.id, **sums._asdict())


@api.get("/<batch>/results", responses={200: None, **problem_responses(404, 409, 422)})
def read_batch_results(path: BatchPath, query: ResultsQuery) -> Response:
    """Read the results in the order of lines, one JSON object per line (NDJSON).

    `line`, `custom_id`, `job_id`, `status`, and `result` or `error`.  `status` is that of the job; `refused`: the line
    could not be accepted; `removed`: retention has removed the job.  The header `Next-Line` is the `from` of the next
    page; without it this is the last one.
    """
    batch = visible_batch(path.batch)
    if batch.state is BatchState.NAMED:
        detail = f"Batch {batch.id!r} has no lines: it was not made by POST /batches.  See GET /queue/jobs?batch=…"
        raise Conflict(detail, batch=batch.id)
    page = read_results(database(), batch, query.first, query.limit, _MAX_PAGE_BYTES, ended_only=query.ended)
    headers = {} if page.next_line is None else {"Next-Line": str(page.next_line)}
    return Response(b"".join(line + b"\n" for line in page.lines), content_type=NDJSON, headers=headers)


@queue_api.post(
    "/<batch>/cancel",
    responses={
        200: BatchCancelResult,
        202: response_of(BatchCancelResult, "Some jobs are left"),
        **problem_responses(404, 409, 415),
    },
    operation_id="cancel_queue_batch",
)
@api.post(
    "/<batch>/cancel",
    responses={
        200: BatchCancelResult,
        202: response_of(BatchCancelResult, "Some jobs are left"),
        **problem_responses(404, 409, 415),
    },
)
@scope(Scope.SUBMIT)
def cancel_batch(path: BatchPath) -> tuple[dict[str, Any], int]:
    """Cancel all jobs of a batch that have not ended, first those that would start next.

    200: no job of the batch will start.  202: the batch has so many jobs that some are left: those of a batch of lines
    are canceled all the same, for another one repeat the request.  409: all jobs of the batch have ended.
    """
    batch = visible_batch(path.batch)
    if batches().read_progress(batch).completed_ms is not None:
        raise Conflict(f"All jobs of batch {batch.id!r} have ended.", batch=batch.id)
    done = batch_control.cancel(dispatcher(), batches(), batch, _CONTROL_TIME_S)
    remaining = 0 if done.is_complete else count_waiting(batches().read_progress(batch))
    result = BatchCancelResult.build(batch=batch.id, canceled=done.canceled, canceling=done.asked, remaining=remaining)
    return result, 200 if done.is_complete else 202


@api.post("/<batch>/pause", responses={200: BatchView, **problem_responses(404, 409, 415)})
@scope(Scope.MANAGE)
def pause_batch(path: BatchPath) -> dict[str, Any]:
    """Start no more jobs of a batch; those that run go on to their ends.  Lines that come wait."""
    return _set_paused(path.batch, True)


@api.post("/<batch>/resume", responses={200: BatchView, **problem_responses(404, 409, 415)})
@scope(Scope.MANAGE)
def resume_batch(path: BatchPath) -> dict[str, Any]:
    """Go on with a batch that was paused, in the order of acceptance."""
    return _set_paused(path.batch, False)


def visible_batch(batch_id: str) -> Batch:
    """Return a batch that this request may see.  Raises NotFound."""
    found = batches().find(batch_id, visible_tenant()) if batch_id.isprintable() else None
    return require(found, batch_id)


def _set_paused(batch_id: str, is_paused: bool) -> dict[str, Any]:
    changed = batch_control.set_paused(dispatcher(), batches(), visible_batch(batch_id), is_paused, _CONTROL_TIME_S)
    return BatchView.build(batches().read_progress(changed))


# -- the head ----------------------------------------------------------------------------------------------------


def _read_head(query: BatchHeadQuery) -> dict[str, Any]:
    """Return the fields of the head that are given.  Raises ProblemError."""
    if request.mimetype == NDJSON:
        if request.content_length:
            raise ProblemError(415, "unsupported_media_type", "No lines here", "Send lines to /batches/{batch}/lines.")
        return query.model_dump(exclude_none=True)
    try:
        head: dict[str, Any] = BatchHead.model_validate(request.get_json()).model_dump(exclude_none=True)
    except ValidationError as error:
        raise validation_error(error) from None
    return head


def _new_batch(head: dict[str, Any]) -> Batch:
    """Return the batch of a head, after a look at whether its lines can be accepted with it.  Raises InvalidJob."""
    tenant, now = current_identity().tenant.name, now_ms()
    window, callback_url = window_ms(head.get("window")), head.get("callback_url")
    if callback_url is not None and (problem := dispatcher().check_url(callback_url)):
        raise InvalidJob("callback_url", f"callback_url: {problem}")
    inherited = {name: head[name] for name in INHERITED if name in head}
    if window is not None:
        inherited.setdefault("priority", PRIORITY_LEAST_URGENT)
    batch = Batch(
        tenant=tenant,
        id=new_batch_id(),
        state=BatchState.OPEN,
        created_ms=now,
        changed_ms=now,
        name=head.get("name"),
        on_error=OnError(head.get("on_error", OnError.SKIP)),
        head=inherited,
        callback_url=callback_url,
        deadline_ms=None if window is None else now + window,
    )
    if "model" in inherited:
        probe = batch_lines.make_submission(batch, 0, _PROBE, now, None)
        prepare_job(probe, dispatcher().catalog.get().resolve(inherited["model"]), dispatcher().check_url, now)
    return batch


def _idempotency_key() -> str | None:
    return check_idempotency_key(request.headers.get("Idempotency-Key"))


def _fingerprint(head: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(head, option=orjson.OPT_SORT_KEYS)).hexdigest()
