"""The pages of batches: list, progress and cancel."""

from typing import Any

from flask import redirect, request

from app.api import batches as batches_api
from app.api import job_views as jobs_api
from app.page.login import page_view
from app.page.rendering import render_page, segment
from app.schemas.job_schemas import BatchPath, BatchQuery, ListQuery


@page_view("/page/batches")
def batches() -> Any:
    listed = batches_api.list_batches(BatchQuery(limit=20, cursor=request.args.get("cursor") or None))
    return render_page("batches.html", batches=listed["batches"], next=listed["next_cursor"])


@page_view("/page/batches/<batch>")
def batch(batch: str) -> Any:
    progress = batches_api.get_batch(BatchPath(batch=batch))
    query = {name: request.args.get(name) or None for name in ("status", "cursor")}
    listed = jobs_api.list_jobs(ListQuery.model_validate({"batch": batch, "limit": 50, **query}))
    return render_page(
        "batch.html", batch=progress, jobs=listed["jobs"], next=listed["next_cursor"], status=query["status"]
    )


@page_view("/page/batches/<batch>/cancel")
def ask_to_cancel_batch(batch: str) -> Any:
    return render_page("cancel_batch.html", batch=batches_api.get_batch(BatchPath(batch=batch)))


@page_view("/page/batches/<batch>/cancel", method="POST")
def cancel_batch(batch: str) -> Any:
    batches_api.cancel_batch(BatchPath(batch=batch))
    return redirect(f"/page/batches/{segment(batch)}?done=batch-canceled", 303)
