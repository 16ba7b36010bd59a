"""`slotkeeper doctor`: what is wrong with this installation, and what to do about it."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from app.cli.output import json_option, print_json
from app.terminal import console, echo

if TYPE_CHECKING:
    from app.cli.doctor_checks import Finding

_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Look at every part of this installation, from this host, and say what to do.

    Settings, database, disk, Redis, broker, inference servers, workers, maintenance, secret, port.  Works when they
    are down: no part is waited for longer than ten seconds, and all are asked at once.  Exit status: 1 if anything
    fails.
    """
    from app.cli import doctor_checks
    from slotkeeper import logs

    logs.configure("CRITICAL")
    found = []
    with console(stderr=True).status("asking ...") as status:
        for finding in doctor_checks.run_checks(doctor_checks.all_checks()):
            found.append(finding)
            status.update(f"asking ... {finding.part} has answered")
            if not as_json:
                _print(finding)
    level = doctor_checks.worst_level(found)
    if as_json:
        print_json({"level": level, "findings": [asdict(it) for it in found]})
    else:
        echo({"ok": "All is well.", "warn": "It works; see the warnings.", "fail": "Something does not work."}[level])
    sys.exit(1 if level == "fail" else 0)


def _print(finding: "Finding") -> None:
    echo(f"{_MARKS[finding.level]}  {finding.part:<12} {finding.said}")
    if finding.remedy:
        echo(f"{'':<18}{finding.remedy}")


COMMANDS = (doctor,)
