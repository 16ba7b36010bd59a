"""Pausing, draining, freezing and resuming: the same commands for servers, models and tenants."""

import click

from app.cli.output import api_client, path_segment
from app.terminal import echo, escape_line

# kind -> word -> (state, help)
_OF_SERVERS = {
    "pause": ("paused", "Start no new jobs on a server; its running jobs end."),
    "drain": ("draining", "Let the jobs on a server end; start no new ones."),
    "freeze": ("frozen", "Start no new jobs until an operator has checked it."),
    "resume": ("online", "Start jobs on a server again."),
}
_OF_OTHERS = {
    "pause": ("paused", "Start no jobs; accept new jobs, which wait."),
    "drain": ("draining", "Run the waiting jobs; accept no new jobs."),
    "freeze": ("frozen", "Start no jobs, and accept no new jobs."),
    "resume": ("online", "Start and accept jobs again."),
}


def add_state_commands(group: click.Group, kind: str) -> None:
    """Give a group these commands, for a kind of thing: server, model, tenant."""
    for word, (state, text) in (_OF_SERVERS if kind == "server" else _OF_OTHERS).items():
        group.add_command(_command(word, kind, state, text))


def _command(word: str, kind: str, state: str, text: str) -> click.Command:
    @click.argument("name", metavar=kind.upper())
    @click.option("--reason", default="", help="The reason, which is shown to those whose jobs wait.")
    def change(name: str, reason: str) -> None:
        body = {"state": state, "reason": reason} if reason else {"state": state}
        api_client().request("PATCH", f"/admin/{kind}s/{path_segment(name)}", body=body)
        echo(escape_line(f"{name} is {state}{f' ({reason})' if reason else ''}."))

    return click.command(word, help=text)(change)
