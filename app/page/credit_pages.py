"""The pages of credits: a tenant's balance, transfers and what an operator does with them; all accounts and prices."""

import secrets
from typing import Any

from flask import redirect, request

from app.api import credit_views as credits_api
from app.auth.access import visible_name
from app.page.layout import form
from app.page.login import page_view, run_or_ask_again
from app.page.rendering import render_page, segment
from app.schemas.credit_schemas import AccountBody, ActBody, CreditsQuery
from app.schemas.tenant_schemas import TenantPath
from slotkeeper.credit_amounts import parse_credits
from slotkeeper.errors import InvalidRequest, NotFound
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.tenants import OWN_TENANT

_ACTS = ("grant", "withdraw", "refund")


@page_view("/page/credits", Scope.READ)
def credits() -> Any:
    return _render(request.args.get("tenant", OWN_TENANT))


@page_view("/page/credits/act", Scope.OPERATE, method="POST")
def act() -> Any:
    """Grant, withdraw or refund credits.  The form has its own key, so that sent twice it is done once."""
    fields = form()
    tenant = fields.get("tenant", "").strip()

    def do() -> Any:
        body = {
            "kind": fields.get("kind", ""),
            "amount": _amount("amount"),
            "reason": fields.get("reason", "").strip(),
            "job_id": fields.get("job", "").strip() or None,
        }
        credits_api.act(visible_name(tenant), ActBody.model_validate(body), fields.get("key", "")[:100] or _new_key())
        return redirect(f"/page/credits?tenant={segment(tenant)}&done=credited", 303)

    return run_or_ask_again(do, lambda error: _render(tenant, error=error))


@page_view("/page/credits/account", Scope.OPERATE, method="POST")
def change_account() -> Any:
    """Open an account, change it, or close it."""
    fields = form()
    tenant = fields.get("tenant", "").strip()

    def change() -> Any:
        path = TenantPath(tenant=visible_name(tenant))
        if fields.get("act") == "close":
            credits_api.close_account(path)
        else:
            body = {"overdraft": _amount("overdraft") or 0, "low_mark": _amount("low")}
            credits_api.open_account(path, AccountBody.model_validate(body))
        return redirect(f"/page/credits?tenant={segment(tenant)}&done=changed", 303)

    return run_or_ask_again(change, lambda error: _render(tenant, error=error))


@page_view("/page/prices", Scope.OPERATE)
def prices() -> Any:
    listed = credits_api.get_prices()["prices"]
    return render_page("prices.html", prices=listed, accounts=credits_api.list_accounts()["accounts"])


def _render(tenant: str, *, error: str = "") -> Any:
    name = visible_name(tenant)
    query = CreditsQuery.model_validate({"cursor": request.args.get("cursor") or None})
    try:
        account = credits_api.credits_of(name, query)
    except NotFound:
        account = None
    return render_page("credits.html", tenant=name, account=account, acts=_ACTS, key=_new_key(), error=error)


def _amount(field: str) -> int | None:
    """Return an amount of the form, in micro-credits; None: the field is empty.  Raises InvalidRequest."""
    text = form().get(field, "").strip()
    try:
        return parse_credits(text) if text else None
    except ValueError as error:
        raise InvalidRequest(field, f"{field}: {error}") from None


def _new_key() -> str:
    return secrets.token_hex(16)
