"""Reading a batch of jobs: a JSON array, or NDJSON."""

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
            NDJSON: {"schema": {"type": "string", "description": "One such object a line."}},
        }
    }
)


def read_batch(request: Request, most_bytes: int, longest: int) -> list[BatchItem]:
    """The jobs asked for.  Raises ProblemError, which names the index.

    They are read one by one: the first that is wrong ends it, however many follow.  Each may have `longest` bytes.
    """
    request.max_content_length = most_bytes
    if request.mimetype == NDJSON:
        require_known_length(request)
    body = read_body(request)
    if request.mimetype == NDJSON:
        found = _iter_lines(body, longest)
    elif starts_array(body):
        found = iter_array(body, longest)
    else:
        raise _invalid_batch(
            "The body must be a JSON array of jobs, or NDJSON with Content-Type: application/x-ndjson."
        )
    items = [_parse_item(index, it) for index, it in enumerate(found)]
    if not items:
        raise _invalid_batch(f"The batch holds no jobs; send 1 to {MAX_BATCH_JOBS}.")
    return items


def _parse_item(index: int, found: Any) -> BatchItem:
    if index == MAX_BATCH_JOBS:
        raise _invalid_batch(f"The batch holds more than {MAX_BATCH_JOBS} jobs; send them in several.")
    try:
        return BatchItem.model_validate(found)
    except ValidationError as error:
        raise validation_error(error, index=index) from None


def _iter_lines(body: bytes, longest: int) -> Iterator[Any]:
    for index, line in enumerate(line for line in BytesIO(body) if line.strip()):
        if len(line) > longest:
            raise _invalid_batch(f"A line may have {longest} bytes.", index=index)
        yield parse_json(line, index=index)


def _invalid_batch(detail: str, **facts: Any) -> ProblemError:
    return ProblemError(422, "invalid_request", "The request is not valid", detail, field="body", **facts)
