"""Commands that manage default settings: of all models, and of each kind of model."""

from typing import Any

import click

from app.cli.output import api_client, json_option, path_segment, print_fields, print_json, print_table, read_setting
from app.terminal import echo
from slotkeeper.client_errors import ApiError


@click.group()
def defaults() -> None:
    """Manage the default settings of all models."""


@defaults.command("show")
@json_option
def show_defaults(as_json: bool) -> None:
    """Show the defaults; * marks each changed setting."""
    _print(api_client().get("/admin/defaults"), as_json)


@defaults.command("set")
@click.argument("settings", metavar="NAME=VALUE...", nargs=-1, required=True)
@json_option
def set_defaults(settings: tuple[str, ...], as_json: bool) -> None:
    """Change defaults; the others stay.

    A value is JSON; a word without quotes is a string.
    """
    _print(_change("/admin/defaults", settings), as_json)


@defaults.command("reset")
def reset_defaults() -> None:
    """Reset all defaults to the built-in values."""
    api_client().request("PUT", "/admin/defaults", body={})
    echo("All defaults have their built-in values.")


@click.group()
def kinds() -> None:
    """Manage kinds of models and their default settings.

    A kind, such as prediction or training, is a group of models with common defaults.
    """


@kinds.command("list")
@json_option
def list_kinds(as_json: bool) -> None:
    """List the kinds with their models and settings."""
    listed = api_client().get("/admin/kinds")["kinds"]
    if as_json:
        print_json(listed)
        return
    rows = [(kind["kind"], ", ".join(kind["models"]) or "-", kind["overrides"]) for kind in listed]
    print_table(("kind", "models", "settings"), rows, "There are no kinds.")


@kinds.command("show")
@click.argument("kind")
@json_option
def show_kind(kind: str, as_json: bool) -> None:
    """Show the settings of a kind; * marks each changed one."""
    _print(api_client().get(f"/admin/kinds/{path_segment(kind)}"), as_json)


@kinds.command("set")
@click.argument("kind")
@click.argument("settings", metavar="NAME=VALUE...", nargs=-1)
@json_option
def set_kind(kind: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Add a kind, or change its settings.

    \b
    slotkeeper kinds set training max_poll_time=86400 max_retries=3 policy=fair
    slotkeeper models configure my-trainer kind=training
    """
    _print(_change(f"/admin/kinds/{path_segment(kind)}", settings), as_json)


@kinds.command("rm")
@click.argument("kind")
def remove_kind(kind: str) -> None:
    """Remove a kind that no model uses."""
    api_client().request("DELETE", f"/admin/kinds/{path_segment(kind)}")
    echo(f"{kind} is removed.")


def _change(path: str, settings: tuple[str, ...]) -> Any:
    """Add the settings to the overrides at the path, and return the response."""
    api = api_client()
    try:
        before = api.get(path)["overrides"]
    except ApiError as error:
        if error.status != 404:
            raise
        before = {}
    return api.request("PUT", path, body={**before, **dict(read_setting(setting) for setting in settings)})


def _print(answer: Any, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    overrides, settings = answer["overrides"], {**answer["built_in"], **answer["overrides"]}
    print_fields({f"{name} *" if name in overrides else name: value for name, value in settings.items()})


COMMANDS = (defaults, kinds)
