"""Commands for whoever watches processes: probes of containers, and people."""

import sys

import click

from app.cli.output import age, api_client, json_option, print_json, print_table
from app.terminal import echo

_ROLES = ("web", "worker", "maintenance", "webhooks", "relay", "beat")


@click.command()
@click.argument("role", type=click.Choice(_ROLES))
@click.option("--live", is_flag=True, help="Only whether it turns; nothing else is asked.")
def health(role: str, live: bool) -> None:
    """Say whether this host's processes of a role are ready, or live: a probe for containers.

    Live: one of them turns, whatever else is away.  Ready: it says so in Redis too, and a canary went through each
    worker in the last 20 s, maintenance has swept in the last 15 s.  Exit status 1: not so.
    """
    from tasks import ready

    why = ready.liveness_problem(role) if live else ready.readiness_problem(role)
    if why is not None:
        echo(why, err=True)
        sys.exit(1)
    echo("live" if live else "ready")


@click.command()
@json_option
def processes(as_json: bool) -> None:
    """List the processes of this installation that live, on all hosts, and how they fare."""
    found = api_client().get("/admin/processes")["processes"]
    if as_json:
        print_json(found)
        return
    rows = (
        (
            it["role"],
            it["host"],
            it["pid"],
            it["version"],
            age(it["since"]),
            "yes" if it["lives"] else f"silent for {it['silent_s']:.0f} s",
            "-" if it["runs"] is None else f"{it['runs']} of {it['capacity']}",
            "-" if it["canary_ms"] is None else f"{it['canary_ms']:.1f} ms, {it['canary_age_s']:.0f} s ago",
        )
        for it in found
    )
    titles = ("role", "host", "pid", "version", "for", "lives", "runs", "canary")
    print_table(titles, rows, "No process says that it lives: is Redis there?")


COMMANDS = (health, processes)
