"""Functions of the commands `remove` and `keep` that servers and models share."""

from collections.abc import Mapping
from typing import Any

import click

from app.cli.output import api_client, path_segment, print_json
from app.terminal import echo, escape_line


def remove(kind: str, name: str, params: Mapping[str, str]) -> dict[str, Any]:
    """Request a removal, and return its state.  `kind`: servers or models."""
    answer: dict[str, Any] = api_client().request("DELETE", f"/admin/{kind}/{path_segment(name)}", params=params)
    return answer


def print_removal(removal: Mapping[str, Any], as_json: bool) -> None:
    """Print whether a removal is done, and what it still waits for."""
    if as_json:
        print_json(removal)
        return
    name = removal["name"]
    if removal["state"] == "leaving":
        quarantined = f", {removal['quarantined']} slots quarantined" if removal["quarantined"] else ""
        remaining = f"{format_counts(removal['remaining'])}{quarantined}"
        echo(escape_line(f"{name} gets no new jobs, and is removed when these have ended: {remaining}."))
        return
    echo(escape_line(f"{name} is removed."))
    if removal["lost"]:
        echo(escape_line(f"These jobs lost their runs, and run again on other servers: {', '.join(removal['lost'])}."))
    if removal["idle"]:
        echo(escape_line(f"These servers serve no model now: {', '.join(removal['idle'])}."))


def format_counts(by_state: Mapping[str, int] | None) -> str:
    """Return the numbers of unfinished jobs by state, as text."""
    return ", ".join(f"{count} {state}" for state, count in sorted((by_state or {}).items())) or "nothing"


def keep_command(kind: str) -> click.Command:
    """Return the command `keep` for a kind: server or model."""

    @click.argument("name", metavar=kind.upper())
    def keep(name: str) -> None:
        api_client().request("DELETE", f"/admin/{kind}s/{path_segment(name)}/removal")
        echo(escape_line(f"The removal of {name} is canceled."))

    return click.command("keep", help=f"Cancel the removal of a {kind}.")(keep)
