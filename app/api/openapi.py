"""All use of flask-openapi: the blueprints, the responses of views, the OpenAPI document, and its page at /docs.

The document and its page work without a network.
"""

from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

import orjson
from flask import Flask, Response, current_app, redirect, request
from flask.json.provider import JSONProvider
from flask_openapi import APIBlueprint, Info, OpenAPI
from flask_openapi_swagger.plugins import RegisterPlugin
from pydantic import BaseModel
from werkzeug.datastructures import Headers
from werkzeug.routing import BaseConverter

from app.auth.access import public
from app.context import context
from app.problems import CONTENT_TYPE, validation_problem
from app.request_json import JsonRequest
from app.schemas.base import Problem
from routing.admission.constraints import NAME_PATTERN
from routing.admission.submission import MAX_KEY_LENGTH
from slotkeeper import json_text
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.tenants import PRINTABLE_PATTERN

_REASONS = {
    400: "The body is not valid JSON",
    401: "No valid key",
    402: "The tenant has too few credits",
    403: "Not allowed",
    404: "Not found",
    409: "The current state does not allow this",
    411: "The request has no Content-Length",
    413: "The body is too large",
    415: "The body is not JSON",
    421: "The Host header does not name this machine",
    422: "A field is invalid; `field` and `errors` name it",
    429: "A limit is reached; Retry-After says when to send the request again",
    500: "The server failed",
    501: "This server sends no streams",
    503: "The database or Redis is unavailable; Retry-After says when to send the request again",
}
_STATUSES = (403, 421, 422, 500)  # of each view
_KEYED_STATUSES = (401, 403, 421, 422, 500, 503)  # of each view that requires a key
_HEADERS = "x-headers"  # openapi_document moves them to the parameters.
SECURITY: dict[str, Any] = {"key": {"type": "http", "scheme": "bearer", "description": "A tenant's key, sk_…"}}
_DOCUMENT = "/openapi.json"
_DOCS_PATH = "/docs"
_EXTENSION = "slotkeeper_document"
_document_lock = Lock()
# For /docs: its own scripts and styles, some of them inline; nothing from other origins.
_DOCS_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
# For app.page: nothing inline, nothing from other origins, and forms send only to this origin.
_PAGE_POLICY = "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'"
_API_POLICY = "default-src 'none'"


class _OrjsonProvider(JSONProvider):
    """Encodes responses that views return as dicts."""

    def dumps(self, obj: Any, **_: Any) -> str:
        return orjson.dumps(obj, default=str).decode()

    def loads(self, s: str | bytes, **_: Any) -> Any:
        return json_text.loads(s)


class _JobId(BaseConverter):
    """A job's id in a path that has a fixed word at the same place."""

    regex = "(?!retry-all$)[^/]+"
    part_isolating = True


class _Response(Response):
    """A response whose headers are checked only where that may change them."""

    def get_wsgi_headers(self, environ: dict[str, Any]) -> Headers:
        """Return the headers.  app.server.wsgi sets Content-Length, and a Location of these statuses is ASCII."""
        if self.status_code in (200, 201, 202):
            return self.headers
        return super().get_wsgi_headers(environ)


class _Application(OpenAPI):
    """The application.  None of its functions is a coroutine."""

    response_class = _Response

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function.  Flask would examine each view and each hook at each request."""
        return func


def new_app(version: str) -> OpenAPI:
    """Return a Flask application that builds its OpenAPI document, which `register` serves."""
    app = _Application(
        "app",
        info=Info(title="Slotkeeper", version=version, description="A dispatcher for GPU inference."),
        security_schemes=SECURITY,
        validation_error_model=Problem,
        validation_error_callback=validation_problem,
        doc_ui=False,
        static_folder=None,
    )
    app.openapi_version = "3.1.0"
    app.request_class = JsonRequest
    app.json = _OrjsonProvider(app)
    app.url_map.converters["job"] = _JobId
    app.url_map.merge_slashes = False  # Names may contain slashes.
    return app


class _Blueprint(APIBlueprint):
    """A blueprint whose views require a scope."""

    scope: Scope | None = None


def blueprint(name: str, title: str, prefix: str = "", *, scope: Scope | None) -> APIBlueprint:
    """Return a blueprint for the views of one heading.

    scope: what a key must be for to use them; a view may have another (app.auth.access.scope).  None: they need no key.
    """
    keyed = scope is not None
    api = _Blueprint(
        name,
        f"app.api.{name}",
        url_prefix=prefix or None,
        abp_tags=[{"name": title}],
        abp_security=[{"key": []}] if keyed else None,
        abp_responses=problem_responses(*(_KEYED_STATUSES if keyed else _STATUSES)),
        operation_id_callback=_operation_id,
    )
    api.scope = scope
    return api


def no_store(api: APIBlueprint) -> APIBlueprint:
    """Forbid browsers and proxies to cache the responses of these views."""
    api.after_request(_set_no_store)
    return api


def _set_no_store(response: Response) -> Response:
    response.headers["Cache-Control"] = "no-store"
    return response


def _operation_id(*, bp_name: str, name: str, path: str, method: str) -> str:
    return name


def problem_responses(*statuses: int) -> dict[str | int, Any]:
    """Return the descriptions of error responses, by their status."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {status: {"description": _REASONS[status], "content": {CONTENT_TYPE: schema}} for status in statuses}


def response_of(
    model: type[BaseModel], description: str, kinds: Iterable[str] = ("application/json",)
) -> dict[str, Any]:
    """Return the description of a response whose schema another view registers.  `kinds`: its media types."""
    schema = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
    return {"description": description, "content": dict.fromkeys(kinds, schema)}


def optional_headers(
    longest: int = MAX_KEY_LENGTH, form: str = PRINTABLE_PATTERN, shortest: int = 1, **described: str
) -> dict[str, Any]:
    """Return openapi_extensions for optional headers that a view reads itself: Some_Header="its description"."""
    schema = {"type": "string", "minLength": shortest, "maxLength": longest, "pattern": f"^{form}$"}
    return {
        _HEADERS: [
            {"name": name.replace("_", "-"), "in": "header", "description": text, "schema": schema}
            for name, text in described.items()
        ]
    }


def required_headers(**described: str) -> dict[str, Any]:
    """The same for headers without which the view refuses the request."""
    extensions = optional_headers(MAX_KEY_LENGTH, PRINTABLE_PATTERN, 1, **described)
    for header in extensions[_HEADERS]:
        header["required"] = True
    return extensions


def openapi_document(app: Flask, require_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document of an application that requires keys, or of one that does not."""
    assert isinstance(app, OpenAPI)
    document: dict[str, Any] = app.api_doc
    if not require_keys:
        document.get("components", {}).pop("securitySchemes", None)
        for operation in (operation for path in document["paths"].values() for operation in path.values()):
            operation.pop("security", None)
            operation["responses"].pop("401", None)
    for path in document["paths"].values():
        for operation in path.values():
            _clean_up(operation)
    _add_property_names(document)
    return document


def _add_property_names(part: Any) -> None:
    """Add the pattern of keys in attributes and constraints: flask-openapi's schemas have no propertyNames."""
    for child in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _add_property_names(child)
    fields = part.get("properties") if isinstance(part, dict) else None
    for name in ("attributes", "constraints"):
        for schema in (fields or {}).get(name, {}).get("anyOf", []):
            if "maxProperties" in schema:
                schema["propertyNames"] = {"pattern": f"^{NAME_PATTERN}$"}


def _clean_up(operation: dict[str, Any]) -> None:
    """Move headers to the parameters, and remove the response that flask-openapi adds for its own validation."""
    if "description" in operation:
        operation["description"] = operation["description"].replace("<br/>", "\n").strip()
    headers = operation.pop(_HEADERS, [])
    if headers:
        operation["parameters"] = operation.get("parameters", []) + headers
    if CONTENT_TYPE not in operation["responses"].get("422", {}).get("content", {CONTENT_TYPE: None}):
        del operation["responses"]["422"]


def register(app: Flask) -> None:
    """Add /openapi.json, and /docs, which redirects to the folder of the page's files."""
    swagger = RegisterPlugin.register(doc_url=_DOCUMENT)
    app.register_blueprint(swagger, url_prefix=_DOCS_PATH)
    for endpoint in [name for name in app.view_functions if name.startswith(f"{swagger.name}.")]:
        app.view_functions[endpoint] = _make_public(app.view_functions[endpoint])
    app.add_url_rule(_DOCUMENT, "document", public(_serve_document))
    app.after_request(_security_headers)
    app.add_url_rule(_DOCS_PATH, "docs", public(lambda: redirect(f"{_DOCS_PATH}/{swagger.name}")))


def _serve_document() -> Response:
    """Return the document, which is built at the first request: most processes never get one."""
    extensions = current_app.extensions
    with _document_lock:  # flask-openapi shows other threads a document that is half built.
        if _EXTENSION not in extensions:
            extensions[_EXTENSION] = orjson.dumps(openapi_document(current_app, context().settings.require_keys))
    return Response(extensions[_EXTENSION], content_type="application/json")


def _headers_with(allowed: str) -> list[tuple[str, str]]:
    policy = "Content-Security-Policy", f"{allowed}; frame-ancestors 'none'"
    return [("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY"), policy]


_SECURITY_HEADERS = {allowed: _headers_with(allowed) for allowed in (_DOCS_POLICY, _PAGE_POLICY, _API_POLICY)}
API_HEADERS = _SECURITY_HEADERS[_API_POLICY]
"""The headers that each response of the API has."""


def _security_headers(response: Response) -> Response:
    """Forbid other sites to embed a response, and a response to load from other origins."""
    allowed = _DOCS_POLICY if request.path.startswith(_DOCS_PATH) else _API_POLICY
    if request.blueprint == "page":
        allowed = _PAGE_POLICY
    response.headers.extend(_SECURITY_HEADERS[allowed])
    return response


def _make_public(view):  # type: ignore[no-untyped-def]
    return public(lambda **path: view(**path))
