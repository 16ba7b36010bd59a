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
from app.removal import RemovalQuery, ServerRemovalQuery
from app.schemas.job_schemas import ModelPath, ServerPath
from slotkeeper.errors import NotFound, SlotkeeperError
from slotkeeper.jobs.values import Job
from slotkeeper.registry import catalog_removal
from tasks.services import database

# -- models ------------------------------------------------------------------------------------------------


@page_view("/page/remove/models/<path:model>", admin=True)
def ask_to_remove_model(model: str, wrong: str = "") -> Any:
    found = models_api.get_model(ModelPath(model=model))
    catalog = dispatcher().catalog.get()
    idle = {name for name in found["servers"] if set(catalog.servers[name].endpoints) == {model}}
    left = catalog_removal.count_active_jobs(database(), model)
    return render_page("remove_model.html", model=found, left=left, idle=idle, wrong=wrong)


@page_view("/page/remove/models/<path:model>", method="POST", admin=True)
def remove_model(model: str) -> Any:
    def act() -> Any:
        answer, _ = models_api.remove_model(ModelPath(model=model), RemovalQuery(drain=_is_checked("drain")))
        return redirect("/?done=removed" if answer["state"] == "done" else f"{_model_path(model)}?done=leaving", 303)

    return _run_or_ask_again(act, lambda wrong: ask_to_remove_model(model=model, wrong=wrong))


@page_view("/page/keep/models/<path:model>", method="POST", admin=True)
def keep_model(model: str) -> Any:
    models_api.keep_model(ModelPath(model=model))
    return redirect(f"{_model_path(model)}?done=kept", 303)


# -- servers -----------------------------------------------------------------------------------------------


@page_view("/page/remove/servers/<path:server>", admin=True)
def ask_to_remove_server(server: str, wrong: str = "") -> Any:
    catalog = dispatcher().catalog.get()
    others = {name for row in catalog.servers.values() if row.name != server for name in row.endpoints}
    found = servers_api.get_server(ServerPath(server=server))
    bereft = set(found["models"]) - others
    return render_page("remove_server.html", server=found, runs=_runs(server), bereft=bereft, wrong=wrong)


@page_view("/page/remove/servers/<path:server>", method="POST", admin=True)
def remove_server(server: str) -> Any:
    def act() -> Any:
        asked = ServerRemovalQuery(drain=_is_checked("drain"), force=_is_checked("force"))
        answer, _ = servers_api.remove_server(ServerPath(server=server), asked)
        done = answer["state"] == "done"
        return redirect("/page/servers?done=removed" if done else f"{_server_path(server)}?done=leaving", 303)

    return _run_or_ask_again(act, lambda wrong: ask_to_remove_server(server=server, wrong=wrong))


@page_view("/page/keep/servers/<path:server>", method="POST", admin=True)
def keep_server(server: str) -> Any:
    servers_api.keep_server(ServerPath(server=server))
    return redirect(f"{_server_path(server)}?done=kept", 303)


def _runs(server: str) -> list[Job]:
    return [job for job in dispatcher().store.list_running() if job.server == server]


# -- both --------------------------------------------------------------------------------------------------


def _run_or_ask_again(act: Callable[[], Any], ask_again: Callable[[str], Any]) -> Any:
    """Return the response of the act; if the API refuses it, return the form with the API's message."""
    try:
        return act()
    except NotFound:
        raise
    except (SlotkeeperError, ValidationError) as error:
        status, _, detail = problem_of(error)
        answer = ask_again(detail)
        answer.status_code = status
        return answer


def _is_checked(name: str) -> bool:
    return form().get(name) == "yes"


def _model_path(name: str) -> str:
    return f"/page/models/{segment(name)}"


def _server_path(name: str) -> str:
    return f"/page/servers/{segment(name)}"
