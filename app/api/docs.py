"""The OpenAPI document, and a page that shows it.  Both work without a network."""

from threading import Lock

import orjson
from flask import Flask, Response, current_app, redirect
from flask_openapi_swagger.plugins import RegisterPlugin

from app.api.openapi import openapi_document
from app.auth.access import public
from app.context import current_request

_DOCUMENT = "/openapi.json"
_PAGE = "/docs"
_EXTENSION = "slotkeeper_document"
_document_lock = Lock()


def register(app: Flask) -> None:
    """Add /openapi.json, and /docs, which redirects to the folder of the page's files."""
    swagger = RegisterPlugin.register(doc_url=_DOCUMENT)
    app.register_blueprint(swagger, url_prefix=_PAGE)
    for endpoint in [name for name in app.view_functions if name.startswith(f"{swagger.name}.")]:
        app.view_functions[endpoint] = _make_public(app.view_functions[endpoint])
    app.add_url_rule(_DOCUMENT, "document", public(_serve_document))
    app.after_request(_security_headers)
    app.add_url_rule(_PAGE, "docs", public(lambda: redirect(f"{_PAGE}/{swagger.name}")))


def _serve_document() -> Response:
    """Return the document, which is built at the first request: most processes never get one."""
    extensions = current_app.extensions
    with _document_lock:  # flask-openapi shows other threads a document that is half built.
        if _EXTENSION not in extensions:
            extensions[_EXTENSION] = orjson.dumps(openapi_document(current_app))
    return Response(extensions[_EXTENSION], content_type="application/json")


# For /docs: its own scripts and styles, some of them inline; nothing from other origins.
_DOCS_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
# For app.page: nothing inline, nothing from other origins, and forms send only to this origin.
_PAGE_POLICY = "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'"
_API_POLICY = "default-src 'none'"


def _headers_with(allowed: str) -> list[tuple[str, str]]:
    policy = "Content-Security-Policy", f"{allowed}; frame-ancestors 'none'"
    return [("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY"), policy]


_HEADERS = {allowed: _headers_with(allowed) for allowed in (_DOCS_POLICY, _PAGE_POLICY, _API_POLICY)}


def _security_headers(response: Response) -> Response:
    """Forbid other sites to embed a response, and a response to load from other origins."""
    request = current_request()
    allowed = _DOCS_POLICY if request.path.startswith(_PAGE) else _API_POLICY
    if request.blueprint == "page":
        allowed = _PAGE_POLICY
    response.headers.extend(_HEADERS[allowed])
    return response


def _make_public(view):  # type: ignore[no-untyped-def]
    return public(lambda **path: view(**path))
