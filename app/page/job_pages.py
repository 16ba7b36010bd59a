"""The pages of jobs, batches and dead jobs: lists, one job with its timeline and files, cancel and retry."""

import re
from dataclasses import dataclass
from typing import Any

from flask import Response, redirect, request

from app.api import batch_views
from app.api import job_views as jobs_api
from app.auth.access import current_identity
from app.context import dispatcher
from app.page.layout import form
from app.page.login import PageError, page_view
from app.page.rendering import json_preview, render_page, segment
from app.payloads import is_own, read_payload
from app.request_deadline import answered_in_time
from app.result_files import File, files_in, may_hold_files, shortened
from app.schemas.batch_schemas import BatchPath, BatchQuery, ErrorsQuery
from app.schemas.job_schemas import DlqQuery, JobPath, ListQuery, RetryAllQuery, WaitQuery
from routing.queries import job_timeline
from routing.queries.explain import NULL_RESULT
from routing.queries.job_timeline import Phase, PhaseKind, Timeline, merge_unreached
from slotkeeper import json_text
from slotkeeper.clock import now_ms
from slotkeeper.errors import Conflict, InsufficientCredits, JobNotFound
from slotkeeper.jobs.states import END_SENTENCES, FINAL_STATES, Reason, State
from slotkeeper.jobs.values import Event, Job
from slotkeeper.large_json import is_expensive_to_parse
from slotkeeper.registry.identity import Scope

_TIMELINE_WIDTH = 1000  # in the units of the SVG view box
_MIN_BAR_WIDTH = 3
_SHOWN_ERRORS = 20
_PAGE_SIZE = 100


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase on the timeline.  `x` and `width` are in thousandths of the timeline."""

    phase: Phase
    x: float
    width: float
    duration_ms: int


@page_view("/page/jobs")
def jobs() -> Any:
    if (job_id := _query_value("id")) is not None:
        return redirect(f"/page/jobs/{segment(job_id)}", 303)
    status, model, cursor = _query_value("status"), _query_value("model"), _query_value("cursor")
    query = ListQuery.model_validate({"status": status, "model": model, "limit": 50, "cursor": cursor})
    listed = jobs_api.list_jobs(query)
    return render_page(
        "jobs.html", jobs=listed["jobs"], next=listed["next_cursor"], status=status, model=model, states=State
    )


@page_view("/page/jobs/<path:job_id>")
def job(job_id: str) -> Any:
    """Show a job.  If `job_id` is the start or the end of an id, redirect to the whole id."""
    stored = jobs_api.visible_job(job_id)
    if stored.id != job_id:
        return redirect(f"/page/jobs/{segment(stored.id)}", 303)
    if _query_value("payload"):  # By itself: the page reads a job again and again, and each look is noted.
        return Response(json_preview(read_payload(stored)), content_type="text/plain; charset=utf-8")
    path = JobPath(job_id=job_id)
    events, at_ms = dispatcher().store.list_events(job_id), now_ms()
    result, files = _result_of(stored)
    timeline = job_timeline.build_timeline(dispatcher().store, dispatcher().catalog.get(), stored, events, at_ms)
    return render_page(
        "job.html",
        job=jobs_api.get_job(path, WaitQuery(wait=0)),
        payload=json_preview(read_payload(stored)) if is_own(stored) else None,
        remote_id=stored.remote_id,
        explanation=None if stored.state in FINAL_STATES else jobs_api.explain_job(path),
        attempts=jobs_api.list_attempts(path)["attempts"],
        events=[_event_row(event) for event in events],
        timeline=timeline,
        result=None if stored.result is None else json_preview(shortened(result, files)),
        null_result=NULL_RESULT if stored.result == "null" else None,
        files=files,
        phase_totals=[(kind, timeline.total_ms(kind, at_ms)) for kind in PhaseKind],
        bars=_bars(timeline, at_ms),
        has_ended=stored.state in FINAL_STATES,
        end_sentence=END_SENTENCES[Reason(stored.why)] if stored.state in FINAL_STATES else None,
        is_dead=stored.state is State.DEAD,
        created_ms=stored.created_ms,
    )


@page_view("/page/jobs/<path:job_id>/files/<int:number>")
def result_file(job_id: str, number: int) -> Any:
    """Return a file of the result: a picture that the browser shows, or a download.

    The browser executes nothing in the file: only known types of pictures keep their type.
    """
    _, files = _result_of(jobs_api.visible_job(job_id))
    try:
        content = files[number].content()
    except (IndexError, ValueError):
        raise PageError(404, "No such file", "The job's result has no such file, or it is not valid base64.") from None
    file = files[number]
    response = Response(content, content_type=file.media_type if file.is_picture else "application/octet-stream")
    response.headers.set(
        "Content-Disposition", "inline" if file.is_picture else "attachment", filename=_file_name(job_id, number, file)
    )
    return response


@page_view("/page/jobs/<path:job_id>/cancel", Scope.SUBMIT, method="POST")
@answered_in_time
def cancel(job_id: str) -> Any:
    canceled, _ = jobs_api.cancel_job(JobPath(job_id=job_id))
    return redirect(f"/page/jobs/{segment(job_id)}?done={canceled['status']}", 303)


@page_view("/page/jobs/<path:job_id>/retry", Scope.MANAGE, method="POST")
@answered_in_time
def retry(job_id: str) -> Any:
    jobs_api.retry_dead(JobPath(job_id=job_id))
    return redirect(f"/page/jobs/{segment(job_id)}?done=retried", 303)


def _result_of(job: Job) -> tuple[Any, list[File]]:
    """Return the result of a job and the files in it.  A text replaces a result that is expensive to parse."""
    if job.result is None:
        return None, []
    if is_expensive_to_parse(job.result):
        return f"{len(job.result):,} characters in very many parts: see them with `slotkeeper job {job.id} --json`.", []
    result = json_text.loads(job.result)
    return result, files_in(result) if may_hold_files(job.result) else []


def _file_name(job_id: str, number: int, file: File) -> str:
    """Return a readable file name, without characters that have a meaning in a header or a path."""
    name = re.sub(r"[^0-9A-Za-z_. -]", "_", file.name or "")[-100:].lstrip(".")
    return name or f"{re.sub(r'[^0-9A-Za-z-]', '_', job_id)[-100:]}-{number + 1}{file.ending}"


def _query_value(name: str) -> str | None:
    """Return a parameter of the query string; None if it is missing or blank."""
    return request.args.get(name, "").strip() or None


def _event_row(event: Event) -> dict[str, Any]:
    """Return an event as a row of the table; its data, except the reason, are in `facts`."""
    facts = {name: value for name, value in event.data.items() if name != "why" and value not in (None, "", 0)}
    error = facts.pop("error", None)
    if error:
        facts["error"] = f"{error.get('code')}: {error.get('message')}"
    return {"type": event.type, "at": event.at_ms, "why": event.data.get("why"), "facts": facts}


def _bars(timeline: Timeline, now_ms: int) -> list[Bar]:
    """Return a bar for each phase.  Its width shows the duration, with a minimum so that the bar is visible."""
    phases = merge_unreached(timeline.phases)
    durations_ms = [phase.lasted_ms(now_ms) for phase in phases]
    widths = [max(_MIN_BAR_WIDTH, _TIMELINE_WIDTH * ms / max(1, sum(durations_ms))) for ms in durations_ms]
    scale = _TIMELINE_WIDTH / max(1.0, sum(widths))
    bars, x = [], 0.0
    for phase, ms, width in zip(phases, durations_ms, widths, strict=True):
        bars.append(Bar(phase, round(x, 1), round(width * scale, 1), ms))
        x += width * scale
    return bars


@page_view("/page/batches")
def batches() -> Any:
    listed = batch_views.list_batches(BatchQuery(limit=20, cursor=request.args.get("cursor") or None))
    return render_page("batches.html", batches=listed["batches"], next=listed["next_cursor"])


@page_view("/page/batches/<batch>")
def batch(batch: str) -> Any:
    progress = batch_views.get_batch(BatchPath(batch=batch))
    query = {name: request.args.get(name) or None for name in ("status", "cursor")}
    listed = jobs_api.list_jobs(ListQuery.model_validate({"batch": batch, "limit": 50, **query}))
    errors = []
    if progress["refused"]:
        first = ErrorsQuery.model_validate({"limit": _SHOWN_ERRORS})
        errors = batch_views.list_batch_errors(BatchPath(batch=batch), first)["errors"]
    return render_page(
        "batch.html",
        batch=progress,
        jobs=listed["jobs"],
        next=listed["next_cursor"],
        status=query["status"],
        errors=errors,
        may_manage=current_identity().may(Scope.MANAGE),
    )


@page_view("/page/batches/<batch>/pause", Scope.MANAGE, method="POST")
def pause_batch(batch: str) -> Any:
    batch_views.pause_batch(BatchPath(batch=batch))
    return redirect(f"/page/batches/{segment(batch)}?done=batch-paused", 303)


@page_view("/page/batches/<batch>/resume", Scope.MANAGE, method="POST")
def resume_batch(batch: str) -> Any:
    batch_views.resume_batch(BatchPath(batch=batch))
    return redirect(f"/page/batches/{segment(batch)}?done=batch-resumed", 303)


@page_view("/page/batches/<batch>/cancel")
def ask_to_cancel_batch(batch: str) -> Any:
    return render_page("cancel_batch.html", batch=batch_views.get_batch(BatchPath(batch=batch)))


@page_view("/page/batches/<batch>/cancel", Scope.SUBMIT, method="POST")
def cancel_batch(batch: str) -> Any:
    batch_views.cancel_batch(BatchPath(batch=batch))
    return redirect(f"/page/batches/{segment(batch)}?done=batch-canceled", 303)


@page_view("/page/dead", Scope.MANAGE)
def dead() -> Any:
    model, cursor = request.args.get("model", "").strip() or None, request.args.get("cursor") or None
    listed = jobs_api.list_dead(DlqQuery(model=model, limit=_PAGE_SIZE, cursor=cursor))
    return render_page("dead.html", jobs=listed["jobs"], next=listed["next_cursor"], model=model)


@page_view("/page/dead/retry", Scope.MANAGE, method="POST")
def retry_chosen() -> Any:
    """Retry the selected jobs.  Skip jobs that another operator has retried or deleted in the meantime."""
    job_ids = form().getlist("job")[:_PAGE_SIZE]
    return redirect(f"/page/dead?done={sum(_try_retry(job_id) for job_id in job_ids)}-retried", 303)


@page_view("/page/dead/retry-all", Scope.MANAGE)
def ask_to_retry_all() -> Any:
    return render_page("retry_all.html", model=_query_value("model"))


@page_view("/page/dead/retry-all", Scope.MANAGE, method="POST")
def retry_all() -> Any:
    result = jobs_api.retry_all_dead(RetryAllQuery(model=form().get("model") or None))
    return redirect(f"/page/dead?done={result['retried']}-{'left' if result['more'] else 'retried'}", 303)


def _try_retry(job_id: str) -> bool:
    """Retry a dead job.  Return False if it is not dead, does not exist, or its tenant has too few credits."""
    try:
        jobs_api.retry_dead(JobPath(job_id=job_id))
    except (Conflict, InsufficientCredits, JobNotFound):
        return False
    return True
