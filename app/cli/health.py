"""Commands that show the state of processes, for container probes and for operators."""

import sys
from typing import Any

import click

from app.cli.output import age, api_client, json_option, print_json, print_table
from app.terminal import echo
from tasks.process_files import ROLES, liveness_problem


@click.command()
@click.argument("role", type=click.Choice(ROLES))
@click.option("--live", is_flag=True, help="Check only that the process itself runs.")
def health(role: str, live: bool) -> None:
    """Check that processes of this host are ready or alive.

    A probe for containers.  Alive (--live): a process of the role runs, even if Redis and others do not answer.  Ready:
    it also reports to Redis, a canary passed through each worker in the last 20 s, and the maintenance task sweep ran
    in the last 15 s.  Exit status 1: not ready, or not alive.
    """
    if live:
        problem = liveness_problem(role)
    else:
        from tasks.liveness import readiness_problem  # Imports redis, which --live does not need.

        problem = readiness_problem(role)
    if problem is not None:
        echo(problem, err=True)
        sys.exit(1)
    echo("live" if live else "ready")


@click.command()
@json_option
def processes(as_json: bool) -> None:
    """List the processes on all hosts and their state."""
    listed = api_client().get("/admin/processes")["processes"]
    if as_json:
        print_json(listed)
        return
    titles = ("role", "host", "pid", "version", "for", "alive", "runs", "canary")
    print_table(titles, map(_process_row, listed), "No process reports that it is alive; see whether Redis answers.")


def _process_row(process: dict[str, Any]) -> tuple[Any, ...]:
    canary_ms = process["canary_ms"]
    return (
        process["role"],
        process["host"],
        process["pid"],
        process["version"],
        age(process["since"]),
        "yes" if process["lives"] else f"silent for {process['silent_s']:.0f} s",
        "-" if process["runs"] is None else f"{process['runs']} of {process['capacity']}",
        "-" if canary_ms is None else f"{canary_ms:.1f} ms, {process['canary_age_s']:.0f} s ago",
    )


COMMANDS = (health, processes)
