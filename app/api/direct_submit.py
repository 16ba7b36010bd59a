"""`POST /queue/submit` without Flask's frame around the view, which costs more than the view itself (ADR 0023).

WSGI middleware of the Flask application.  It answers an ordinary request whose job is accepted.  All others go on to
Flask: requests with a query or another type of body, and those that are refused, for which the view raises the refusal.
"""

from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Any

import orjson

from app.api import openapi, submit_views
from app.auth import access
from app.auth.api_keys import KeyCache
from app.context import Context
from app.request_deadline import view_time_limit
from app.request_json import parse_json
from app.schemas.job_schemas import SubmitBody
from slotkeeper.registry.identity import Scope

Headers = list[tuple[str, str]]
Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_PATH, _TYPE = "/queue/submit", "application/json"


class DirectSubmit:
    """The WSGI application `flask`, with submits answered directly.  Thread-safe."""

    def __init__(self, flask: Wsgi, context: Context, keys: KeyCache | None) -> None:
        """keys: None: no keys are required."""
        self._flask, self._context, self._keys = flask, context, keys

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = self._read_ordinary(environ)
        if body is not None:
            try:
                content, headers = self._submit(environ, body)
            except Exception as refusal:
                environ[submit_views.REFUSAL] = refusal
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

    def _submit(self, environ: dict[str, Any], body: bytes) -> tuple[bytes, Headers]:
        """Accept the job, and return the response.  Raises what the view and the hooks before it raise."""
        try:
            with view_time_limit(environ):
                if self._keys is None:
                    access.reject_remote(environ, self._context.settings)
                sender = access.identify_sender(environ, self._keys, Scope.SUBMIT)
                request = SubmitBody.model_validate(parse_json(body))
                receipt, rates = submit_views.accept(request, sender, environ, self._context.dispatcher)
        finally:
            access.reset_actor()
        headers = [("Content-Type", _TYPE), ("Location", receipt["links"]["self"])]
        return orjson.dumps(receipt), headers + openapi.API_HEADERS + submit_views.rate_headers(rates)
