"""Removing: what the commands of servers and models share."""

from collections.abc import Mapping
from typing import Any

import click

from app.cli.output import api_client, path_segment, print_json
from app.terminal import echo, escape_line


def remove(kind: str, name: str, params: Mapping[str, str]) -> dict[str, Any]:
    answer: dict[str, Any] = api_client().request("DELETE", f"/admin/{kind}/{path_segment(name)}", params=params)
    return answer


def print_removal(it: Mapping[str, Any], as_json: bool) -> None:
    """How far it has come."""
    if as_json:
        print_json(it)
        return
    if it["state"] == "leaving":
        withheld = f", {it['quarantined']} slots quarantined" if it["quarantined"] else ""
        remaining = f"{format_counts(it['remaining'])}{withheld}"
        echo(escape_line(f"{it['name']} takes nothing new, and will be removed when this has ended: {remaining}."))
        return
    echo(escape_line(f"{it['name']} is removed."))
    if it["lost"]:
        echo(escape_line(f"Lost runs, whose jobs run again elsewhere: {', '.join(it['lost'])}."))
    if it["idle"]:
        echo(escape_line(f"Servers that serve no model any more: {', '.join(it['idle'])}."))


def format_counts(by_state: Mapping[str, int] | None) -> str:
    """Jobs that have not ended."""
    return ", ".join(f"{count} {state}" for state, count in sorted((by_state or {}).items())) or "nothing"


def keep_command(kind: str) -> click.Command:
    """Make the command `keep` for a server or a model."""

    @click.argument("name", metavar=kind.upper())
    def keep(name: str) -> None:
        """Call its removal off."""
        api_client().request("DELETE", f"/admin/{kind}s/{path_segment(name)}/removal")
        echo(escape_line(f"{name} stays."))

    return click.command("keep")(keep)
