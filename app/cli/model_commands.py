"""Commands about what holds where a model says nothing: for its kind, and for all models."""

from typing import Any

import click

from app.cli.output import api_client, json_option, path_segment, print_fields, print_json, print_table, read_setting
from app.terminal import echo


@click.group()
def defaults() -> None:
    """What holds for all models that do not say otherwise."""


@defaults.command("show")
@json_option
def show_defaults(as_json: bool) -> None:
    """Show them; * marks what is not built in."""
    _print(api_client().get("/admin/defaults"), as_json)


@defaults.command("set")
@click.argument("settings", metavar="NAME=VALUE...", nargs=-1, required=True)
@json_option
def set_defaults(settings: tuple[str, ...], as_json: bool) -> None:
    """Change some; the others stay.  Values are JSON; a bare word is a text."""
    _print(_change("/admin/defaults", settings), as_json)


@defaults.command("reset")
def reset_defaults() -> None:
    """Let hold what is built in."""
    api_client().request("PUT", "/admin/defaults", body={})
    echo("What is built in holds.")


@click.group()
def kinds() -> None:
    """Kinds of models, such as prediction and training, and what holds for each."""


@kinds.command("list")
@json_option
def list_kinds(as_json: bool) -> None:
    """List them, and which models are of each."""
    found = api_client().get("/admin/kinds")["kinds"]
    if as_json:
        print_json(found)
        return
    rows = [(it["kind"], ", ".join(it["models"]) or "-", it["overrides"]) for it in found]
    print_table(("kind", "models", "says"), rows, "There are no kinds.")


@kinds.command("show")
@click.argument("kind")
@json_option
def show_kind(kind: str, as_json: bool) -> None:
    """Show what holds for its models; * marks what is not built in."""
    _print(api_client().get(f"/admin/kinds/{path_segment(kind)}"), as_json)


@kinds.command("set")
@click.argument("kind")
@click.argument("settings", metavar="NAME=VALUE...", nargs=-1)
@json_option
def set_kind(kind: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Add a kind, or change some of what holds for its models.

    \b
    slotkeeper kinds set training max_poll_time=86400 max_retries=3 policy=fair
    slotkeeper models configure my-trainer kind=training
    """
    _print(_change(f"/admin/kinds/{path_segment(kind)}", settings), as_json)


@kinds.command("rm")
@click.argument("kind")
def remove_kind(kind: str) -> None:
    """Forget a kind of which no model is any more."""
    api_client().request("DELETE", f"/admin/kinds/{path_segment(kind)}")
    echo(f"{kind} is removed.")


def _change(path: str, settings: tuple[str, ...]) -> Any:
    from slotkeeper.client import ApiError

    api = api_client()
    try:
        before = api.get(path)["overrides"]
    except ApiError as error:
        if error.status != 404:
            raise
        before = {}
    return api.request("PUT", path, body={**before, **dict(read_setting(one) for one in settings)})


def _print(it: Any, as_json: bool) -> None:
    if as_json:
        print_json(it)
        return
    own = it["overrides"]
    print_fields({f"{name} *" if name in own else name: value for name, value in {**it["built_in"], **own}.items()})


COMMANDS = (defaults, kinds)
