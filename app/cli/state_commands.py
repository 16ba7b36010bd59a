"""Pausing, draining, freezing and resuming: the same commands for servers, models and tenants."""

import click

from app.cli.output import api_client, path_segment
from app.terminal import echo, escape_line

# kind -> word -> (state, help)
_OF_SERVERS = {
    "pause": ("paused", "Start nothing more on it, for a while; what runs there ends."),
    "drain": ("draining", "Let what runs on it end, and start nothing more."),
    "freeze": ("frozen", "Start nothing more on it, until somebody has looked."),
    "resume": ("online", "Use it again."),
}
_OF_OTHERS = {
    "pause": ("paused", "Start nothing of it; new jobs are accepted and wait."),
    "drain": ("draining", "Let what waits go on, and accept no new jobs."),
    "freeze": ("frozen", "Start nothing of it, and accept no new jobs."),
    "resume": ("online", "Let it go on."),
}


def add_state_commands(group: click.Group, kind: str) -> None:
    """Give a group these commands, for a kind of thing: server, model, tenant."""
    for word, (state, text) in (_OF_SERVERS if kind == "server" else _OF_OTHERS).items():
        group.add_command(_command(word, kind, state, text))


def _command(word: str, kind: str, state: str, text: str) -> click.Command:
    @click.argument("name", metavar=kind.upper())
    @click.option("--reason", default="", help="Why; it is shown to whoever waits.")
    def change(name: str, reason: str) -> None:
        body = {"state": state, "reason": reason} if reason else {"state": state}
        api_client().request("PATCH", f"/admin/{kind}s/{path_segment(name)}", body=body)
        echo(escape_line(f"{name} is {state}{f' ({reason})' if reason else ''}."))

    return click.command(word, help=text)(change)
