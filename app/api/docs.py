"""The document of this interface, and a page to read it with.  Both work without a network."""

from threading import Lock

import orjson
from flask import Flask, Response, current_app, redirect
from flask_openapi_swagger.plugins import RegisterPlugin

from app.api.openapi import openapi_document
from app.auth.access import public
from app.context import asked

_DOCUMENT = "/openapi.json"
_PAGE = "/docs"
_TEXT = "slotkeeper_document"
_document_lock = Lock()


def register(app: Flask) -> None:
    """Add /openapi.json, and the page at /docs, which redirects to where the page's own files lie."""
    swagger = RegisterPlugin.register(doc_url=_DOCUMENT)
    app.register_blueprint(swagger, url_prefix=_PAGE)
    for endpoint in [name for name in app.view_functions if name.startswith(f"{swagger.name}.")]:
        app.view_functions[endpoint] = _make_public(app.view_functions[endpoint])
    app.add_url_rule(_DOCUMENT, "document", public(_serve_document))
    app.after_request(_security_headers)
    app.add_url_rule(_PAGE, "docs", public(lambda: redirect(f"{_PAGE}/{swagger.name}")))


def _serve_document() -> Response:
    """Made when it is first asked for: most processes never are."""
    kept = current_app.extensions
    with _document_lock:  # flask-openapi shows others what it has made of it so far.
        if _TEXT not in kept:
            kept[_TEXT] = orjson.dumps(openapi_document(current_app))
    return Response(kept[_TEXT], content_type="application/json")


# The page's own scripts and styles, some of them inline; nothing from elsewhere.
_DOCS_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
# Ours (app.page): nothing inline, nothing from elsewhere, and forms lead nowhere else.
_PAGE_POLICY = "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'"
_API_POLICY = "default-src 'none'"


def _headers_with(allowed: str) -> list[tuple[str, str]]:
    policy = "Content-Security-Policy", f"{allowed}; frame-ancestors 'none'"
    return [("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY"), policy]


_HEADERS = {allowed: _headers_with(allowed) for allowed in (_DOCS_POLICY, _PAGE_POLICY, _API_POLICY)}


def _security_headers(response: Response) -> Response:
    """No page of another site shows ours inside it, and ours loads nothing from others."""
    seen = asked()
    allowed = _DOCS_POLICY if seen.path.startswith(_PAGE) else _API_POLICY
    if seen.blueprint == "page":
        allowed = _PAGE_POLICY
    response.headers.extend(_HEADERS[allowed])
    return response


def _make_public(view):  # type: ignore[no-untyped-def]
    return public(lambda **path: view(**path))
