"""Commands that show presets, probe an address, and check a server."""

import sys
from typing import Any

import click

from app.cli.output import api_client, json_option, path_segment, print_fields, print_json, print_table, read_json
from app.cli.server_commands import servers
from app.terminal import echo, escape_line, safe_json


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
        print_table(("preset", "", "checked", "servers"), rows, "There are no presets.")
        for model in answer["behind"]:
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
    return "/MODEL" in (result["endpoint"] or "")


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


COMMANDS = (presets,)
