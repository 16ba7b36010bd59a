"""Generate the page of the REST API from its OpenAPI document, and the page of errors from the error classes."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from app.api.openapi import openapi_document
from app.factory import create_routes
from app.problems import error_title, status_of
from app.server.wsgi import LARGE_HEAD
from slotkeeper.errors import SlotkeeperError

_APP = Path(__file__).resolve().parents[2] / "app"
_METHODS = ("get", "post", "put", "patch", "delete")
_TOP = """# REST API

Every request and response is JSON. `GET /openapi.json` is the whole description for programs; `/docs` shows it in the
browser, with the fields of all responses. Where keys are required, send `Authorization: Bearer sk_…`. The page on
[errors](errors.md) describes refusals.

`python -m tools.reference` writes this page from the OpenAPI document.
"""
_ERRORS_TOP = """# Errors

Every refusal is `application/problem+json` (RFC 9457). `code` is a stable word for programs, `detail` says what is
wrong and what to do, `field` and `errors` name the fields of the request that are wrong. With status 429 and 503 the
header `Retry-After` says in how many seconds to try again.

```json
{
  "type": "urn:slotkeeper:problem:unknown_model", "title": "No such model is registered", "status": 422,
  "detail": "There is no model 'zimgg'; did you mean zimg?", "instance": "/queue/submit",
  "code": "unknown_model", "field": "model"
}
```

Celery clients get the same codes in `JobFailed`; processes that import Slotkeeper get the classes of
`slotkeeper.errors`. `python -m tools.reference` writes this page.

| status | code | title |
|---|---|---|
"""


def rest_page() -> str:
    """Return the Markdown of the page of the REST API."""
    app = create_routes()
    document = openapi_document(app, require_keys=True)
    by_tag: dict[str, list[str]] = defaultdict(list)
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                operation = item[method]
                by_tag[operation["tags"][0]].append("".join(_operation(document, method, path, operation)))
    return _TOP + "".join(f"\n## {tag}\n\n" + "\n".join(sections) for tag, sections in by_tag.items())


def _operation(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of the section of one operation."""
    yield f"### `{method.upper()} {path}`\n\n"
    yield operation.get("summary", "")
    if operation.get("description"):
        yield f" {_one_line(operation['description'])}"
    yield "\n"
    rows = [
        (f"`{parameter['name']}`", parameter["in"], _type(parameter["schema"]), parameter.get("description", ""))
        for parameter in operation.get("parameters", [])
    ]
    rows += list(_body_rows(document, operation))
    if rows:
        yield "\n| field | in | type | |\n|---|---|---|---|\n"
        yield from (
            f"| {name} | {place} | {kind} | {_one_line(description)} |\n" for name, place, kind, description in rows
        )
    statuses = [f"{status}" for status in sorted(operation["responses"])]
    yield f"\nResponses: {', '.join(statuses)}.\n"


def _body_rows(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield (field, place, type, description) of each field of the request body."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content.get("schema", {})
        name = schema.get("$ref", "").rpartition("/")[2]
        schema = document["components"]["schemas"].get(name, schema)
        required = schema.get("required", [])
        for field, described in schema.get("properties", {}).items():
            place = "body, required" if field in required else "body"
            yield f"`{field}`", place, _type(described), described.get("description", "")
        return


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(option) for option in schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    return f"list of {_type(schema.get('items', {}))}" if kind == "array" else str(kind)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def errors_page() -> str:
    """Return the Markdown of the page of errors."""
    rows = {*_error_classes(SlotkeeperError), *_problems()}
    known = {(status, code) for status, code, _ in rows}
    rows |= {row for row in _refusals() if row[:2] not in known}
    return _ERRORS_TOP + "".join(f"| {status} | `{code}` | {title} |\n" for status, code, title in sorted(rows))


def _error_classes(base: type[SlotkeeperError]) -> Iterator[tuple[int, str, str]]:
    """Yield (status, code, title) of the error classes below `base`."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith(("slotkeeper.", "routing.", "tasks.", "app.")) and "code" in vars(kind):
            yield status_of(kind), kind.code, error_title(kind)
        yield from _error_classes(kind)


def _refusals() -> Iterator[tuple[int, str, str]]:
    """Yield (status, code, title) of what the server refuses itself, before a view: Refusal(status, code, ...)."""
    yield LARGE_HEAD[0], LARGE_HEAD[1], HTTPStatus(LARGE_HEAD[0]).phrase
    for path in sorted((_APP / "server").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and _name_of(node.func) in ("Refusal", "_refuse"):
                match [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]:
                    case [int() as status, str() as code]:
                        yield status, code, HTTPStatus(status).phrase


def _name_of(function: ast.expr) -> str:
    """Return the name of a function or method that is called."""
    return str(getattr(function, "id", getattr(function, "attr", "")))


def _problems() -> Iterable[tuple[int, str, str]]:
    """Yield (status, code, title) of the errors that views raise themselves: ProblemError(status, code, title, ...)."""
    for path in sorted(_APP.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("ProblemError", "problem_response"):
                values = [argument.value for argument in node.args[:3] if isinstance(argument, ast.Constant)]
                if len(values) == 3 and all(isinstance(value, int | str) for value in values):
                    yield int(str(values[0])), str(values[1]), str(values[2])
