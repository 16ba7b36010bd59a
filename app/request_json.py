"""Reading requests strictly: what could be understood in two ways is refused, not guessed.

JSON's parser is the standard library's.  orjson would be quicker, but rounds whole numbers beyond 64 bits and keeps
the last of two equal keys without a word; both would change what the client meant.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

import flask
from werkzeug.exceptions import RequestEntityTooLarge

from app.context import asked
from app.problems import ProblemError, printable_text
from slotkeeper import json_text
from slotkeeper.errors import InvalidRequest

BODY_COMPLETE = "slotkeeper.whole_body"
"""In the WSGI environment: the server has read the body to its end."""


class _Refused(ValueError):
    """Text that the parser would take and we do not."""


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _Refused(f"the key {printable_text(_first_duplicate(pairs))!r} stands twice in one object")
    return made


def _first_duplicate(pairs: Iterable[tuple[str, Any]]) -> str:
    """The first key that has stood before.  One look at each: a body may hold hundreds of thousands."""
    seen: set[str] = set()
    return next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _reject_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is no JSON; send null or a text")


_decoder = json.JSONDecoder(object_pairs_hook=_object_without_duplicates, parse_constant=_reject_constant)
_BLANKS = re.compile(r"[ \t\n\r]*")


def parse_json(text: bytes, **facts: Any) -> Any:
    """The JSON value.  Raises ProblemError 400, with `facts`, that says where it breaks off."""
    with _parse_errors_as_problems(facts):
        return _decoder.decode(text.decode())


def iter_array(text: bytes, longest: int) -> Iterator[Any]:
    """The values in a JSON array, one after the other.  Raises ProblemError 400, with the index of the one.

    While the parser is at work no other thread gets a turn.  So it is given one value at a time, which may have
    `longest` characters, and whoever asks for them can leave off.
    """
    facts: dict[str, int] = {}
    with _parse_errors_as_problems(facts):
        array = text.decode()
        at = _skip_sign("[", array, 0)
        while not array.startswith("]", at):
            at = _skip_sign(",", array, at) if facts else at
            facts["index"] = facts.get("index", -1) + 1
            value, at = _parse_element(array, at, longest)
            yield value
            at = _skip_blanks(array, at)
        if (end := _skip_sign("]", array, at)) < len(array):
            raise json.JSONDecodeError("Extra data", array, end)


def starts_array(text: bytes) -> bool:
    """Whether it begins as a JSON array."""
    return text[:1024].lstrip(b" \t\n\r").startswith(b"[")


def _parse_element(text: str, at: int, longest: int) -> tuple[Any, int]:
    """The value there, and where it ends.  Raises ValueError."""
    if len(text) - at <= longest:
        return _decoder.raw_decode(text, at)
    try:
        value, length = _decoder.raw_decode(text[at : at + longest])
    except json.JSONDecodeError:
        raise _Refused(f"it is malformed, or longer than {longest} characters") from None
    return value, at + length


def _skip_sign(sign: str, text: str, at: int) -> int:
    """Where it goes on after this sign.  Raises JSONDecodeError."""
    at = _skip_blanks(text, at)
    if not text.startswith(sign, at):
        raise json.JSONDecodeError(f"Expecting {sign!r}", text, at)
    return _skip_blanks(text, at + 1)


def _skip_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found.end()


@contextmanager
def _parse_errors_as_problems(facts: dict[str, Any]) -> Iterator[None]:
    """Turn what parsing raises into a ProblemError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is no UTF-8", facts) from None
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} in line {error.lineno}, column {error.colno}", facts) from None
    except RecursionError:
        raise _malformed("it is nested too deeply", facts) from None
    except _Refused as error:
        raise _malformed(str(error), facts) from None
    except ValueError:  # Python's limit on the digits of an integer
        errors = [{"field": "body", "message": json_text.TOO_MANY_DIGITS}]
        detail = f"In the body, {json_text.TOO_MANY_DIGITS}."
        raise ProblemError(
            422, "invalid_request", "The request is not valid", detail, field="body", errors=errors, **facts
        ) from None


def _malformed(what: str, facts: dict[str, Any]) -> ProblemError:
    return ProblemError(400, "malformed_json", "Not valid JSON", f"The body is not valid JSON: {what}.", **facts)


def read_body(request: flask.Request) -> bytes:
    """The whole body.  Raises ProblemError for one that broke off, RequestEntityTooLarge.

    Werkzeug ends quietly where a body breaks off, and at the limit where no length was announced: a part would pass
    for the whole.
    """
    announced, most = request.content_length, request.max_content_length
    if most is not None:  # Said once more, or Flask looks it up in its settings at each step of reading.
        request.max_content_length = most + 1 if announced is None else most
    body = request.get_data()
    if most is not None and len(body) > most:
        raise RequestEntityTooLarge
    if announced is not None and len(body) != announced:
        detail = f"{len(body)} of the {announced} bytes announced have arrived; nothing was done.  Send it again."
        raise ProblemError(400, "incomplete_body", "The body broke off", detail)
    return body


def require_known_length(request: flask.Request) -> None:
    """For bodies whose beginning could pass for the whole.  Raises ProblemError unless it is known where they end.

    The length tells it, or the server under us, which has seen the last chunk.
    """
    if request.content_length is None and not request.environ.get(BODY_COMPLETE):
        detail = "Send Content-Length: without it a body that breaks off cannot be told from a whole one."
        raise ProblemError(411, "length_required", "The length is not known", detail)


def reject_nul() -> None:
    """For before_request: PostgreSQL cannot even be asked about a name with a NUL.  Raises ProblemError."""
    seen = asked()
    if seen.endpoint is None:
        return  # There is nothing at this address anyway.
    for field, text in (seen.view_args or {}).items():
        reject_nul_in(field, str(text))
    if not seen.query_string:
        return
    for field, texts in seen.args.lists():
        reject_nul_in(field, *texts)


def reject_nul_in(field: str, *texts: str) -> None:
    """Raises ProblemError 422 where a field, or what it is given, holds a NUL."""
    if any("\0" in text for text in (field, *texts)):
        name, detail = printable_text(field), "holds a NUL character (%00); send it without"
        told = {"field": name, "errors": [{"field": name, "message": detail}]}
        raise ProblemError(422, "invalid_request", "The request is not valid", f"{name} {detail}", **told)


class JsonRequest(flask.Request):
    """A request whose JSON is read by `parse`.  flask-openapi asks for it by get_json."""

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> Any:
        """The body, which must be a JSON object.  Raises ProblemError, also when `silent`."""
        if self.mimetype != "application/json" and self.content_type:
            detail = "This takes one JSON object, with Content-Type: application/json."
            raise ProblemError(415, "unsupported_media_type", "Not JSON", detail)
        text = read_body(self)
        body = parse_json(text)
        if not isinstance(body, dict):
            raise ProblemError(422, "invalid_request", "The request is not valid", "The body must be a JSON object.")
        return body


def parse_time(name: str, text: str) -> int:
    """ISO 8601 as ms since the epoch, as the field `name` has it; no time before that.  Raises InvalidRequest."""
    try:
        when = datetime.fromisoformat(text)
        if when.tzinfo is not None:
            return max(round(when.timestamp() * 1000), 0)
    except (ValueError, OverflowError):
        pass
    raise InvalidRequest(name, f"{name} must be ISO 8601 with its zone, such as 2030-01-31T12:00:00Z")
