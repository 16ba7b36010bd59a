"""Render templates, and format values for them.  Autoescaping is on: no value becomes markup."""

import hashlib
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from flask import Response, request
from jinja2 import Environment, PackageLoader, StrictUndefined

from app.page import layout
from routing.queries.explain import breaker_reason
from routing.queries.job_timeline import format_duration
from slotkeeper import json_text
from slotkeeper.clock import now_ms
from slotkeeper.credit_amounts import format_credits
from slotkeeper.registry.identity import by_tenant

_MAX_JSON_CHARS = 20_000
_STATIC = files("app.page") / "static"
MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}


def render_page(template: str, code: int = 200, /, **values: Any) -> Response:
    """Render a template and return the response with the status `code`."""
    text = _templates().get_template(template).render(**layout.template_values(), **values)
    return Response(text, code, content_type="text/html; charset=utf-8")


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("app.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "by_tenant": by_tenant,
        "duration": duration,
        "age": age,
        "time_between": time_between,
        "timestamp": timestamp,
        "time_of_day": time_of_day,
        "short_id": short_id,
        "number": number,
        "percent": percent,
        "credits": format_credits,
        "plural": plural,
        "segment": segment,
        "sentence": sentence,
        "json_preview": json_preview,
        "breaker_reason": breaker_reason,
    }
    environment.globals |= {"asset": asset, "current_url": current_url}
    return environment


@cache
def asset(name: str) -> str:
    """Return the URL of a static file.  The URL changes with the content, so that browsers can cache the file."""
    return f"/page/static/{name}?v={hashlib.sha256(content(name)).hexdigest()[:12]}"


@cache
def content(name: str) -> bytes:
    """Return the content of a static file.  Raises FileNotFoundError."""
    return (_STATIC / name).read_bytes()


# -- values ------------------------------------------------------------------------------------------------


def duration(ms: int | float | None) -> str:
    """Format a duration in its two largest units."""
    if ms is None:
        return "–"
    return format_duration(ms)


def age(at: str | int | None) -> str:
    """Format the time since a moment."""
    return "–" if at is None else duration(max(0, now_ms() - _ms(at)))


def time_between(from_: str | int, to: str | int | None) -> str:
    """Format the time between two moments."""
    return "–" if to is None else duration(max(0, _ms(to) - _ms(from_)))


def timestamp(at: str | int | None) -> str:
    """Format a moment as a date and a time of day to the second, in UTC."""
    return "–" if at is None else f"{_utc(at):%Y-%m-%d %H:%M:%S}"


def time_of_day(at: str | int | None) -> str:
    """Format a moment as a time of day with milliseconds, in UTC."""
    return "–" if at is None else f"{_utc(at):%H:%M:%S}.{_ms(at) % 1000:03d}"


def _ms(at: str | int) -> int:
    return at if isinstance(at, int) else round(datetime.fromisoformat(at).timestamp() * 1000)


def _utc(at: str | int) -> datetime:
    return datetime.fromtimestamp(_ms(at) / 1000, UTC)


def short_id(job_id: str) -> str:
    """Return the end of a UUID, its most random part; the search for jobs accepts it."""
    return job_id if len(job_id) != 36 else job_id[-8:]


def number(value: int | float | None) -> str:
    """Format a number with thin spaces between the thousands."""
    if value is None:
        return "–"
    text = f"{value:,.1f}" if isinstance(value, float) and not value.is_integer() else f"{round(value):,}"
    return text.replace(",", "\u2009")


def percent(share: float | None) -> str:
    return "–" if share is None else f"{round(share * 100)} %"


def plural(count: int, singular: str, plural_form: str = "") -> str:
    """Format a count with its noun."""
    return f"{number(count)} {singular if count == 1 else plural_form or singular + 's'}"


def segment(text: str) -> str:
    """Quote a name as one segment of a URL path."""
    return quote(text, safe="")


def sentence(text: str) -> str:
    """Return the text as a sentence, with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "?", "!")) else ".")


def json_preview(value: Any) -> str:
    """Format a value as JSON; cut a long text and add the number of omitted characters."""
    text = json_text.dumps(value, indent=True).decode()
    omitted = len(text) - _MAX_JSON_CHARS
    return text if omitted <= 0 else f"{text[:_MAX_JSON_CHARS]}\n… and {number(omitted)} characters more"


def current_url(**changed: Any) -> str:
    """Return the URL of the request with changed query parameters; None removes a parameter."""
    query = {name: value for name, value in (request.args.to_dict() | changed).items() if value not in (None, "")}
    return request.path + (f"?{urlencode(query)}" if query else "")
