"""What flask-openapi is to us, in one place: how views are described, and the document that comes of it."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import orjson
from flask import Flask, Response
from flask.json.provider import JSONProvider
from flask_openapi import APIBlueprint, Info, OpenAPI
from pydantic import BaseModel, ConfigDict
from werkzeug.routing import BaseConverter

from app.problems import CONTENT_TYPE, validation_problem
from app.request_json import JsonRequest
from routing.admission.constraints import NAME_PATTERN
from routing.admission.submission import MAX_KEY_LENGTH
from slotkeeper import json_text
from slotkeeper.registry.tenants import PRINTABLE_PATTERN

_REASONS = {
    400: "The body is not valid JSON",
    401: "No valid key",
    403: "Not allowed",
    404: "There is no such thing",
    409: "The present state does not allow this",
    411: "The body's length is not announced",
    413: "The body is too large",
    415: "The body is not JSON",
    421: "The Host header does not name this machine",
    422: "A field is wrong; `field` and `errors` name it",
    429: "More than the limits allow at present; Retry-After says when to come back",
    500: "The server failed",
    503: "The database or Redis is away; Retry-After says when to come back",
}
_EVERYWHERE = (403, 421, 422, 500)
_HEADERS = "x-headers"  # only on the way to `document`
_KEYED = (401, 403, 421, 422, 500, 503)
SECURITY: dict[str, Any] = {"key": {"type": "http", "scheme": "bearer", "description": "A tenant's key, sk_…"}}


class Schema(BaseModel):
    """Base of what is read and written.  Its schema is built once: flask-openapi asks for it at every request."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _schema(cls, args, tuple(sorted(kwargs.items())))


@cache
def _schema(model: type[BaseModel], args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    made: dict[str, Any] = BaseModel.model_json_schema.__func__(model, *args, **dict(kwargs))  # type: ignore[attr-defined]
    return made


class Problem(Schema):
    """An error, as RFC 9457 has it."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    field: str | None = None
    errors: list[dict[str, str]] | None = None
    index: int | None = None


class _OrjsonProvider(JSONProvider):
    """Answers that views give as dicts."""

    def dumps(self, obj: Any, **_: Any) -> str:
        return orjson.dumps(obj, default=str).decode()

    def loads(self, s: str | bytes, **_: Any) -> Any:
        return json_text.loads(s)


class _JobId(BaseConverter):
    """A job's id where a fixed word stands beside it."""

    regex = "(?!retry-all$)[^/]+"
    part_isolating = True


def new_app(version: str) -> OpenAPI:
    """A Flask application that describes itself.  The document is served by app.api.docs."""
    app = OpenAPI(
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
    app.url_map.merge_slashes = False  # Names may hold them.
    return app


def blueprint(name: str, title: str, prefix: str = "", *, keyed: bool = True) -> APIBlueprint:
    """Views under one heading.  `keyed`: they ask for a tenant's key."""
    return APIBlueprint(
        name,
        f"app.api.{name}",
        url_prefix=prefix or None,
        abp_tags=[{"name": title}],
        abp_security=[{"key": []}] if keyed else None,
        abp_responses=problem_responses(*(_KEYED if keyed else _EVERYWHERE)),
        operation_id_callback=_operation_id,
    )


def no_store(api: APIBlueprint) -> APIBlueprint:
    """Nobody on the way keeps what these views answer."""
    api.after_request(_set_no_store)
    return api


def _set_no_store(answer: Response) -> Response:
    answer.headers["Cache-Control"] = "no-store"
    return answer


def _operation_id(*, bp_name: str, name: str, path: str, method: str) -> str:
    return name


def problem_responses(*statuses: int) -> dict[str | int, Any]:
    """The description of answers with an error."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {status: {"description": _REASONS[status], "content": {CONTENT_TYPE: schema}} for status in statuses}


def response_of(
    model: type[BaseModel], description: str, kinds: Iterable[str] = ("application/json",)
) -> dict[str, Any]:
    """The description of an answer whose schema is known by another view."""
    schema = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
    return {"description": description, "content": dict.fromkeys(kinds, schema)}


def optional_headers(
    longest: int = MAX_KEY_LENGTH, form: str = PRINTABLE_PATTERN, shortest: int = 1, **described: str
) -> dict[str, Any]:
    """openapi_extensions for optional headers that a view reads by itself: Some_Header="what it is for"."""
    schema = {"type": "string", "minLength": shortest, "maxLength": longest, "pattern": f"^{form}$"}
    return {
        _HEADERS: [
            {"name": name.replace("_", "-"), "in": "header", "description": text, "schema": schema}
            for name, text in described.items()
        ]
    }


def openapi_document(app: Flask) -> dict[str, Any]:
    """The OpenAPI document.  It asks for keys only where this process does."""
    assert isinstance(app, OpenAPI)
    made: dict[str, Any] = app.api_doc
    if not app.extensions["slotkeeper_settings"].require_keys:
        made.get("components", {}).pop("securitySchemes", None)
        for operation in (one for path in made["paths"].values() for one in path.values()):
            operation.pop("security", None)
            operation["responses"].pop("401", None)
    for path in made["paths"].values():
        for operation in path.values():
            _tidy(operation)
    _add_property_names(made)
    return made


def _add_property_names(part: Any) -> None:
    """Say which keys attributes and constraints may have: flask-openapi's own schemas know no propertyNames."""
    for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _add_property_names(one)
    fields = part.get("properties") if isinstance(part, dict) else None
    for name in ("attributes", "constraints"):
        for asked in (fields or {}).get(name, {}).get("anyOf", []):
            if "maxProperties" in asked:
                asked["propertyNames"] = {"pattern": f"^{NAME_PATTERN}$"}


def _tidy(operation: dict[str, Any]) -> None:
    """Put headers beside the parameters, and drop the answer that flask-openapi adds for its own validation."""
    if "description" in operation:
        operation["description"] = operation["description"].replace("<br/>", "\n").strip()
    headers = operation.pop(_HEADERS, [])
    if headers:
        operation["parameters"] = operation.get("parameters", []) + headers
    if CONTENT_TYPE not in operation["responses"].get("422", {}).get("content", {CONTENT_TYPE: None}):
        del operation["responses"]["422"]
