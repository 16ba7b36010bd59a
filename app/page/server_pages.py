"""The pages of servers: the list, one server with the reasons why it gets no jobs; and its removal."""

from typing import Any

from flask import redirect, request

from app.api import server_views as servers_api
from app.context import dispatcher
from app.page.layout import state_body
from app.page.login import is_checked, page_view, run_or_ask_again
from app.page.rendering import render_page, segment
from app.schemas.server_schemas import ServerPath, ServerRemovalQuery
from routing.queries.explain import explain_idle_server
from routing.queries.model_overview import read_slots
from slotkeeper.jobs.values import Job
from slotkeeper.registry.identity import Scope
from tasks.services import validations, workers

_MAX_TILES = 256


@page_view("/page/servers", Scope.OPERATE)
def servers() -> Any:
    listed = servers_api.list_servers()
    return render_page("servers.html", servers=listed["servers"], is_redis_down=listed["fleets"] is None)


@page_view("/page/servers/<path:server>", Scope.OPERATE)
def server(server: str) -> Any:
    """Show a server; with `?ask` also request its health, which may take until the time limit."""
    overview, registered = servers_api.get_server(ServerPath(server=server)), servers_api.known_server(server)
    slots = read_slots(dispatcher(), [registered], dispatcher().store.list_running())[server]
    check_result = servers_api.check_server(ServerPath(server=server)) if request.args.get("ask") else None
    return render_page(
        "server.html",
        server=overview,
        slots=slots[:_MAX_TILES],
        more=max(0, len(slots) - _MAX_TILES),
        reasons=explain_idle_server(dispatcher(), workers(), registered),
        check_result=check_result,
        answers=next(iter(validations().read_answers({}, server)), None),
    )


@page_view("/page/servers/<path:server>/state", Scope.OPERATE, method="POST")
def change_server(server: str) -> Any:
    servers_api.change_server(ServerPath(server=server), state_body())
    return redirect(f"/page/servers/{segment(server)}?done=changed", 303)


@page_view("/page/servers/<path:server>/reset", Scope.OPERATE, method="POST")
def reset_server(server: str) -> Any:
    servers_api.reset_server(ServerPath(server=server))
    return redirect(f"/page/servers/{segment(server)}?done=reset", 303)


@page_view("/page/remove/servers/<path:server>", Scope.OPERATE)
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


@page_view("/page/remove/servers/<path:server>", Scope.OPERATE, method="POST")
def remove_server(server: str) -> Any:
    def remove() -> Any:
        query = ServerRemovalQuery(drain=is_checked("drain"), force=is_checked("force"))
        removal, _ = servers_api.remove_server(ServerPath(server=server), query)
        done = removal["state"] == "done"
        return redirect("/page/servers?done=removed" if done else f"{_server_path(server)}?done=leaving", 303)

    return run_or_ask_again(remove, lambda error: ask_to_remove_server(server=server, error=error))


@page_view("/page/keep/servers/<path:server>", Scope.OPERATE, method="POST")
def keep_server(server: str) -> Any:
    servers_api.keep_server(ServerPath(server=server))
    return redirect(f"{_server_path(server)}?done=kept", 303)


def _running_jobs(server: str) -> list[Job]:
    return [job for job in dispatcher().store.list_running() if job.server == server]


def _server_path(name: str) -> str:
    return f"/page/servers/{segment(name)}"
