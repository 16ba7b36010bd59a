"""The start page with its plots: all models for operators; other tenants are redirected to their jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flask import Response, current_app, redirect, request
from werkzeug.exceptions import NotFound

from app.api import model_views as models_api
from app.api import server_views as servers_api
from app.api.stream_views import stream_events
from app.auth.access import current_identity
from app.context import dispatcher
from app.page.login import page_view
from app.page.rendering import MEDIA_TYPES, content, render_page
from app.schemas.event_schemas import StreamQuery
from routing.queries import model_overview
from routing.queries.model_overview import LastHourUsage, ModelOverview, SlotState
from slotkeeper.clock import now_ms
from tasks.services import database

WIDTH, HEIGHT = 240, 48  # of a plot, in pixels
_LAST_HOUR = "slotkeeper_last_hour"
_MAX_MODELS = 50
_MAX_TILES = 64
_YEAR_S = 31_536_000


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot.  `area` and `line`: SVG paths in a box of WIDTH by HEIGHT.  `words`: the description of the plot."""

    area: str
    line: str
    words: str
    width: int = WIDTH
    height: int = HEIGHT


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model on the overview.  `servers`: (the server as in the API, its slots, the number of slots not shown)."""

    model: dict[str, Any]
    now: ModelOverview
    servers: list[tuple[dict[str, Any], list[SlotState], int]]
    plot: Plot


def last_hour() -> LastHourUsage:
    """Return the slot use of the last hour, which the app caches."""
    usage: LastHourUsage | None = current_app.extensions.get(_LAST_HOUR)
    if usage is None:
        usage = current_app.extensions.setdefault(_LAST_HOUR, LastHourUsage(database()))
    return usage


@page_view("/")
def overview() -> Any:
    if not current_identity().operates:
        return redirect("/page/jobs", 303)
    name_filter = request.args.get("q", "").strip()
    listed = models_api.list_models()["models"]
    matching = [model for model in listed if name_filter.lower() in model["model"].lower()]
    matching.sort(key=lambda model: (-(model["waiting"] or 0), model["model"]))
    servers = servers_api.list_servers()
    cards = _cards(matching[:_MAX_MODELS], servers["servers"])
    return render_page(
        "overview.html",
        cards=cards,
        name_filter=name_filter,
        models=len(listed),
        more=len(matching) - len(cards),
        servers=servers["servers"],
        is_redis_down=servers["fleets"] is None,
        now=now_ms(),
    )


def _cards(models: list[dict[str, Any]], servers: list[dict[str, Any]]) -> list[ModelCard]:
    """Return a card for each model, except models that were removed in the meantime."""
    catalog, now, running = dispatcher().catalog.get(), now_ms(), dispatcher().store.list_running()
    configured = [catalog.models[model["model"]] for model in models if model["model"] in catalog.models]
    overviews = model_overview.read_overview(dispatcher(), last_hour(), configured, running, now)
    slots = model_overview.read_slots(dispatcher(), list(catalog.servers.values()), running)
    by_name = {server["server"]: server for server in servers}
    return [
        ModelCard(
            model,
            overviews[model["model"]],
            [
                (by_name[name], slots.get(name, [])[:_MAX_TILES], max(0, len(slots.get(name, [])) - _MAX_TILES))
                for name in model["servers"]
                if name in by_name
            ],
            slot_use_plot(overviews[model["model"]].use, overviews[model["model"]].ended, model["slots"]),
        )
        for model in models
        if model["model"] in overviews
    ]


# -- routes that every page uses ---------------------------------------------------------------------------


@page_view("/page/stream")
def stream() -> Response:
    """Stream events as GET /stream does, for the tenant that is logged in."""
    return stream_events(StreamQuery())


@page_view("/page/static/<name>", open_to_all=True)
def asset(name: str) -> Response:
    """Return a static file."""
    media_type = MEDIA_TYPES.get(name.rpartition(".")[2])
    if media_type is None or "/" in name:
        raise NotFound
    try:
        body = content(name)
    except OSError:
        raise NotFound from None
    return Response(body, content_type=media_type, headers={"Cache-Control": f"public, max-age={_YEAR_S}, immutable"})


@page_view("/page/<path:rest>")
def nothing_here(rest: str) -> Any:
    """Return the error page for an unknown path."""
    raise NotFound


def slot_use_plot(use: Sequence[float], ended: Sequence[int], slots: int) -> Plot:
    """Return the plot of the share of slots in use.

    use, ended: the share and the number of ended jobs of each minute, the newest last.  slots: of the online servers.
    """
    count = "1 job" if sum(ended) == 1 else f"{sum(ended)} jobs"
    if not slots:
        return Plot("", "", f"No server is online. {count} ended in the last hour.")
    if not any(use):
        return Plot("", "", f"Slot use over the last hour: none. {count} ended.")
    step = WIDTH / (len(use) - 1)
    points = [f"{n * step:.1f} {_y(share):.1f}" for n, share in enumerate(use)]
    line = "M" + "L".join(points)
    mean, most = sum(use) / len(use), max(use)
    words = (
        f"Slot use over the last hour: {use[-1]:.0%} at last, {mean:.0%} on average, {most:.0%} at most. {count} ended."
    )
    return Plot(f"{line}L{WIDTH} {HEIGHT}L0 {HEIGHT}Z", line, words)


def _y(share: float) -> float:
    return HEIGHT - 1 - share * (HEIGHT - 2)
