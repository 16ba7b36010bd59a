"""Commands for inference servers and their presets."""

import sys
from typing import Any

import click

from app.cli.arguments import read_attributes, read_json
from app.cli.output import (
    api_client,
    display,
    json_option,
    path_segment,
    print_fields,
    print_json,
    print_table,
)
from app.cli.state_commands import add_state_commands, keep_command, print_removal, remove
from app.terminal import echo, escape_line, safe_json


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
            model,
            server["state"],
            server["slots"],
            _format_status(server),
            endpoint,
            _format_attributes(server["attributes"]),
        )
        for server in listed
        for model, endpoint in (server["models"] or {"-": "-"}).items()
    )
    titles = ("server", "model", "state", "slots", "now", "endpoint", "attributes")
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
    api = api_client()
    answer = api.post("/admin/register", body)
    if as_json:
        print_json(answer)
        return
    slots = answer["slots"]
    echo(escape_line(f"{server} serves {model} on {slots} slot{'s' * (slots != 1)}."))
    reasons = api.get(f"/admin/servers/{path_segment(server)}/check")["reasons"]
    if blocked := "; ".join(reason["sentence"] for reason in reasons if reason["code"] != "nothing_waits"):
        echo(escape_line(f"It gets no jobs now: {blocked}."), err=True)


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
    print_removal(remove("servers", server, params), as_json)


@click.command()
@click.argument("name", required=False)
@json_option
def presets(name: str | None, as_json: bool) -> None:
    """List the presets of inference servers, or show one.

    A preset describes the API of one kind of server, such as cog.

    \b
    slotkeeper presets cog
    slotkeeper models configure flux preset=cog
    """
    answer = api_client().get("/admin/presets" if name is None else f"/admin/presets/{path_segment(name)}")
    if as_json:
        print_json(answer)
    elif name is None:
        rows = ((row["name"], row["title"], row["evidence"], row["servers"]) for row in answer["presets"])
        print_table(("preset", "kind of server", "checked", "servers"), rows, "There are no presets.")
        for model in answer["outdated"]:
            echo(f"Model {escape_line(model['model'])} uses an older version of {model['preset']}; update it with:")
            echo(f"  slotkeeper models configure {path_segment(model['model'])} preset={model['preset']}")
    else:
        _print_preset(answer)


def _print_preset(preset: dict[str, Any]) -> None:
    print_fields({key: preset[key] for key in ("name", "title", "servers", "evidence", "checked")})
    for note in preset["notes"]:
        echo(f"- {escape_line(note)}")
    echo()
    echo(safe_json(preset["description"], indent=2))
    echo()
    _print_commands("MODEL", "SERVER", preset["name"], preset["endpoint"], preset["slots"])
    echo(f"slotkeeper submit MODEL {_quoted(safe_json(preset['payload']))}")


def _print_commands(model: str, server: str, preset: str, endpoint: str, slots: int) -> None:
    """Print the commands that register a server."""
    echo(f"slotkeeper models configure {model} preset={preset}")
    echo(f"slotkeeper servers register {model} {server} {_quoted(endpoint)} --slots {slots}")


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)


@servers.command("probe")
@click.argument("url")
@click.option("--preset", metavar="NAME", help="Use this preset instead of the detected one.")
@click.option("--payload", metavar="JSON", help="Run a job on the server: JSON, @FILE, or - for standard input.")
@click.option("--model", help="The model whose secrets may be sent to the server.")
@click.option(
    "--patience",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0, 25, min_open=True),
    help="Time limit in seconds.",
)
@json_option
def probe(url: str, preset: str | None, payload: str | None, model: str | None, patience: float, as_json: bool) -> None:
    """Detect which kind of inference server answers at URL.

    With --payload, also runs a job on the server.  Registers nothing.  Shows each request with the rule that classified
    the response, and ends with the commands that register the server.  Exit status 1: no server answers, the job
    did not complete, or the server does not say which models it has.

    \b
    slotkeeper servers probe http://10.0.0.4:5000 --payload '{"prompt": "a cat"}'
    """
    body: dict[str, Any] = {"url": url, "preset": preset, "model": model, "patience": patience}
    body = {key: value for key, value in body.items() if value is not None}
    if payload is not None:
        body["payload"] = read_json(payload, "payload")
    result = api_client().post("/admin/servers/probe", body)
    if as_json:
        print_json(result)
    else:
        _print_probe(result, model or "MODEL")
    if not result["reachable"] or _lacks_name(result) or (result["outcome"] or {"kind": "done"})["kind"] != "done":
        sys.exit(1)


def _print_probe(result: dict[str, Any], model: str) -> None:
    for exchange in result["exchanges"]:
        _print_exchange(exchange)
    if not result["reachable"]:
        echo("No server answers at this URL; check that it runs and that the host of the API can reach it.")
        return
    for match in result["candidates"]:
        echo(escape_line(f"{match['preset']}: {match['because']} (weight {match['weight']})"))
    if not result["candidates"]:
        echo("No preset matches.  If the server answers a POST with the result, use --preset generic-sync.")
    if result["health"]:
        echo(escape_line(f"health: {safe_json(_drop_empty(result['health']))}"))
    if result["outcome"]:
        echo(escape_line(f"job: {safe_json(result['outcome'])}"))
    if _lacks_name(result):
        echo()
        echo(
            "The server does not say which models it has.  Put the model's name in the place of MODEL, and probe again:"
        )
        echo(escape_line(f"slotkeeper servers probe {result['endpoint']}"))
    elif (result["outcome"] or {"kind": "done"})["kind"] == "done":
        echo()
        _print_commands(model, "SERVER", result["preset"], result["endpoint"], 1)


def _lacks_name(result: dict[str, Any]) -> bool:
    """Return whether the endpoint has the placeholder of a model's name that the server did not report."""
    return "MODEL" in (result["endpoint"] or "").split("/")


def _drop_empty(health: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in health.items() if value not in (None, "", [])}


def _print_exchange(exchange: dict[str, Any]) -> None:
    response = f"{exchange['status']} {exchange['answer']}" if exchange["status"] is not None else exchange["answer"]
    echo(escape_line(f"{exchange['step']}  {exchange['request']}  {exchange['took_ms']} ms  ->  {response}"))
    if exchange["rule"]:
        echo(escape_line(f"    {exchange['means']}, by {exchange['rule']}"))


@servers.command("check")
@click.argument("server")
@json_option
def check(server: str, as_json: bool) -> None:
    """Explain why a server gets no jobs.

    Exit status 1: there is a reason other than that no job waits.
    """
    result = api_client().get(f"/admin/servers/{path_segment(server)}/check")
    if as_json:
        print_json(result)
    elif not result["reasons"]:
        echo(escape_line(result["sentence"]))
    else:
        rows = ((reason["code"], reason["until"], reason["sentence"]) for reason in result["reasons"])
        print_table(("reason", "until", ""), rows, "")
        if result["health"]:
            echo(escape_line(f"The server reports: {safe_json(_drop_empty(result['health']))}"))
    if any(reason["code"] != "nothing_waits" for reason in result["reasons"]):
        sys.exit(1)


servers.add_command(keep_command("server"))
add_state_commands(servers, "server")

COMMANDS = (servers, presets)
