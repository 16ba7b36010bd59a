"""Why a server gets no jobs: what the record and the room say of it, each thing that stands in the way by itself."""

from collections.abc import Iterator

from redis.exceptions import RedisError

from routing.admission import constraints
from routing.dispatch.dispatcher import Dispatcher
from routing.queries import job_list
from routing.queries.explain import Blocker, breaker_open, of_server, quarantine_sentence, stopped
from routing.queries.model_status import ModelLoad, read_model_load
from routing.queries.process_list import ProcessList
from routing.queries.server_status import ServerStatus, read_servers, slot_use
from routing.queue.slots import server_of_slot
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.states import State
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import STOPPED_STATES, Server

_LOOKED_AT = 100  # waiting jobs of a model


def explain_idle_server(dispatcher: Dispatcher, workers: WorkerCapacity, server: Server) -> tuple[Blocker, ...]:
    """What keeps it from jobs, what lasts longest first; nothing: it gets whatever comes."""
    catalog = dispatcher.catalog.get()
    found = [*_in_record(server, catalog), *_misconfigured(dispatcher, server)]
    try:
        return (*found, *dispatcher.queues.call_if_available(lambda: [*_in_room(dispatcher, workers, server, catalog)]))
    except RedisError:
        sentence = "Redis does not answer, so no job is offered; jobs are safe in the database"
        return (*found, Blocker("redis_away", sentence))


def _in_record(server: Server, catalog: CatalogSnapshot) -> Iterator[Blocker]:
    if server.state != "online":
        yield Blocker("server_paused", stopped("server", server.name, server), server.name)
    if not server.endpoints:
        yield Blocker("no_model", "it serves no model; register one", server.name)
    for name in sorted(server.endpoints):
        model = catalog.models.get(name)
        if model is not None and model.state in STOPPED_STATES:
            yield Blocker("model_paused", stopped("model", name, model), name)


def _misconfigured(dispatcher: Dispatcher, server: Server) -> Iterator[Blocker]:
    """Name models whose jobs wait for the next attempt, since the last could not run as they are configured."""
    for name in sorted(server.endpoints):
        waiting = job_list.find_jobs(dispatcher.store.database, state=State.DELAYED, model=name, limit=_LOOKED_AT)
        job = next((job for job in waiting if job.error_code == "misconfigured"), None)
        if job is not None:
            sentence = f"model {name!r}, or the address of its server, is misconfigured: {job.error_message}"
            yield Blocker("misconfigured", sentence, name)


def _in_room(
    dispatcher: Dispatcher, workers: WorkerCapacity, server: Server, catalog: CatalogSnapshot
) -> Iterator[Blocker]:
    """Raises redis errors."""
    standing = read_servers(dispatcher.slots, server.fleet).get(server.name)
    if standing is None:
        yield Blocker("not_in_room", "it is not in Redis yet; the next sweep adds it", server.name)
        return
    yield from _of_slots(dispatcher, server, standing)
    loads = {name: read_model_load(dispatcher, catalog.models[name]) for name in sorted(server.endpoints)}
    for name, load in loads.items():
        if load.breaker == "open":
            yield breaker_open(name, load.open_why, load.open_until_ms)
    yield from _of_jobs(dispatcher, server, loads)
    if workers.read_total() == 0:
        yield Blocker("no_worker", "no live worker has a free place: none is running, or all are full")


def _of_slots(dispatcher: Dispatcher, server: Server, standing: ServerStatus) -> Iterator[Blocker]:
    if standing.breaker == "open":
        yield of_server(server.name, "breaker open", standing)
    elif standing.breaker == "probing":
        yield Blocker("server_probing", "one trial job is running there, since its breaker was open", server.name)
    if standing.away_since_ms or standing.cooling:
        yield of_server(server.name, "away" if standing.away_since_ms else "in cooldown", standing)
    withheld = quarantine.list_by_server(dispatcher.store.database).get(server.name, ())
    use = slot_use(server.state, standing, len(withheld))
    if use.running and not standing.free:
        yield Blocker("slots_busy", f"none of its {server.slots} slots is free: {use.running} run jobs", server.name)
    for slot, (job_id, sentence) in ProcessList(dispatcher.slots.scripts).read_awaits().items():
        if server_of_slot(slot) == server.name:
            yield Blocker("run_waits", f"job {job_id} on {slot}: {sentence}", slot)
    for row in withheld:
        yield Blocker("slot_withheld", quarantine_sentence(row), row.slot)


def _of_jobs(dispatcher: Dispatcher, server: Server, loads: dict[str, ModelLoad]) -> Iterator[Blocker]:
    waiting = [name for name, load in loads.items() if load.waiting]
    if not waiting:
        yield Blocker("nothing_waits", "no job waits for a model that it serves")
    for name in waiting:
        jobs = dispatcher.store.list_queued([name], limit=_LOOKED_AT)
        unmet = [line for job in jobs for line in constraints.unmet_conditions(job.constraints, server, name)]
        if jobs and all(constraints.unmet_conditions(job.constraints, server, name) for job in jobs):
            wanted = ", ".join(sorted(set(unmet)))
            sentence = f"the waiting jobs of model {name!r} require what it does not declare: {wanted}"
            yield Blocker("constraints_unmet", sentence, name)
