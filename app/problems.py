"""Error responses as application/problem+json (RFC 9457): the fault, its place, and what to do.

type, title, status, detail, instance      as in the RFC
code                                       a stable code for programs
field, errors [{field, message}], index    the invalid part of the request, if it is known
"""

import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import orjson
import structlog
from flask import Flask, Response, g, request
from pydantic import ValidationError
from redis.exceptions import RedisError
from werkzeug.exceptions import HTTPException

from app.schemas.base import known_fields
from slotkeeper.errors import (
    Conflict,
    DatabaseUnavailable,
    IdempotencyConflict,
    InsufficientCredits,
    InvalidRequest,
    JobNotFound,
    NotFound,
    ScopeMissing,
    SlotkeeperError,
    TooManyRequests,
    Unauthorized,
)

log = structlog.get_logger(__name__)

CONTENT_TYPE = "application/problem+json"
_RETRY_AFTER_S = 2.0
_MAX_ERRORS = 20
_MAX_DISCARDED, _PIECE = 32 << 20, 64 << 10  # bytes
_MAX_TEXT_CHARS = 500

# The first matching class applies.
_STATUS: tuple[tuple[type[SlotkeeperError], int], ...] = (
    (Unauthorized, 401),
    (InsufficientCredits, 402),
    (ScopeMissing, 403),
    (InvalidRequest, 422),
    (IdempotencyConflict, 409),
    (Conflict, 409),
    (JobNotFound, 404),
    (NotFound, 404),
    (TooManyRequests, 429),
    (DatabaseUnavailable, 503),
)
# Members of a problem that a fact must not replace.
_RENAMED = {"status": "job_status", "type": "kind", "title": "name", "detail": "about", "instance": "where"}


class ProblemError(Exception):
    """An error of the HTTP layer.  Use cases raise SlotkeeperErrors instead."""

    def __init__(self, status: int, code: str, title: str, detail: str, **facts: Any) -> None:
        super().__init__(detail)
        self.status, self.code, self.title, self.detail, self.facts = status, code, title, detail, facts


def problem_response(
    status: int,
    code: str,
    title: str,
    detail: str,
    facts: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the response for a problem.  `facts`: its further members."""
    body = {
        "type": f"urn:slotkeeper:problem:{code}",
        "title": title,
        "status": status,
        "detail": printable_text(detail),
        "instance": printable_text(request.path),
        "code": code,
        **{_RENAMED.get(name, name): _replace_surrogates(value) for name, value in (facts or {}).items()},
    }
    response = Response(orjson.dumps(body, default=str), status, content_type=CONTENT_TYPE)
    response.headers.update(headers or {})
    return response


def printable_text(text: str) -> str:
    """Return text of a client for a JSON response: shortened, and without lone surrogates."""
    printable: str = _replace_surrogates(text[:_MAX_TEXT_CHARS])
    return printable


def _replace_surrogates(fact: Any) -> Any:
    """Replace lone surrogates in a text, which UTF-8 cannot encode.  Other values are returned unchanged."""
    return fact.encode(errors="replace").decode() if isinstance(fact, str) else fact


def register_error_handlers(app: Flask) -> None:
    """Send every error of `app` as a problem."""
    for kind, handler in _handlers().items():
        app.register_error_handler(kind, handler)


def problem_for(error: Exception) -> Response | HTTPException:
    """Return the problem response for an error."""
    return next(handler for kind, handler in _handlers().items() if isinstance(error, kind))(error)


def _handlers() -> dict[type[Exception], Callable[[Any], Response | HTTPException]]:
    """Return the handler of each class of errors; the first matching class applies."""
    return {
        ProblemError: _from_problem_error,
        SlotkeeperError: _from_slotkeeper_error,
        ValidationError: validation_problem,
        HTTPException: _from_http_exception,
        RedisError: _from_redis_error,
        Exception: _from_unexpected_error,
    }


def _from_problem_error(error: ProblemError) -> Response:
    return problem_response(error.status, error.code, error.title, error.detail, error.facts)


def _from_slotkeeper_error(error: SlotkeeperError) -> Response:
    status = status_of(type(error))
    if status >= 500:
        log.warning("request_refused", code=error.code, path=request.path, detail=error.detail)
    facts = dict(error.facts)
    if isinstance(error, TooManyRequests):
        g.rates = error.rates
    if isinstance(error, InvalidRequest):
        facts["errors"] = [{"field": error.field, "message": printable_text(error.detail)}]
    headers = {"WWW-Authenticate": 'Bearer realm="slotkeeper"'} if status == 401 else _retry_after(error.retry_after_s)
    return problem_response(status, error.code, error_title(type(error)), error.detail, facts, headers)


def status_of(kind: type[SlotkeeperError]) -> int:
    """Return the HTTP status of a class of errors."""
    return next((status for base, status in _STATUS if issubclass(kind, base)), 500)


def error_title(kind: type[SlotkeeperError]) -> str:
    """Return the first line of the docstring of a class of errors."""
    return (kind.__doc__ or kind.code).partition("\n")[0].rstrip(".")


def _retry_after(seconds: float | None) -> dict[str, str]:
    return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}


def validation_problem(error: ValidationError) -> Response:
    """Return a response with status 422 that lists the invalid fields."""
    return _from_problem_error(validation_error(error))


def validation_error(error: ValidationError, **facts: Any) -> ProblemError:
    """Return the error for an invalid body or query.  `facts`: further members of the problem."""
    known = known_fields(error.title)
    errors = [
        _field_error(fault, known) for fault in error.errors(include_url=False, include_context=False)[:_MAX_ERRORS]
    ]
    detail = "; ".join(f"{fault['field']} {fault['message']}".strip() for fault in errors)
    members = {"field": errors[0]["field"], "errors": errors, **facts}
    return ProblemError(422, "invalid_request", "The request is not valid", detail, **members)


def _field_error(error: Any, known: Iterable[str]) -> dict[str, str]:
    message = printable_text(_message(error, known))
    named = (str(part) for part in error["loc"] if part not in ("", "[key]"))  # "[key]": the key itself is invalid.
    field = printable_text(".".join(named)) or _field_named_in(message, known)
    return {"field": field, "message": message.removeprefix(f"{field} ")}


def _field_named_in(message: str, known: Iterable[str]) -> str:
    """Return the field that a message begins with; `body` if it names none."""
    word = message.partition(" ")[0]
    return word if word in known else "body"


def _message(error: Any, known: Iterable[str]) -> str:
    match error["type"]:
        case "missing":
            return "is missing; send it"
        case "extra_forbidden":
            near = get_close_matches(str(error["loc"][-1]), list(known), n=1)
            return f"is not known; did you mean {near[0]}?" if near else "is not known; remove it"
        case "value_error":
            return str(error["msg"]).removeprefix("Value error, ")
        case _:
            return "is wrong: " + str(error["msg"])[0].lower() + str(error["msg"])[1:]


def _from_http_exception(error: HTTPException) -> Response | HTTPException:
    if error.code is None or error.code < 400:  # a redirect, or a complete response
        return error
    if error.code == 413:
        _discard_body()
    response = error.get_response()
    headers = {name: value for name, value in response.headers if name not in ("Content-Type", "Content-Length")}
    code = error.name.lower().replace(" ", "_").replace("-", "_")
    return problem_response(error.code, code, error.name, _detail(error), headers=headers)


def _discard_body() -> None:
    """Read and discard the rest of a refused body, up to a limit.

    If the connection were closed while the client is still sending, the client would not see the response.
    """
    remaining = request.content_length or _MAX_DISCARDED
    if remaining > _MAX_DISCARDED:
        return
    body = request.environ["wsgi.input"]
    while remaining > 0 and (piece := body.read(min(remaining, _PIECE))):
        remaining -= len(piece)


def _detail(error: HTTPException) -> str:
    match error.code:
        case 404:
            return "This address does not exist; /docs lists all addresses."
        case 405:
            return "This address does not allow this method; the header Allow lists the allowed ones."
        case 413:
            return (
                f"The body may have at most {request.max_content_length} bytes; send a reference to the data instead, "
                "or have the operator raise SLOTKEEPER_MAX_BODY_BYTES (for a batch SLOTKEEPER_MAX_BATCH_BYTES) and the "
                "max_payload_bytes of the model."
            )
        case _:
            return error.description or error.name


def _from_redis_error(error: RedisError) -> Response:
    log.warning("redis_away", path=request.path, error=str(error))
    detail = "Redis does not answer; try again."
    return problem_response(
        503, "redis_unavailable", "Redis cannot be reached", detail, headers=_retry_after(_RETRY_AFTER_S)
    )


def _from_unexpected_error(error: Exception) -> Response:
    log.error("request_failed", path=request.path, method=request.method, exc_info=error)
    detail = "The server has an error, which is in its log; try again later."
    return problem_response(500, "internal_error", "The server failed", detail)
