"""Reading a batch of jobs: a JSON array, or NDJSON."""

from typing import Any

from flask import Request
from flask_openapi import RequestBody
from pydantic import ValidationError

from app.api.reading import body_of, check_whole, parse
from app.errors import ProblemError, invalid
from app.schemas import BatchItem

MOST = 1000
NDJSON = "application/x-ndjson"

_ITEM = BatchItem.model_json_schema()
DESCRIPTION = RequestBody.model_validate(
    {
        "content": {
            "application/json": {"schema": {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": MOST}},
            NDJSON: {"schema": {"type": "string", "description": "One such object a line."}},
        }
    }
)


def read(request: Request, most_bytes: int) -> list[BatchItem]:
    """The jobs asked for.  Raises ProblemError, which names the index."""
    request.max_content_length = most_bytes
    if request.mimetype == NDJSON:
        check_whole(request)
    body = body_of(request)
    found = _lines(body) if request.mimetype == NDJSON else parse(body)
    if not isinstance(found, list):
        raise _refused("The body must be a JSON array of jobs, or NDJSON with Content-Type: application/x-ndjson.")
    if not 1 <= len(found) <= MOST:
        raise _refused(f"The batch holds {len(found)} jobs; send 1 to {MOST}.")
    return [_item(index, it) for index, it in enumerate(found)]


def _item(index: int, found: Any) -> BatchItem:
    """One at a time: the first that is wrong ends it, however many follow."""
    try:
        return BatchItem.model_validate(found)
    except ValidationError as error:
        raise invalid(error, index=index) from None


def _lines(body: bytes) -> list[Any]:
    lines = [line for line in body.split(b"\n") if line.strip()]
    if len(lines) > MOST:  # before any of it is parsed
        raise _refused(f"The batch holds {len(lines)} jobs; send 1 to {MOST}.")
    return [parse(line, index=index) for index, line in enumerate(lines)]


def _refused(detail: str) -> ProblemError:
    return ProblemError(422, "invalid_request", "The request is not valid", detail, field="body")
