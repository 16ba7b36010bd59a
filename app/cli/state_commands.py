"""The commands pause, drain, freeze and resume, for servers, models and tenants."""

import click

from app.cli.output import api_client, path_segment
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
