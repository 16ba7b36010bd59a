"""The first screen: each model for operators, the jobs of a tenant for others."""

from dataclasses import dataclass
from typing import Any

from flask import Response, current_app, redirect, request
from werkzeug.exceptions import NotFound

from app.api import model_views as models_api
from app.api import server_views as servers_api
from app.api.stream_views import StreamQuery, stream_events
from app.auth.access import current_tenant
from app.context import dispatcher
from app.page import plots
from app.page.login import page_view
from app.page.rendering import KINDS, content, render_page
from routing.queries import model_overview
from routing.queries.model_overview import LastHourUsage, ModelOverview, SlotState
from slotkeeper.clock import now_ms
from tasks.services import database

_LAST_HOUR = "slotkeeper_last_hour"
_MOST_MODELS = 50
_MOST_TILES = 64
_A_YEAR_S = 31_536_000


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model on the overview.  `servers`: (the server as in the API, its slots, how many more)."""

    model: dict[str, Any]
    now: ModelOverview
    servers: list[tuple[dict[str, Any], list[SlotState], int]]
    plot: plots.Plot


def last_hour() -> LastHourUsage:
    found: LastHourUsage | None = current_app.extensions.get(_LAST_HOUR)
    if found is None:
        found = current_app.extensions.setdefault(_LAST_HOUR, LastHourUsage(database()))
    return found


@page_view("/")
def overview() -> Any:
    if not current_tenant().admin:
        return redirect("/page/jobs", 303)
    wanted = request.args.get("q", "").strip()
    listed = models_api.list_models()["models"]
    found = [model for model in listed if wanted.lower() in model["model"].lower()]
    found.sort(key=lambda model: (-(model["waiting"] or 0), model["model"]))
    servers = servers_api.list_servers()
    cards = _cards(found[:_MOST_MODELS], servers["servers"])
    return render_page(
        "overview.html",
        cards=cards,
        wanted=wanted,
        models=len(listed),
        more=len(found) - len(cards),
        servers=servers["servers"],
        room_away=servers["fleets"] is None,
        now=now_ms(),
    )


def _cards(shown: list[dict[str, Any]], servers: list[dict[str, Any]]) -> list[ModelCard]:
    catalog, now, running = dispatcher().catalog.get(), now_ms(), dispatcher().store.list_running()
    known = [catalog.models[model["model"]] for model in shown if model["model"] in catalog.models]
    found = model_overview.read_overview(dispatcher(), last_hour(), known, running, now)
    slots = model_overview.read_slots(dispatcher(), list(catalog.servers.values()), running)
    by_name = {server["server"]: server for server in servers}
    return [
        ModelCard(
            model,
            found[model["model"]],
            [
                (by_name[name], slots.get(name, [])[:_MOST_TILES], max(0, len(slots.get(name, [])) - _MOST_TILES))
                for name in model["servers"]
                if name in by_name
            ],
            plots.slot_use_plot(found[model["model"]].use, found[model["model"]].ended, model["slots"]),
        )
        for model in shown
        if model["model"] in found
    ]


# -- what every screen needs -------------------------------------------------------------------------------


@page_view("/page/stream")
def stream() -> Response:
    """As GET /stream, for who is logged in."""
    return stream_events(StreamQuery())


@page_view("/page/static/<name>", open_to_all=True)
def asset(name: str) -> Response:
    kind = KINDS.get(name.rpartition(".")[2])
    if kind is None or "/" in name:
        raise NotFound
    try:
        body = content(name)
    except OSError:
        raise NotFound from None
    return Response(body, content_type=kind, headers={"Cache-Control": f"public, max-age={_A_YEAR_S}, immutable"})


@page_view("/page/<path:rest>")
def nothing_here(rest: str) -> Any:
    raise NotFound
