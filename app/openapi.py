"""What flask-openapi is to us, in one place: how views are described, and the document that comes of it."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache, partial
from typing import Any

import orjson
from flask import Flask, Response
from flask.json.provider import JSONProvider
from flask.wrappers import Request as AnyRequest
from flask_openapi import APIBlueprint, Info, OpenAPI
from flask_openapi.types import ParametersTuple
from flask_openapi.utils import parse_parameters
from pydantic import BaseModel, ConfigDict
from werkzeug.datastructures import Headers
from werkzeug.routing import BaseConverter, Map, MapAdapter, Rule
from werkzeug.wsgi import get_host

from admission.placement import NAME
from admission.submission import LONGEST_KEY
from app.errors import CONTENT_TYPE, of_validation
from app.reading import Request
from foundation import exact
from registry.tenants import SHOWN

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
_AS_FLASK_ASKS = {"return_rule": True}
SECURITY: dict[str, Any] = {"key": {"type": "http", "scheme": "bearer", "description": "A tenant's key, sk_…"}}


class Model(BaseModel):
    """Base of what is read and written.  Its schema is built once: flask-openapi asks for it at every request.

    What requests are checked by is built when their view is registered; the others, which only describe answers, when
    the document is asked for.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), defer_build=True)

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _schema(cls, args, tuple(sorted(kwargs.items())))


@cache
def _schema(model: type[BaseModel], args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    made: dict[str, Any] = BaseModel.model_json_schema.__func__(model, *args, **dict(kwargs))  # type: ignore[attr-defined]
    return made


class Problem(Model):
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
        return exact.loads(s)

    def response(self, *args: Any, **kwargs: Any) -> Response:
        body = self._prepare_response_obj(args, kwargs)
        return Response(orjson.dumps(body, default=str), content_type="application/json")


class _JobId(BaseConverter):
    """A job's id where a fixed word stands beside it."""

    regex = "(?!retry-all$)[^/]+"
    part_isolating = True


class _Written(Headers):
    """Headers as they go out.  Those that come as a list are ours, and none has to be looked at."""

    def extend(self, arg: Any = None, /, **named: str) -> None:
        if isinstance(arg, list):
            self._list += arg
        else:
            super().extend(arg, **named)


class _Told(Response):
    """What a view answers as a dict.  It is whole."""

    def __init__(self, body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """`headers`: names as they are written, and plain ASCII."""
        self._text = orjson.dumps(body, default=str)
        own = ("Content-Type", "application/json"), ("Content-Length", str(len(self._text)))
        super().__init__([self._text], status, _Written([*own, *(headers or {}).items()]))

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "HEAD":
            return super().__call__(environ, start_response)
        start_response(self.status, list(self.headers))
        return [self._text]


class _Map(Map):
    """As werkzeug's.  `plain`: by method and path, where those lead that hold no names; each is looked for once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plain: dict[tuple[str, str], Rule] = {}


class _Address(MapAdapter):
    map: _Map

    def match(self, *args: Any, **kwargs: Any) -> Any:
        """As werkzeug's, which looks anew for each request."""
        if args or kwargs != _AS_FLASK_ASKS:
            return super().match(*args, **kwargs)
        seen = self.default_method, self.path_info
        rule = self.map.plain.get(seen)
        if rule is None:
            rule, names = super().match(return_rule=True)
            if names or rule.rule != self.path_info:
                return rule, names
            self.map.plain[seen] = rule
        return rule, {}


class _App(OpenAPI):
    url_map_class = _Map

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """As it is: none of ours is a coroutine, which Flask would find out six times for each request."""
        return func

    def make_response(self, rv: Any) -> Response:
        """As Flask's, of which a dict would go through five hands."""
        found = rv if isinstance(rv, tuple) else (rv,)
        return _Told(*found) if isinstance(found[0], dict) else super().make_response(rv)

    def create_url_adapter(self, request: AnyRequest | None) -> MapAdapter | None:
        """As Flask's, which reads the host's name anew for each request, three times."""
        if request is None or "HTTP_UPGRADE" in request.environ:
            return super().create_url_adapter(request)
        environ = request.environ
        scheme = environ["wsgi.url_scheme"]
        called = environ.get("HTTP_HOST"), environ["SERVER_NAME"], environ["SERVER_PORT"]
        request.host, server_name = _host(scheme, *called)
        path, query = request.path, request.query_string.decode(errors="replace")
        return _Address(self.url_map, server_name, request.root_path, "", scheme, path, request.method, query)


@lru_cache(maxsize=64)
def _host(scheme: str, header: str | None, name: str, port: str) -> tuple[str, str]:
    """The host that a request names, and as it stands in addresses.  Raises BadHost."""
    host = get_host({"wsgi.url_scheme": scheme, "HTTP_HOST": header, "SERVER_NAME": name, "SERVER_PORT": port})
    return host, Map().bind(host).server_name


def new_app(version: str) -> OpenAPI:
    """A Flask application that describes itself.  The document is served by app.api.docs."""
    app = _App(
        "app",
        info=Info(title="Slotkeeper", version=version, description="A dispatcher for GPU inference."),
        security_schemes=SECURITY,
        validation_error_model=Problem,
        validation_error_callback=of_validation,
        doc_ui=False,
        static_folder=None,
    )
    app.openapi_version = "3.1.0"
    app.request_class = Request
    app.json = _OrjsonProvider(app)
    app.url_map.converters["job"] = _JobId
    app.url_map.merge_slashes = False  # Names may hold them.
    return app


class _Views(APIBlueprint):
    """Views that are described when the document is asked for: it takes longer than all else until a process is ready,
    and most are never asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._undescribed: list[Callable[[], object]] = []

    def _collect_openapi_info(self, rule: str, func: Any, **described: Any) -> ParametersTuple:
        self._undescribed.append(partial(super()._collect_openapi_info, rule, func, **described))
        read = parse_parameters(func, doc_ui=False)
        for model in filter(None, read):
            model.model_rebuild()
        return read

    def describe(self, app: OpenAPI) -> None:
        """As flask-openapi does when they are registered."""
        while self._undescribed:
            self._undescribed.pop(0)()
        app.tags.extend(tag for tag in self.tags if tag.name not in app.tag_names)
        app.tag_names.extend(tag.name for tag in self.tags if tag.name not in app.tag_names)
        app.paths.update(self.paths)
        app.components_schemas.update(self.components_schemas)


def blueprint(name: str, title: str, prefix: str = "", *, keyed: bool = True) -> APIBlueprint:
    """Views under one heading.  `keyed`: they ask for a tenant's key."""
    return _Views(
        name,
        f"app.api.{name}",
        url_prefix=prefix or None,
        abp_tags=[{"name": title}],
        abp_security=[{"key": []}] if keyed else None,
        abp_responses=problems(*(_KEYED if keyed else _EVERYWHERE)),
        operation_id_callback=_operation_id,
    )


def kept_out_of_caches(api: APIBlueprint) -> APIBlueprint:
    """Nobody on the way keeps what these views answer."""
    api.after_request(_not_stored)
    return api


def _not_stored(answer: Response) -> Response:
    answer.headers["Cache-Control"] = "no-store"
    return answer


def _operation_id(*, bp_name: str, name: str, path: str, method: str) -> str:
    return name


def problems(*statuses: int) -> dict[str | int, Any]:
    """The description of answers with an error."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {status: {"description": _REASONS[status], "content": {CONTENT_TYPE: schema}} for status in statuses}


def described(model: type[BaseModel], description: str, kinds: Iterable[str] = ("application/json",)) -> dict[str, Any]:
    """The description of an answer whose schema is known by another view."""
    schema = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
    return {"description": description, "content": dict.fromkeys(kinds, schema)}


def headers(longest: int = LONGEST_KEY, form: str = SHOWN, shortest: int = 1, **described: str) -> dict[str, Any]:
    """openapi_extensions for optional headers that a view reads by itself: Some_Header="what it is for"."""
    schema = {"type": "string", "minLength": shortest, "maxLength": longest, "pattern": f"^{form}$"}
    return {
        _HEADERS: [
            {"name": name.replace("_", "-"), "in": "header", "description": text, "schema": schema}
            for name, text in described.items()
        ]
    }


def document(app: Flask) -> dict[str, Any]:
    """The OpenAPI document.  It asks for keys only where this process does."""
    assert isinstance(app, OpenAPI)
    for views in app.blueprints.values():
        if isinstance(views, _Views):
            views.describe(app)
    made: dict[str, Any] = app.api_doc
    if not app.extensions["slotkeeper_settings"].require_keys:
        made.get("components", {}).pop("securitySchemes", None)
        for operation in (one for path in made["paths"].values() for one in path.values()):
            operation.pop("security", None)
            operation["responses"].pop("401", None)
    for path in made["paths"].values():
        for operation in path.values():
            _tidy(operation)
    _tell_names(made)
    return made


def _tell_names(part: Any) -> None:
    """Say which keys attributes and constraints may have: flask-openapi's own schemas know no propertyNames."""
    for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _tell_names(one)
    fields = part.get("properties") if isinstance(part, dict) else None
    for name in ("attributes", "constraints"):
        for asked in (fields or {}).get(name, {}).get("anyOf", []):
            if "maxProperties" in asked:
                asked["propertyNames"] = {"pattern": f"^{NAME}$"}


def _tidy(operation: dict[str, Any]) -> None:
    """Put headers beside the parameters, and drop the answer that flask-openapi adds for its own validation."""
    if "description" in operation:
        operation["description"] = operation["description"].replace("<br/>", "\n").strip()
    headers = operation.pop(_HEADERS, [])
    if headers:
        operation["parameters"] = operation.get("parameters", []) + headers
    if CONTENT_TYPE not in operation["responses"].get("422", {}).get("content", {CONTENT_TYPE: None}):
        del operation["responses"]["422"]
