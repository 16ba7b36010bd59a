"""`slotkeeper doctor`: what is wrong with this installation, and what to do about it."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from app.cli.common import json_option, print_json
from app.terminal import console, say

if TYPE_CHECKING:
    from app.cli.checkup import Finding

_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Look at every part of this installation, from this host, and say what to do.

    Settings, database, disk, Redis, broker, inference servers, workers, maintenance, secret, port.  Works when they
    are down: no part is waited for longer than ten seconds, and all are asked at once.  Exit status: 1 if anything
    fails.
    """
    from app.cli import checkup
    from slotkeeper import logs

    logs.configure("CRITICAL")
    found = []
    with console(stderr=True).status("asking ...") as status:
        for finding in checkup.examine(checkup.all_checks()):
            found.append(finding)
            status.update(f"asking ... {finding.part} has answered")
            if not as_json:
                _print(finding)
    level = checkup.worst(found)
    if as_json:
        print_json({"level": level, "findings": [asdict(it) for it in found]})
    else:
        say({"ok": "All is well.", "warn": "It works; see the warnings.", "fail": "Something does not work."}[level])
    sys.exit(1 if level == "fail" else 0)


def _print(finding: "Finding") -> None:
    say(f"{_MARKS[finding.level]}  {finding.part:<12} {finding.said}")
    if finding.remedy:
        say(f"{'':<18}{finding.remedy}")


COMMANDS = (doctor,)
