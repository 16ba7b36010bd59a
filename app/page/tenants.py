"""The page of tenants: their keys, limits and states."""

from typing import Any

from flask import redirect

from app.api import tenant_views as tenants_api
from app.context import dispatcher
from app.page.login import page_view
from app.page.rendering import render_page
from app.page.visitor import form, state_body
from app.schemas.tenant_schemas import TenantBody, TenantPath


@page_view("/page/tenants", admin=True)
def tenants() -> Any:
    models = dispatcher().catalog.refresh().models.values()
    return render_page(
        "tenants.html",
        tenants=tenants_api.list_tenants()["tenants"],
        limited_models=[model for model in sorted(models, key=lambda model: model.name) if _is_limited(model.config)],
    )


@page_view("/page/tenants/state", method="POST", admin=True)
def change_tenant() -> Any:
    tenants_api.change_tenant(
        TenantPath(tenant=form().get("tenant", "").strip()), TenantBody.model_validate(state_body().model_dump())
    )
    return redirect("/page/tenants?done=changed", 303)


def _is_limited(config: Any) -> bool:
    return bool(config.tenant_slots or config.tenant_slot_limits or config.weights)
