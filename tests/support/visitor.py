"""Somebody who looks at the page without a script: follows links, fills in forms, keeps cookies."""

import re
from html import unescape
from typing import Any

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from tests.support.api import Api


class Visitor:
    """A browser's part in it."""

    def __init__(self, app: Flask, **environ: Any) -> None:
        self.client = FlaskClient(app, app.response_class, use_cookies=True)
        self.client.environ_base |= environ

    def get(self, path: str, **options: Any) -> TestResponse:
        return self.client.get(path, **options)

    def post(self, path: str, token: str | None = None, **fields: Any) -> TestResponse:
        """Send a form as the page has it; `token`: another than its own."""
        return self.client.post(path, data={"token": self.token() if token is None else token, **fields})

    def token(self) -> str:
        """As it stands in the forms of this visit."""
        found = re.search(r'name="token" value="([^"]+)"', self.get("/page/log-in", follow_redirects=True).text)
        assert found is not None, "each screen has a form"
        return unescape(found[1])

    def log_in(self, key: str) -> TestResponse:
        return self.post("/page/log-in", key=key)


def visitor(api: Api, **environ: Any) -> Visitor:
    return Visitor(api.client.application, **environ)


def key_of(api: Api, name: str, *, admin: bool = False) -> str:
    """The key of a new tenant."""
    return api.tenant(name, admin=admin)["Authorization"].removeprefix("Bearer ")
