"""Inference servers: registering, pausing, removing.  Takes effect everywhere within two seconds."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from app.addresses import validate_endpoint
from app.api.catalog_changes import admin_blueprint, close_breaker, queue_counts, read_server_status, refresh_redis
from app.api.openapi import problem_responses, response_of
from app.auth.access import current_tenant
from app.context import dispatcher
from app.describing import validate_description as described_by
from app.kinds import ServerCheck, check_result
from app.removal import RemovalView, ServerRemovalQuery
from app.schemas.job_schemas import RegisterBody, ReleaseSlotsBody, ServerPath, StateBody
from app.schemas.server_schemas import (
    FleetView,
    QuarantinedSlotView,
    ServerDetail,
    ServerList,
    ServerStatusView,
    ServerView,
)
from routing.admission.constraints import parse_attributes, parse_model_attributes
from routing.admission.submission import check_name
from routing.dispatch import earlier_requests
from routing.maintenance import decommission as upkeep
from routing.maintenance import quarantined_slots
from routing.queries import server_status
from routing.queries.explain import explain_idle_server
from slotkeeper import audit
from slotkeeper.clock import now_ms
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.registry import catalog_removal
from slotkeeper.registry.values import AdminState, Server
from tasks.server_adapters import health_adapter
from tasks.servers import ServerSession, call_server
from tasks.services import catalog, database, workers

api = admin_blueprint("servers", "Servers", "/admin")


@api.post(
    "/register",
    responses={
        201: ServerView,
        200: response_of(ServerView, "Known before; changed"),
        **problem_responses(400, 409, 413, 415, 422),
    },
)
def register_server(body: RegisterBody) -> tuple[dict[str, Any], int]:
    """Add a server for a model, or change its endpoint and slots.  The model is created if it is new.

    A change ends no run: what began before is asked for at the address to which it was sent, and keeps its slot.  Two
    servers may have one endpoint: each gives it as many jobs as its own slots, and neither takes the other's for
    foreign ones.

    Slots, attributes, weight, version, runtime, preset and description that are left out stay as they are.  A server of
    one fleet cannot take over a model of another that has servers or unfinished jobs: 409.
    """
    check_name(body.model)
    check_name(body.server, "server")
    validate_endpoint(body.endpoint)
    attributes = None if body.attributes is None else parse_attributes(body.attributes)
    of_model = parse_model_attributes(model_version=body.model_version, runtime=body.runtime)
    known = dispatcher().catalog.refresh().servers.get(body.server)
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
    refresh_redis(server.fleet)
    return ServerView.build(server), 200 if known is not None and body.model in known.endpoints else 201


@api.get("/servers", responses={200: ServerList})
def list_servers() -> dict[str, Any]:
    """List servers with their status in Redis, and the slots of each fleet.

    `scores` has the parts of a server's score for a model; the server with the lowest total is chosen.  `quarantined`
    lists slots whose run has ended here while the server may still be running it.
    """
    found = dispatcher().catalog.refresh()
    statuses: Mapping[str, server_status.ServerStatus] = {}
    try:
        fleets = [FleetView.build(depths, fleet=name) for name, depths in queue_counts(found.fleets()).items()]
        statuses = read_server_status(found.fleets())
    except RedisError:
        fleets = None
    servers = sorted(found.servers.values(), key=lambda server: server.name)
    quarantined = quarantine.list_by_server(database())
    return ServerList.build(
        servers=[_server_detail(server, statuses, quarantined) for server in servers], fleets=fleets
    )


@api.get("/servers/<path:server>", responses={200: ServerDetail, **problem_responses(404)})
def get_server(path: ServerPath) -> dict[str, Any]:
    """Show a server, its status in Redis, and its quarantined slots."""
    known = known_server(path.server)
    statuses: Mapping[str, server_status.ServerStatus] = {}
    with suppress(RedisError):
        statuses = read_server_status([known.fleet])
    return _server_detail(known, statuses, quarantine.list_by_server(database()))


@api.patch("/servers/<path:server>", responses={200: ServerView, **problem_responses(400, 404, 413, 415, 422)})
def change_server(path: ServerPath, body: StateBody) -> dict[str, Any]:
    """Drain, pause, freeze or resume a server.

    A server that is not online finishes its runs and gets no new ones; the three words differ for people only.
    """
    known = known_server(path.server)
    catalog().set_server_state(
        known.name, body.state, reason=body.reason or "", by=current_tenant().name, now_ms=now_ms()
    )
    if body.state == AdminState.ONLINE:
        close_breaker(known.fleet, "server", known.name)
    refresh_redis(known.fleet)
    return ServerView.build(known_server(path.server))


@api.post("/servers/<path:server>/reset", responses={200: ServerDetail, **problem_responses(404, 415, 503)})
def reset_server(path: ServerPath) -> dict[str, Any]:
    """Say that a server is well: its breaker is closed, its cooldown is over, and its failures are forgotten.

    Whether it is paused or drained stays as it is.
    """
    known = known_server(path.server)
    dispatcher().slots.reset_breaker(known.fleet, "server", known.name)
    audit.write_entry(dispatcher().store.database, audit.make_entry("server.reset", server=known.name))
    refresh_redis(known.fleet)
    return _server_detail(known, read_server_status([known.fleet]), quarantine.list_by_server(database()))


@api.post(
    "/servers/<path:server>/release",
    responses={200: ServerDetail, **problem_responses(400, 404, 409, 413, 415, 422, 503)},
)
def release_server(path: ServerPath, body: ReleaseSlotsBody) -> dict[str, Any]:
    """Release the quarantined slots of a server, which are used again at once.

    Runs that wait until the server has ended their earlier request send it again.  Only for a server that certainly
    does not run these jobs any more, such as one whose process has ended.  If it still runs one of them, its slot then
    has two jobs.
    """
    known = known_server(path.server)
    slots = [row.slot for row in quarantine.list_by_server(database())[known.name] if body.slot in (None, row.slot)]
    slots += earlier_requests.list_slots(database(), known.name, body.slot)
    if not slots:
        which = "no slot" if body.slot is None else f"no slot {body.slot!r}"
        raise Conflict(
            f"Server {known.name!r} has {which} that is quarantined, or whose run waits for an earlier request; "
            "GET /admin/servers lists those that are quarantined, GET /admin/servers/{server}/check names the runs."
        )
    audit.write_entry(dispatcher().store.database, audit.make_entry("server.release", server=known.name, slots=slots))
    quarantined_slots.release_all(dispatcher(), known, body.slot)
    earlier_requests.release(database(), known.name, body.slot)
    return _server_detail(known, read_server_status([known.fleet]), quarantine.list_by_server(database()))


@api.get("/servers/<path:server>/check", responses={200: ServerCheck, **problem_responses(404)})
def check_server(path: ServerPath) -> dict[str, Any]:
    """Explain why a server gets no jobs, from the database, Redis and a health check made now."""
    known = known_server(path.server)
    reasons = explain_idle_server(dispatcher(), workers(), known)
    speaker = health_adapter(dispatcher().catalog.get(), known)
    return check_result(known, reasons, None if speaker is None else call_server(speaker, ServerSession.health))


@api.delete(
    "/servers/<path:server>",
    responses={
        200: RemovalView,
        202: response_of(RemovalView, "It gets no new jobs, and is removed when its runs have ended"),
        **problem_responses(404, 409, 415, 422),
    },
)
def remove_server(path: ServerPath, query: ServerRemovalQuery) -> tuple[dict[str, Any], int]:
    """Remove a server.  Its models stay, and their jobs wait for another server.

    409: it has runs or quarantined slots.  With `drain` it gets no new jobs, and is removed when its runs have ended.
    With `force` it is removed at once: its runs (`lost`) end and their jobs run on another server, at no cost.
    """
    name, by = known_server(path.server).name, current_tenant().name
    found = catalog_removal.remove_server(database(), name, now_ms(), by, drain=query.drain, force=query.force)
    if found.is_over:
        upkeep.forget_server(dispatcher(), found)
        upkeep.end_runs_now(dispatcher(), found.lost)
    else:
        refresh_redis(found.fleet)
    return RemovalView.build(found), 200 if found.is_over else 202


@api.delete("/servers/<path:server>/removal", responses={200: ServerView, **problem_responses(404, 415)})
def keep_server(path: ServerPath) -> dict[str, Any]:
    """Call a removal off: the server gets jobs again."""
    known = known_server(path.server)
    catalog_removal.cancel_server_removal(database(), known.name)
    refresh_redis(known.fleet)
    return ServerView.build(known_server(known.name))


def _overrides(body: RegisterBody) -> dict[str, Any] | None:
    """Return the preset and description that the body names; None: neither, and both stay as they were."""
    given = {name: getattr(body, name) for name in ("preset", "description") if name in body.model_fields_set}
    return {name: value for name, value in given.items() if value is not None} if given else None


def _server_detail(
    server: Server,
    statuses: Mapping[str, server_status.ServerStatus],
    quarantined: Mapping[str, Sequence[QuarantinedSlot]],
) -> dict[str, Any]:
    status, slots = statuses.get(server.name), quarantined.get(server.name, ())
    use = status and server_status.slot_use(server.state, status, len(slots))
    return ServerDetail.build(
        server,
        status=status and ServerStatusView.build(status),
        quarantined=[QuarantinedSlotView.build(slot) for slot in slots],
        running=use and use.running,
        free=use and use.free,
        blocked_by=(use and use.blocked_by) or None,
    )


def known_server(name: str) -> Server:
    found = dispatcher().catalog.refresh().servers.get(name)
    if found is None:
        raise NotFound("There is no such server; GET /admin/servers lists them.", server=name)
    return found
