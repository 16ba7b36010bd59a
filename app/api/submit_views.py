"""Submit one job, or a batch of jobs."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication

import orjson
from flask import Response, g, request
from redis.exceptions import RedisError

from app.api.openapi import API_HEADERS, blueprint, optional_headers, problem_responses
from app.auth import access
from app.auth.access import current_identity
from app.auth.api_keys import KeyCache
from app.context import Context, context, dispatcher
from app.request_deadline import answered_in_time, view_time_limit
from app.request_json import BATCH_BODY, MAX_BATCH_JOBS, parse_json, read_batch
from app.schemas.cursors import batch_filter
from app.schemas.job_schemas import (
    BatchNameQuery,
    BatchReceipt,
    BatchReceiptItem,
    SubmitBody,
    position_fields,
)
from app.schemas.job_schemas import SubmitReceipt as ReceiptView
from routing.admission.submission import MAX_KEY_LENGTH, Submission, check_idempotency_key, error_index, not_before_ms
from routing.admission.submit_limits import LimitStatus
from routing.dispatch.dispatcher import Dispatcher, Receipt
from routing.queries import explain, positions
from routing.queries.positions import QueuePosition
from slotkeeper.jobs.states import State
from slotkeeper.jobs.values import new_job_id
from slotkeeper.registry.identity import Identity, Scope, Tenant
from tasks.services import workers

_PATH, _TYPE = "/queue/submit", "application/json"
REFUSAL = "slotkeeper.refusal"
"""In the WSGI environment: why DirectSubmit did not accept the job."""

api = blueprint("queue", "Submit", "/queue", scope=Scope.SUBMIT)


def show_rates(response: Response) -> Response:
    """Say what is left of rates and slot time, as draft-ietf-httpapi-ratelimit-headers-10 defines it."""
    for name, value in rate_headers(g.get("rates", ())):
        response.headers[name] = value
    return response


def rate_headers(rates: Sequence[LimitStatus]) -> list[tuple[str, str]]:
    """Return the headers that say what is left of rates."""
    if not rates:
        return []
    units = {rate.name: f';qu="{rate.unit}"' if rate.unit else "" for rate in rates}
    policies = [f'"{rate.name}";q={rate.quota};w={rate.window_s}{units[rate.name]}' for rate in rates]
    left = [f'"{rate.name}";r={rate.left};t={rate.reset_s}' for rate in rates]
    return [("RateLimit-Policy", ", ".join(policies)), ("RateLimit", ", ".join(left))]


api.after_request(show_rates)
_KEY = optional_headers(
    Idempotency_Key="Names this request: if it is sent again within a day, it returns the same job."
)
_MAX_BATCH_KEY_CHARS = MAX_KEY_LENGTH - len(f"/{MAX_BATCH_JOBS - 1}")
_BATCH_KEY = optional_headers(
    _MAX_BATCH_KEY_CHARS,
    Idempotency_Key="Names this batch: if it is sent again within a day, it returns the same jobs.",
)
_REFUSALS = problem_responses(400, 402, 409, 413, 415, 422, 429)


@api.post("/submit", responses={202: ReceiptView, **_REFUSALS}, openapi_extensions=_KEY)
@answered_in_time
def submit(body: SubmitBody) -> tuple[dict[str, Any], int, dict[str, str]]:
    """Submit a job.

    The response is sent after the job is stored.  `next_step` and `position` describe what comes next.

    429: the model's queue is full, or the tenant submits too fast.  422: the model is not registered, the job probably
    cannot start before its deadline, or no server meets its constraints and the model refuses such jobs.  409: the
    model or tenant accepts no new jobs, or the Idempotency-Key was used for another request.  402: the tenant has too
    few credits.
    """
    if (refusal := request.environ.get(REFUSAL)) is not None:
        raise refusal
    receipt, g.rates = accept(body, current_identity(), request.environ, dispatcher())
    return receipt, 202, {"Location": receipt["links"]["self"]}


def accept(
    body: SubmitBody, sender: Identity, environ: Mapping[str, Any], dispatcher: Dispatcher
) -> tuple[dict[str, Any], Sequence[LimitStatus]]:
    """Submit the job of a request, and return its ReceiptView, and what is left of the sender's rates."""
    job = submission(body, sender.tenant, environ.get("HTTP_IDEMPOTENCY_KEY"), environ.get("HTTP_TRACEPARENT"))
    (receipt,) = dispatcher.submit([job], sender)
    accepted = receipt.accepted
    position = position_fields(accepted.state, _position_of(receipt, dispatcher))
    view = ReceiptView.build(accepted, **position, notice=_notice(receipt), links=_links(accepted.id))
    return view, receipt.rates


@api.post(
    "/submit-batch",
    responses={202: BatchReceipt, **_REFUSALS, **problem_responses(411)},
    request_body=BATCH_BODY,
    openapi_extensions=_BATCH_KEY,
)
def submit_batch(query: BatchNameQuery) -> tuple[dict[str, Any], int]:
    """Submit up to 1000 jobs: all of them are accepted, or none.

    The body is a JSON array, or one JSON object per line (application/x-ndjson).  A refusal names the `index` of the
    job, counted from 0.  Several requests that name the same `batch` submit one batch.
    """
    sender, headers = current_identity(), request.headers
    key = check_idempotency_key(headers.get("Idempotency-Key"), _MAX_BATCH_KEY_CHARS)
    traceparent = headers.get("traceparent")
    settings = context().settings
    items = read_batch(request, settings.max_batch_bytes, settings.max_body_bytes)
    name = batch_filter(query.batch) or new_job_id()
    submissions: list[Submission] = []
    with error_index(submissions):
        for index, item in enumerate(items):
            item_key = f"{key}/{index}" if item.idempotency_key is None and key is not None else item.idempotency_key
            submissions.append(submission(item, sender.tenant, item_key, traceparent, name))
    receipts = dispatcher().submit(submissions, sender)
    g.rates = receipts[0].rates
    jobs = [BatchReceiptItem.build(receipt.accepted, notice=receipt.notice) for receipt in receipts]
    accepted = sum(not receipt.accepted.deduplicated for receipt in receipts)
    stored_name = name if accepted else _find_batch_name(receipts[0])
    return BatchReceipt.build(batch=stored_name, accepted=accepted, jobs=jobs), 202


def submission(
    body: SubmitBody, tenant: Tenant, key: str | None, traceparent: str | None, batch: str | None = None
) -> Submission:
    """Return the submission of a body.  Raises InvalidJob for an invalid time."""
    return Submission(
        body,
        tenant=tenant.name,
        source="rest" if batch is None else "batch",
        idempotency_key=key,
        traceparent=traceparent,
        batch=batch,
        not_before_ms=not_before_ms(body.not_before),
    )


def _find_batch_name(receipt: Receipt) -> str | None:
    """Return the batch of a job that was accepted before; None: it has none, or was removed."""
    job = dispatcher().store.get(receipt.accepted.id)
    return None if job is None else job.batch


def _position_of(receipt: Receipt, dispatcher: Dispatcher) -> QueuePosition:
    if receipt.accepted.state is not State.QUEUED:
        return QueuePosition()
    if receipt.accepted.enters_queue:
        return positions.queue_position(dispatcher, workers(), receipt.job, receipt.position)
    return positions.read_position(dispatcher, workers(), receipt.job)


def _notice(receipt: Receipt) -> str | None:
    # With a position, Redis has just answered: a submit must not wait for an unavailable Redis twice.
    if receipt.notice is None and receipt.position is not None:
        with suppress(RedisError):
            if not workers().is_any_alive():
                return f"At present {explain.NO_WORKER}; the job waits until one does."
    return receipt.notice


def _links(job_id: str) -> dict[str, str]:
    path = f"/queue/jobs/{job_id}"
    return {"self": path, **{name: f"{path}/{name}" for name in ("cancel", "attempts", "explain")}}


# -- before Flask --------------------------------------------------------------------------------------------------


class DirectSubmit:
    """WSGI middleware: answers `POST /queue/submit` without Flask's frame, which costs more than the view (ADR 23).

    It answers an ordinary request whose job is accepted.  All others go on to Flask: requests with a query or another
    type of body, and those that are refused, for which the view raises the refusal.  Thread-safe.
    """

    def __init__(self, flask: WSGIApplication, context: Context, keys: KeyCache | None) -> None:
        """keys: None: no keys are required."""
        self._flask, self._context, self._keys = flask, context, keys

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body = self._read_ordinary(environ)
        if body is not None:
            try:
                content, headers = self._submit(environ, body)
            except Exception as refusal:
                environ[REFUSAL] = refusal
            else:
                start_response("202 ACCEPTED", headers)
                return [content]
        return self._flask(environ, start_response)

    def _read_ordinary(self, environ: dict[str, Any]) -> bytes | None:
        """Return the body of a submit that can be answered directly; None: it is another request.

        Flask can read the body again.
        """
        is_submit = environ["PATH_INFO"] == _PATH and environ["REQUEST_METHOD"] == "POST"
        if not is_submit or environ.get("CONTENT_TYPE") != _TYPE or environ.get("QUERY_STRING"):
            return None
        length = environ.get("CONTENT_LENGTH", "")
        if not length.isdecimal() or int(length) > self._context.settings.max_body_bytes:
            return None
        body = environ["wsgi.input"].read(int(length))
        environ["wsgi.input"] = BytesIO(body)
        return body if len(body) == int(length) else None

    def _submit(self, environ: dict[str, Any], body: bytes) -> tuple[bytes, list[tuple[str, str]]]:
        """Accept the job, and return the response.  Raises what the view and the hooks before it raise."""
        try:
            with view_time_limit(environ):
                if self._keys is None:
                    access.reject_remote(environ, self._context.settings)
                sender = access.identify_sender(environ, self._keys, Scope.SUBMIT)
                request = SubmitBody.model_validate(parse_json(body))
                receipt, rates = accept(request, sender, environ, self._context.dispatcher)
        finally:
            access.reset_actor()
        headers = [("Content-Type", _TYPE), ("Location", receipt["links"]["self"])]
        return orjson.dumps(receipt), headers + API_HEADERS + rate_headers(rates)
