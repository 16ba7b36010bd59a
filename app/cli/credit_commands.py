"""Commands for credits and prices, by the API.  Amounts are credits; the API and --json have micro-credits."""

import csv
import secrets
import sys
from typing import Any

import click

from app.cli.arguments import read_json
from app.cli.output import (
    api_client,
    json_option,
    path_segment,
    print_fields,
    print_json,
    print_table,
    short_time,
)
from app.terminal import echo, escape_line
from slotkeeper.credit_amounts import format_credits, parse_credits

_COLUMNS = (
    *("id", "kind", "amount", "at", "job_id", "model", "server"),
    *("reserved", "slot_ms", "price", "why", "actor", "carried"),
)


_ALL = 10_000_000


class _Amount(click.ParamType):
    """An amount in credits, as micro-credits."""

    name = "credits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_credits(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


_AMOUNT = _Amount()
_reason_option = click.option("--reason", default="", help="Shown with the transfer.")
_key_option = click.option(
    "--key", help="Names this act: with the same key it is done once.  [default: a random one for each call]"
)


@click.group()
def credits() -> None:
    """Show the credits of tenants; as an operator open accounts, grant and refund.

    A tenant with an account pays for the slot time of its jobs; see slotkeeper prices.
    """


@credits.command("show")
@click.argument("tenant", default="me")
@click.option("--csv", "as_csv", is_flag=True, help="Print the transfers as a table for a spreadsheet.")
@click.option("--limit", type=click.IntRange(1, _ALL), help="How many transfers.  [default: 20; of a table all]")
@json_option
def show_credits(tenant: str, as_csv: bool, limit: int | None, as_json: bool) -> None:
    """Show a tenant's balance and its latest transfers.

    Without TENANT: the tenant of the key that is used.
    """
    api, path = api_client(), f"/tenants/{path_segment(tenant)}/credits"
    account = api.get(path, limit=1)
    transfers = list(api.iter_pages(path, "transfers", limit or (_ALL if as_csv else 20)))
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([_COLUMNS, *([transfer[name] for name in _COLUMNS] for transfer in transfers)])
    elif as_json:
        print_json(account | {"transfers": transfers, "next_cursor": None})
    else:
        _print_balance(account)
        titles = ("at", "kind", "credits", "job", "slot s", "why", "by")
        print_table(titles, map(_transfer_row, transfers), "There are no transfers.")


@credits.command("list")
@json_option
def list_accounts(as_json: bool) -> None:
    """List the tenants that pay for their jobs."""
    accounts = api_client().get("/admin/credit-accounts")["accounts"]
    if as_json:
        print_json(accounts)
        return
    rows = [
        (
            account["tenant"],
            *(format_credits(account[name]) for name in ("available", "held", "spent")),
            _state(account),
        )
        for account in accounts
    ]
    print_table(("tenant", "available", "held", "spent", "account"), rows, "No tenant has an account.")


@credits.command("open")
@click.argument("tenant")
@click.option("--overdraft", type=_AMOUNT, default="0", help="How far below 0 a reservation may lead.  [default: 0]")
@click.option("--low", type=_AMOUNT, help="Send the event credit.low when less is available.")
@json_option
def open_account(tenant: str, overdraft: int, low: int | None, as_json: bool) -> None:
    """Let a tenant pay for the jobs that it submits from now on, or change its account."""
    body = {"overdraft": overdraft, "low_mark": low}
    _print_changed(
        api_client().request("PUT", f"/admin/tenants/{path_segment(tenant)}/credit-account", body=body), as_json
    )


@credits.command("close")
@click.argument("tenant")
@json_option
def close_account(tenant: str, as_json: bool) -> None:
    """Let a tenant's jobs cost nothing from now on.

    Jobs that hold credits are charged at their end.
    """
    _print_changed(api_client().request("DELETE", f"/admin/tenants/{path_segment(tenant)}/credit-account"), as_json)


@credits.command("grant")
@click.argument("tenant")
@click.argument("amount", type=_AMOUNT)
@_reason_option
@_key_option
@json_option
def grant(tenant: str, amount: int, reason: str, key: str | None, as_json: bool) -> None:
    """Give a tenant credits.

    \b
    slotkeeper credits grant acme 250 --reason "invoice 17"
    """
    _act(tenant, {"kind": "grant", "amount": amount, "reason": reason}, key, as_json)


@credits.command("withdraw")
@click.argument("tenant")
@click.argument("amount", type=_AMOUNT)
@_reason_option
@_key_option
@json_option
def withdraw(tenant: str, amount: int, reason: str, key: str | None, as_json: bool) -> None:
    """Take credits back that are available."""
    _act(tenant, {"kind": "withdraw", "amount": amount, "reason": reason}, key, as_json)


@credits.command("refund")
@click.argument("tenant")
@click.argument("job_id", metavar="JOB")
@click.option("--amount", type=_AMOUNT, help="Part of what it has cost.  [default: all]")
@_reason_option
@_key_option
@json_option
def refund(tenant: str, job_id: str, amount: int | None, reason: str, key: str | None, as_json: bool) -> None:
    """Give back what a job has cost."""
    _act(tenant, {"kind": "refund", "amount": amount, "reason": reason, "job_id": job_id}, key, as_json)


def _act(tenant: str, body: dict[str, Any], key: str | None, as_json: bool) -> None:
    headers = {"Idempotency-Key": key or secrets.token_hex(16)}
    done = api_client().post(f"/admin/tenants/{path_segment(tenant)}/credits", body, headers)
    if as_json:
        print_json(done)
    else:
        amount = format_credits(done["amount"])
        echo(f"{done['kind']}: {amount} credits.  See: slotkeeper credits show {escape_line(tenant)}")


def _print_changed(account: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(account)
    else:
        _print_balance(account)


def _print_balance(account: dict[str, Any]) -> None:
    amounts = {name: format_credits(account[name]) for name in ("available", "held", "spent", "overdraft")}
    low = None if account["low_mark"] is None else format_credits(account["low_mark"])
    print_fields({"tenant": account["tenant"], "account": _state(account), **amounts, "low mark": low})


def _state(account: dict[str, Any]) -> str:
    return "open" if account["open"] else "closed: its jobs cost nothing"


def _transfer_row(transfer: dict[str, Any]) -> tuple[Any, ...]:
    slot_s = None if transfer["slot_ms"] is None else f"{transfer['slot_ms'] / 1000:.1f}"
    amount = format_credits(transfer["amount"])
    return (
        short_time(transfer["at"]),
        transfer["kind"],
        amount,
        transfer["job_id"],
        slot_s,
        transfer["why"],
        transfer["actor"],
    )


@click.group()
def prices() -> None:
    """Show or set what a second of a slot costs, by model and by what its server declares."""


@prices.command("show")
@json_option
def show_prices(as_json: bool) -> None:
    """Show the price list.

    The first row that fits a job and its server applies; without one the job costs nothing.
    """
    _print_prices(api_client().get("/admin/prices"), as_json)


@prices.command("set")
@click.argument("price_list", metavar="PRICES")
@json_option
def set_prices(price_list: str, as_json: bool) -> None:
    """Replace the price list.  No job that was accepted before costs more by it.

    PRICES is JSON, - for standard input, or @FILE, with micro-credits: 1,000,000 make a credit.  A row without model is
    for all models, one without constraints for all servers.

    \b
    slotkeeper prices set '{"prices": [{"model": "flux", "per_slot_s": 2000}]}'
    """
    body = read_json(price_list, "PRICES")
    _print_prices(api_client().request("PUT", "/admin/prices", body=body), as_json)


def _print_prices(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            row["model"] or "any",
            ", ".join(f"{name}: {wanted}" for name, wanted in row["constraints"].items()) or "any",
            format_credits(row["per_slot_s"]),
            format_credits(row["per_slot_s"] * row["reserve_s"]),
        )
        for row in answer["prices"]
    ]
    titles = ("model", "server", "credits a second", "held for a job")
    print_table(titles, rows, "There are no prices: all jobs cost nothing.")


COMMANDS = (credits, prices)
