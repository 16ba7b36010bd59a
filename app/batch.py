"""Reads a batch of jobs: a JSON array, or NDJSON."""

from collections.abc import Iterator
from io import BytesIO
from typing import Any

from flask import Request
from flask_openapi import RequestBody
from pydantic import ValidationError

from app.problems import ProblemError, validation_error
from app.request_json import iter_array, parse_json, read_body, require_known_length, starts_array
from app.schemas.job_schemas import BatchItem

MAX_BATCH_JOBS = 1000
NDJSON = "application/x-ndjson"

_ITEM = BatchItem.model_json_schema()
BATCH_BODY = RequestBody.model_validate(
    {
        "content": {
            "application/json": {
                "schema": {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": MAX_BATCH_JOBS}
            },
            NDJSON: {"schema": {"type": "string", "description": "One such object per line."}},
        }
    }
)


def read_batch(request: Request, most_bytes: int, longest: int) -> list[BatchItem]:
    """Return the jobs in the body.  Raises ProblemError with the index of the first invalid job.

    Jobs are parsed one by one, so that the rest is not parsed after an invalid job.  `most_bytes`: limit of the body.
    `longest`: limit of one job, in bytes.
    """
    request.max_content_length = most_bytes
    if request.mimetype == NDJSON:
        require_known_length(request)
    body = read_body(request)
    if request.mimetype == NDJSON:
        values = _iter_lines(body, longest)
    elif starts_array(body):
        values = iter_array(body, longest)
    else:
        raise _invalid_batch(
            "The body must be a JSON array of jobs, or NDJSON with Content-Type: application/x-ndjson."
        )
    items = [_parse_item(index, value) for index, value in enumerate(values)]
    if not items:
        raise _invalid_batch(f"The batch holds no jobs; send 1 to {MAX_BATCH_JOBS}.")
    return items


def _parse_item(index: int, value: Any) -> BatchItem:
    if index == MAX_BATCH_JOBS:
        raise _invalid_batch(f"The batch holds more than {MAX_BATCH_JOBS} jobs; send them in several.")
    try:
        return BatchItem.model_validate(value)
    except ValidationError as error:
        raise validation_error(error, index=index) from None


def _iter_lines(body: bytes, longest: int) -> Iterator[Any]:
    for index, line in enumerate(line for line in BytesIO(body) if line.strip()):
        if len(line) > longest:
            raise _invalid_batch(f"A line may have at most {longest} bytes.", index=index)
        yield parse_json(line, index=index)


def _invalid_batch(detail: str, **facts: Any) -> ProblemError:
    return ProblemError(422, "invalid_request", "The request is not valid", detail, field="body", **facts)
