"""The command `slotkeeper conform`."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
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
@click.option("--node", metavar="NAME", help="Check a node, through its gateway, from a machine of the installation.")
@click.option("--model", default="gated", show_default=True, help="The model of the node that wraps the test model.")
@click.option(
    "--mode", type=click.Choice(("sync", "async", "stream")), help="How the server answers.  [default: detected]"
)
@click.option("--endpoint", default="/generate", show_default=True, help="Path of the model.")
@click.option(
    "--direct-queue", default=10, show_default=True, type=click.IntRange(0, 1000), help="Direct calls that may wait."
)
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(ABILITIES),
    help="Skip the checks of this ability; repeat it for several.",
)
@click.option("--only", multiple=True, metavar="NAME", help="Run only this check; repeat it for several.")
@click.option("--restart", metavar="COMMAND", help="A shell command that kills the server and starts it again.")
@click.option("--gate-host", default="127.0.0.1", show_default=True, help="Address of this machine for the server.")
@json_option
def conform(
    url: str | None,
    node: str | None,
    model: str,
    mode: str | None,
    endpoint: str,
    direct_queue: int,
    without: tuple[str, ...],
    only: tuple[str, ...],
    restart: str | None,
    gate_host: str,
    as_json: bool,
) -> None:
    """Check whether a server keeps the slot protocol.

    docs/reference/slot-protocol.md lists the checks.  The server must be idle, must serve no other client during the
    checks, and must wrap the model in slotkeeper/serve/gated.py, which ends runs on request.  Without URL the command
    checks the reference server, which passes all checks.  Exit status 1: a check failed; 2: the checks could not run.

    \b
    slotkeeper serve slotkeeper.serve.gated:model --slots 2 --port 9001
    slotkeeper conform http://127.0.0.1:9001
    slotkeeper conform --node attic
    """
    from slotkeeper.conform.check_runner import CannotTest
    from slotkeeper.conform.check_runner import conform as run_checks

    if url is not None and node is not None:
        raise click.UsageError("Give a URL or --node.")
    names, run_restart = _check_names(only), partial(_run_command, restart) if restart else None
    started = (
        _started_reference(mode)
        if url is None and node is None
        else nullcontext(_find_server(url, node, model, mode, endpoint, direct_queue, frozenset(without), run_restart))
    )
    with started as server:
        try:
            results = []
            for result in run_checks(server, lambda check: not names or check.name in names, gate_host):
                results.append(result)
                if not as_json and sys.stderr.isatty():
                    echo(f"{result.check.name}  {result.ended}", err=True)
        except CannotTest as error:
            echo(escape_line(f"The server cannot be checked: {error}."), err=True)
            sys.exit(2)
    _report(results, as_json)


def _check_names(only: tuple[str, ...]) -> frozenset[str]:
    """Return the names of checks as a set.  Raises UsageError for an unknown name."""
    from slotkeeper.conform.protocol_checks import CHECKS

    unknown = sorted(set(only) - {check.name for check in CHECKS})
    if unknown:
        raise click.UsageError(f"There is no check {unknown[0]!r}; docs/reference/slot-protocol.md lists the checks.")
    return frozenset(only)


@contextmanager
def _started_reference(mode: str | None) -> "Iterator[ServerUnderTest]":
    """Start the reference server, and yield it."""
    from slotkeeper.conform.reference import GATED, started

    with started(GATED, "--slots", "2", *(["--async"] if mode == "async" else [])) as process:
        yield process.served


def _find_server(
    url: str | None,
    node: str | None,
    model: str,
    mode: str | None,
    endpoint: str,
    direct_queue: int,
    without: frozenset[str],
    restart: Callable[[], None] | None,
) -> "ServerUnderTest":
    """Return the server at the URL, or the node through its gateway.  Raises as _address_of_node."""
    from slotkeeper.conform.check_context import ServerUnderTest

    headers: dict[str, str] = {}
    if node is not None:  # It takes jobs of the dispatcher alone, and answers with a stream.
        url, headers = _address_of_node(node)
        headers["X-Model"] = model
        mode, endpoint, without = "stream", "/run", without | {"direct"}
    return ServerUnderTest((url or "").rstrip("/"), mode or "", endpoint, direct_queue, without, restart, headers)


def _address_of_node(name: str) -> tuple[str, dict[str, str]]:
    """Return the URL of a node at its gateway, and the headers with which that is used.

    Raises NotFound: there is no such node; ClickException: it is not connected.
    """
    from migrations.migrate import check
    from tasks.node_addresses import gateway_headers, node_addresses
    from tasks.services import database, nodes

    if problem := check(database().url):
        raise click.ClickException(problem)
    node = nodes().get(name)
    gateway = asyncio.run(node_addresses().resolve(node.id))
    if gateway is None or not gateway.number:
        raise click.ClickException(f"Node {name!r} is not connected: start its agent with `slotkeeper agent run`.")
    return f"{gateway.endpoint.url}/n/{node.id}/0", gateway_headers()


def _run_command(command: str) -> None:
    subprocess.run(command, shell=True, check=False, stdout=sys.stderr)


def _report(results: "list[CheckResult]", as_json: bool) -> None:
    """Print the results.  Exits with status 1 if a check failed."""
    counts = {word: sum(result.ended == word for result in results) for word in ("passed", "failed", "skipped")}
    if as_json:
        checks = [
            {
                "check": result.check.name,
                "section": result.check.section,
                "level": result.check.level,
                "says": result.check.says,
                "ended": result.ended,
                "why": result.why or None,
            }
            for result in results
        ]
        print_json({"counts": counts, "checks": checks})
    else:
        rows = [
            (result.check.name, result.check.section, result.check.level, result.ended, result.why or result.check.says)
            for result in results
        ]
        print_table(("check", "section", "level", "", ""), rows, "No check ran.")
        echo(", ".join(f"{count} {word}" for word, count in counts.items()) + ".")
    if counts["failed"]:
        sys.exit(1)
