"""Commands for validations, by the API."""

from typing import Any

import click

from app.cli.arguments import read_json
from app.cli.output import age, api_client, json_option, path_segment, print_json, print_table
from app.terminal import echo, escape_line


@click.group()
def validations() -> None:
    """Manage jobs with known answers, which find servers that answer wrongly."""


@validations.command("list")
@json_option
def list_validations(as_json: bool) -> None:
    """List the validations."""
    listed = api_client().get("/admin/validations")["validations"]
    if as_json:
        print_json(listed)
        return
    rows = [(one["name"], one["model"], one["every_s"], one["compare"], _state(one)) for one in listed]
    print_table(("name", "model", "every s", "compare", "state"), rows, "There are no validations.")


@validations.command("set")
@click.argument("name")
@click.argument("model")
@click.argument("payload")
@click.argument("expected")
@click.option("--every", "every_s", default=600, show_default=True, type=click.IntRange(10, 86_400), help="Seconds.")
@click.option("--compare", type=click.Choice(["equal", "subset", "close"]), default="subset", show_default=True)
@click.option("--tolerance", default=0.0, type=click.FloatRange(0), help="By how much numbers may differ, with close.")
@click.option("--disabled", is_flag=True, help="Keep it, and submit no jobs.")
@json_option
def set_validation(
    name: str,
    model: str,
    payload: str,
    expected: str,
    every_s: int,
    compare: str,
    tolerance: float,
    disabled: bool,
    as_json: bool,
) -> None:
    """Add or replace a validation.

    PAYLOAD and EXPECTED are JSON, - for standard input, or @FILE.  "*" in EXPECTED fits any value.

    \b
    slotkeeper validations set cat zimg '{"prompt": "a cat", "seed": 1}' '{"sha256": "0f3a", "took": "*"}'
    """
    body = {
        "model": model,
        "payload": read_json(payload, "PAYLOAD"),
        "expected": read_json(expected, "EXPECTED"),
        "every_s": every_s,
        "compare": compare,
        "tolerance": tolerance,
        "enabled": not disabled,
    }
    answer = api_client().request("PUT", f"/admin/validations/{path_segment(name)}", body=body)
    if as_json:
        print_json(answer)
    else:
        echo(f"{escape_line(name)} is set; see the answers with: slotkeeper validations report")


@validations.command("remove")
@click.argument("name")
def remove_validation(name: str) -> None:
    """Remove a validation."""
    api_client().request("DELETE", f"/admin/validations/{path_segment(name)}")
    echo(f"{escape_line(name)} is removed.")


@validations.command("report")
@json_option
def report_validations(as_json: bool) -> None:
    """Show the latest answers of each server, 20 at most."""
    servers = api_client().get("/admin/validations/report")["servers"]
    if as_json:
        print_json(servers)
        return
    rows = [(one["server"], one["right"], one["wrong"], one["none"], _last(one), one["last_wrong"]) for one in servers]
    titles = ("server", "right", "wrong", "no result", "last wrong", "where it differed")
    print_table(titles, rows, "No server has answered a validation yet.")


def _state(validation: dict[str, Any]) -> str:
    return "enabled" if validation["enabled"] else "disabled"


def _last(answers: dict[str, Any]) -> str | None:
    return None if answers["last_wrong_at"] is None else f"{age(answers['last_wrong_at'])} ago"


COMMANDS = (validations,)
