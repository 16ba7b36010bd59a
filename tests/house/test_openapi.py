"""The OpenAPI document is valid and describes the whole interface."""

import ast
import re
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from flask_openapi import APIBlueprint
from openapi_spec_validator import OpenAPIV31SpecValidator

from app import api as headings
from app import factory
from app.api import openapi
from app.api.openapi import openapi_document
from app.context import context_of
from tests.support.api import Api

# For people and for tools that read the document, not part of what it describes.
UNDESCRIBED = {"/openapi.json", "/docs", "/docs/swagger", "/docs/swagger/{filename}", "/docs/oauth2-redirect.html"}
METHODS = {"get", "post", "put", "patch", "delete"}


@pytest.fixture
def described(api: Api) -> dict[str, Any]:
    return openapi_document(api.client.application, context_of(api.client.application).settings.require_keys)


def _operations(described: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method} {path}", operation)
        for path, item in described["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    ]


def test_the_document_is_valid(described: dict[str, Any]) -> None:
    assert described["openapi"] == "3.1.0"
    OpenAPIV31SpecValidator(described).validate()


def test_the_api_serves_the_openapi_document(api: Api, described: dict[str, Any]) -> None:
    assert api.client.get("/openapi.json").json == described


def test_concurrent_requests_build_the_document_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []

    def ask() -> None:
        api.client.application.test_client().get("/openapi.json")

    def make(*_: Any) -> dict[str, Any]:
        made.append(None)
        if len(made) == 1:
            others.start()
            others.join(0.2)
        return {}

    others = Thread(target=ask)
    monkeypatch.setattr(openapi, "openapi_document", make)
    ask()
    others.join()
    assert len(made) == 1


def test_every_route_is_described(api: Api, described: dict[str, Any]) -> None:
    routes = {
        (re.sub(r"<(?:[^<:]+:)?([^>]+)>", r"{\1}", rule.rule), method.lower())
        for rule in api.client.application.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    known = {(path, method) for path, item in described["paths"].items() for method in item if method in METHODS}
    assert {route for route in routes if route[0] not in UNDESCRIBED and not _is_of_page(route[0])} == known


def _is_of_page(path: str) -> bool:
    return path == "/" or path.startswith("/page/")


def test_every_error_is_a_problem(described: dict[str, Any]) -> None:
    for where, operation in _operations(described):
        for status, answer in operation["responses"].items():
            if int(status) >= 400 and not where.startswith("get /health"):
                content = answer["content"]
                assert list(content) == ["application/problem+json"], (where, status)
                assert content["application/problem+json"]["schema"] == {"$ref": "#/components/schemas/Problem"}


def test_every_operation_has_a_summary_and_a_unique_id(described: dict[str, Any]) -> None:
    operations = _operations(described)
    names = [operation["operationId"] for _, operation in operations]
    assert len(set(names)) == len(names)
    for where, operation in operations:
        assert operation["summary"].endswith("."), where
        assert any(int(status) < 300 for status in operation["responses"]), where
        assert "<br" not in operation.get("description", ""), where


def test_without_required_keys_the_document_requires_no_authentication(described: dict[str, Any]) -> None:
    assert "securitySchemes" not in described["components"]
    for where, operation in _operations(described):
        assert not operation.get("security"), where
        assert "401" not in operation["responses"], where


@pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true"}])
def test_every_operation_that_requires_a_key_documents_that(
    described: dict[str, Any], settings: dict[str, str]
) -> None:
    keyless = {where for where, operation in _operations(described) if not operation.get("security")}
    assert keyless == {"get /health/live", "get /health/ready", "post /tasks/callback/{job_id}"}
    for where, operation in _operations(described):
        assert where in keyless or "401" in operation["responses"], where


def test_the_views_of_every_module_are_served() -> None:
    made = {
        name
        for path in Path(headings.__file__).parent.glob("*_views.py")
        for name, value in vars(import_module(f"app.api.{path.stem}")).items()
        if isinstance(value, APIBlueprint) and value not in factory._APIS
    }
    assert made == set(), "list these blueprints in _APIS (app/factory.py)"


def test_each_view_builds_its_response_with_the_class_that_describes_it() -> None:
    by_hand = [
        f"{module.name}: {view.name}"
        for module in sorted(Path(headings.__file__).parent.glob("*_views.py"))
        for view in ast.walk(ast.parse(module.read_text()))
        if isinstance(view, ast.FunctionDef)
        for answer in ast.walk(view)
        if isinstance(answer, ast.Return) and isinstance(_body(answer.value), ast.Dict | ast.BinOp)
        if "dict[str, str]" not in ast.unparse(view.returns or ast.Constant(""))
    ]
    assert by_hand == []


def _body(answer: ast.expr | None) -> ast.expr | None:
    """Without status and headers."""
    return answer.elts[0] if isinstance(answer, ast.Tuple) else answer
