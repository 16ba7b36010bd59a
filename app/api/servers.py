"""Inference servers: registering, pausing, removing.  Takes effect everywhere within two seconds."""

from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError

from app import views
from app.addresses import check_endpoint
from app.admin import admin_blueprint, bring_to_redis, close_breaker, depths_of, standings_of
from app.auth import tenant
from app.context import dispatcher
from app.describing import described as described_by
from app.kinds import ServerCheck
from app.openapi import described, problems
from app.schemas import ListedServer, RegisterBody, ServerList, ServerPath, ServerView, StateBody
from insight.idle import why_idle
from jobs.errors import NotFound
from jobs.record import Server, now_ms
from jobs.states import Standing
from jobs.withheld import Withheld
from routing import draining
from routing.policies.placement import read_attributes, read_of_model
from routing.slots import ServerStanding
from routing.submission import check_model_name
from tasks.descriptions import Misconfigured, server_for
from tasks.servers import Health
from tasks.wiring import catalog, workers

api = admin_blueprint("servers", "Servers", "/admin")


@api.post(
    "/register",
    responses={
        201: ServerView,
        200: described(ServerView, "Known before; changed"),
        **problems(400, 409, 413, 415, 422),
    },
)
def register_server(body: RegisterBody) -> tuple[dict[str, Any], int]:
    """Add a server for a model, or change its endpoint and slots.  The model is created if it is new.

    Attributes, weight, version, runtime, preset and description that are left out stay as they are.  A server of one
    fleet cannot take over a model of another that has servers or unfinished jobs: 409.
    """
    check_model_name(body.model)
    check_model_name(body.server, "server")
    check_endpoint(body.endpoint)
    attributes = None if body.attributes is None else read_attributes(body.attributes)
    of_model = read_of_model(model_version=body.model_version, runtime=body.runtime)
    known = dispatcher().fleet.refresh().servers.get(body.server)
    overrides = _overrides(body)
    description = described_by(body.model, overrides or {})
    server = catalog().register(
        body.model,
        body.server,
        body.endpoint,
        body.slots,
        now_ms(),
        attributes,
        body.weight,
        of_model,
        overrides,
        description,
    )
    bring_to_redis(server.fleet)
    return views.server(server), 200 if known is not None and body.model in known.endpoints else 201


@api.get("/servers", responses={200: ServerList})
def list_servers() -> dict[str, Any]:
    """List servers, how each stands in the waiting room, and the slots of each fleet.

    `scores` has the parts by which servers are compared for a model: the lowest total is chosen.  `withheld` are slots
    whose run has ended here while its server has not let go of it.
    """
    found = dispatcher().fleet.refresh()
    standings: Mapping[str, ServerStanding] = {}
    try:
        fleets = [views.fleet(name, depths) for name, depths in depths_of(found.fleets()).items()]
        standings = standings_of(found.fleets())
    except RedisError:
        fleets = None
    servers, withheld = sorted(found.servers.values(), key=lambda server: server.name), draining.by_server(dispatcher())
    return {"servers": [_listed(server, standings, withheld) for server in servers], "fleets": fleets}


@api.patch("/servers/<path:server>", responses={200: ServerView, **problems(400, 404, 413, 415, 422)})
def change_server(path: ServerPath, body: StateBody) -> dict[str, Any]:
    """Drain, pause, freeze or resume a server.

    Unless it is online, what runs there goes on and nothing new is sent; the three words differ for people only.
    """
    known = _known(path.server)
    catalog().set_server_state(known.name, body.state, reason=body.reason or "", by=tenant().name, now=now_ms())
    if body.state == Standing.ONLINE:
        close_breaker(known.fleet, "server", known.name)
    bring_to_redis(known.fleet)
    return views.server(_known(path.server))


@api.post("/servers/<path:server>/reset", responses={200: ListedServer, **problems(404, 415, 503)})
def reset_server(path: ServerPath) -> dict[str, Any]:
    """Say that a server is well: its breaker is closed, its slots rest no more, and its failures are forgotten.

    Whether it is paused or drained stays as it is.
    """
    known = _known(path.server)
    dispatcher().slots.reset(known.fleet, "server", known.name)
    bring_to_redis(known.fleet)
    return _listed(known, standings_of([known.fleet]), draining.by_server(dispatcher()))


@api.get("/servers/<path:server>/check", responses={200: ServerCheck, **problems(404)})
def check_server(path: ServerPath) -> dict[str, Any]:
    """Say why a server gets no jobs: what the record and the waiting room know, and what it says of itself just now."""
    known = _known(path.server)
    reasons = why_idle(dispatcher(), workers(), known)
    return views.server_check(known, reasons, _health(known))


def _health(server: Server) -> Health | None:
    """Asked by the description of its first model; None: there is none by which it could be."""
    if not server.endpoints:
        return None
    model, url = min(server.endpoints.items())
    found = dispatcher().fleet.snapshot()
    try:
        return server_for(url, found.models[model], found.described_by(server.name, model)).health()
    except Misconfigured:
        return None


@api.delete("/servers/<path:server>", responses={204: None, **problems(404, 415)})
def remove_server(path: ServerPath) -> tuple[str, int]:
    """Forget a server.  Its models stay, and their jobs wait for another; drain it first to let runs end."""
    known = _known(path.server)
    catalog().remove_server(known.name)
    bring_to_redis(known.fleet)
    return "", 204


def _overrides(body: RegisterBody) -> dict[str, Any] | None:
    """What is said of how it is spoken to for this model; None: nothing, and it stays as it was."""
    given = {name: getattr(body, name) for name in ("preset", "description") if name in body.model_fields_set}
    return {name: value for name, value in given.items() if value is not None} if given else None


def _listed(
    it: Server, standings: Mapping[str, ServerStanding], withheld: Mapping[str, Sequence[Withheld]]
) -> dict[str, Any]:
    now = {"standing": views.standing(standings.get(it.name)), "withheld": views.withheld(withheld.get(it.name, ()))}
    return views.server(it) | now


def _known(name: str) -> Server:
    found = dispatcher().fleet.refresh().servers.get(name)
    if found is None:
        raise NotFound("There is no such server; GET /admin/servers lists them.", server=name)
    return found
