"""The command that lists the acts of operators."""

import json
from pathlib import Path

import click

from app.cli.output import api_client, json_option, limit_option, print_json, print_table
from app.terminal import echo

_EVERYTHING = 1 << 40


@click.command()
@click.option("--actor", metavar="NAME", help="Who: the name of a key.")
@click.option("--act", metavar="WORD", help="What, such as server.drain.")
@click.option("--job", "job_id", metavar="ID", help="To which job.")
@click.option("--model")
@click.option("--server")
@click.option("--tenant")
@click.option("--since", metavar="TIME", help="From then on: ISO 8601 with its zone.")
@click.option("--until", metavar="TIME", help="Before then.")
@click.option("--export", type=click.Path(dir_okay=False, path_type=Path), help="Write all of them there, one a line.")
@limit_option
@json_option
def audit(limit: int, as_json: bool, export: Path | None, **wanted: str | None) -> None:
    """List the acts of operators, the newest first.

    Shows who did what, when, from where, and to which job, server, model or tenant.

    \b
    slotkeeper audit --actor ops --since 2026-11-01T00:00:00Z
    slotkeeper audit --export acts.jsonl
    """
    most = limit if export is None else _EVERYTHING
    found = api_client().iter_pages("/admin/audit", "acts", most, **wanted)
    if export is not None:
        with export.open("w", encoding="utf-8") as file:
            count = sum(file.write(json.dumps(one, ensure_ascii=False) + "\n") > 0 for one in found)
        echo(f"{count} acts are in {export}.")
        return
    acts = list(found)
    if as_json:
        print_json(acts)
        return
    rows = [
        (one["at"], one["actor"], one["interface"], one["act"], _what(one), one["reason"], one["origin"])
        for one in acts
    ]
    print_table(("at", "by", "interface", "act", "what", "reason", "from"), rows, "There are no such acts.")


def _what(one: dict[str, str]) -> str:
    return " ".join(one[name] for name in ("job_id", "server", "model", "tenant") if one[name])


COMMANDS = (audit,)
