"""Commands for nodes, by the API."""

from typing import Any

import click

from app.cli.output import age, api_client, json_option, path_segment, print_fields, print_json, print_table, short_time
from app.terminal import echo, escape_line


@click.group()
def nodes() -> None:
    """Manage nodes: machines behind NAT whose agents connect to a gateway."""


@nodes.command("list")
@json_option
def list_nodes(as_json: bool) -> None:
    """List nodes: all for operators, otherwise those of the tenant."""
    listed = api_client().get("/nodes")["nodes"]
    if as_json:
        print_json(listed)
        return
    rows = [
        (
            one["name"],
            one["state"],
            one["since"] and age(one["since"]),
            one["grant"]["pool"],
            one["grant"]["owner"],
            ", ".join(one["models"]),
            one["fault"] or one["reason"],
        )
        for one in listed
    ]
    titles = ("name", "state", "since", "pool", "owner", "serves", "why")
    print_table(titles, rows, "There are no nodes; slotkeeper nodes token makes a token with which one enrols.")


@nodes.command("show")
@click.argument("name")
@json_option
def show_node(name: str, as_json: bool) -> None:
    """Show a node."""
    found = api_client().get(f"/nodes/{path_segment(name)}")
    print_json(found) if as_json else print_fields(found)


@nodes.command("token")
@click.option("--pool", required=True, help="A model is served by the node only if its configuration names this pool.")
@click.option("--owner", help="The tenant to which the node will belong.  [default: that of this key]")
@click.option(
    "--environment", "environments", multiple=True, help="One it may be of; repeat it.  [default: production]"
)
@click.option("--model", "models", multiple=True, help="A name or pattern it may serve; repeat it.  [default: all]")
@click.option("--max-slots", default=8, show_default=True, type=click.IntRange(1, 1000))
@click.option("--trusted", is_flag=True, help="It is a machine of this installation.")
@click.option("--uses", default=1, show_default=True, type=click.IntRange(1, 1000), help="So many nodes may enrol.")
@click.option("--valid", "valid_s", default=3600, show_default=True, type=click.IntRange(60), help="Seconds.")
@json_option
def make_token(
    pool: str,
    owner: str | None,
    environments: tuple[str, ...],
    models: tuple[str, ...],
    max_slots: int,
    trusted: bool,
    uses: int,
    valid_s: int,
    as_json: bool,
) -> None:
    """Make a token with which a node enrols.  It is shown once.

    \b
    slotkeeper nodes token --pool homes --model zimg
    """
    body: dict[str, Any] = {
        "owner": owner,
        "pool": pool,
        "environments": list(environments) or ["production"],
        "models": list(models) or ["*"],
        "max_slots": max_slots,
        "trusted": trusted,
        "uses": uses,
        "valid_s": valid_s,
    }
    made = api_client().request("POST", "/nodes/tokens", body=body)
    if as_json:
        print_json(made)
        return
    echo(escape_line(made["token"]))
    echo(f"Valid until {short_time(made['expires_at'])}.", err=True)


@nodes.command("tokens")
@json_option
def list_tokens(as_json: bool) -> None:
    """List the enrolment tokens that can be used."""
    listed = api_client().get("/nodes/tokens")["tokens"]
    if as_json:
        print_json(listed)
        return
    rows = [
        (one["id"], one["grant"]["pool"], one["grant"]["owner"], one["uses_left"], short_time(one["expires_at"]))
        for one in listed
    ]
    print_table(("id", "pool", "owner", "uses left", "expires"), rows, "There are no tokens.")


@nodes.command("forget-token")
@click.argument("token_id")
def remove_token(token_id: str) -> None:
    """Remove an enrolment token, by its id."""
    api_client().request("DELETE", f"/nodes/tokens/{path_segment(token_id)}")
    echo(f"{escape_line(token_id)} is removed.")


@nodes.command("revoke")
@click.argument("name")
@click.option("--reason", default="", help="Stands in the audit log.")
def revoke_node(name: str, reason: str) -> None:
    """Revoke a node and its keys: its connection is closed, and its results are refused."""
    api_client().request("POST", f"/nodes/{path_segment(name)}/revoke", body={"reason": reason})
    echo(f"{escape_line(name)} is revoked.")


@nodes.command("remove")
@click.argument("name")
def remove_node(name: str) -> None:
    """Remove a node that was revoked, and on which nothing runs."""
    api_client().request("DELETE", f"/nodes/{path_segment(name)}")
    echo(f"{escape_line(name)} is removed.")


COMMANDS = (nodes,)
