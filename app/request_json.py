"""Strict parsing of requests, one JSON object or a batch of jobs: ambiguous JSON is refused.

The parser is that of the standard library.  orjson would be faster, but it rounds integers of more than 64 bits, and
silently keeps the last of duplicate keys; both would change the value that the client sent.
"""

import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from io import BytesIO
from typing import Any, NoReturn

import flask
from flask import Request, request
from flask_openapi import RequestBody
from pydantic import ValidationError
from werkzeug.exceptions import RequestEntityTooLarge

from app.problems import ProblemError, printable_text, validation_error
from app.schemas.job_schemas import BatchItem
from slotkeeper import json_text
from slotkeeper.errors import InvalidRequest

BODY_COMPLETE = "slotkeeper.body_complete"
"""In the WSGI environment: the server has read the body to its end."""
_BEGIN = re.compile(r"[ \t\n\r]*(\[)[ \t\n\r]*(?:(\])[ \t\n\r]*)?")  # of an array, which may be empty
_NEXT = re.compile(r"[ \t\n\r]*([,\]])[ \t\n\r]*")  # after an element
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


class _Refused(ValueError):
    """The parser would accept the text, but it is ambiguous or no JSON."""


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise _Refused(f"the key {printable_text(_first_duplicate(pairs))!r} appears twice in one object")
    return values


def _first_duplicate(pairs: Iterable[tuple[str, Any]]) -> str:
    """Return the first key that occurs a second time.  In one pass: a body may have hundreds of thousands of keys."""
    seen: set[str] = set()
    return next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _reject_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is no JSON; send null or a text")


_decoder = json.JSONDecoder(object_pairs_hook=_object_without_duplicates, parse_constant=_reject_constant)


def parse_json(text: bytes, part: str = "body", **facts: Any) -> Any:
    """Return the JSON value.  Raises ProblemError 400 with `facts`, which names the place of the error.

    part: what the text is of the request, for the error.
    """
    try:
        return _decoder.decode(text.decode())
    except (ValueError, RecursionError) as error:
        raise _parse_problem(error, facts, part) from None


def iter_array(text: bytes, longest: int) -> Iterator[Any]:
    """Yield the elements of a JSON array.  Raises ProblemError 400 with the index of the invalid element.

    longest: characters that one element may have.  The parser holds the GIL, so it parses one element at a time, and
    the caller can stop in between.
    """
    facts: dict[str, int] = {}
    try:
        array = text.decode()
        sign, at = _match_sign(_BEGIN, array, 0)
        while sign != "]":
            facts["index"] = facts.get("index", -1) + 1
            value, at = _parse_element(array, at, longest)
            yield value
            sign, at = _match_sign(_NEXT, array, at)
        if at < len(array):
            raise json.JSONDecodeError("Extra data", array, at)
    except (ValueError, RecursionError) as error:
        raise _parse_problem(error, facts) from None


def starts_array(text: bytes) -> bool:
    """Return whether the text begins like a JSON array."""
    return text[:1024].lstrip(b" \t\n\r").startswith(b"[")


def _parse_element(text: str, at: int, longest: int) -> tuple[Any, int]:
    """Return the value at an offset, and the offset of its end.  Raises ValueError."""
    if len(text) - at <= longest:
        return _decoder.raw_decode(text, at)
    try:
        value, length = _decoder.raw_decode(text[at : at + longest])
    except json.JSONDecodeError:
        raise _Refused(f"it is malformed, or longer than {longest} characters") from None
    return value, at + length


def _match_sign(signs: re.Pattern[str], text: str, at: int) -> tuple[str, int]:
    """Return the last of the signs at an offset, and the offset after it and the whitespace around it.

    Raises JSONDecodeError if there is no such sign.
    """
    match = signs.match(text, at)
    if match is None:
        rest = text[at:].lstrip(" \t\n\r")
        raise json.JSONDecodeError("Expecting ',' or ']'", text, len(text) - len(rest))
    return match[match.lastindex or 0], match.end()


def _parse_problem(error: Exception, facts: dict[str, Any], part: str = "body") -> ProblemError:
    """Return the problem for an error of the parser."""
    match error:
        case UnicodeDecodeError():
            reason = f"byte {error.start} is no UTF-8"
        case json.JSONDecodeError():
            reason = f"{error.msg} in line {error.lineno}, column {error.colno}"
        case RecursionError():
            reason = "it is nested too deeply"
        case _Refused():
            reason = str(error)
        case _:  # Python's limit on the digits of an integer
            errors = [{"field": "body", "message": json_text.TOO_MANY_DIGITS}]
            detail = f"In the {part}, {json_text.TOO_MANY_DIGITS}."
            title = "The request is not valid"
            return ProblemError(422, "invalid_request", title, detail, field="body", errors=errors, **facts)
    return ProblemError(400, "malformed_json", "Not valid JSON", f"The {part} is not valid JSON: {reason}.", **facts)


def read_body(request: flask.Request) -> bytes:
    """Return the whole body.  Raises ProblemError if the body is incomplete; RequestEntityTooLarge.

    Werkzeug returns an incomplete body without an error, and cuts a body without Content-Length at the limit.  A part
    would be taken for the whole.
    """
    announced, most = request.content_length, request.max_content_length
    if most is not None:  # Set it on the request: otherwise Flask reads its settings at each step.
        request.max_content_length = most + 1 if announced is None else most
    body = request.get_data()
    if most is not None and len(body) > most:
        raise RequestEntityTooLarge
    if announced is not None and len(body) != announced:
        detail = f"{len(body)} of the {announced} bytes announced have arrived; nothing was done.  Send it again."
        raise ProblemError(400, "incomplete_body", "The body broke off", detail)
    return body


def require_known_length(request: flask.Request) -> None:
    """Refuse a body whose end is not known: a part of it could be taken for the whole.  Raises ProblemError 411.

    The end is known if the request has Content-Length, or if the HTTP server has read the last chunk.
    """
    if request.content_length is None and not request.environ.get(BODY_COMPLETE):
        detail = "Send Content-Length: without it a body that breaks off cannot be told from a whole one."
        raise ProblemError(411, "length_required", "The length is not known", detail)


def reject_nul() -> None:
    """Refuse a NUL in the path or query: PostgreSQL accepts it in no text.  For before_request.

    Raises ProblemError.
    """
    if request.endpoint is None:
        return  # No view has this path: the response is 404.
    for field, text in (request.view_args or {}).items():
        reject_nul_in(field, str(text))
    if not request.query_string:
        return
    for field, texts in request.args.lists():
        reject_nul_in(field, *texts)


def reject_nul_in(field: str, *texts: str) -> None:
    """Refuse a field whose name or value has a NUL.  Raises ProblemError 422."""
    if any("\0" in text for text in (field, *texts)):
        name, detail = printable_text(field), "holds a NUL character (%00); send it without"
        facts = {"field": name, "errors": [{"field": name, "message": detail}]}
        raise ProblemError(422, "invalid_request", "The request is not valid", f"{name} {detail}", **facts)


class JsonRequest(flask.Request):
    """A request whose JSON is parsed by `parse_json`.  flask-openapi calls get_json."""

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> Any:
        """Return the body, which must be a JSON object.  Raises ProblemError, even if `silent`."""
        if self.mimetype != "application/json" and self.content_type:
            detail = "This takes one JSON object, with Content-Type: application/json."
            raise ProblemError(415, "unsupported_media_type", "Not JSON", detail)
        text = read_body(self)
        body = parse_json(text)
        if not isinstance(body, dict):
            raise ProblemError(422, "invalid_request", "The request is not valid", "The body must be a JSON object.")
        return body


def parse_time(name: str, text: str) -> int:
    """Return the time of the field `name`, in ISO 8601, as ms since the epoch; at least 0.  Raises InvalidRequest."""
    try:
        when = datetime.fromisoformat(text)
        if when.tzinfo is not None:
            return max(round(when.timestamp() * 1000), 0)
    except (ValueError, OverflowError):
        pass
    raise InvalidRequest(name, f"{name} must be ISO 8601 with its zone, such as 2030-01-31T12:00:00Z")


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


def read_lines(request: Request, most_bytes: int, longest: int) -> list[Any]:
    """Return the values of the lines in the body (NDJSON); of a line that is not valid, the error.

    `most_bytes`: limit of the body.  `longest`: limit of one line, in bytes.  Raises ProblemError: it is no NDJSON, or
    has too many lines.
    """
    if request.mimetype != NDJSON:
        detail = f"Send lines as NDJSON, with Content-Type: {NDJSON}."
        raise ProblemError(415, "unsupported_media_type", "Not NDJSON", detail)
    request.max_content_length = most_bytes
    require_known_length(request)
    lines = [line for line in BytesIO(read_body(request)) if line.strip()]
    if len(lines) > MAX_BATCH_JOBS:
        raise _invalid_batch(f"The body has more than {MAX_BATCH_JOBS} lines; send them in several requests.")
    return [_parse_line(line, longest) for line in lines]


def _parse_line(line: bytes, longest: int) -> Any:
    if len(line) > longest:
        return InvalidRequest("line", f"The line has more than {longest} bytes.")
    try:
        return parse_json(line, "line")
    except ProblemError as error:
        return InvalidRequest("line", error.detail)


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
