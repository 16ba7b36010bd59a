"""A request for a job, validated against its model and turned into a NewJob."""

import hashlib
import re
from collections.abc import Callable, Sized
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from routing.admission.constraints import encode_constraints
from routing.admission.job_request import MODEL_PATTERN, REQUEST_FIELDS, JobRequest
from routing.admission.labels import encode_labels
from slotkeeper import json_text, trace_context
from slotkeeper.errors import InvalidJob
from slotkeeper.jobs.terms import MAX_GONE_S, MAX_OUTPUT, MIN_GONE_S, JobTerms
from slotkeeper.jobs.values import (
    PRIORITY_DEFAULT,
    PRIORITY_LEAST_URGENT,
    PRIORITY_MOST_URGENT,
    PRODUCTION,
    NewJob,
    new_job_id,
)
from slotkeeper.registry.run_config import read_on_failure
from slotkeeper.registry.snapshot import Model
from slotkeeper.registry.tenants import PRINTABLE_PATTERN

_MODEL = re.compile(MODEL_PATTERN)
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_KEY_LENGTH = 255
_LONGEST_WAIT_S = 366 * 86_400
_DEEPEST = 64  # levels of a payload
_TIME_FORMAT = "must be ISO 8601 with its zone, such as 2030-01-31T12:00:00Z, or a number of seconds from now"

UrlCheck = Callable[[str], str | None]
"""Returns why a URL may not be called; None: it may."""


PATH_WORDS = frozenset({"check", "release", "removal", "reset", "state", "stats"})
"""What stands after a name in a path of the API or the page, such as /admin/servers/{server}/check."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request, and what its interface knows beside it.

    `expires_ms`, `not_before_ms`: in place of the request's `ttl` and `not_before`, where the client named a time (ms).
    `id`: chosen by the client (Celery's task id); None: a new one.  `batch`: the name of the batch.  `custom_id`: the
    client's name of this line of the batch.  `traceparent`: of the trace that it belongs to; one that is not
    well-formed is ignored.
    """

    request: JobRequest
    tenant: str = "default"
    source: str = "rest"
    id: str | None = None
    idempotency_key: str | None = None
    traceparent: str | None = None
    batch: str | None = None
    envelope: str | None = None
    expires_ms: int | None = None
    not_before_ms: int | None = None
    custom_id: str | None = None


def check_name(name: str, field: str = "model") -> str:
    """Return the name.  Raises InvalidJob unless it can name a model, a server or a queue."""
    if not isinstance(name, str) or not _MODEL.fullmatch(name):
        raise InvalidJob(
            field, f"{field} must be 1 to 128 letters, digits or . _ / : @ + - and begin with a letter or digit"
        )
    path, _, word = name.rpartition("/")
    if path and word in PATH_WORDS:
        raise InvalidJob(field, f"{field} must not end with /{word}: paths of the API have this word after a name")
    return name


@dataclass(slots=True)
class error_index:
    """Add the index of a job, counted from 0, to a refusal of one job of many.

    done: the accepted jobs before it; the block appends each accepted job.
    """

    done: Sized

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InvalidJob):
            error.facts["index"] = len(self.done)


def prepare_job(
    submission: Submission, model: Model, check_url: UrlCheck, now_ms: int, environment: str = PRODUCTION
) -> NewJob:
    """Return the job to accept.  Raises InvalidJob, which names the field and the remedy.

    environment: of a request that names none.
    """
    request = submission.request
    payload = encode_payload(request.payload, model.config.max_payload_bytes)
    if request.callback_url is not None:
        problem = check_url(request.callback_url)
        if problem:
            raise InvalidJob("callback_url", f"callback_url: {problem}")
    delay_s = _seconds("not_before", _from_now_s(request.not_before, submission.not_before_ms, now_ms))
    ttl_s = _seconds("ttl", _from_now_s(request.ttl, submission.expires_ms, now_ms))
    if ttl_s is None:
        ttl_s = model.config.default_ttl
    if ttl_s is not None and delay_s and ttl_s <= delay_s:
        raise InvalidJob("ttl", "ttl ends before not_before: the job would expire before it may start")
    return NewJob(
        id=_job_id(submission.id),
        model=model.name,
        payload=payload,
        priority=_priority(request.priority),
        tenant=submission.tenant,
        callback_url=request.callback_url,
        not_before_ms=now_ms + round(delay_s * 1000) if delay_s else None,
        deadline_ms=now_ms + round(ttl_s * 1000) if ttl_s is not None else None,
        given_times=_given_times(submission),
        idempotency_key=check_idempotency_key(submission.idempotency_key),
        fingerprint=_fingerprint(submission, payload) if submission.idempotency_key else "",
        source=submission.source,
        envelope=submission.envelope,
        constraints=encode_constraints(request.constraints, request.environment or environment),
        labels=encode_labels(request.labels),
        traceparent=trace_context.parse_traceparent(submission.traceparent),
        batch=submission.batch,
        terms=_terms(request, model, submission.custom_id),
    )


def not_before_ms(value: float | str | None) -> int | None:
    """Return a time in ISO 8601 as ms since the epoch; None: seconds from now, or nothing.  Raises InvalidJob."""
    if not isinstance(value, str):
        return None
    try:
        when = datetime.fromisoformat(value)
    except ValueError:
        raise InvalidJob("not_before", f"not_before {_TIME_FORMAT}") from None
    if when.tzinfo is None:
        raise InvalidJob("not_before", f"not_before names no zone; {_TIME_FORMAT}")
    try:
        return round(when.timestamp() * 1000)
    except (OverflowError, ValueError):
        raise InvalidJob("not_before", "not_before must lie between now and 366 days from now") from None


def _terms(request: JobRequest, model: Model, custom_id: str | None) -> str | None:
    """Return the terms of a job as they are stored.  Raises InvalidJob: its model does not allow them."""
    on_failure, size, gone_s = request.on_failure, request.expected_output, request.cancel_when_gone
    if on_failure is None and size is None and gone_s is None and custom_id is None:
        return None
    if on_failure is not None:
        on_failure = read_on_failure(on_failure, model.name, model.config)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_OUTPUT):
        raise InvalidJob("expected_output", f"expected_output must be a whole number from 1 to {MAX_OUTPUT}")
    if gone_s is not None and (
        isinstance(gone_s, bool) or not isinstance(gone_s, int | float) or not MIN_GONE_S <= gone_s <= MAX_GONE_S
    ):
        raise InvalidJob("cancel_when_gone", f"cancel_when_gone must be {MIN_GONE_S} to {MAX_GONE_S} seconds")
    terms = JobTerms(on_failure=on_failure, expected_output=size, cancel_when_gone=gone_s, custom_id=custom_id)
    return terms.encode()


def encode_payload(payload: Any, limit: int) -> str:
    """Return compact JSON.  Raises InvalidJob for what JSON cannot hold, a NUL, or more than `limit` bytes."""
    if not isinstance(payload, dict):
        raise InvalidJob("payload", "payload must be a JSON object")
    try:
        encoded = json_text.dumps(payload)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse_unfit(payload)
        raise InvalidJob("payload", f"payload cannot be written as JSON: {error}") from None
    if _may_be_unfit(encoded):
        _refuse_unfit(payload)
    if len(encoded) > limit:
        raise InvalidJob(
            "payload",
            f"payload is {len(encoded)} bytes long, this model takes {limit}; send a reference to the data instead, "
            "or have the operator raise the model's max_payload_bytes at /admin/model-configs and, for bodies above "
            "it, SLOTKEEPER_MAX_BODY_BYTES",
        )
    return encoded.decode()


def _may_be_unfit(encoded: bytes) -> bool:
    """Return whether each value has to be checked: most payloads have nothing that an unfit one is written as."""
    brackets = encoded.count(b"{") + encoded.count(b"[")
    return brackets > _DEEPEST or b"null" in encoded or b"\\u0000" in encoded


def _refuse_unfit(value: Any, depth: int = 0) -> None:
    """NaN and infinities would silently become null, and a NUL cannot be stored by every database."""
    if depth > _DEEPEST:
        raise InvalidJob("payload", f"payload is nested deeper than {_DEEPEST} levels")
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise InvalidJob("payload", "payload holds NaN or an infinity, which JSON does not know; send null or a text")
    if isinstance(value, str) and "\x00" in value:
        raise InvalidJob("payload", "payload holds a NUL character; remove it, or encode binary data as base64")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_unfit(key, depth + 1)
            _refuse_unfit(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_unfit(item, depth + 1)


def _priority(priority: int | bool | None) -> int:
    if priority is None or priority is False:
        return PRIORITY_DEFAULT
    if priority is True:
        return PRIORITY_MOST_URGENT
    if not isinstance(priority, int) or not PRIORITY_MOST_URGENT <= priority <= PRIORITY_LEAST_URGENT:
        raise InvalidJob("priority", "priority must be true, or a whole number from 1 (most urgent) to 9")
    return priority


def _seconds(field: str, value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_WAIT_S:
        raise InvalidJob(field, f"{field} must lie between now and 366 days from now")
    return float(value)


def _from_now_s(seconds: float | None, moment_ms: int | None, now_ms: int) -> float | None:
    return seconds if moment_ms is None else max(moment_ms - now_ms, 0) / 1000


def _given_times(submission: Submission) -> str | None:
    if submission.not_before_ms is None and submission.expires_ms is None:
        return None
    given = {"not_before": submission.not_before_ms, "deadline": submission.expires_ms}
    return " ".join(name for name, moment_ms in given.items() if moment_ms is not None) or None


def _job_id(wanted: str | None) -> str:
    if wanted is None:
        return new_job_id()
    if not _JOB_ID.fullmatch(wanted):
        raise InvalidJob("id", "a job id must be 1 to 64 letters, digits or . _ -")
    return wanted


def check_idempotency_key(key: str | None, longest: int = MAX_KEY_LENGTH) -> str | None:
    """Return the key.  Raises InvalidJob unless it is None, or can be shown on one line."""
    if key is not None and (not 1 <= len(key) <= longest or not re.fullmatch(PRINTABLE_PATTERN, key)):
        raise InvalidJob("Idempotency-Key", f"Idempotency-Key must be 1 to {longest} printable characters")
    return key


def _fingerprint(submission: Submission, payload: str) -> str:
    """Return a hash of the fields that are set, so that a new field does not change the fingerprint of old requests.

    Times count as they were sent: how far off they are differs when the same request is sent again.
    """
    request = submission.request
    fields: dict[str, Any] = {name: value for name in REQUEST_FIELDS if (value := getattr(request, name)) is not None}
    fields["payload"] = payload
    for name, encode in (("constraints", encode_constraints), ("labels", encode_labels)):
        if name in fields:
            fields[name] = encode(fields[name])
    fields |= {
        name: value for name in ("expires_ms", "not_before_ms") if (value := getattr(submission, name)) is not None
    }
    given = {name: value for name, value in fields.items() if value != ""}
    return hashlib.sha256(orjson.dumps(given, option=orjson.OPT_SORT_KEYS)).hexdigest()
