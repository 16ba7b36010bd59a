"""Commands about batches: jobs that were submitted together."""

from typing import Any

import click

from app.cli.output import age, api_client, json_option, path_segment, print_fields, print_json, print_table
from app.terminal import echo

_MAX_BATCHES = 50


@click.group()
def batches() -> None:
    """Show and cancel batches: jobs submitted together."""


@batches.command("list")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, _MAX_BATCHES))
@json_option
def list_batches(limit: int, as_json: bool) -> None:
    """List batches, the newest first."""
    listed = api_client().get("/queue/batches", limit=limit)["batches"]
    if as_json:
        print_json(listed)
        return
    rows = [
        (
            batch["batch"],
            batch["tenant"],
            f"{batch['ended']} of {batch['jobs']}",
            _format_counts(batch),
            age(batch["created_at"]),
        )
        for batch in listed
    ]
    print_table(("batch", "tenant", "ended", "jobs", "age"), rows, "There are no batches.")


@batches.command("show")
@click.argument("batch")
@json_option
def show_batch(batch: str, as_json: bool) -> None:
    """Show the progress of a batch.

    `slotkeeper jobs --batch BATCH` lists its jobs.
    """
    progress = api_client().get(f"/queue/batches/{path_segment(batch)}")
    if as_json:
        print_json(progress)
    else:
        print_fields(progress | {"by_state": _format_counts(progress)})


@batches.command("cancel")
@click.argument("batch")
@json_option
def cancel_batch(batch: str, as_json: bool) -> None:
    """Cancel all jobs of a batch that have not ended."""
    total: dict[str, Any] = {"batch": batch, "canceled": 0, "canceling": 0, "remaining": 1}
    while total["remaining"]:
        response = api_client().post(f"/queue/batches/{path_segment(batch)}/cancel")
        summed = {name: total[name] + response[name] for name in ("canceled", "canceling")}
        total = response | summed
        if response["remaining"]:
            echo(f"{total['canceled']} canceled, {response['remaining']} left …", err=True)
    if as_json:
        print_json(total)
    else:
        echo(f"{total['canceled']} canceled, {total['canceling']} asked to stop.")


def _format_counts(batch: dict[str, Any]) -> str:
    return ", ".join(f"{count} {state}" for state, count in batch["by_state"].items())


COMMANDS = (batches,)
