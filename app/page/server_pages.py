"""The pages of servers: the list, and one server with the reasons why it gets no jobs."""

from typing import Any

from flask import redirect, request

from app.api import server_views as servers_api
from app.context import dispatcher
from app.page.login import page_view
from app.page.rendering import render_page, segment
from app.page.visitor import state_body
from app.schemas.server_schemas import ServerPath
from routing.queries.explain import explain_idle_server
from routing.queries.model_overview import read_slots
from tasks.services import workers

_MAX_TILES = 256


@page_view("/page/servers", admin=True)
def servers() -> Any:
    listed = servers_api.list_servers()
    return render_page("servers.html", servers=listed["servers"], is_redis_down=listed["fleets"] is None)


@page_view("/page/servers/<path:server>", admin=True)
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
    )


@page_view("/page/servers/<path:server>/state", method="POST", admin=True)
def change_server(server: str) -> Any:
    servers_api.change_server(ServerPath(server=server), state_body())
    return redirect(f"/page/servers/{segment(server)}?done=changed", 303)


@page_view("/page/servers/<path:server>/reset", method="POST", admin=True)
def reset_server(server: str) -> Any:
    servers_api.reset_server(ServerPath(server=server))
    return redirect(f"/page/servers/{segment(server)}?done=reset", 303)
