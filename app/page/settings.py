"""The page with the settings of this process, without secrets."""

import re
from typing import Any

from pydantic_settings import BaseSettings
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from app.api import ledger as ledger_api
from app.config import SETTINGS
from app.page.login import page_view
from app.page.rendering import render_page

_SECRET = re.compile(r"secret|password|token|_key$")
_HIDDEN = "set, not shown"


@page_view("/page/settings", admin=True)
def settings() -> Any:
    sections = [
        (title.replace("`", ""), [_setting_row(kind(), kind, name) for name in kind.model_fields])
        for title, kind in SETTINGS.items()
    ]
    return render_page("settings.html", sections=sections, ledger=ledger_api.get_ledger())


def _setting_row(settings: BaseSettings, kind: type[BaseSettings], name: str) -> dict[str, Any]:
    value, prefix = getattr(settings, name), str(kind.model_config.get("env_prefix", ""))
    field = kind.model_fields[name]
    shown = display_setting(name, value) if field.repr or "://" in str(value) or not value else _HIDDEN
    return {"name": f"{prefix}{name}".upper(), "value": shown, "is_default": value == field.default}


def display_setting(name: str, value: Any) -> str:
    """Return the value of a setting without its secrets."""
    if value in ("", None):
        return "empty"
    if _SECRET.search(name):
        return _HIDDEN
    return _without_password(str(value)) if "://" in str(value) else str(value)


def _without_password(url: str) -> str:
    """Mask the passwords of one or more URLs, which commas, semicolons or spaces separate."""
    return re.sub(r"[^,;\s]+", lambda match: _mask_one_url(match[0]) if "://" in match[0] else match[0], url)


def _mask_one_url(url: str) -> str:
    """Mask the password and the values of the query; hide a URL that cannot be parsed."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return f"{url.partition('://')[0]}://{_HIDDEN}"
    parsed = parsed.set(query=dict.fromkeys(parsed.query, "***"))
    return parsed.render_as_string(hide_password=True)
