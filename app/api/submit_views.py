"""Submitting jobs: one, or many at once."""

from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from flask import request
from redis.exceptions import RedisError

from app import batch
from app.api.openapi import blueprint, optional_headers, problem_responses
from app.auth.access import current_tenant
from app.context import asked, context, dispatcher
from app.job_answers import BatchReceipt, BatchReceiptItem, queue_position
from app.job_answers import SubmitReceipt as ReceiptView
from app.request_deadline import answered_in_time
from app.schemas.cursors import batch_filter
from app.schemas.job_schemas import BatchNameQuery, SubmitBody
from routing.admission.submission import MAX_KEY_LENGTH, Submission, check_idempotency_key, error_index
from routing.dispatch.dispatcher import Dispatcher, Receipt
from routing.queries import explain, positions
from routing.queries.positions import QueuePosition
from slotkeeper.errors import InvalidJob
from slotkeeper.jobs.states import State
from slotkeeper.jobs.values import new_job_id
from slotkeeper.registry.tenants import Tenant
from tasks.services import workers

Answer = tuple[dict[str, Any], int, dict[str, str]]

api = blueprint("queue", "Submit", "/queue")

_KEY = optional_headers(Idempotency_Key="Names this request: sent again within a day, it is the same job.")
_MAX_BATCH_KEY_CHARS = MAX_KEY_LENGTH - len(f"/{batch.MAX_BATCH_JOBS - 1}")
_BATCH_KEY = optional_headers(
    _MAX_BATCH_KEY_CHARS, Idempotency_Key="Names this batch: sent again within a day, it is the same jobs."
)
_REFUSALS = problem_responses(400, 409, 413, 415, 422, 429)


@api.post("/submit", responses={202: ReceiptView, **_REFUSALS}, openapi_extensions=_KEY)
@answered_in_time
def submit(body: SubmitBody) -> Answer:
    """Submit a job.

    The response is sent after the job is stored.  `next_step` and `position` describe what comes next.

    429: the model's queue is full, or the tenant submits too fast.  422: the model is not registered, the job probably
    cannot start before its deadline, or no server meets its constraints and the model refuses such jobs.  409: the
    model or tenant accepts no new jobs, or the Idempotency-Key was used for another request.
    """
    whose, sent, found = current_tenant(), asked().environ, context()
    wanted = submission(body, whose, sent.get("HTTP_IDEMPOTENCY_KEY"), sent.get("HTTP_TRACEPARENT"))
    (receipt,) = found.dispatcher.submit([wanted], whose)
    accepted = receipt.accepted
    where, links = queue_position(accepted.state, _position_of(found.dispatcher, receipt)), _links(accepted.id)
    answer = ReceiptView.build(accepted, **where, notice=_notice(receipt), links=links)
    return answer, 202, {"Location": links["self"]}


@api.post(
    "/submit-batch",
    responses={202: BatchReceipt, **_REFUSALS, **problem_responses(411)},
    request_body=batch.BATCH_BODY,
    openapi_extensions=_BATCH_KEY,
)
def submit_batch(query: BatchNameQuery) -> tuple[dict[str, Any], int]:
    """Submit up to 1000 jobs: all of them are accepted, or none.

    A JSON array, or one JSON object a line (application/x-ndjson).  A refusal names the `index` of the job,
    counted from 0.  Several requests that name the same `batch` submit one batch.
    """
    whose, sent = current_tenant(), request.headers
    key, trace = check_idempotency_key(sent.get("Idempotency-Key"), _MAX_BATCH_KEY_CHARS), sent.get("traceparent")
    settings = context().settings
    items = batch.read_batch(request, settings.max_batch_bytes, settings.max_body_bytes)
    name = batch_filter(query.batch) or new_job_id()
    wanted = [
        replace(_batch_submission(index, item, whose, key, trace), batch=name) for index, item in enumerate(items)
    ]
    receipts = dispatcher().submit(wanted, whose)
    jobs = [BatchReceiptItem.build(it.accepted, notice=it.notice) for it in receipts]
    accepted = sum(not it.accepted.deduplicated for it in receipts)
    known_as = name if accepted else _find_batch_name(receipts[0])
    return BatchReceipt.build(batch=known_as, accepted=accepted, jobs=jobs), 202


def submission(
    body: SubmitBody, tenant: Tenant, key: str | None, traceparent: str | None, batch: str | None = None
) -> Submission:
    """Return the submission of a body.  Raises InvalidJob for a time that is none."""
    _, not_before_ms = moment(body.not_before)
    return Submission(
        body,
        tenant=tenant.name,
        idempotency_key=key,
        traceparent=traceparent,
        batch=batch,
        not_before_ms=not_before_ms,
    )


def moment(given: Any) -> tuple[Any, int | None]:
    """(seconds from now, None) or (None, ms since the epoch).  Raises InvalidJob."""
    if not isinstance(given, str):
        return given, None
    try:
        when = datetime.fromisoformat(given)
    except ValueError:
        raise InvalidJob("not_before", f"not_before {_SHAPE}") from None
    if when.tzinfo is None:
        raise InvalidJob("not_before", f"not_before names no zone; {_SHAPE}")
    try:
        return None, round(when.timestamp() * 1000)
    except (OverflowError, ValueError):
        raise InvalidJob("not_before", "not_before must lie between now and 366 days from now") from None


_SHAPE = "must be ISO 8601 with its zone, such as 2030-01-31T12:00:00Z, or a number of seconds from now"


def _batch_submission(
    index: int, item: batch.BatchItem, whose: Tenant, key: str | None, trace: str | None
) -> Submission:
    own_key = item.idempotency_key
    if own_key is None and key is not None:
        own_key = f"{key}/{index}"
    with error_index(index):
        return submission(item, whose, own_key, trace)


def _find_batch_name(receipt: Receipt) -> str | None:
    """What a job that had been accepted before came in."""
    known = dispatcher().store.get(receipt.accepted.id)
    return None if known is None else known.batch


def _position_of(dispatcher: Dispatcher, receipt: Receipt) -> QueuePosition:
    if receipt.accepted.state is not State.QUEUED:
        return QueuePosition()
    if receipt.accepted.enters_queue:
        return positions.queue_position(dispatcher, workers(), receipt.job, receipt.position)
    return positions.read_position(dispatcher, workers(), receipt.job)


def _notice(receipt: Receipt) -> str | None:
    if (
        receipt.notice is None and receipt.position is not None
    ):  # Redis has just answered; no submit waits for it twice.
        with suppress(RedisError):
            if not workers().is_any_alive():
                return f"At present {explain.NO_WORKER}; the job waits until one does."
    return receipt.notice


def _links(job_id: str) -> dict[str, str]:
    own = f"/queue/jobs/{job_id}"
    return {"self": own, **{name: f"{own}/{name}" for name in ("cancel", "attempts", "explain")}}
