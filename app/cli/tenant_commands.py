"""Commands that manage the secrets of inference servers."""

import sys

import click

from app.cli.output import api_client, json_option, path_segment, print_json, print_table
from app.terminal import echo


@click.group()
def secrets() -> None:
    """Manage keys and passwords of inference servers.

    Descriptions of servers name them as {{secret/NAME}}.  Their values are never shown.
    """


@secrets.command("set")
@click.argument("name")
@click.option(
    "--model",
    "models",
    metavar="MODEL",
    multiple=True,
    help="Model whose description may use it; repeat it for several.",
)
@click.option("--all-models", is_flag=True, help="The descriptions of all models may use it.")
@json_option
def set_secret(name: str, models: tuple[str, ...], all_models: bool, as_json: bool) -> None:
    """Set or replace a secret.

    The command prompts for the value or reads it from standard input, so that it is not in the list of processes.

    \b
    slotkeeper secrets set HF_TOKEN --model flux
    slotkeeper secrets set HF_TOKEN --model flux < token.txt
    """
    if bool(models) == all_models:
        raise click.UsageError("Say which models may use it: --model MODEL, or --all-models.")
    value = click.prompt("Value", hide_input=True) if sys.stdin.isatty() else sys.stdin.read().rstrip("\r\n")
    body = {"value": value, "models": None if all_models else list(models)}
    answer = api_client().request("PUT", f"/admin/secrets/{path_segment(name)}", body=body)
    if as_json:
        print_json(answer)
    else:
        echo(f"{name} is set, for {_format_models(answer['models'])}.")


@secrets.command("list")
@json_option
def list_secrets(as_json: bool) -> None:
    """List secrets without their values."""
    answer = api_client().get("/admin/secrets")
    if as_json:
        print_json(answer)
        return
    rows = [
        (secret["secret"], _format_models(secret["models"]), secret["set_at"], secret["set_by"])
        for secret in answer["secrets"]
    ]
    print_table(("secret", "models", "set at", "set by"), rows, "There are no secrets.")


@secrets.command("rm")
@click.argument("name")
def remove_secret(name: str) -> None:
    """Remove a secret that no description uses."""
    api_client().request("DELETE", f"/admin/secrets/{path_segment(name)}")
    echo(f"{name} is removed.")


def _format_models(models: list[str] | None) -> str:
    return "all models" if models is None else ", ".join(models)


COMMANDS = (secrets,)
