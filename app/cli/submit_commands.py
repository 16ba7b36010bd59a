"""Commands that submit jobs and wait for their ends."""

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from app.cli.arguments import RequestCommand, read_json, read_request
from app.cli.output import (
    api_client,
    display,
    json_option,
    no_result,
    output_option,
    print_json,
    save_result,
    without_files,
)
from app.terminal import INTERRUPTED, console, echo, escape_line
from slotkeeper import trace_context
from slotkeeper.client_errors import ClientError

if TYPE_CHECKING:
    from slotkeeper.client import Client

Job = dict[str, Any]


@click.command(cls=RequestCommand)
@click.argument("model")
@click.argument("payload", default="{}")
@click.option(
    "--count", default=1, show_default=True, type=click.IntRange(1, 100_000), help="Number of jobs to submit."
)
@click.option("--wait", is_flag=True, help="Wait until the job ends and print the result.")
@output_option
@json_option
def submit(
    model: str, payload: str, count: int, wait: bool, output: Path | None, as_json: bool, **options: Any
) -> None:
    """Submit a job for MODEL.

    PAYLOAD is JSON, - for standard input, or @FILE.  With --wait the exit status is 0 only if all jobs completed, and 3
    if the API did not answer for too long, so that their state is unknown.  A restart of the API does not end the wait.

    \b
    slotkeeper submit zimg '{"prompt": "a sunset"}' --wait
    slotkeeper submit zimg '{"prompt": "a sunset"}' --wait --output sunset.png
    slotkeeper submit zimg --constraint gpu=A100,H100 --constraint 'memory>=40'
    """
    if output is not None and (not wait or count > 1):
        raise click.UsageError("--output saves the result of one ended job: give --wait, and leave --count out.")
    body: Job = {"model": model, "payload": read_json(payload, "PAYLOAD"), **read_request(options)}
    jobs = _submit(body, count)
    for notice in sorted({job["notice"] for job in jobs if job.get("notice")}):
        echo(notice, err=True)
    if wait:
        jobs = wait_for_jobs(api_client(), jobs)
    from slotkeeper.client import is_final

    is_saved = output is None or save_result(jobs[0], output)
    if as_json:
        print_json(jobs if count > 1 else jobs[0])
    else:
        for job in jobs:
            _print_submitted(job)
    if not is_saved:
        raise no_result(jobs[0], output)
    if any(is_final(job) and job["status"] != "completed" for job in jobs):
        sys.exit(1)


def _submit(body: Job, count: int) -> list[Job]:
    """Submit `count` jobs, each with a new idempotency key, so that a lost response can be retried."""
    from slotkeeper.client import PATIENCE_S

    api, run = api_client(), secrets.token_hex(8)

    def submit_one(n: int) -> Job:
        key, patience_s = f"{run}-{n}", 0 if count == 1 else PATIENCE_S  # A single submit fails at once.
        submitted = api.submit(
            **body, idempotency_key=key, headers=trace_header(), patience_s=patience_s, on_pause=_print_resend
        )
        return dict(submitted)

    return [submit_one(n) for n in _with_progress(range(count), count, "submitted")]


def trace_header() -> dict[str, str]:
    """Return the header with the trace that called this command, or {}."""
    traceparent = trace_context.parse_traceparent(trace_context.get_process_traceparent())
    return {} if traceparent is None else {"traceparent": traceparent}


def wait_for_jobs(api: "Client", jobs: list[Job]) -> list[Job]:
    """Wait until the jobs have ended, and return them.  On Ctrl-C exit with status 130; the jobs continue."""
    try:
        if len(jobs) == 1:
            return [dict(api.wait_for_job(jobs[0]["job_id"], notify=_print_changes(jobs[0]), on_pause=_print_pause))]
        jobs_shown = _with_progress(jobs, len(jobs), "ended")
        return [dict(api.wait_for_job(job["job_id"], on_pause=_print_pause)) for job in jobs_shown]
    except KeyboardInterrupt:
        hint = f"The job continues; wait for it with: slotkeeper job {jobs[0]['job_id']} --wait"
        if len(jobs) > 1:
            ids = "\n".join(job["job_id"] for job in jobs)
            hint = f"The {len(jobs)} jobs continue; see each with: slotkeeper job ID\n{ids}"
        echo(hint, err=True)
        sys.exit(INTERRUPTED)


def _print_pause(error: ClientError) -> None:
    """Print why the state of a job is unknown for a while."""
    echo(f"{error.message}  The job continues; trying again.", err=True)


def _print_resend(error: ClientError) -> None:
    """Print why a submit is sent again with the same idempotency key."""
    echo(f"{error.message}  Sending the job again; it is accepted only once.", err=True)


def _with_progress(items: Any, count: int, label: str) -> Iterator[Any]:
    """Yield the items; show a progress bar on a terminal if there is more than one."""
    if count == 1 or not sys.stderr.isatty():
        return iter(items)
    from rich.progress import track

    return iter(track(items, label, total=count, console=console(stderr=True), transient=True))


def _print_changes(job: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], None]:
    """Print the status of a job on standard error, and return a function that prints each change of it."""
    printed = ""

    def print_if_changed(job: Mapping[str, Any]) -> None:
        nonlocal printed
        status = _format_status(job)
        if status != printed:
            echo(status, err=True)
            printed = status

    print_if_changed(job)
    return print_if_changed


def _format_status(job: Mapping[str, Any]) -> str:
    error = job.get("last_error")
    position = f"position {job['position']}" if job.get("position") else ""
    failure = f"attempt {job['attempts']}: {error['code']}: {escape_line(error['message'])}" if error else ""
    return "  ".join(filter(None, [job["job_id"], job["status"], position, failure]))


def _print_submitted(job: Job) -> None:
    error = job.get("error")
    if error:
        echo(f"{job['job_id']}  {job['status']}  {error['code']}: {escape_line(error['message'])}")
    elif job.get("result") is not None:
        echo(f"{job['job_id']}  {job['status']}  {display(without_files(job['result']))}")
    else:
        position = f"position {job['position']}" if job.get("position") else ""
        parts = [
            job["job_id"],
            job["status"],
            position or (job.get("next_step") == "starting" and "starting"),
            start_of(job),
        ]
        echo("  ".join(filter(None, parts)))


def start_of(job: Job) -> str:
    """Return when a job should start, as text; "": unknown, or at once."""
    if not job.get("estimated_start_s") or job.get("next_step") == "starting":
        return ""
    return f"starts in about {job['estimated_start_s']:g} s"


def format_basis(explanation: Mapping[str, Any]) -> str:
    """Return what the estimated start is computed from, as text."""
    basis = explanation.get("estimate_basis")
    if not basis:
        return ""
    return f": {basis['jobs_before']} before it, {basis['mean_run_s']:g} s a run, {basis['slots']} slots"


COMMANDS = (submit,)
