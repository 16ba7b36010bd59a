"""Commands for operation: doctor, health, processes, ledger, usage, watch, audit."""

import csv
import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from app.cli.findings import Finding, worst_level
from app.cli.output import (
    age,
    api_client,
    display,
    json_option,
    limit_option,
    path_segment,
    print_json,
    print_table,
    short_id,
)
from app.terminal import console, echo, escape_line
from slotkeeper.client_errors import ApiError, ApiUnreachable
from tasks.process_files import ROLES, liveness_problem

_WATCH_JOBS = 12
_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
_SUMMARIES = {
    "ok": "All checks passed.",
    "warn": "No check failed; see the warnings.",
    "fail": "At least one check failed.",
}
_NO_LIMIT = 1 << 40


@click.command()
@json_option
def ledger(as_json: bool) -> None:
    """Count all accepted jobs and check that none is missing.

    Exit status 1: the counts of the states do not add up to the accepted jobs.
    """
    answer = api_client().get("/admin/ledger")
    if as_json:
        print_json(answer)
    else:
        rows = [(state, count, answer["purged"].get(state, 0)) for state, count in answer["by_state"].items()]
        print_table(("state", "jobs", "deleted"), rows, "")
        verdict = "each has a state" if answer["balanced"] else "BUT THE COUNTS OF THE STATES DO NOT ADD UP TO THIS"
        echo(f"{answer['accepted']} jobs were accepted; {verdict}.")
        if any(answer["purged"].values()):
            echo("Deleted: after their retention, or dead jobs that an operator has deleted.")
    if not answer["balanced"]:
        sys.exit(1)


@click.command("usage")
@click.argument("tenant", default="me")
@click.option("--from", "first", metavar="DAY", help="First day, such as 2030-01-31 (UTC).  [default: of this month]")
@click.option("--to", "last", metavar="DAY", help="Last day.  [default: today]")
@click.option("--by", type=click.Choice(["day", "model"]), default="day", show_default=True)
@click.option("--csv", "as_csv", is_flag=True, help="Print a table for a spreadsheet.")
@json_option
def show_usage(tenant: str, first: str | None, last: str | None, by: str, as_csv: bool, as_json: bool) -> None:
    """Show what a tenant has used: seconds of slots, runs and jobs.

    Without TENANT: the tenant of the key that is used.
    """
    query = {"from": first, "to": last, "by": by}
    answer = api_client().get(f"/tenants/{path_segment(tenant)}/usage", **query)
    names = ("day", "model", "slot_s", "runs", "accepted", "completed", "ended")
    rows = [[row[name] for name in names] for row in answer["usage"]]
    if as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([names, *rows])
    elif as_json:
        print_json(answer)
    else:
        shown = [[*row[:2], f"{row[2]:.1f}", *row[3:]] for row in rows]
        titles = ("day", "model", "slot seconds", "runs", "accepted", "completed", "ended otherwise")
        print_table(titles, shown, f"Tenant {escape_line(answer['tenant'])} has used nothing in this time.")


@click.command()
@click.option(
    "--every", default=1.0, show_default=True, type=click.FloatRange(0.2, 60), help="Seconds between updates."
)
def watch(every: float) -> None:
    """Show queues, slots and newest jobs live, until Ctrl-C."""
    from rich.live import Live

    api = api_client()
    screen = console()
    view = _render_view(api)  # Before the live view starts, so that an error is printed in the usual way.
    with Live(view, console=screen, screen=screen.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                live.update(view, refresh=True)
                time.sleep(every)
                try:
                    view = _render_view(api)
                except (ApiError, ApiUnreachable) as error:  # for example while the API restarts
                    view = error.message
        except KeyboardInterrupt:
            return


def _render_view(api: Any) -> Any:
    """Return the live view: totals, fleets and newest jobs, as a rich renderable."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table

    def new_table(title: str, *names: str) -> Table:
        table = Table(*names, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.columns[0].no_wrap = True
        return table

    fleets = new_table("Fleets", "fleet", "waiting", "taken", "free", "cooling", "servers")
    answer = api.get("/admin/servers")
    for fleet in answer["fleets"] or []:
        names = [f"{s['server']} ({s['state']})" for s in answer["servers"] if s["fleet"] == fleet["fleet"]]
        counts = [display(fleet[name]) for name in ("fleet", "waiting", "taken", "free", "cooling")]
        fleets.add_row(*map(escape_line, [*counts, ", ".join(names)]))
    newest = new_table("Newest jobs", "job", "model", "status", "priority", "attempts", "slot", "age")
    for job in api.get("/queue/jobs", limit=_WATCH_JOBS)["jobs"]:
        values = (short_id(job["job_id"]), job["model"], job["status"], job["priority"], job["attempts"], job["slot"])
        newest.add_row(*(escape_line(display(value)) for value in values), age(job["created_at"]))
    states = api.get("/admin/ledger")["by_state"]
    summary = "   ".join(f"{state} {count}" for state, count in states.items() if count) or "no jobs yet"
    return Group(f"{api.url}   {summary}\n", fleets, newest)


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check every part of this installation.

    Checks settings, database, state folder, disk, clocks, Redis, broker, inference servers, gateways, workers,
    maintenance, logs, secret and port from this host, and says how to repair each fault.  All checks run at once, and
    each ends after ten seconds, so the command works when parts are down.  Exit status 1: a check failed.
    """
    from app.cli.doctor_runner import run_all_checks
    from slotkeeper import logs

    logs.configure("CRITICAL")
    findings = []
    with console(stderr=True).status("checking ...") as status:
        for finding in run_all_checks():
            findings.append(finding)
            status.update(f"checking ... {finding.part} is done")
            if not as_json:
                _print(finding)
    level = worst_level(findings)
    if as_json:
        print_json({"level": level, "findings": [_as_json(finding) for finding in findings]})
    else:
        echo(_SUMMARIES[level])
    sys.exit(1 if level == "fail" else 0)


def _as_json(finding: Finding) -> dict[str, str]:
    return {"part": finding.part, "level": finding.level, "message": finding.message, "remedy": finding.remedy}


def _print(finding: Finding) -> None:
    echo(f"{_MARKS[finding.level]}  {finding.part:<12} {finding.message}")
    if finding.remedy:
        echo(f"{'':<18}{finding.remedy}")


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
        "yes" if process["alive"] else f"silent for {process['silent_s']:.0f} s",
        "-" if process["runs"] is None else f"{process['runs']} of {process['capacity']}",
        "-" if canary_ms is None else f"{canary_ms:.1f} ms, {process['canary_age_s']:.0f} s ago",
    )


@click.command()
@click.option("--actor", metavar="NAME", help="Only acts of this actor: the name of a key.")
@click.option("--act", metavar="WORD", help="Only this act, such as server.drain.")
@click.option("--job", "job_id", metavar="ID", help="Only acts on this job.")
@click.option("--model")
@click.option("--server")
@click.option("--tenant")
@click.option("--since", metavar="TIME", help="Only acts since this time (ISO 8601 with time zone).")
@click.option("--until", metavar="TIME", help="Only acts before this time.")
@click.option(
    "--export",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all acts to this file, one JSON object per line.",
)
@limit_option
@json_option
def audit(limit: int, as_json: bool, export: Path | None, **filters: str | None) -> None:
    """List the acts of operators, the newest first.

    Shows who did what, when, from where, and to which job, server, model or tenant.

    \b
    slotkeeper audit --actor ops --since 2026-11-01T00:00:00Z
    slotkeeper audit --export acts.jsonl
    """
    max_acts = limit if export is None else _NO_LIMIT
    pages = api_client().iter_pages("/admin/audit", "acts", max_acts, **filters)
    if export is not None:
        with export.open("w", encoding="utf-8") as file:
            count = sum(file.write(json.dumps(act, ensure_ascii=False) + "\n") > 0 for act in pages)
        echo(f"{count} acts are in {export}.")
        return
    acts = list(pages)
    if as_json:
        print_json(acts)
        return
    rows = [
        (act["at"], act["actor"], act["act"], _format_target(act), act["reason"], act["interface"], act["origin"])
        for act in acts
    ]
    print_table(("at", "by", "act", "what", "reason", "interface", "from"), rows, "There are no such acts.")


def _format_target(act: dict[str, str]) -> str:
    return " ".join(act[name] for name in ("job_id", "server", "model", "tenant") if act[name])


COMMANDS = (doctor, health, processes, ledger, show_usage, watch, audit)
