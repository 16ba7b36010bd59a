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
        rows = ((one["name"], one["title"], one["evidence"], one["servers"]) for one in answer["presets"])
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
    the response, and ends with the commands that register the server.  Exit status 1: no server answers, or the job did
    not complete.

    \b
    slotkeeper servers probe http://10.0.0.4:5000 --payload '{"prompt": "a cat"}'
    """
    body: dict[str, Any] = {"url": url, "preset": preset, "model": model, "patience": patience}
    body = {key: value for key, value in body.items() if value is not None}
    if payload is not None:
        body["payload"] = read_json(payload, "payload")
    found = api_client().post("/admin/servers/probe", body)
    if as_json:
        print_json(found)
    else:
        _print_probe(found, model or "MODEL")
    if not found["reachable"] or (found["outcome"] or {"kind": "done"})["kind"] != "done":
        sys.exit(1)


def _print_probe(found: dict[str, Any], model: str) -> None:
    for one in found["exchanges"]:
        _print_exchange(one)
    if not found["reachable"]:
        echo("No server answers at this URL; see that it runs and that the API's host can reach it.")
        return
    for one in found["candidates"]:
        echo(escape_line(f"{one['preset']}: {one['because']} (weight {one['weight']})"))
    if not found["candidates"]:
        echo("No preset matches.  If the server answers a POST with the result, use --preset generic-sync.")
    if found["health"]:
        echo(escape_line(f"health: {safe_json(_drop_empty(found['health']))}"))
    if found["outcome"]:
        echo(escape_line(f"job: {safe_json(found['outcome'])}"))
    if (found["outcome"] or {"kind": "done"})["kind"] == "done":
        echo()
        _print_commands(model, "SERVER", found["preset"], found["endpoint"], 1)


def _drop_empty(health: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in health.items() if value not in (None, "", [])}


def _print_exchange(one: dict[str, Any]) -> None:
    answer = f"{one['status']} {one['answer']}" if one["status"] is not None else one["answer"]
    echo(escape_line(f"{one['step']}  {one['request']}  {one['took_ms']} ms  ->  {answer}"))
    if one["rule"]:
        echo(escape_line(f"    {one['means']}, by {one['rule']}"))


@servers.command("check")
@click.argument("server")
@json_option
def check(server: str, as_json: bool) -> None:
    """Explain why a server gets no jobs.

    Exit status 1: there is a reason other than that no job waits.
    """
    found = api_client().get(f"/admin/servers/{path_segment(server)}/check")
    if as_json:
        print_json(found)
    elif not found["reasons"]:
        echo(escape_line(found["sentence"]))
    else:
        rows = ((one["code"], one["until"], one["sentence"]) for one in found["reasons"])
        print_table(("reason", "until", ""), rows, "")
        if found["health"]:
            echo(escape_line(f"The server reports: {safe_json(_drop_empty(found['health']))}"))
    if any(one["code"] != "nothing_waits" for one in found["reasons"]):
        sys.exit(1)


COMMANDS = (presets,)
