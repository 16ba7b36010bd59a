"""The commands `slotkeeper agent …`, also `python -m slotkeeper.agent`."""

import logging
import os
import socket
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click

from slotkeeper.agent.config import AgentConfig, InvalidConfig, read_config
from slotkeeper.agent.owner_controls import OwnerControls

_TIMEOUT_S = 30

_config_option = click.option(
    "--config",
    "path",
    default="agent.toml",
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="What the node offers.",
)


@click.group("agent")
def main() -> None:
    """Run a node: connect to a gateway from behind NAT, run jobs, and sign their results."""


@main.command("enroll")
@click.argument("api_url")
@click.option("--name", default=socket.gethostname, help="Of the node.  [default: the host's name]")
@click.option("--token", envvar="SLOTKEEPER_NODE_TOKEN", help="Asked for if it is not given.")
@click.option("--ca", type=click.Path(exists=True, dir_okay=False), help="Certificate authority of the API, as PEM.")
@_config_option
def enroll_command(api_url: str, name: str, token: str | None, ca: str | None, path: Path) -> None:
    """Enrol this machine as a node, with a token that an operator has made.

    API_URL: of the REST API.  The key is made here, and never leaves the machine.
    """
    import requests  # Here and below, so that `slotkeeper --help` is quick.

    from slotkeeper.agent.identity import enroll

    config = _read(path)
    token = token or click.prompt("Token", hide_input=True)

    def post(body: dict[str, str]) -> dict[str, Any]:
        try:
            response = requests.post(
                f"{api_url.rstrip('/')}/nodes/enroll", json=body, timeout=_TIMEOUT_S, verify=ca or True
            )
            answer = response.json()
        except (requests.RequestException, ValueError) as error:
            raise click.ClickException(f"{api_url} does not answer as the API does: {error}") from None
        if response.status_code != 201:
            raise click.ClickException(str(answer.get("detail", answer)))
        return dict(answer)

    try:
        identity = enroll(config.state_dir, name, token.strip(), post)
    except (InvalidConfig, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{identity.name} is enrolled; start it with: slotkeeper agent run")


@main.command("run")
@click.option("--grace", default=10.0, show_default=True, help="Seconds that runs get when the agent is stopped.")
@click.option("--debug", is_flag=True, help="Log errors of functions in full; their texts may hold payloads.")
@_config_option
def run_command(grace: float, debug: bool, path: Path) -> None:
    """Connect, and run jobs until SIGTERM or Ctrl-C.

    Exit status: 2 wrong configuration, 3 the node was revoked.
    """
    from slotkeeper.agent.agent import Agent, Stopped, run_until_signaled
    from slotkeeper.agent.identity import load_identity
    from slotkeeper.agent.run_journal import JournalFailed

    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("websockets").setLevel(logging.ERROR)
    config = _read(path)
    try:
        agent = Agent(config, load_identity(config.state_dir), grace_s=grace)
    except (InvalidConfig, OSError, JournalFailed) as error:
        raise click.UsageError(str(error)) from None
    try:
        run_until_signaled(agent)
    except Stopped as stopped:
        click.echo(f"Error: {stopped}", err=True)
        sys.stdout.flush()
        os._exit(stopped.status)
    logging.shutdown()
    os._exit(0)  # A normal exit would wait for functions that do not end.


@main.command("rotate")
@_config_option
def rotate_command(path: Path) -> None:
    """Replace the key of the node.

    A running agent does so within seconds; the old key signs nothing any more then.
    """
    from slotkeeper.agent.identity import make_new_key

    try:
        key_id = make_new_key(_read(path).state_dir)
    except (InvalidConfig, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"The key {key_id} is used as soon as the gateway has accepted it.")


@main.command("pause")
@click.option("--until", help="A time of day, such as 18:00.  [default: until `resume`]")
@click.option("--reason", default="", help="Shown to operators.")
@_config_option
def pause_command(until: str | None, reason: str, path: Path) -> None:
    """Take no more jobs; those that run go on."""
    until_s = None
    if until is not None:
        try:
            at = datetime.combine(datetime.now().date(), datetime.strptime(until, "%H:%M").time())
        except ValueError:
            raise click.UsageError("--until: give a time of day, such as 18:00") from None
        until_s = (at if at.timestamp() > time.time() else at + timedelta(days=1)).timestamp()
    _controls(_read(path)).pause(reason, until_s)
    click.echo("Paused; a running agent tells the gateway within a second.")


@main.command("resume")
@_config_option
def resume_command(path: Path) -> None:
    """Take jobs again."""
    _controls(_read(path)).resume()
    click.echo("Resumed.")


@main.command("status")
@_config_option
def status_command(path: Path) -> None:
    """Show who the node is, and whether its owner lets jobs in now."""
    from slotkeeper.agent.identity import load_identity

    config = _read(path)
    try:
        identity = load_identity(config.state_dir)
    except InvalidConfig as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{identity.name} ({identity.id}), key {identity.key_id}, gateway {config.gateway}")
    why_not = _controls(config).why_not()
    click.echo(f"Takes no jobs: {why_not}." if why_not else "Takes jobs while it is connected.")


def _controls(config: AgentConfig) -> OwnerControls:
    config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return OwnerControls(config.state_dir, config.hours)


def _read(path: Path) -> AgentConfig:
    try:
        return read_config(path)
    except InvalidConfig as error:
        raise click.UsageError(str(error)) from None


if __name__ == "__main__":
    main(prog_name="python -m slotkeeper.agent")
