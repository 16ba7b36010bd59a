"""The page of one model: its queue, its servers and its configuration; and its removal."""

from typing import Any

from flask import redirect

from app.api import model_views as models_api
from app.api import server_views as servers_api
from app.context import dispatcher
from app.page.layout import state_body
from app.page.login import is_checked, page_view, run_or_ask_again
from app.page.overview_pages import last_hour, slot_use_plot
from app.page.rendering import render_page, segment
from app.schemas.model_schemas import ModelPath
from app.schemas.server_schemas import RemovalQuery
from routing.queries.explain import explain_job
from routing.queries.model_overview import read_overview, read_slots
from routing.queries.model_status import read_lanes
from slotkeeper.clock import now_ms
from slotkeeper.registry import catalog_removal
from slotkeeper.registry.identity import Scope
from tasks.services import database, workers


@page_view("/page/models/<path:model>", Scope.OPERATE)
def model(model: str) -> Any:
    path = ModelPath(model=model)
    overview, at_ms = models_api.get_model(path), now_ms()
    configured = dispatcher().catalog.get().models[model]
    running = dispatcher().store.list_running()
    lanes, is_complete = read_lanes(dispatcher(), configured)
    now = read_overview(dispatcher(), last_hour(), [configured], running, at_ms)[model]
    slots = read_slots(dispatcher(), list(dispatcher().catalog.get().servers.values()), running)
    servers = [server for server in servers_api.list_servers()["servers"] if model in server["models"]]
    return render_page(
        "model.html",
        model=overview,
        now=now,
        plot=slot_use_plot(now.use, now.ended, overview["slots"]),
        servers=[(server, slots.get(server["server"], [])) for server in servers],
        lanes=lanes,
        is_complete=is_complete,
        next_job=_explain_next(lanes[0].first.id) if lanes else None,
        config=models_api.get_config(path),
    )


@page_view("/page/models/<path:model>/state", Scope.OPERATE, method="POST")
def change_model(model: str) -> Any:
    models_api.change_model(ModelPath(model=model), state_body())
    return redirect(f"/page/models/{segment(model)}?done=changed", 303)


def _explain_next(job_id: str) -> Any:
    """Explain why the next job has not started; None: it has been deleted."""
    job = dispatcher().store.get(job_id)
    return job and explain_job(dispatcher(), workers(), job)


@page_view("/page/remove/models/<path:model>", Scope.OPERATE)
def ask_to_remove_model(model: str, error: str = "") -> Any:
    overview = models_api.get_model(ModelPath(model=model))
    catalog = dispatcher().catalog.get()
    idle_servers = {name for name in overview["servers"] if set(catalog.servers[name].endpoints) == {model}}
    return render_page(
        "remove_model.html",
        model=overview,
        active_jobs=catalog_removal.count_active_jobs(database(), model),
        idle_servers=idle_servers,
        error=error,
    )


@page_view("/page/remove/models/<path:model>", Scope.OPERATE, method="POST")
def remove_model(model: str) -> Any:
    def remove() -> Any:
        removal, _ = models_api.remove_model(ModelPath(model=model), RemovalQuery(drain=is_checked("drain")))
        return redirect("/?done=removed" if removal["state"] == "done" else f"{_model_path(model)}?done=leaving", 303)

    return run_or_ask_again(remove, lambda error: ask_to_remove_model(model=model, error=error))


@page_view("/page/keep/models/<path:model>", Scope.OPERATE, method="POST")
def keep_model(model: str) -> Any:
    models_api.keep_model(ModelPath(model=model))
    return redirect(f"{_model_path(model)}?done=kept", 303)


def _model_path(name: str) -> str:
    return f"/page/models/{segment(name)}"
