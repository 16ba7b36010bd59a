"""Commands for tenants, in the database without the API, and for the secrets of inference servers, by the API."""

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from app.cli.output import acting_locally, api_client, json_option, path_segment, print_fields, print_json, print_table
from app.cli.state_commands import add_state_commands
from app.terminal import echo, escape_line
from slotkeeper.errors import NotFound

if TYPE_CHECKING:
    from slotkeeper.registry.api_keys import NewKey
    from slotkeeper.registry.tenant_limits import TenantLimits
    from slotkeeper.registry.tenants import Tenants


@click.group()
def secrets() -> None:
    """Manage keys and passwords of inference servers.

    Descriptions of servers name them as {{secret/NAME}}.  Their values are never shown.
    """


@secrets.command("set")
@click.argument("name")
@click.option(
    "--model",
    "models",
    metavar="MODEL",
    multiple=True,
    help="Model whose description may use it; repeat it for several.",
)
@click.option("--all-models", is_flag=True, help="The descriptions of all models may use it.")
@json_option
def set_secret(name: str, models: tuple[str, ...], all_models: bool, as_json: bool) -> None:
    """Set or replace a secret.

    The command prompts for the value or reads it from standard input, so that it is not in the list of processes.

    \b
    slotkeeper secrets set HF_TOKEN --model flux
    slotkeeper secrets set HF_TOKEN --model flux < token.txt
    """
    if bool(models) == all_models:
        raise click.UsageError("Say which models may use it: --model MODEL, or --all-models.")
    value = click.prompt("Value", hide_input=True) if sys.stdin.isatty() else sys.stdin.read().rstrip("\r\n")
    body = {"value": value, "models": None if all_models else list(models)}
    answer = api_client().request("PUT", f"/admin/secrets/{path_segment(name)}", body=body)
    if as_json:
        print_json(answer)
    else:
        echo(f"{name} is set, for {_format_models(answer['models'])}.")


@secrets.command("list")
@json_option
def list_secrets(as_json: bool) -> None:
    """List secrets without their values."""
    answer = api_client().get("/admin/secrets")
    if as_json:
        print_json(answer)
        return
    rows = [
        (secret["secret"], _format_models(secret["models"]), secret["set_at"], secret["set_by"])
        for secret in answer["secrets"]
    ]
    print_table(("secret", "models", "set at", "set by"), rows, "There are no secrets.")


@secrets.command("rm")
@click.argument("name")
def remove_secret(name: str) -> None:
    """Remove a secret that no description uses."""
    api_client().request("DELETE", f"/admin/secrets/{path_segment(name)}")
    echo(f"{name} is removed.")


def _format_models(models: list[str] | None) -> str:
    return "all models" if models is None else ", ".join(models)


@click.group()
def tenants() -> None:
    """Manage tenants and their limits; their keys: slotkeeper keys.

    list, add, change and remove work directly on the database of this machine.  pause, drain, freeze and resume call
    the API, so that they take effect at once on all hosts.
    """


@tenants.command("list")
@json_option
def list_tenants(as_json: bool) -> None:
    """List the tenants with their keys, limits and states.

    A tenant that was not added is listed only while it is paused, draining or frozen.
    """
    from slotkeeper.clock import now_ms
    from slotkeeper.registry.api_keys import ApiKeys
    from slotkeeper.registry.identity import Scope
    from slotkeeper.registry.tenant_limits import NO_LIMITS

    with acting_locally():
        registry = open_tenants()
        added = {tenant.name for tenant in registry.list_all()}
        keys = ApiKeys(registry.database).list_by_tenant(now_ms())
        states, limits = _read_states_and_limits()
    listed = [
        {
            "name": name,
            "keys": len(keys.get(name, ())),
            "operates": any(Scope.OPERATE in key.scopes for key in keys.get(name, ())),
            "rate_per_s": limits.get(name, NO_LIMITS).rate_per_s,
            "burst": limits.get(name, NO_LIMITS).burst,
            "state": states.get(name, "online"),
        }
        for name in sorted(added | states.keys())
    ]
    if as_json:
        print_json(listed)
        return
    titles = ("name", "keys", "operates", "submits per s", "at once", "state")
    print_table(
        titles,
        (list(tenant.values()) for tenant in listed),
        "There are no tenants.  Add one with: slotkeeper tenants add NAME",
    )


@tenants.command("add")
@click.argument("name")
@click.option("--operate", "--admin", is_flag=True, help="Its key may do everything, for all tenants.")
@click.option("--audit", is_flag=True, help="Its key may also read the audit log.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Submits per second.  [default: no limit]")
@click.option("--burst", type=click.IntRange(min=1), help="Submits at once, above --rate.")
@json_option
def add_tenant(name: str, operate: bool, audit: bool, rate: float | None, burst: int | None, as_json: bool) -> None:
    """Add a tenant and print its first key.

    The key has the scopes submit, read and manage, unless --operate is given.  It cannot be read again.
    """
    from slotkeeper.clock import now_ms
    from slotkeeper.registry.identity import FIRST_SCOPES, Scope, Tenant
    from slotkeeper.registry.tenant_limits import TenantLimits

    if burst is not None and rate is None:
        raise click.UsageError("--burst needs --rate; give both.")
    scopes = {Scope.OPERATE} if operate else {*FIRST_SCOPES, Scope.AUDIT} if audit else FIRST_SCOPES
    with acting_locally():
        limits = TenantLimits(rate_per_s=rate, burst=burst)
        new = open_tenants().add(Tenant(name), now_ms(), scopes, limits=limits)
    print_new_key(name, new, as_json)


def print_new_key(tenant: str, new: "NewKey", as_json: bool, note: str = "") -> None:
    """Print a key that was just made, alone on standard output."""
    if as_json:
        print_json({"name": tenant, "key_id": new.id, "key": new.key})
        return
    echo(new.key)
    from app.config import AppSettings

    use = (
        "Commands use it as SLOTKEEPER_KEY, requests as `Authorization: Bearer KEY`."
        if AppSettings().require_keys
        else "The API does not require keys before it is started with SLOTKEEPER_REQUIRE_KEYS=true."
    )
    echo(f"Save this key now: it cannot be read again.  {note}{use}", err=True)


@tenants.command("change")
@click.argument("name", required=False)
@click.option("--all", "for_all", is_flag=True, help="In place of NAME: each tenant for which the limit is not set.")
@click.option("--rate", type=click.FloatRange(0, 1_000_000), help="Submits per second; 0: no limit.")
@click.option("--burst", type=click.IntRange(0, 1_000_000), help="Submits at once; 0: as many as --rate says.")
@click.option(
    "--model-rate",
    "model_rates",
    metavar="MODEL=RATE[:BURST]",
    multiple=True,
    help="Submits per second for a model; repeat it.  These replace the ones before.",
)
@click.option("--model", "models", multiple=True, help="Model whose jobs it may submit; repeat it for several.")
@click.option("--all-models", is_flag=True, help="It may submit jobs of all models.")
@click.option(
    "--environment", "environments", multiple=True, help="Environment of its jobs; repeat it; the first is the default."
)
@click.option("--most-urgent", type=click.IntRange(0, 9), help="Most urgent priority that it may use; 0: any.")
@click.option("--max-waiting", type=click.IntRange(min=0), help="Jobs that may wait; 0: no limit.")
@click.option("--max-slots", type=click.IntRange(0, 1_000_000), help="Slots that it may hold at once; 0: any number.")
@click.option("--slot-s-per-day", type=click.FloatRange(min=0), help="Seconds of slots a day, UTC; 0: no limit.")
@click.option("--slot-s-per-month", type=click.FloatRange(min=0), help="Seconds of slots a month, UTC; 0: no limit.")
@click.option("--max-open-batches", type=click.IntRange(0, 100_000), help="Batches that have not ended; 0: 100.")
@click.option("--max-batch-lines", type=click.IntRange(0, 100_000), help="Lines of a batch; 0: 100,000.")
@click.option("--max-result-bytes", type=click.IntRange(min=0), help="Largest result of a job; 0: no limit.")
@click.option("--max-payload-bytes", type=click.IntRange(min=0), help="Largest payload of a job; 0: no limit.")
def change_tenant(
    name: str | None,
    for_all: bool,
    model_rates: tuple[str, ...],
    models: tuple[str, ...],
    all_models: bool,
    environments: tuple[str, ...],
    **numbers: float | None,
) -> None:
    """Change the limits of a tenant.

    The new limits take effect within two seconds.  The keys and the webhooks of the tenant stay.
    """
    from slotkeeper.clock import now_ms
    from slotkeeper.registry.tenant_limits import INSTALLATION

    if (name is None) != for_all:
        raise click.UsageError("Name a tenant, or give --all.")
    changes: dict[str, Any] = {
        "rate_per_s" if field == "rate" else field: value or None
        for field, value in numbers.items()
        if value is not None
    }
    if model_rates:
        changes["model_rates"] = dict(_parse_model_rate(text) for text in model_rates)
    if models or all_models:
        changes["models"] = None if all_models else list(models)
    if environments:
        changes["environments"] = list(environments)
    if not changes:
        raise click.UsageError("Nothing to change; give --rate or another limit.")
    with acting_locally():
        open_tenants().change(INSTALLATION if name is None else name, changes, now_ms())
    echo("The limits of all tenants are changed." if name is None else f"Tenant {escape_line(name)} is changed.")


def _parse_model_rate(text: str) -> tuple[str, dict[str, float]]:
    """Return the model and the rate of MODEL=RATE[:BURST].  Raises UsageError."""
    parts = re.fullmatch(r"(.+)=([0-9]*\.?[0-9]+)(?::([0-9]+))?", text)
    if parts is None:
        raise click.UsageError(f"--model-rate {text!r} is not MODEL=RATE or MODEL=RATE:BURST, such as zimg=5:20.")
    return parts[1], {"rate_per_s": float(parts[2])} | ({"burst": int(parts[3])} if parts[3] else {})


@tenants.command("show")
@click.argument("name")
@json_option
def show_tenant(name: str, as_json: bool) -> None:
    """Show the state of a tenant and the limits that apply to it."""
    from tasks.services import catalog

    with acting_locally():
        open_tenants()
        snapshot = catalog().read()
    state = snapshot.tenants[name].state if name in snapshot.tenants else "online"
    limits = snapshot.limits_of(name).model_dump(exclude_defaults=True)
    if as_json:
        print_json({"tenant": name, "state": state, "limits": limits})
        return
    print_fields({"tenant": name, "state": state, **(limits or {"limits": "none"})})


@tenants.command("remove")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def remove_tenant(name: str, yes: bool) -> None:
    """Remove a tenant with its keys and webhooks.

    The command shows what the tenant has and asks for confirmation.  The jobs of the tenant stay and continue.
    """
    from slotkeeper.outbox.subscriptions import delete_of_tenant

    with acting_locally():
        registry = open_tenants()
        if all(tenant.name != name for tenant in registry.list_all()):
            raise NotFound(f"There is no tenant {name!r}.")
        holdings = _format_holdings(name)
    echo(f"Tenant {escape_line(name)} has {holdings}.", err=True)
    echo("Its keys stop working and its webhooks are deleted; its jobs continue.", err=True)
    if not yes:
        click.confirm("Remove this tenant?", abort=True, err=True)
    with acting_locally():
        registry.remove(name, also=delete_of_tenant)
    echo(f"Tenant {escape_line(name)} is removed.")


def _format_holdings(name: str) -> str:
    """Return the numbers of jobs and webhooks of a tenant, as text."""
    from routing.queries.job_list import count_tenant_holdings
    from tasks.services import database

    holdings = count_tenant_holdings(database(), name)
    jobs = ", ".join(f"{count} {state}" for state, count in holdings.active.items()) or "none"
    return f"jobs that have not ended: {jobs}; webhooks: {holdings.webhooks}"


def _read_states_and_limits() -> "tuple[dict[str, str], Mapping[str, TenantLimits]]":
    """Return the state of each tenant that is not online, and the limits of each tenant that has some."""
    from tasks.services import catalog

    snapshot = catalog().read()
    return {name: tenant.state for name, tenant in snapshot.tenants.items()}, snapshot.limits


def open_tenants() -> "Tenants":
    """Return the registry of tenants.  Raises ClickException: the database has another schema."""
    from migrations.migrate import check
    from slotkeeper.registry.tenants import Tenants
    from tasks.services import database

    if problem := check(database().url):
        raise click.ClickException(problem)
    return Tenants(database())


add_state_commands(tenants, "tenant")

COMMANDS = (tenants, secrets)
