"""Jobs: the list, and the life of one."""

import re
from dataclasses import dataclass
from typing import Any

from flask import Response, redirect, request

from app.api import dlq as dlq_api
from app.api import job_views as jobs_api
from app.context import dispatcher
from app.page.login import PageError, page_view
from app.page.rendering import json_preview, render_page, segment
from app.request_deadline import answered_in_time
from app.result_files import File, files_in, may_hold_files, shortened
from app.schemas.job_schemas import JobPath, ListQuery, WaitQuery
from routing.queries import job_timeline
from routing.queries.explain import NULL_RESULT
from routing.queries.job_timeline import Phase, PhaseKind, Timeline
from slotkeeper import json_text
from slotkeeper.clock import now_ms
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.values import Event, Job
from slotkeeper.large_json import is_expensive_to_parse

_WIDTH = 1000  # of a time line, in its own units
_MIN_BAR_WIDTH = 3


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase on the timeline.  `x` and `width`: in thousandths of the timeline."""

    phase: Phase
    x: float
    width: float
    lasted_ms: int


@page_view("/page/jobs")
def jobs() -> Any:
    wanted = _query_value("status"), _query_value("model"), _query_value("cursor")
    if (job_id := _query_value("id")) is not None:
        return redirect(f"/page/jobs/{segment(job_id)}", 303)
    status, model, cursor = wanted
    query = ListQuery.model_validate({"status": status, "model": model, "limit": 50, "cursor": cursor})
    found = jobs_api.list_jobs(query)
    return render_page(
        "jobs.html", jobs=found["jobs"], next=found["next_cursor"], status=status, model=model, states=State
    )


@page_view("/page/jobs/<path:job_id>")
def job(job_id: str) -> Any:
    known = jobs_api.visible_job(job_id)
    if known.id != job_id:
        return redirect(f"/page/jobs/{segment(known.id)}", 303)
    path = JobPath(job_id=job_id)
    trail, now = dispatcher().store.list_events(job_id), now_ms()
    result, files = _result_of(known)
    life = job_timeline.build_timeline(dispatcher().store, dispatcher().catalog.get(), known, trail, now)
    return render_page(
        "job.html",
        job=jobs_api.get_job(path, WaitQuery(wait=0)),
        payload=known.payload,
        remote_id=known.remote_id,
        source=known.source,
        explained=None if known.state in FINAL_STATES else jobs_api.explain_job(path),
        attempts=jobs_api.list_attempts(path)["attempts"],
        events=[_event_row(event) for event in trail],
        life=life,
        result=None if known.result is None else json_preview(shortened(result, files)),
        null_result=NULL_RESULT if known.result == "null" else None,
        files=files,
        parts_of=[(kind, life.total_ms(kind, now)) for kind in PhaseKind],
        bars=_bars(life, now),
        has_ended=known.state in FINAL_STATES,
        is_dead=known.state is State.DEAD,
        created_ms=known.created_ms,
    )


@page_view("/page/jobs/<path:job_id>/files/<int:number>")
def result_file(job_id: str, number: int) -> Any:
    """A file of the result: a picture to be drawn, or a download.  Nothing in it is run."""
    _, files = _result_of(jobs_api.visible_job(job_id))
    try:
        content = files[number].content()
    except (IndexError, ValueError):
        raise PageError(404, "No such file", "The job's result has no such file, or it is no base64.") from None
    file = files[number]
    response = Response(content, content_type=file.media_type if file.is_picture else "application/octet-stream")
    response.headers.set(
        "Content-Disposition", "inline" if file.is_picture else "attachment", filename=_file_name(job_id, number, file)
    )
    return response


@page_view("/page/jobs/<path:job_id>/cancel", method="POST")
@answered_in_time
def cancel(job_id: str) -> Any:
    answer, _ = jobs_api.cancel_job(JobPath(job_id=job_id))
    return redirect(f"/page/jobs/{segment(job_id)}?done={answer['status']}", 303)


@page_view("/page/jobs/<path:job_id>/retry", method="POST", admin=True)
@answered_in_time
def retry(job_id: str) -> Any:
    dlq_api.retry_dead(JobPath(job_id=job_id))
    return redirect(f"/page/jobs/{segment(job_id)}?done=retried", 303)


def _result_of(job: Job) -> tuple[Any, list[File]]:
    """Return a job's result, and the files in it."""
    if job.result is None:
        return None, []
    if is_expensive_to_parse(job.result):
        return f"{len(job.result):,} characters in very many parts: see them with `slotkeeper job {job.id} --json`.", []
    result = json_text.loads(job.result)
    return result, files_in(result) if may_hold_files(job.result) else []


def _file_name(job_id: str, number: int, file: File) -> str:
    """A name for people, without what a header or a folder could take for more."""
    name = re.sub(r"[^0-9A-Za-z_. -]", "_", file.name or "")[-100:].lstrip(".")
    return name or f"{re.sub(r'[^0-9A-Za-z-]', '_', job_id)[-100:]}-{number + 1}{file.ending}"


def _query_value(name: str) -> str | None:
    return request.args.get(name, "").strip() or None


def _event_row(event: Event) -> dict[str, Any]:
    """An event with its facts as pairs of words."""
    facts = {name: value for name, value in event.data.items() if name != "why" and value not in (None, "", 0)}
    error = facts.pop("error", None)
    if error:
        facts["error"] = f"{error.get('code')}: {error.get('message')}"
    return {"type": event.type, "at": event.at_ms, "why": event.data.get("why"), "facts": facts}


def _bars(life: Timeline, now_ms: int) -> list[Bar]:
    """Return a bar for each phase, as wide as the phase lasted, but wide enough to be seen."""
    lasted = [phase.lasted_ms(now_ms) for phase in life.phases]
    shown = [max(_MIN_BAR_WIDTH, _WIDTH * ms / max(1, sum(lasted))) for ms in lasted]
    scale = _WIDTH / max(1.0, sum(shown))
    bars, x = [], 0.0
    for phase, ms, width in zip(life.phases, lasted, shown, strict=True):
        bars.append(Bar(phase, round(x, 1), round(width * scale, 1), ms))
        x += width * scale
    return bars
