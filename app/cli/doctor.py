"""`slotkeeper doctor`: find faults of this installation and say how to repair them."""

import sys
from typing import TYPE_CHECKING

import click

from app.cli.output import json_option, print_json
from app.terminal import console, echo

if TYPE_CHECKING:
    from app.cli.findings import Finding

_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
_SUMMARIES = {
    "ok": "All checks passed.",
    "warn": "No check failed; see the warnings.",
    "fail": "At least one check failed.",
}


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check every part of this installation.

    Checks settings, database, state folder, disk, Redis, broker, inference servers, workers, maintenance, logs, secret
    and port from this host, and says how to repair each fault.  All checks run at once, and each ends after ten
    seconds, so the command works when parts are down.  Exit status 1: a check failed.
    """
    from app.cli import doctor_checks
    from app.cli.findings import worst_level
    from slotkeeper import logs

    logs.configure("CRITICAL")
    findings = []
    with console(stderr=True).status("checking ...") as status:
        for finding in doctor_checks.run_checks(doctor_checks.all_checks()):
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


def _as_json(finding: "Finding") -> dict[str, str]:
    return {"part": finding.part, "level": finding.level, "said": finding.message, "remedy": finding.remedy}


def _print(finding: "Finding") -> None:
    echo(f"{_MARKS[finding.level]}  {finding.part:<12} {finding.message}")
    if finding.remedy:
        echo(f"{'':<18}{finding.remedy}")


COMMANDS = (doctor,)
