"""Credits: balances and transfers of tenants, operators' acts, and prices."""

from typing import Any

from flask import Response, request

from app.api.csv_response import csv_response, wants_csv
from app.api.openapi import blueprint, no_store, problem_responses, required_headers, response_of
from app.auth.access import visible_name
from app.context import dispatcher
from app.schemas.credit_schemas import (
    AccountBody,
    AccountList,
    ActBody,
    BalanceView,
    CreditsQuery,
    CreditsView,
    PriceList,
    PricesBody,
    PriceView,
    TransferView,
)
from app.schemas.tenant_schemas import TenantPath
from routing.admission.constraints import encode_constraints
from routing.admission.submission import check_idempotency_key, error_index
from slotkeeper.clock import iso_time, now_ms
from slotkeeper.errors import Conflict, InvalidRequest
from slotkeeper.process import package_version
from slotkeeper.registry.credit_accounts import Account, Act
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.prices import Price, set_prices
from tasks.services import credit_accounts, database, processes

api = no_store(blueprint("credits", "Credits", "/tenants", scope=Scope.READ))
admin_api = no_store(blueprint("credit_acts", "Credits", "/admin", scope=Scope.OPERATE))

_KEY = required_headers(Idempotency_Key="Names this act: if it is sent again, it is done once.")


@api.get("/<path:tenant>/credits", responses={200: CreditsView, **problem_responses(404, 422)})
def show_credits(path: TenantPath, query: CreditsQuery) -> dict[str, Any] | Response:
    """Show a tenant's balance and its transfers, the newest first.  `me` is the tenant of the key that is used.

    Amounts are micro-credits.  With `Accept: text/csv` the response is a table of the transfers with a line of names,
    and the header `Next-Cursor` has the `cursor` of the next page, if there is one.
    404: the tenant has no account: its jobs cost nothing.
    """
    view = credits_of(visible_name(path.tenant), query)
    if not wants_csv():
        return view
    headers = {} if view["next_cursor"] is None else {"Next-Cursor": view["next_cursor"]}
    return csv_response(list(TransferView.model_fields), view["transfers"], headers)


def credits_of(tenant: str, query: CreditsQuery) -> dict[str, Any]:
    """Return CreditsView of a tenant.  Raises NotFound: it has no account."""
    account = credit_accounts().get(tenant)
    rows = credit_accounts().list_transfers(account, query.before, query.limit)
    cursor = f"t{rows[-1].id}" if len(rows) == query.limit else None
    return CreditsView.build(account, transfers=[_transfer_view(row) for row in rows], next_cursor=cursor)


@admin_api.get("/credit-accounts", responses={200: AccountList})
def list_accounts() -> dict[str, Any]:
    """List the accounts of all tenants that have one."""
    return AccountList.build(accounts=[BalanceView.build(account) for account in credit_accounts().list_all()])


@admin_api.put(
    "/tenants/<path:tenant>/credit-account",
    responses={200: BalanceView, **problem_responses(400, 404, 409, 413, 415, 422)},
)
def open_account(path: TenantPath, body: AccountBody) -> dict[str, Any]:
    """Let a tenant's jobs cost what the prices say, from now on, or change its account.

    409: a process of another release runs, which would not charge the jobs that it ends: finish the upgrade first.
    """
    _require_one_release()
    credit_accounts().open(path.tenant, body.overdraft, body.low_mark, now_ms())
    return _changed(path.tenant)


@admin_api.delete("/tenants/<path:tenant>/credit-account", responses={200: BalanceView, **problem_responses(404, 415)})
def close_account(path: TenantPath) -> dict[str, Any]:
    """Let a tenant's jobs cost nothing from now on.  Those that hold credits are charged at their end."""
    credit_accounts().close(path.tenant, now_ms())
    return _changed(path.tenant)


@admin_api.post(
    "/tenants/<path:tenant>/credits",
    responses={
        200: response_of(TransferView, "It was done before"),
        201: TransferView,
        **problem_responses(400, 404, 409, 413, 415, 422),
    },
    openapi_extensions=_KEY,
)
def act_on_account(path: TenantPath, body: ActBody) -> tuple[dict[str, Any], int]:
    """Grant or withdraw credits, or refund what a job has cost.

    409: more than is available, or than the job has cost; or the Idempotency-Key came with another act.
    """
    reference = check_idempotency_key(request.headers.get("Idempotency-Key"))
    if reference is None:
        raise InvalidRequest("Idempotency-Key", "Idempotency-Key is missing: it keeps an act from being done twice")
    return act(path.tenant, body, reference)


def act(tenant: str, body: ActBody, reference: str) -> tuple[dict[str, Any], int]:
    """Do an act once, and return TransferView and the status.  Raises InvalidRequest."""
    if (body.kind == "refund") != (body.job_id is not None):
        raise InvalidRequest("job_id", "job_id names the job of a refund; leave it out of other acts")
    if body.amount is None and body.kind != "refund":
        raise InvalidRequest("amount", "amount is missing; send micro-credits, of which 1,000,000 make a credit")
    done = Act(body.kind, body.amount, body.reason, reference, body.job_id)
    row, is_new = credit_accounts().act(tenant, done, now_ms())
    return _transfer_view(row), 201 if is_new else 200


@admin_api.get("/prices", responses={200: PriceList})
def get_prices() -> dict[str, Any]:
    """Show what a second of a slot costs.  The first row that fits a job and its server applies."""
    return PriceList.build(prices=[PriceView.build(price) for price in dispatcher().catalog.refresh().prices])


@admin_api.put("/prices", responses={200: PriceList, **problem_responses(400, 413, 415, 422)})
def put_prices(body: PricesBody) -> dict[str, Any]:
    """Replace the price list, within a second everywhere.

    A job costs no more than the highest price that could apply when it was accepted; at its start it may become less.
    """
    given: list[Price] = []
    with error_index(given):
        for row in body.prices:
            given.append(Price(row.model, encode_constraints(row.constraints), row.per_slot_s, row.reserve_s))
    set_prices(database(), given, now_ms())
    return get_prices()


def _changed(tenant: str) -> dict[str, Any]:
    dispatcher().catalog.refresh()
    account: Account = credit_accounts().get(tenant)
    return BalanceView.build(account)


def _require_one_release() -> None:
    """Raise Conflict if a process of another release has reported within the last minute.  Raises RedisError."""
    releases = {str(process.facts.get("version")) for process in processes().read_all()} - {package_version()}
    if releases:
        raise Conflict(
            f"Processes of release {', '.join(sorted(releases))} run, which would not charge the jobs that they end; "
            "finish the upgrade, and repeat this a minute later.",
            releases=sorted(releases),
        )


def _transfer_view(row: Any) -> dict[str, Any]:
    view = {name: getattr(row, name) for name in TransferView.model_fields if name not in {"at", "carried"}}
    return TransferView.build(**view, at=iso_time(row.at_ms), carried=bool(row.carried))
