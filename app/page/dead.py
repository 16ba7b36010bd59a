"""The page of dead jobs, which an operator can retry."""

from typing import Any

from flask import redirect, request

from app.api import dlq as dlq_api
from app.page.login import page_view
from app.page.rendering import render_page
from app.page.visitor import form
from app.schemas.job_schemas import DlqQuery, JobPath
from slotkeeper.errors import Conflict, JobNotFound

_PAGE_SIZE = 100


@page_view("/page/dead", admin=True)
def dead() -> Any:
    model, cursor = request.args.get("model", "").strip() or None, request.args.get("cursor") or None
    listed = dlq_api.list_dead(DlqQuery(model=model, limit=_PAGE_SIZE, cursor=cursor))
    return render_page("dead.html", jobs=listed["jobs"], next=listed["next_cursor"], model=model)


@page_view("/page/dead/retry", method="POST", admin=True)
def retry_chosen() -> Any:
    """Retry the selected jobs.  Skip jobs that another operator has retried or deleted in the meantime."""
    job_ids = form().getlist("job")[:_PAGE_SIZE]
    return redirect(f"/page/dead?done={sum(_try_retry(job_id) for job_id in job_ids)}-retried", 303)


@page_view("/page/dead/retry-all", method="POST", admin=True)
def retry_all() -> Any:
    result = dlq_api.retry_all_dead(dlq_api.RetryAllQuery(model=form().get("model") or None))
    return redirect(f"/page/dead?done={result['retried']}-{'left' if result['more'] else 'retried'}", 303)


def _try_retry(job_id: str) -> bool:
    """Retry a dead job.  Return False if the job is not dead or does not exist."""
    try:
        dlq_api.retry_dead(JobPath(job_id=job_id))
    except (Conflict, JobNotFound):
        return False
    return True
