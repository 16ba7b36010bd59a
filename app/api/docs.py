"""The document of this interface, and a page to read it with.  Both work without a network."""

import orjson
from flask import Flask, Response, redirect
from flask_openapi_swagger.plugins import RegisterPlugin

from app.api.openapi import document
from app.auth import public

_DOCUMENT = "/openapi.json"
_PAGE = "/docs"


def register(app: Flask) -> None:
    """Add /openapi.json, and the page at /docs, which redirects to where the page's own files lie."""
    swagger = RegisterPlugin.register(doc_url=_DOCUMENT)
    app.register_blueprint(swagger, url_prefix=_PAGE)
    for endpoint in [name for name in app.view_functions if name.startswith(f"{swagger.name}.")]:
        app.view_functions[endpoint] = _opened(app.view_functions[endpoint])
    text = orjson.dumps(document(app))
    app.add_url_rule(_DOCUMENT, "document", public(lambda: Response(text, content_type="application/json")))
    app.add_url_rule(_PAGE, "docs", public(lambda: redirect(f"{_PAGE}/{swagger.name}")))


def _opened(view):  # type: ignore[no-untyped-def]
    return public(lambda **path: view(**path))
