"""The command that shows the audit log: the acts of operators."""

import json
from pathlib import Path

import click

from app.cli.output import api_client, json_option, limit_option, print_json, print_table
from app.terminal import echo

_NO_LIMIT = 1 << 40


@click.command()
@click.option("--actor", metavar="NAME", help="Only acts of this actor: the name of a key.")
@click.option("--act", metavar="WORD", help="Only this act, such as server.drain.")
@click.option("--job", "job_id", metavar="ID", help="Only acts on this job.")
@click.option("--model")
@click.option("--server")
@click.option("--tenant")
@click.option("--since", metavar="TIME", help="Only acts since this time (ISO 8601 with time zone).")
@click.option("--until", metavar="TIME", help="Only acts before this time.")
@click.option(
    "--export",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all acts to this file, one JSON object per line.",
)
@limit_option
@json_option
def audit(limit: int, as_json: bool, export: Path | None, **filters: str | None) -> None:
    """List the acts of operators, the newest first.

    Shows who did what, when, from where, and to which job, server, model or tenant.

    \b
    slotkeeper audit --actor ops --since 2026-11-01T00:00:00Z
    slotkeeper audit --export acts.jsonl
    """
    max_acts = limit if export is None else _NO_LIMIT
    pages = api_client().iter_pages("/admin/audit", "acts", max_acts, **filters)
    if export is not None:
        with export.open("w", encoding="utf-8") as file:
            count = sum(file.write(json.dumps(act, ensure_ascii=False) + "\n") > 0 for act in pages)
        echo(f"{count} acts are in {export}.")
        return
    acts = list(pages)
    if as_json:
        print_json(acts)
        return
    rows = [
        (act["at"], act["actor"], act["interface"], act["act"], _format_target(act), act["reason"], act["origin"])
        for act in acts
    ]
    print_table(("at", "by", "interface", "act", "what", "reason", "from"), rows, "There are no such acts.")


def _format_target(act: dict[str, str]) -> str:
    return " ".join(act[name] for name in ("job_id", "server", "model", "tenant") if act[name])


COMMANDS = (audit,)
