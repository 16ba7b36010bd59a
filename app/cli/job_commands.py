"""Commands for jobs and dead jobs."""

import itertools
import sys
from pathlib import Path
from typing import Any

import click

from app.cli.output import (
    age,
    api_client,
    json_option,
    limit_option,
    no_result,
    output_option,
    path_segment,
    print_fields,
    print_json,
    print_table,
    save_result,
    short_id,
    short_time,
    without_files,
)
from app.cli.submit_commands import Job, format_basis, start_of, wait_for_jobs
from app.terminal import console, echo, escape_line

_STATES = ("queued", "delayed", "running", "completed", "failed", "expired", "canceled", "dead")
_HIDDEN_FIELDS = ("cost", "links", "deduplicated", "result", "payload", "error", "last_error", "cancel_requested")


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
    api, retried, left_out, more, unpaid = api_client(), 0, 0, True, set[str]()
    with console(stderr=True).status("") as status:
        while more:
            answer = api.request("POST", "/admin/dlq/retry-all", params={"model": model})
            retried, more, left_out = retried + answer["retried"], answer["more"], answer["left_out"]
            unpaid.update(answer["unpaid"])
            status.update(f"{retried} jobs ...")
    echo(f"{retried} jobs are queued again.")
    if unpaid:
        echo(f"Some stay dead, for these tenants have too few credits: {escape_line(', '.join(sorted(unpaid)))}.")
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


@click.command("jobs")
@click.option("--status", type=click.Choice(_STATES))
@click.option("--model")
@click.option("--batch", help="Only jobs of this batch.")
@click.option("--label", metavar="NAME=VALUE", multiple=True, help="Only jobs with this label; repeat it for several.")
@limit_option
@json_option
def list_jobs(
    status: str | None, model: str | None, batch: str | None, label: tuple[str, ...], limit: int, as_json: bool
) -> None:
    """List jobs, the newest first."""
    filters = {"status": status, "model": model, "batch": batch, "label": list(label) or None}
    print_jobs(list(api_client().iter_pages("/queue/jobs", "jobs", limit, **filters)), as_json)


def print_jobs(jobs: list[Job], as_json: bool) -> None:
    if as_json:
        print_json(jobs)
        return
    rows = (
        (
            short_id(job["job_id"]),
            job["model"],
            job["status"],
            job["priority"],
            job["attempts"],
            job["slot"],
            age(job["created_at"]),
            _error_code(job),
        )
        for job in jobs
    )
    print_table(
        ("job", "model", "status", "priority", "attempts", "slot", "age", "error"), rows, "There are no such jobs."
    )


def _error_code(job: Job) -> str | None:
    """Return the code of a job's last error; of a dead job, that of its last attempt."""
    error = job.get("error") or job.get("last_error") or {}
    return error.get("last_code") or error.get("code")


@click.command("job")
@click.argument("job_id", metavar="ID")
@click.option("--wait", is_flag=True, help="Wait until the job ends.")
@click.option("--payload", "with_payload", is_flag=True, help="Show what was submitted, too.")
@output_option
@json_option
def show_job(job_id: str, wait: bool, with_payload: bool, output: Path | None, as_json: bool) -> None:
    """Show a job and its result.

    With --wait the exit status is 0 only if the job completed, and 3 if its state is unknown.
    """
    api = api_client()
    job = dict(api.get_job(job_id, patience_s=0))
    if wait:
        (job,) = wait_for_jobs(api, [job])
    if with_payload:
        job = api.get(f"/queue/jobs/{path_segment(str(job['job_id']))}", include="payload")
    is_saved = output is None or save_result(job, output)
    if as_json:
        print_json(job)
    else:
        print_job(job)
    if not is_saved:
        raise no_result(job, output)
    if wait and job["status"] != "completed":
        sys.exit(1)


def print_job(job: Job) -> None:
    print_fields(job, _HIDDEN_FIELDS)
    for name in ("error", "last_error"):
        if job.get(name):
            echo(f"{name.replace('_', ' ')}: {job[name]['code']}: {escape_line(job[name]['message'])}")
    if job.get("cost"):
        echo(f"cost: {job['cost']['sentence']}")
    if job.get("payload") is not None:
        echo("payload:")
        print_json(job["payload"])
    if job.get("result") is not None:
        echo("result:")
        print_json(without_files(job["result"]))


@click.command()
@click.argument("job_id", metavar="ID")
@json_option
def explain(job_id: str, as_json: bool) -> None:
    """Explain what a job waits for and when it should start."""
    explanation = api_client().get(f"/queue/jobs/{path_segment(job_id)}/explain")
    if as_json:
        print_json(explanation)
        return
    echo(escape_line(explanation["sentence"]))
    if start := start_of(explanation):
        echo(f"The job {start}{format_basis(explanation)}.")
    before = ", ".join(explanation["before"]) or None
    print_fields(
        {
            "jobs ahead": explanation["ahead"],
            "just before": before,
            "policy": explanation["policy"],
            "overtaken": _format_overtaking(explanation),
        }
    )
    if explanation["servers"]:
        rows = [(name, obstacle or "can take the job") for name, obstacle in explanation["servers"].items()]
        print_table(("server", "now"), rows, "")


def _format_overtaking(explanation: Job) -> str | None:
    """Return which later jobs can overtake a job, as text; None: there is no limit."""
    match explanation["longest_overtaking_s"]:
        case None:
            return None
        case 0:
            return "by no job that is submitted later"
        case bound_s:
            return f"only by jobs that are submitted up to {bound_s:g} s later"


@click.command()
@click.argument("job_id", metavar="ID")
@json_option
def cancel(job_id: str, as_json: bool) -> None:
    """Cancel a job that waits or runs.

    A running job is canceled on its server, if the server can do that.
    """
    answer = api_client().cancel(job_id, patience_s=0)
    if as_json:
        print_json(answer)
    else:
        echo(f"{answer['job_id']}  {answer['status']}")


@click.command()
@click.argument("job_id", metavar="ID")
@json_option
def attempts(job_id: str, as_json: bool) -> None:
    """List the attempts of a job and how each ended."""
    answer = api_client().get(f"/queue/jobs/{path_segment(job_id)}/attempts")
    if as_json:
        print_json(answer)
    else:
        print_attempts(answer["attempts"])


def print_attempts(attempts: list[dict[str, Any]]) -> None:
    numbers = itertools.count(1)  # As the job counts its attempts: without starts that met no server.
    rows = (
        (
            None if attempt["unreached"] else next(numbers),
            _format_outcome(attempt),
            _format_error(attempt["error"]),
            attempt["slot"],
            short_time(attempt["started_at"]),
            short_time(attempt["ended_at"]),
        )
        for attempt in attempts
    )
    print_table(("attempt", "outcome", "error", "slot", "started", "ended"), rows, "The job has not started yet.")


def _format_outcome(attempt: dict[str, Any]) -> str | None:
    starts = attempt["unreached"]
    if not starts:
        return attempt["outcome"]
    return f"{starts} {'start' if starts == 1 else 'starts'} met no server: {attempt['outcome']}"


def _format_error(error: dict[str, Any] | None) -> str | None:
    return f"{error['code']}: {error['message']}" if error else None


@click.command()
@click.argument("job_id", metavar="ID")
def envelope(job_id: str) -> None:
    """Print the signed result of a job that ran on a node, for `slotkeeper verify`.

    \b
    slotkeeper envelope 01a2b3c4 > cat.json
    slotkeeper verify cat.json
    """
    print_json(api_client().get(f"/queue/jobs/{path_segment(job_id)}/envelope"))


COMMANDS = (list_jobs, show_job, explain, cancel, attempts, envelope, dlq)
