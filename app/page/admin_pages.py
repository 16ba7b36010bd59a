"""The pages of tenants, the audit log and the settings."""

import re
from contextlib import suppress
from typing import Any

from flask import redirect, request
from pydantic_settings import BaseSettings
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from app.api import audit_views as audit_api
from app.api import operation_views as operation_api
from app.api import tenant_views as tenants_api
from app.config import SETTINGS
from app.context import dispatcher
from app.page.layout import form, state_body
from app.page.login import page_view, run_or_ask_again
from app.page.rendering import render_page
from app.schemas.operation_schemas import AuditQuery
from app.schemas.tenant_schemas import LimitsBody, TenantBody, TenantPath
from slotkeeper.audit import ACTIONS
from slotkeeper.registry.identity import Scope

_LISTS = frozenset({"models", "environments"})
_LIMITS = [name for name in LimitsBody.model_fields if name != "model_rates"]  # It takes a table.
_FILTERS = ("actor", "act", "job_id", "model", "server", "tenant")
_SECRET = re.compile(r"secret|password|token|_key$")
_HIDDEN = "set, not shown"


@page_view("/page/audit", Scope.AUDIT)
def audit() -> Any:
    filters = {name: request.args.get(name, "").strip() for name in _FILTERS}
    given = {name: value for name, value in filters.items() if value}
    query = AuditQuery(**given, limit=100, cursor=request.args.get("cursor") or None)
    entries, next_cursor = audit_api.find_acts(query)
    return render_page("audit.html", entries=entries, next=next_cursor, filters=filters, actions=sorted(ACTIONS))


@page_view("/page/tenants", Scope.OPERATE)
def tenants() -> Any:
    return _render_tenants()


def _render_tenants(error: str = "") -> Any:
    models = dispatcher().catalog.refresh().models.values()
    return render_page(
        "tenants.html",
        error=error,
        limits=_LIMITS,
        tenants=tenants_api.list_tenants()["tenants"],
        limited_models=[model for model in sorted(models, key=lambda model: model.name) if _is_limited(model.config)],
    )


@page_view("/page/tenants/state", Scope.OPERATE, method="POST")
def change_tenant() -> Any:
    tenants_api.change_tenant(
        TenantPath(tenant=form().get("tenant", "").strip()), TenantBody.model_validate(state_body().model_dump())
    )
    return redirect("/page/tenants?done=changed", 303)


@page_view("/page/tenants/limits", Scope.OPERATE, method="POST")
def change_limit() -> Any:
    """Change one limit of a tenant, or, without a tenant, of each for which it is not set; empty: it has none."""

    def change() -> Any:
        tenant, value = form().get("tenant", "").strip(), form().get("value", "").strip()
        name = form().get("limit", "")
        given = value.replace(",", " ").split() if name in _LISTS else _number(value)
        body = LimitsBody.model_validate({name: None if value == "" else given})
        if tenant:
            tenants_api.change_tenant(TenantPath(tenant=tenant), TenantBody(limits=body))
        else:
            tenants_api.change_limits(body)
        return redirect("/page/tenants?done=changed", 303)

    return run_or_ask_again(change, _render_tenants)


def _number(text: str) -> int | float | str:
    """Return the number that a field has, or its text, which is refused."""
    for convert in (int, float):
        with suppress(ValueError):
            return convert(text)
    return text


def _is_limited(config: Any) -> bool:
    return bool(config.tenant_slots or config.tenant_slot_limits or config.weights)


@page_view("/page/settings", Scope.OPERATE)
def settings() -> Any:
    sections = [
        (title.replace("`", ""), [_setting_row(kind(), kind, name) for name in kind.model_fields])
        for title, kind in SETTINGS.items()
    ]
    return render_page("settings.html", sections=sections, ledger=operation_api.get_ledger())


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
