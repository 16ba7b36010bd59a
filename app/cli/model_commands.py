"""Commands for models, their configuration, its defaults and the kinds of models."""

from typing import Any

import click

from app.cli.arguments import read_setting
from app.cli.output import api_client, json_option, path_segment, print_fields, print_json, print_table
from app.cli.state_commands import add_state_commands, format_counts, keep_command, print_removal, remove
from app.terminal import echo, escape_line
from slotkeeper.client_errors import ApiError

# Fields that _print_model prints as sentences, or that the configuration contains.
_HIDDEN_MODEL_FIELDS = ("load", "longest_overtaking_s", "longest_wait", "model_type", "removal", "work_s")


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


@click.group()
def models() -> None:
    """Manage models and their configuration."""


@models.command("list")
@json_option
def list_models(as_json: bool) -> None:
    """List models."""
    listed = api_client().get("/admin/models")["models"]
    if as_json:
        print_json(listed)
    else:
        _print_models(listed)


def _print_models(listed: list[dict[str, Any]]) -> None:
    rows = (
        (
            *(model[name] for name in ("model", "state", "model_type", "policy", "slots", "waiting")),
            ", ".join(model["servers"]),
        )
        for model in listed
    )
    titles = ("model", "state", "type", "policy", "slots", "waiting", "servers")
    print_table(titles, rows, "There are no models.  `slotkeeper servers register` adds a model with its server.")


@models.command("show")
@click.argument("model")
@json_option
def show_model(model: str, as_json: bool) -> None:
    """Show the state and the configuration of a model.

    Also says how long jobs may wait.  A * marks each setting of the model that differs from the default.
    """
    api = api_client()
    state = api.get(f"/admin/models/{path_segment(model)}")
    configuration = api.get(f"/admin/model-configs/{path_segment(model)}")
    if as_json:
        print_json({**state, **configuration})
        return
    _print_model(state)
    overrides, settings = configuration["overrides"], configuration["config"]
    print_fields({f"{name} *" if name in overrides else name: value for name, value in settings.items()})


def _print_model(state: dict[str, Any]) -> None:
    load = state["load"] or {}
    print_fields({**state, **load, "servers": ", ".join(state["servers"])}, _HIDDEN_MODEL_FIELDS)
    if state.get("removal"):
        remaining = format_counts(state["removal"]["remaining"])
        echo(escape_line(f"The model is being removed; jobs that have not ended: {remaining}."))
    echo(state["longest_wait"])
    if load.get("work_s"):
        echo(f"The waiting jobs are about {load['work_s']:g} s of work for the slots of the model.")
    echo()


@models.command("configure")
@click.argument("model")
@click.argument("settings", metavar="NAME=VALUE...", nargs=-1, required=True)
@json_option
def configure_model(model: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Change settings of a model; the others stay.

    A value is JSON; a word without quotes is a string.  `slotkeeper models show MODEL` lists the settings, and
    docs/how-to/models.md explains them.

    \b
    slotkeeper models configure flux model_type=async poll_interval=0.5
    slotkeeper models configure flux preset=slot-protocol description=@flux.json
    """
    api, path = api_client(), f"/admin/model-configs/{path_segment(model)}"
    changes = dict(read_setting(setting) for setting in settings)
    answer = api.request("PUT", path, body={**_overrides(api, path), **changes})
    if as_json:
        print_json(answer)
        return
    print_fields({name: answer["config"].get(name) for name in changes})
    if not api.get(f"/admin/models/{path_segment(model)}")["servers"]:
        echo(f"No server serves {escape_line(model)} yet: see `slotkeeper models list`.", err=True)


def _overrides(api: Any, path: str) -> dict[str, Any]:
    """Return the settings of a model that differ from the defaults; {} for an unknown model."""
    try:
        overrides: dict[str, Any] = api.get(path)["overrides"]
    except ApiError as error:
        if error.status != 404:
            raise
        return {}
    return overrides


@models.command("reset")
@click.argument("model")
def reset_model(model: str) -> None:
    """Reset all settings of a model to their defaults."""
    api_client().request("DELETE", f"/admin/model-configs/{path_segment(model)}")
    echo(f"{model} has the default configuration.")


@models.command("remove")
@click.argument("model")
@click.option("--drain", is_flag=True, help="Accept no new jobs, and remove it when its jobs have ended.")
@json_option
def remove_model(model: str, drain: bool, as_json: bool) -> None:
    """Remove a model with its configuration and statistics.

    Its ended jobs stay readable.
    """
    params = {"drain": "true"} if drain else {}
    print_removal(remove("models", model, params), as_json)


models.add_command(keep_command("model"))
add_state_commands(models, "model")

COMMANDS = (models, defaults, kinds)
