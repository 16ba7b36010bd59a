"""Commands for operators: dead jobs, servers, models, the ledger and the live view."""

import sys
from typing import Any

import click

from app.cli import removal, state_commands
from app.cli.arguments import read_attributes
from app.cli.output import (
    api_client,
    display,
    json_option,
    limit_option,
    path_segment,
    print_fields,
    print_json,
    print_table,
    read_json,
    read_setting,
)
from app.cli.submit_commands import print_attempts, print_job, print_jobs
from app.terminal import console, echo, escape_line
from slotkeeper.client_errors import ApiError, ApiUnreachable

_WATCH_JOBS = 12
# Fields that _print_model prints as sentences, or that the configuration contains.
_HIDDEN_MODEL_FIELDS = ("load", "longest_overtaking_s", "longest_wait", "model_type", "removal", "work_s")


@click.group()
def dlq() -> None:
    """List, retry and delete dead jobs.

    A job is dead when it has used up its retries, or when workers died while they ran it.
    """


@dlq.command("list")
@click.option("--model")
@limit_option
@json_option
def list_dead(model: str | None, limit: int, as_json: bool) -> None:
    """List dead jobs."""
    print_jobs(list(api_client().iter_pages("/admin/dlq", "jobs", limit, model=model)), as_json)


@dlq.command("show")
@click.argument("job_id", metavar="ID")
@json_option
def show_dead(job_id: str, as_json: bool) -> None:
    """Show a dead job with all of its attempts."""
    api = api_client()
    job = api.get(f"/queue/jobs/{path_segment(job_id)}")
    attempts = api.get(f"/queue/jobs/{path_segment(job_id)}/attempts")["attempts"]
    if as_json:
        print_json({**job, "attempts": attempts})
        return
    print_job(job)
    print_attempts(attempts)


@dlq.command("retry")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
def retry_dead(job_ids: tuple[str, ...]) -> None:
    """Queue dead jobs again, with all retries available."""
    for job_id in job_ids:
        api_client().post(f"/admin/dlq/{path_segment(job_id)}/retry")
        echo(f"{job_id}  queued")


@dlq.command("retry-all")
@click.option("--model", help="Only jobs of this model.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def retry_all_dead(model: str | None, yes: bool) -> None:
    """Queue all dead jobs again."""
    if not yes:
        click.confirm(f"Queue all dead jobs{f' of {model}' if model else ''} again?", abort=True)
    api, retried, left_out, more = api_client(), 0, 0, True
    with console(stderr=True).status("") as status:
        while more:
            answer = api.request("POST", "/admin/dlq/retry-all", params={"model": model})
            retried, more, left_out = retried + answer["retried"], answer["more"], answer["left_out"]
            status.update(f"{retried} jobs ...")
    echo(f"{retried} jobs are queued again.")
    if left_out:
        count = f"{left_out} or more" if left_out >= 1000 else left_out
        echo(f"Still dead, because their models were removed: {count}.  Register the models again, or delete the jobs.")


@dlq.command("delete")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
def delete_dead(job_ids: tuple[str, ...]) -> None:
    """Delete dead jobs permanently."""
    for job_id in job_ids:
        api_client().request("DELETE", f"/admin/dlq/{path_segment(job_id)}")
        echo(f"{job_id}  deleted")


@click.group()
def servers() -> None:
    """Manage inference servers and their slots."""


@servers.command("list")
@json_option
def list_servers(as_json: bool) -> None:
    """List servers and the slots of each fleet."""
    answer = api_client().get("/admin/servers")
    if as_json:
        print_json(answer)
        return
    _print_servers(answer["servers"])
    if answer["fleets"]:
        _print_fleets(answer["fleets"])


def _print_servers(listed: list[dict[str, Any]]) -> None:
    rows = (
        (
            server["server"],
            server["state"],
            server["slots"],
            _format_status(server),
            model,
            endpoint,
            _format_attributes(server["attributes"]),
        )
        for server in listed
        for model, endpoint in (server["models"] or {"-": "-"}).items()
    )
    titles = ("server", "state", "slots", "now", "model", "endpoint", "attributes")
    empty = "There are no servers.  Register one with: slotkeeper servers register MODEL SERVER URL"
    print_table(titles, rows, empty)


def _format_status(server: dict[str, Any]) -> str:
    """Return why a server gets no jobs at the moment, or fewer; "ok": it can run jobs on all slots."""
    status, quarantined = server["status"], len(server["quarantined"])
    if status is None:
        return "-"
    parts = []
    if status["breaker"] != "closed":
        parts.append(f"breaker {status['breaker']} ({status['breaker_why']}) until {status['breaker_until']}")
    if status["cooling"]:
        parts.append(f"{status['cooling']} in cooldown until {status['cooldown_until']}")
    if quarantined:
        parts.append(f"{quarantined} quarantined")
    if status["away_since"]:
        parts.append(f"away since {status['away_since']}")
    if status.get("silent_since"):
        parts.append(f"silent since {status['silent_since']}")
    if parts and server["running"]:
        parts.append(f"{server['running']} running")
    return ", ".join(parts) or server["blocked_by"] or "ok"


def _format_attributes(attributes: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={','.join(map(str, value)) if isinstance(value, list) else display(value)}"
        for name, value in attributes.items()
    )


def _print_fleets(fleets: list[dict[str, Any]]) -> None:
    names = ("fleet", "waiting", "taken", "free", "cooling")
    print_table(names, ([fleet[name] for name in names] for fleet in fleets), "")


@servers.command("show")
@click.argument("server")
@json_option
def show_server(server: str, as_json: bool) -> None:
    """Show the state and the scores of a server.

    Of the servers with a free slot, the one with the lowest total score runs the next job.
    """
    shown = api_client().get(f"/admin/servers/{path_segment(server)}")
    if as_json:
        print_json(shown)
        return
    status = shown.pop("status")
    shown["attributes"] = _format_attributes(shown["attributes"]) or None
    print_fields({**shown, **(status or {})}, ("models", "scores", "quarantined"))
    for slot in shown["quarantined"]:
        echo(escape_line(slot["sentence"]))
    if status is None:
        echo("Its breaker, cooldowns and scores are unknown, because Redis does not answer.")
        return
    parts = ("load", "failures", "slowness", "swap", "silence", "total")
    rows = [
        (model, endpoint, *(_score(status["scores"], model, part) for part in parts))
        for model, endpoint in shown["models"].items()
    ]
    print_table(("model", "endpoint", *parts), rows, "It serves no model.")


def _score(scores: dict[str, Any], model: str, part: str) -> str | None:
    """Return one part of the score of a model; None: the server has no score for it."""
    return f"{scores[model][part]:.3f}" if part in scores.get(model, ()) else None


@servers.command("release")
@click.argument("server")
@click.option("--slot", metavar="SLOT", help="One slot, such as gpu1-slot0.  [default: all quarantined]")
@json_option
def release_server(server: str, slot: str | None, as_json: bool) -> None:
    """Release the quarantined slots of a server, and runs that wait for it.

    Slotkeeper quarantines a slot while its server may still run a job that has ended in Slotkeeper.  After a worker has
    stopped, a run waits in its slot while its server may still be running the first request.  Release them only if you
    know that the server does not run these jobs, for example because its process has ended.
    """
    answer = api_client().post(f"/admin/servers/{path_segment(server)}/release", {"slot": slot})
    if as_json:
        print_json(answer)
    else:
        echo(f"The quarantined slots of {escape_line(server)}, and runs that waited for it, are released.")


@servers.command("reset")
@click.argument("server")
@json_option
def reset_server(server: str, as_json: bool) -> None:
    """Close the breaker of a server and end its cooldowns.

    Its failures so far no longer count.  Use it after the server has been repaired.
    """
    answer = api_client().post(f"/admin/servers/{path_segment(server)}/reset")
    if as_json:
        print_json(answer)
        return
    echo(escape_line(f"{server} is {answer['state']}; {_format_status(answer)}."))


@servers.command("register")
@click.argument("model")
@click.argument("server")
@click.argument("endpoint")
@click.option(
    "--slots",
    type=click.IntRange(1, 1024),
    help="Jobs that the server runs at the same time.  [default: 1, for a new server]",
)
@click.option(
    "--attribute",
    "attributes",
    metavar="NAME=VALUE",
    multiple=True,
    help="For constraints of jobs; repeat it for several.",
)
@click.option(
    "--weight",
    type=click.FloatRange(0, 1000, min_open=True),
    help="Servers with a higher weight are chosen more often.  [default: 1]",
)
@click.option("--model-version", metavar="TEXT", help="Version of the model on this server.")
@click.option("--runtime", metavar="TEXT", help="Software that runs the model on this server.")
@click.option("--preset", metavar="NAME", help="Preset of this server, if the model's configuration names none.")
@click.option("--description", metavar="JSON", help="The server's API for this model, as JSON or @FILE.")
@json_option
def register_server(
    model: str,
    server: str,
    endpoint: str,
    attributes: tuple[str, ...],
    description: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Add a server, or add a model to a server.

    Slots, attributes, weight and other options that you leave out stay as they are.

    \b
    slotkeeper servers register zimg zimg-api4 http://10.0.0.4:9001/generate --slots 2
    slotkeeper servers register ... --attribute gpu=A100 --attribute memory=80 --weight 2
    """
    body: dict[str, Any] = {"model": model, "server": server, "endpoint": endpoint}
    body |= {name: value for name, value in options.items() if value is not None}
    if description is not None:
        body["description"] = read_json(description, "--description")
    if attributes:
        body["attributes"] = read_attributes(attributes)
    answer = api_client().post("/admin/register", body)
    if as_json:
        print_json(answer)
    else:
        slots = answer["slots"]
        echo(escape_line(f"{server} serves {model} on {slots} slot{'s' * (slots != 1)}."))


@servers.command("remove")
@click.argument("server")
@click.option("--drain", is_flag=True, help="Start no new jobs on it, and remove it when its jobs have ended.")
@click.option(
    "--force", is_flag=True, help="Remove it now; its jobs run again on other servers, and no retry is counted."
)
@json_option
def remove_server(server: str, drain: bool, force: bool, as_json: bool) -> None:
    """Remove a server.  Its models stay."""
    params = {name: "true" for name, is_set in (("drain", drain), ("force", force)) if is_set}
    removal.print_removal(removal.remove("servers", server, params), as_json)


servers.add_command(removal.keep_command("server"))


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
        remaining = removal.format_counts(state["removal"]["remaining"])
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

    A value is JSON; a word without quotes is a string.

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
    removal.print_removal(removal.remove("models", model, params), as_json)


models.add_command(removal.keep_command("model"))


@click.command()
@json_option
def ledger(as_json: bool) -> None:
    """Count all accepted jobs and check that none is missing.

    Exit status 1: the counts of the states do not add up to the accepted jobs.
    """
    answer = api_client().get("/admin/ledger")
    if as_json:
        print_json(answer)
    else:
        rows = [(state, count, answer["purged"].get(state, 0)) for state, count in answer["by_state"].items()]
        print_table(("state", "jobs", "deleted"), rows, "")
        verdict = "each has a state" if answer["balanced"] else "BUT THE COUNTS OF THE STATES DO NOT ADD UP TO THIS"
        echo(f"{answer['accepted']} jobs were accepted; {verdict}.")
        if any(answer["purged"].values()):
            echo("Deleted: after their retention, or dead jobs that an operator has deleted.")
    if not answer["balanced"]:
        sys.exit(1)


@click.command()
@click.option(
    "--every", default=1.0, show_default=True, type=click.FloatRange(0.2, 60), help="Seconds between updates."
)
def watch(every: float) -> None:
    """Show queues, slots and newest jobs live, until Ctrl-C."""
    import time

    from rich.live import Live

    api = api_client()
    screen = console()
    view = _render_view(api)  # Before the live view starts, so that an error is printed in the usual way.
    with Live(view, console=screen, screen=screen.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                live.update(view, refresh=True)
                time.sleep(every)
                try:
                    view = _render_view(api)
                except (ApiError, ApiUnreachable) as error:  # for example while the API restarts
                    view = error.message
        except KeyboardInterrupt:
            return


def _render_view(api: Any) -> Any:
    """Return the live view: totals, fleets and newest jobs, as a rich renderable."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table

    from app.cli.output import age

    def new_table(title: str, *names: str) -> Table:
        table = Table(*names, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.columns[0].no_wrap = True
        return table

    fleets = new_table("Fleets", "fleet", "waiting", "taken", "free", "cooling", "servers")
    answer = api.get("/admin/servers")
    for fleet in answer["fleets"] or []:
        names = [f"{s['server']} ({s['state']})" for s in answer["servers"] if s["fleet"] == fleet["fleet"]]
        counts = [display(fleet[name]) for name in ("fleet", "waiting", "taken", "free", "cooling")]
        fleets.add_row(*map(escape_line, [*counts, ", ".join(names)]))
    newest = new_table("Newest jobs", "job", "model", "status", "priority", "attempts", "slot", "age")
    for job in api.get("/queue/jobs", limit=_WATCH_JOBS)["jobs"]:
        values = (job["job_id"], job["model"], job["status"], job["priority"], job["attempts"], job["slot"])
        newest.add_row(*(escape_line(display(value)) for value in values), age(job["created_at"]))
    states = api.get("/admin/ledger")["by_state"]
    summary = "   ".join(f"{state} {count}" for state, count in states.items() if count) or "no jobs yet"
    return Group(f"{api.url}   {summary}\n", fleets, newest)


state_commands.add_state_commands(servers, "server")
state_commands.add_state_commands(models, "model")

COMMANDS = (dlq, servers, models, ledger, watch)
