"""Commands for batches: submit a file as one, wait for it, read its results, stop it."""

import itertools
import json
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field
from hashlib import sha256
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from app.cli.arguments import BatchCommand, read_request
from app.cli.output import age, api_client, json_option, path_segment, print_fields, print_json, print_table
from app.cli.submit_commands import trace_header
from app.terminal import INTERRUPTED, console, echo, echo_json_text, escape_line
from slotkeeper.client_errors import ClientError
from slotkeeper.credit_amounts import format_credits

if TYPE_CHECKING:
    from rich.progress import Progress

    from slotkeeper.client import Batch, Client

_MAX_BATCHES = 50
_MAX_SHOWN_ERRORS = 20
_READ_AT_ONCE = 1 << 20
_WHICH_BATCH = ("key", "again")


@click.group()
def batches() -> None:
    """Submit, show and stop batches: jobs that belong together."""


@batches.command("submit", cls=BatchCommand)
@click.argument("file", type=click.File("rb"))
@click.option("--name", help="A name for people.")
@click.option("--model", help="The model of lines that name none.")
@click.option(
    "--on-error",
    type=click.Choice(["skip", "refuse"]),
    help="What becomes of a file with bad lines: skip them, or refuse all.  [default: skip]",
)
@click.option("--window", metavar="TIME", help="Time within which the batch should end, such as 24h.")
@click.option("--callback-url", metavar="URL", help="URL that receives a signed POST when all jobs have ended.")
@click.option("--key", metavar="KEY", help="Go on with the batch of this key.  [default: of file and options]")
@click.option("--again", is_flag=True, help="Submit the file once more, although it was submitted before.")
@click.option("--wait", is_flag=True, help="Wait until all jobs have ended.")
@json_option
def submit_batch(file: IO[bytes], key: str | None, again: bool, wait: bool, as_json: bool, **options: Any) -> None:
    """Submit the jobs in FILE as one batch, one JSON object in each line.

    A line has the fields of POST /queue/submit, and `custom_id`.  Options are for lines that do not have the field.
    The same command goes on where it stopped: a line is accepted only once.  Lines that cannot be accepted are printed
    with their numbers, and the others run.  If the API does not answer, the command tries again for five minutes and
    then ends with exit status 3.

    \b
    slotkeeper batches submit jobs.jsonl --model zimg --window 24h --wait
    slotkeeper batches results BATCH > results.jsonl
    """
    head = read_request(options)
    command = _command_of(click.get_current_context())
    if key is None and not again and file.seekable():
        key = _key_of(file, head)
    elif key is None:
        key = secrets.token_hex(16)
        command = f"{command} --key {key}"
    echo(f"If it is interrupted, go on with: {command}", err=True)
    run, api = _Run(), api_client()
    try:
        batch = _submit(api, file, run, key, head)
        run.received = batch["next_line"] or 0
    except ClientError as error:
        error.message = f"{error.message}\n{run.interrupted(command)}"
        raise
    except KeyboardInterrupt:
        echo(run.interrupted(command), err=True)
        sys.exit(INTERRUPTED)
    _print_errors(api, batch, run)
    if wait:
        batch = _wait(api, batch["batch"])
    if as_json:
        print_json({**batch, "known": run.known, "key": key})
    else:
        _print_submitted(batch, run)
    if batch["refused"] or (wait and not _all_completed(batch)):
        sys.exit(1)


submit_file = copy(submit_batch)
submit_file.name = "submit-file"


@dataclass
class _Run:
    """The progress of one upload.

    numbers: in the file, from 1, of each line that is not empty.  known: lines received before; received: so far.
    """

    batch: str = ""
    known: int = 0
    received: int = 0
    numbers: list[int] = field(default_factory=list)

    def note(self, batch: "Batch") -> None:
        received = batch["next_line"] or 0
        if not self.batch:
            self.batch, self.known = batch["batch"], received
        self.received = received

    def interrupted(self, command: str) -> str:
        return f"{self.received} lines were received; submit the rest with: {command}"


def _submit(api: "Client", file: IO[bytes], run: _Run, key: str, head: Mapping[str, Any]) -> "Batch":
    with _progress() as progress:
        task = progress.add_task("0 lines", total=_size(file))

        def note(batch: "Batch") -> None:
            run.note(batch)
            progress.update(task, description=f"{run.received} lines")

        lines = _lines(file, run.numbers, lambda size: progress.update(task, advance=size))
        return api.submit_batch(
            lines, idempotency_key=key, headers=trace_header(), on_chunk=note, on_pause=_print_pause, **head
        )


def _lines(file: IO[bytes], numbers: list[int], on_read: Callable[[int], object]) -> Iterator[bytes]:
    for number, line in enumerate(file, 1):
        on_read(len(line))
        if line.strip():
            numbers.append(number)
            yield line


def _key_of(file: IO[bytes], head: Mapping[str, Any]) -> str:
    """Return a key that the same file and options have again."""
    digest = sha256(json.dumps(head, sort_keys=True).encode())
    while part := file.read(_READ_AT_ONCE):
        digest.update(part)
    file.seek(0)
    return digest.hexdigest()[:32]


def _command_of(ctx: click.Context) -> str:
    """Return the command that was called, without what says which batch it is."""
    words = ["slotkeeper", *ctx.command_path.split()[1:]]
    for param in ctx.command.get_params(ctx):
        name = param.name or ""
        value = ctx.params.get(name)
        if isinstance(param, click.Argument):
            words.append(getattr(value, "name", "-").replace("<stdin>", "-"))
        elif name not in _WHICH_BATCH and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            values = [] if value is True else value if isinstance(value, tuple) else [value]
            words += (
                [param.opts[0]] if value is True else [word for one in values for word in (param.opts[0], str(one))]
            )
    return shlex.join(words)


def _print_pause(error: ClientError) -> None:
    echo(f"{error.message}  Trying again; a line is accepted only once.", err=True)


def _print_errors(api: "Client", batch: "Batch", run: _Run) -> None:
    if not batch["refused"]:
        return
    for error in itertools.islice(api.iter_batch_errors(batch["batch"]), _MAX_SHOWN_ERRORS):
        number = run.numbers[error["line"]] if error["line"] < len(run.numbers) else error["line"]
        echo(f"Line {number}: {escape_line(error['message'])}", err=True)
    if batch["refused"] > _MAX_SHOWN_ERRORS:
        echo(f"All of them: slotkeeper batches errors {batch['batch']}", err=True)


def _print_submitted(batch: "Batch", run: _Run) -> None:
    known = f", and {run.known} had been received before" if run.known else ""
    new, lines = run.received - run.known, run.received - batch["refused"]
    echo(f"Batch {batch['batch']}: {new} lines received{known}.  Jobs: {lines}.  Refused: {batch['refused']} lines.")
    if run.known and not new:
        echo("This file was submitted before; submit it once more with --again.", err=True)
    echo(f"See its progress with: slotkeeper batches show {batch['batch']}", err=True)


def _progress() -> "AbstractContextManager[Progress]":
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _size(file: IO[bytes]) -> int | None:
    """Return the size of the file in bytes; None for a pipe or a terminal."""
    import os

    try:
        return os.fstat(file.fileno()).st_size or None
    except OSError:
        return None


# -- see, wait, read ---------------------------------------------------------------------------------------------


@batches.command("list")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, _MAX_BATCHES))
@json_option
def list_batches(limit: int, as_json: bool) -> None:
    """List batches, the newest first."""
    listed = api_client().get("/batches", limit=limit)["batches"]
    if as_json:
        print_json(listed)
        return
    rows = [
        (
            batch["batch"],
            batch["name"] or "",
            batch["tenant"],
            batch["status"],
            f"{batch['ended']} of {batch['jobs']}",
            _format_counts(batch),
            age(batch["created_at"]),
        )
        for batch in listed
    ]
    print_table(("batch", "name", "tenant", "status", "ended", "jobs", "age"), rows, "There are no batches.")


@batches.command("show")
@click.argument("batch")
@json_option
def show_batch(batch: str, as_json: bool) -> None:
    """Show the progress of a batch.

    `slotkeeper jobs --batch BATCH` lists its jobs.
    """
    _print_batch(api_client().get(f"/batches/{path_segment(batch)}"), as_json)


@batches.command("cost")
@click.argument("batch")
@json_option
def show_cost(batch: str, as_json: bool) -> None:
    """Show what the jobs of a batch cost, in credits."""
    answer = api_client().get(f"/batches/{path_segment(batch)}/cost")
    if as_json:
        print_json(answer)
        return
    held, charged = format_credits(answer["held"]), format_credits(answer["charged"])
    print_fields({"charged": charged, "held": held, "slot time": f"{answer['slot_ms'] / 1000:,.1f} s"})


@batches.command("wait")
@click.argument("batch")
@json_option
def wait_for_batch(batch: str, as_json: bool) -> None:
    """Wait until all jobs of a batch have ended.

    Exit status 0: all completed, and no line was refused.
    """
    ended = _wait(api_client(), batch)
    _print_batch(dict(ended), as_json)
    if ended["refused"] or not _all_completed(ended):
        sys.exit(1)


@batches.command("results")
@click.argument("batch")
@click.option("--from", "first", default=0, show_default=True, type=click.IntRange(0), help="Number of the first line.")
@click.option("--ended", is_flag=True, help="Leave out lines whose jobs have not ended.")
def print_results(batch: str, first: int, ended: bool) -> None:
    """Print the results of a batch in the order of its lines, one JSON object for each."""
    for line in api_client().iter_result_lines(batch, first, ended=ended):
        echo_json_text(line)


@batches.command("errors")
@click.argument("batch")
@json_option
def print_line_errors(batch: str, as_json: bool) -> None:
    """Print the lines of a batch that could not be accepted, and why.  Lines are counted from 0."""
    errors = list(api_client().iter_batch_errors(batch))
    if as_json:
        print_json(errors)
        return
    rows = [(error["line"], error["custom_id"] or "", error["field"] or "", error["message"]) for error in errors]
    print_table(("line", "custom id", "field", "error"), rows, "No line was refused.")


def _wait(api: "Client", batch: str) -> "Batch":
    """Wait for a batch, and show its progress.  On Ctrl-C exit with status 130; the jobs continue."""
    with _progress() as progress:
        task = progress.add_task("ended", total=None)
        try:
            return api.wait_for_batch(
                batch, notify=lambda shown: progress.update(task, completed=shown["ended"], total=shown["jobs"])
            )
        except KeyboardInterrupt:
            echo(f"The batch continues; wait for it with: slotkeeper batches wait {batch}", err=True)
            sys.exit(INTERRUPTED)


def _print_batch(batch: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(batch)
    else:
        print_fields(batch | {"by_state": _format_counts(batch)})


def _all_completed(batch: "Batch") -> bool:
    return batch["by_state"].get("completed", 0) == batch["jobs"]


def _format_counts(batch: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {state}" for state, count in batch["by_state"].items())


# -- stop --------------------------------------------------------------------------------------------------------


@batches.command("pause")
@click.argument("batch")
def pause_batch(batch: str) -> None:
    """Start no more jobs of a batch; those that run continue."""
    api_client().post(f"/batches/{path_segment(batch)}/pause")
    echo(f"It starts no more jobs until: slotkeeper batches resume {escape_line(batch)}")


@batches.command("resume")
@click.argument("batch")
def resume_batch(batch: str) -> None:
    """Go on with a paused batch."""
    api_client().post(f"/batches/{path_segment(batch)}/resume")
    echo("It goes on.")


@batches.command("cancel")
@click.argument("batch")
@json_option
def cancel_batch(batch: str, as_json: bool) -> None:
    """Cancel all jobs of a batch that have not ended."""
    done = api_client().cancel_batch(batch, patience_s=0)
    if as_json:
        print_json(done)
    else:
        echo(f"{done['canceled']} canceled, {done['canceling']} asked to stop.")


COMMANDS = (batches, submit_file)
