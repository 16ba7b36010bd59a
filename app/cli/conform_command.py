"""The command `slotkeeper conform`."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from app.cli.output import json_option, print_json, print_table
from app.terminal import echo, escape_line
from slotkeeper.conform import ABILITIES

if TYPE_CHECKING:
    from slotkeeper.conform.check_context import ServerUnderTest
    from slotkeeper.conform.check_runner import CheckResult


@click.command()
@click.argument("url", required=False)
@click.option("--mode", type=click.Choice(("sync", "async")), help="How it answers.  [default: as it is seen to]")
@click.option("--endpoint", default="/generate", show_default=True, help="Path of the model.")
@click.option(
    "--direct-queue", default=10, show_default=True, type=click.IntRange(0, 1000), help="Calls that may wait."
)
@click.option("--without", multiple=True, type=click.Choice(ABILITIES), help="What it does not promise; repeat it.")
@click.option("--only", multiple=True, metavar="NAME", help="This check alone; repeat it.")
@click.option("--restart", metavar="COMMAND", help="A shell command that kills the server and starts it again.")
@click.option("--gate-host", default="127.0.0.1", show_default=True, help="How the server reaches this machine.")
@json_option
def conform(
    url: str | None,
    mode: str | None,
    endpoint: str,
    direct_queue: int,
    without: tuple[str, ...],
    only: tuple[str, ...],
    restart: str | None,
    gate_host: str,
    as_json: bool,
) -> None:
    """Put the server at URL to the slot protocol, clause by clause (docs/reference/slot-protocol.md).

    It must be idle, serve nobody else meanwhile, and wrap the model that slotkeeper/serve/gated.py describes: one that
    ends its runs when it is told to.  Without a URL the reference server is started and put to it, which shows what a
    server that keeps all of it looks like.  Exit status 1: a clause is not kept; 2: it could not be tried.

    \b
    slotkeeper serve slotkeeper.serve.gated:model --slots 2 --port 9001
    slotkeeper conform http://127.0.0.1:9001
    """
    from slotkeeper.conform.check_context import ServerUnderTest
    from slotkeeper.conform.check_runner import CannotTest
    from slotkeeper.conform.check_runner import conform as put

    names = _known(only)
    with _served(url, mode, endpoint, direct_queue, frozenset(without), restart, ServerUnderTest) as served:
        try:
            verdicts = []
            for verdict in put(served, lambda check: not names or check.name in names, gate_host):
                verdicts.append(verdict)
                if not as_json and sys.stderr.isatty():
                    echo(f"{verdict.check.name}  {verdict.ended}", err=True)
        except CannotTest as why:
            echo(escape_line(f"It cannot be put to the protocol: {why}."), err=True)
            sys.exit(2)
    _tell(verdicts, as_json)


def _known(only: tuple[str, ...]) -> frozenset[str]:
    from slotkeeper.conform.protocol_checks import CHECKS

    wrong = sorted(set(only) - {check.name for check in CHECKS})
    if wrong:
        raise click.UsageError(f"There is no check {wrong[0]!r}; docs/reference/slot-protocol.md names them.")
    return frozenset(only)


@contextmanager
def _served(
    url: str | None,
    mode: str | None,
    endpoint: str,
    direct_queue: int,
    without: frozenset[str],
    restart: str | None,
    of: "type[ServerUnderTest]",
) -> "Iterator[ServerUnderTest]":
    """The server that is named, or one of our own."""
    if url is None:
        from slotkeeper.conform.reference import GATED, started

        with started(GATED, "--slots", "2", *(["--async"] if mode == "async" else [])) as process:
            yield process.served
        return

    def again() -> None:
        subprocess.run(restart or "", shell=True, check=False, stdout=sys.stderr)

    yield of(url.rstrip("/"), mode or "", endpoint, direct_queue, without, again if restart else None)


def _tell(verdicts: "list[CheckResult]", as_json: bool) -> None:
    """Exit status 1 if a clause is not kept."""
    counts = {word: sum(it.ended == word for it in verdicts) for word in ("passed", "failed", "skipped")}
    if as_json:
        told = [
            {
                "check": it.check.name,
                "section": it.check.section,
                "level": it.check.level,
                "says": it.check.says,
                "ended": it.ended,
                "why": it.why or None,
            }
            for it in verdicts
        ]
        print_json({"counts": counts, "checks": told})
    else:
        shown = [
            (it.check.name, it.check.section, it.check.level, it.ended, it.why or it.check.says) for it in verdicts
        ]
        print_table(("check", "section", "level", "", ""), shown, "No check was asked for.")
        echo(", ".join(f"{count} {word}" for word, count in counts.items()) + ".")
    if counts["failed"]:
        sys.exit(1)
