"""Reading JSON strictly: what could be understood in two ways is refused, not guessed.

The parser is the standard library's.  orjson would be quicker, but rounds whole numbers beyond 64 bits and keeps
the last of two equal keys without a word; both would change what the client meant.
"""

import json
from collections.abc import Iterable
from typing import Any, NoReturn

import flask
from werkzeug.exceptions import RequestEntityTooLarge

from app.errors import ProblemError, printable
from routing import exact

WHOLE = "slotkeeper.whole_body"
"""In the WSGI environment: the server has read the body to its end."""


class _Refused(ValueError):
    """Text that the parser would take and we do not."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _Refused(f"the key {printable(_first_twice(pairs))!r} stands twice in one object")
    return made


def _first_twice(pairs: Iterable[tuple[str, Any]]) -> str:
    """The first key that has stood before.  One look at each: a body may hold hundreds of thousands."""
    seen: set[str] = set()
    return next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is no JSON; send null or a text")


_quick = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
_exact = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_int=exact.whole)


def parse(text: bytes, **facts: Any) -> Any:
    """The JSON value.  Raises ProblemError 400, with `facts`, that says where it breaks off."""
    try:
        decoder = _exact if exact.may_hold_long_numbers(text) else _quick
        return decoder.decode(text.decode())
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is no UTF-8", facts) from None
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} in line {error.lineno}, column {error.colno}", facts) from None
    except RecursionError:
        raise _malformed("it is nested too deeply", facts) from None
    except ValueError as error:  # ours
        raise _malformed(str(error), facts) from None


def _malformed(what: str, facts: dict[str, Any]) -> ProblemError:
    return ProblemError(400, "malformed_json", "Not valid JSON", f"The body is not valid JSON: {what}.", **facts)


def body_of(request: flask.Request) -> bytes:
    """The whole body.  Raises ProblemError for one that broke off, RequestEntityTooLarge.

    Werkzeug ends quietly where a body breaks off, and at the limit where no length was announced: a part would pass
    for the whole.
    """
    announced, most = request.content_length, request.max_content_length
    if announced is None and most is not None:
        request.max_content_length = most + 1
    body = request.get_data()
    if most is not None and len(body) > most:
        raise RequestEntityTooLarge
    if announced is not None and len(body) != announced:
        detail = f"{len(body)} of the {announced} bytes announced have arrived; nothing was done.  Send it again."
        raise ProblemError(400, "incomplete_body", "The body broke off", detail)
    return body


def check_whole(request: flask.Request) -> None:
    """For bodies whose beginning could pass for the whole.  Raises ProblemError unless it is known where they end.

    The length tells it, or the server under us, which has seen the last chunk.
    """
    if request.content_length is None and not request.environ.get(WHOLE):
        detail = "Send Content-Length: without it a body that breaks off cannot be told from a whole one."
        raise ProblemError(411, "length_required", "The length is not known", detail)


def _with_plain_settings(body: dict[str, Any]) -> dict[str, Any]:
    """Only what is passed on keeps its long numbers as they were written; the rest is for us to judge."""
    return {name: it if name == "payload" else exact.unwritten(it) for name, it in body.items()}


class Request(flask.Request):
    """A request whose JSON is read by `parse`.  flask-openapi asks for it by get_json."""

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> Any:
        """The body, which must be a JSON object.  Raises ProblemError, also when `silent`."""
        if self.mimetype != "application/json" and self.content_type:
            detail = "This takes one JSON object, with Content-Type: application/json."
            raise ProblemError(415, "unsupported_media_type", "Not JSON", detail)
        text = body_of(self)
        body = parse(text)
        if not isinstance(body, dict):
            raise ProblemError(422, "invalid_request", "The request is not valid", "The body must be a JSON object.")
        return _with_plain_settings(body) if exact.may_hold_long_numbers(text) else body
