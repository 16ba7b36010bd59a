"""The pages that remove models and servers, and cancel a removal."""

from collections.abc import Callable
from typing import Any

from flask import redirect
from pydantic import ValidationError

from app.api import model_views as models_api
from app.api import server_views as servers_api
from app.context import dispatcher
from app.page.login import page_view, problem_of
from app.page.rendering import render_page, segment
from app.page.visitor import form
from app.schemas.model_schemas import ModelPath
from app.schemas.server_schemas import RemovalQuery, ServerPath, ServerRemovalQuery
from slotkeeper.errors import NotFound, SlotkeeperError
from slotkeeper.jobs.values import Job
from slotkeeper.registry import catalog_removal
from tasks.services import database

# -- models ------------------------------------------------------------------------------------------------


@page_view("/page/remove/models/<path:model>", admin=True)
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


@page_view("/page/remove/models/<path:model>", method="POST", admin=True)
def remove_model(model: str) -> Any:
    def remove() -> Any:
        removal, _ = models_api.remove_model(ModelPath(model=model), RemovalQuery(drain=_is_checked("drain")))
        return redirect("/?done=removed" if removal["state"] == "done" else f"{_model_path(model)}?done=leaving", 303)

    return _run_or_ask_again(remove, lambda error: ask_to_remove_model(model=model, error=error))


@page_view("/page/keep/models/<path:model>", method="POST", admin=True)
def keep_model(model: str) -> Any:
    models_api.keep_model(ModelPath(model=model))
    return redirect(f"{_model_path(model)}?done=kept", 303)


# -- servers -----------------------------------------------------------------------------------------------


@page_view("/page/remove/servers/<path:server>", admin=True)
def ask_to_remove_server(server: str, error: str = "") -> Any:
    catalog = dispatcher().catalog.get()
    served_elsewhere = {name for row in catalog.servers.values() if row.name != server for name in row.endpoints}
    overview = servers_api.get_server(ServerPath(server=server))
    return render_page(
        "remove_server.html",
        server=overview,
        running_jobs=_running_jobs(server),
        unserved_models=set(overview["models"]) - served_elsewhere,
        error=error,
    )


@page_view("/page/remove/servers/<path:server>", method="POST", admin=True)
def remove_server(server: str) -> Any:
    def remove() -> Any:
        query = ServerRemovalQuery(drain=_is_checked("drain"), force=_is_checked("force"))
        removal, _ = servers_api.remove_server(ServerPath(server=server), query)
        done = removal["state"] == "done"
        return redirect("/page/servers?done=removed" if done else f"{_server_path(server)}?done=leaving", 303)

    return _run_or_ask_again(remove, lambda error: ask_to_remove_server(server=server, error=error))


@page_view("/page/keep/servers/<path:server>", method="POST", admin=True)
def keep_server(server: str) -> Any:
    servers_api.keep_server(ServerPath(server=server))
    return redirect(f"{_server_path(server)}?done=kept", 303)


def _running_jobs(server: str) -> list[Job]:
    return [job for job in dispatcher().store.list_running() if job.server == server]


# -- helpers -----------------------------------------------------------------------------------------------


def _run_or_ask_again(action: Callable[[], Any], ask_again: Callable[[str], Any]) -> Any:
    """Return the response of the action; if the API refuses it, return the form with the message of the API."""
    try:
        return action()
    except NotFound:
        raise
    except (SlotkeeperError, ValidationError) as error:
        status, _, detail = problem_of(error)
        response = ask_again(detail)
        response.status_code = status
        return response


def _is_checked(name: str) -> bool:
    return form().get(name) == "yes"


def _model_path(name: str) -> str:
    return f"/page/models/{segment(name)}"


def _server_path(name: str) -> str:
    return f"/page/servers/{segment(name)}"
