"""Commands that pause, drain, freeze and resume servers, models and tenants, remove them, and keep them."""

from collections.abc import Mapping
from typing import Any

import click

from app.cli.output import api_client, path_segment, print_json
from app.terminal import echo, escape_line

# command -> (state, help)
_SERVER_COMMANDS = {
    "pause": ("paused", "Start no new jobs on a server; its running jobs end."),
    "drain": ("draining", "Let the jobs on a server end; start no new ones."),
    "freeze": ("frozen", "Start no new jobs until an operator has checked it."),
    "resume": ("online", "Start jobs on a server again."),
}
_OTHER_COMMANDS = {
    "pause": ("paused", "Start no jobs; accept new jobs, which wait."),
    "drain": ("draining", "Run the waiting jobs; accept no new jobs."),
    "freeze": ("frozen", "Start no jobs, and accept no new jobs."),
    "resume": ("online", "Start and accept jobs again."),
}


def add_state_commands(group: click.Group, kind: str) -> None:
    """Add the commands to a group.  `kind`: server, model or tenant."""
    for name, (state, text) in (_SERVER_COMMANDS if kind == "server" else _OTHER_COMMANDS).items():
        group.add_command(_state_command(name, kind, state, text))


def _state_command(command: str, kind: str, state: str, text: str) -> click.Command:
    @click.argument("name", metavar=kind.upper())
    @click.option("--reason", default="", help="The reason, which is shown with the waiting jobs.")
    def change(name: str, reason: str) -> None:
        body = {"state": state, "reason": reason} if reason else {"state": state}
        api_client().request("PATCH", f"/admin/{kind}s/{path_segment(name)}", body=body)
        echo(escape_line(f"{name} is {state}{f' ({reason})' if reason else ''}."))

    return click.command(command, help=text)(change)


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
