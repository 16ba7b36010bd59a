"""Register, pause, check and remove inference servers.  Changes take effect in all processes within two seconds."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from app.api.catalog_changes import (
    close_breaker,
    queue_counts,
    read_server_status,
    refresh_redis,
    validate_description,
    validate_endpoint,
)
from app.api.openapi import blueprint, problem_responses, response_of
from app.auth.access import current_tenant
from app.context import dispatcher
from app.schemas.base import StateBody
from app.schemas.server_schemas import (
    FleetView,
    QuarantinedSlotView,
    RegisterBody,
    ReleaseSlotsBody,
    RemovalView,
    ServerCheck,
    ServerDetail,
    ServerList,
    ServerPath,
    ServerRemovalQuery,
    ServerStatusView,
    ServerView,
    check_result,
)
from routing.admission.constraints import parse_attributes, parse_model_attributes
from routing.admission.submission import check_name
from routing.dispatch import earlier_requests
from routing.maintenance import decommission, quarantined_slots
from routing.queries import server_status
from routing.queries.explain import explain_idle_server
from slotkeeper import audit
from slotkeeper.clock import now_ms
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.registry import catalog_removal
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.values import AdminState, Server
from tasks.server_adapters import health_adapter
from tasks.servers import ServerSession, call_server
from tasks.services import catalog, database, workers

api = blueprint("servers", "Servers", "/admin", scope=Scope.OPERATE)


@api.post(
    "/register",
    responses={
        201: ServerView,
        200: response_of(ServerView, "It was registered before, and is changed"),
        **problem_responses(400, 409, 413, 415, 422),
    },
)
def register_server(body: RegisterBody) -> tuple[dict[str, Any], int]:
    """Add a server for a model, or change its endpoint and slots.  The model is created if it is new.

    A change ends no run: a running job is polled at the address to which it was sent, and keeps its slot.  Two servers
    may have the same endpoint: each sends it as many jobs as it has slots, and neither counts the jobs of the other as
    foreign.

    Slots, attributes, weight, version, runtime, preset and description that are left out stay unchanged.  409: the
    model belongs to another fleet, and has servers or unfinished jobs there.
    """
    check_name(body.model)
    check_name(body.server, "server")
    validate_endpoint(body.endpoint)
    attributes = None if body.attributes is None else parse_attributes(body.attributes)
    model_attributes = parse_model_attributes(model_version=body.model_version, runtime=body.runtime)
    former = dispatcher().catalog.refresh().servers.get(body.server)
    overrides = _overrides(body)
    description = validate_description(body.model, overrides or {})
    server = catalog().register(
        body.model,
        body.server,
        body.endpoint,
        body.slots,
        now_ms(),
        attributes,
        body.weight,
        model_attributes,
        overrides,
        description,
    )
    refresh_redis(server.fleet)
    return ServerView.build(server), 200 if former is not None and body.model in former.endpoints else 201


@api.get("/servers", responses={200: ServerList})
def list_servers() -> dict[str, Any]:
    """List servers with their status in Redis, and the slots of each fleet.

    `scores` has the parts of a server's score for a model; the server with the lowest total is chosen.  `quarantined`
    lists slots whose run has ended in Slotkeeper while the server may still be running it.
    """
    snapshot = dispatcher().catalog.refresh()
    statuses: Mapping[str, server_status.ServerStatus] = {}
    try:
        fleets = [FleetView.build(counts, fleet=name) for name, counts in queue_counts(snapshot.fleets()).items()]
        statuses = read_server_status(snapshot.fleets())
    except RedisError:
        fleets = None
    servers = sorted(snapshot.servers.values(), key=lambda server: server.name)
    quarantined = quarantine.list_by_server(database())
    return ServerList.build(
        servers=[_server_detail(server, statuses, quarantined) for server in servers], fleets=fleets
    )


@api.get("/servers/<path:server>", responses={200: ServerDetail, **problem_responses(404)})
def get_server(path: ServerPath) -> dict[str, Any]:
    """Show a server, its status in Redis, and its quarantined slots."""
    server = known_server(path.server)
    statuses: Mapping[str, server_status.ServerStatus] = {}
    with suppress(RedisError):
        statuses = read_server_status([server.fleet])
    return _server_detail(server, statuses, quarantine.list_by_server(database()))


@api.patch("/servers/<path:server>", responses={200: ServerView, **problem_responses(400, 404, 413, 415, 422)})
def change_server(path: ServerPath, body: StateBody) -> dict[str, Any]:
    """Drain, pause, freeze or resume a server.

    A server that is not online finishes its runs and gets no new ones.  The states draining, paused and frozen have the
    same effect.
    """
    server = known_server(path.server)
    catalog().set_server_state(
        server.name, body.state, reason=body.reason or "", by=current_tenant().name, now_ms=now_ms()
    )
    if body.state == AdminState.ONLINE:
        close_breaker(server.fleet, "server", server.name)
    refresh_redis(server.fleet)
    return ServerView.build(known_server(path.server))


@api.post("/servers/<path:server>/reset", responses={200: ServerDetail, **problem_responses(404, 415, 503)})
def reset_server(path: ServerPath) -> dict[str, Any]:
    """Reset a server: its breaker is closed, its cooldown ends, and its failures are forgotten.

    Its state, such as paused or draining, does not change.
    """
    server = known_server(path.server)
    dispatcher().slots.reset_breaker(server.fleet, "server", server.name)
    audit.write_entry(dispatcher().store.database, audit.make_entry("server.reset", server=server.name))
    refresh_redis(server.fleet)
    return _server_detail(server, read_server_status([server.fleet]), quarantine.list_by_server(database()))


@api.post(
    "/servers/<path:server>/release",
    responses={200: ServerDetail, **problem_responses(400, 404, 409, 413, 415, 422, 503)},
)
def release_server(path: ServerPath, body: ReleaseSlotsBody) -> dict[str, Any]:
    """Release the quarantined slots of a server, which are used again at once.

    Runs that wait until the server has ended their earlier request send it again.  Use it only for a server that
    certainly does not run these jobs any more, such as one whose process has ended.  Otherwise the server may run two
    jobs in one slot.
    """
    server = known_server(path.server)
    slots = [row.slot for row in quarantine.list_by_server(database())[server.name] if body.slot in (None, row.slot)]
    slots += earlier_requests.list_slots(database(), server.name, body.slot)
    if not slots:
        which = "no slot" if body.slot is None else f"no slot {body.slot!r}"
        raise Conflict(
            f"Server {server.name!r} has {which} that is quarantined, or whose run waits for an earlier request; "
            "GET /admin/servers lists those that are quarantined, GET /admin/servers/{server}/check names the runs."
        )
    audit.write_entry(dispatcher().store.database, audit.make_entry("server.release", server=server.name, slots=slots))
    quarantined_slots.release_all(dispatcher(), server, body.slot)
    earlier_requests.release(database(), server.name, body.slot)
    return _server_detail(server, read_server_status([server.fleet]), quarantine.list_by_server(database()))


@api.get("/servers/<path:server>/check", responses={200: ServerCheck, **problem_responses(404)})
def check_server(path: ServerPath) -> dict[str, Any]:
    """Explain why a server gets no jobs, from the database, Redis and a health check made now."""
    server = known_server(path.server)
    reasons = explain_idle_server(dispatcher(), workers(), server)
    adapter = health_adapter(dispatcher().catalog.get(), server)
    return check_result(server, reasons, None if adapter is None else call_server(adapter, ServerSession.health))


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
    With `force` it is removed at once: its runs (`lost`) end, and their jobs run on another server without using up a
    retry.
    """
    name, by = known_server(path.server).name, current_tenant().name
    removal = catalog_removal.remove_server(database(), name, now_ms(), by, drain=query.drain, force=query.force)
    if removal.is_over:
        decommission.forget_server(dispatcher(), removal)
        decommission.end_runs_now(dispatcher(), removal.lost)
    else:
        refresh_redis(removal.fleet)
    return RemovalView.build(removal), 200 if removal.is_over else 202


@api.delete("/servers/<path:server>/removal", responses={200: ServerView, **problem_responses(404, 415)})
def keep_server(path: ServerPath) -> dict[str, Any]:
    """Cancel the removal of a server: it gets jobs again."""
    server = known_server(path.server)
    catalog_removal.cancel_server_removal(database(), server.name)
    refresh_redis(server.fleet)
    return ServerView.build(known_server(server.name))


def _overrides(body: RegisterBody) -> dict[str, Any] | None:
    """Return the preset and description in the body; None: it has neither, and both stay unchanged."""
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
    """Return the server of this name.  Raises NotFound."""
    server = dispatcher().catalog.refresh().servers.get(name)
    if server is None:
        raise NotFound("There is no such server; GET /admin/servers lists them.", server=name)
    return server
