"""Explain why a job waits, and why a server gets no jobs.

The database says whether a job waits at all.  Redis says which slots, limits and breakers the job waits for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from redis.exceptions import RedisError

from routing.admission import constraints
from routing.dispatch.dispatcher import Dispatcher
from routing.queries import job_list, server_status
from routing.queries.model_status import ModelLoad, read_model_load
from routing.queries.positions import StartEstimate, estimate_start
from routing.queries.process_list import ProcessList
from routing.queries.server_status import NOT_CONNECTED, ServerStatus, slot_use
from routing.queue.presence import NodeState, Presence, PresenceSnapshot
from routing.queue.queues import OFFERED, JobStatus, ModelStatus, Position
from routing.queue.slots import server_of_slot
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.batches import Batches
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.jobs.states import END_SENTENCES, Reason, State
from slotkeeper.jobs.values import Job
from slotkeeper.redis.scripts import Command
from slotkeeper.registry.identity import by_tenant
from slotkeeper.registry.policies import longest_overtaking_s
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import STOPPED_STATES, Server, TenantState

NO_WORKER = "no worker reports that it is alive; start one (`slotkeeper up`, `python -m tasks`)"
_MAX_JOBS = 100  # waiting jobs of a model that the check of a server reads
# Codes of waits that end without a change by an operator or a server, so that a start can be estimated.
_TEMPORARY = {"turn", "slots_busy", "slot_withheld"}
# While the job has one of these blockers, other jobs are running or starting.
_PROGRESSING = {"turn", "slots_busy"}
_BREAKER_REASONS = {
    "failures": "failed several runs in a row",
    "rate": "failed most of its latest runs",
    "probe": "failed the trial run after its breaker was open",
}
_QUARANTINE_REASONS = {
    "timed_out": "timed out",
    "canceled": "was canceled",
    "deadline_passed": "passed its deadline",
    "server_lost": "was lost",
    "connection_lost": "lost its connection",
    "worker_lost": "lost its worker",
}


@dataclass(frozen=True, slots=True)
class Blocker:
    """One cause for which a job waits.  `code` is stable; `until_ms`: when it may be over, ms since the epoch."""

    code: str
    sentence: str
    subject: str | None = None
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job waits.  `sentence` sums `waits_for` up.

    `ahead`: number of jobs of its model that come before it; None: it has no place in the queue.
    `before`: the jobs directly before it in its lane (tenant, priority, constraints), at most five, the nearest last.
    `servers`: for each server of its model, why the server cannot take this job now; "": it can.
    """

    sentence: str
    waits_for: tuple[Blocker, ...] = ()
    ahead: int | None = None
    before: Sequence[str] = ()
    policy: str | None = None
    longest_overtaking_s: float | None = None
    servers: Mapping[str, str] = field(default_factory=dict)
    estimate: StartEstimate | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A server of the job's model, and why it cannot take the job now; "": it can."""

    server: Server
    status: ServerStatus | None
    quarantined: Sequence[QuarantinedSlot]
    blocked_by: str


# -- a job -----------------------------------------------------------------------------------------------------


NULL_RESULT = (
    "Its result is null: the server's answer has null, or nothing, where the server's description says that the result "
    "stands (submit.result, status.result)."
)


def explain_job(dispatcher: Dispatcher, workers: WorkerCapacity, job: Job) -> Explanation:
    """Return why a job waits, or its state if it does not wait.

    While Redis does not answer, the explanation of a queued job says only that.  Raises DatabaseUnavailable.
    """
    if job.state is State.DELAYED:
        return _explain_held(dispatcher, job) if job.due_ms is None else _explain_delayed(job)
    if job.state is not State.QUEUED:
        blockers = (*_run_waits(dispatcher, job), *_server_of_run(dispatcher, job))
        return Explanation("  ".join([_describe_state(job), *(one.sentence for one in blockers)]), blockers)
    with suppress(RedisError):
        return dispatcher.queues.call_if_available(lambda: _explain_queued(dispatcher, workers, job))
    return _waiting_for(Blocker("redis_away", "Redis does not answer; the job is safe in the database"))


def breaker_reason(why: str) -> str:
    """Return in words why a breaker opened.  `why`: as in ServerStatus.open_why."""
    return _BREAKER_REASONS.get(why, _BREAKER_REASONS["failures"])


def _explain_held(dispatcher: Dispatcher, job: Job) -> Explanation:
    batch = Batches(dispatcher.store.database).get(job.tenant, job.batch or "")
    if batch is not None and batch.is_paused:
        sentence = f"its batch {batch.id} is paused; POST /batches/{batch.id}/resume lets it go on"
    elif batch is not None and batch.holds_lines:
        sentence = f"its batch {batch.id} is not complete: with on_error=refuse nothing runs before all lines are there"
    else:
        sentence = "its batch is letting its jobs go on"
    return _waiting_for(Blocker("held", sentence, subject=job.batch))


def _explain_delayed(job: Job) -> Explanation:
    if job.failures:
        sentence = f"attempt {job.attempts} failed ({_error_text(job)}); before the next, at its old place, it pauses"
        return _waiting_for(Blocker("retry", sentence, until_ms=job.due_ms))
    return _waiting_for(Blocker("not_before", "it was submitted for later", until_ms=job.due_ms))


def _describe_state(job: Job) -> str:
    """Return the state of a job that runs or has ended, as a sentence."""
    if job.state is State.RUNNING:
        canceling = ", and a cancel is requested" if job.cancel_requested_ms is not None else ""
        return f"It runs on {job.slot}, attempt {job.attempts}{canceling}."
    ended = f"It has ended: {job.state}.  {END_SENTENCES[Reason(job.why)]}"
    if job.state in (State.DEAD, State.FAILED):
        ended += f"  Its error: {_error_text(job)}."
    if job.state is State.DEAD:
        ended += f"  To try it again: slotkeeper dlq retry {job.id}"
    return f"{ended}  {NULL_RESULT}" if job.result == "null" else ended


def _error_text(job: Job) -> str:
    """Return the code and the message of a job's last error, without a full stop."""
    return f"{job.error_code}: {(job.error_message or '').rstrip('.')}"


def _run_waits(dispatcher: Dispatcher, job: Job) -> tuple[Blocker, ...]:
    """Return the cause for which a run waits, apart from its server's response, as its worker reports it."""
    if job.state is State.RUNNING and job.slot is not None:
        with suppress(RedisError):
            job_id, sentence = ProcessList(dispatcher.slots.scripts).read_awaits().get(job.slot, ("", ""))
            # The worker's report may be older than this run.
            if job_id == job.id:
                return (Blocker("run_waits", sentence, job.slot),)
    return ()


def _server_of_run(dispatcher: Dispatcher, job: Job) -> tuple[Blocker, ...]:
    """Return what is wrong with the server of a run, as its health check shows it."""
    server = dispatcher.catalog.get().servers.get(job.server or "")
    if job.state is not State.RUNNING or server is None:
        return ()
    with suppress(RedisError):
        statuses = dispatcher.queues.call_if_available(
            lambda: server_status.read_servers(dispatcher.slots, server.fleet)
        )
        if (status := statuses.get(server.name)) is not None:
            return tuple(_unwell(server.name, status))
    return ()


def _unwell(name: str, status: ServerStatus) -> Iterator[Blocker]:
    """Yield what a server's health check shows to be wrong: it is silent, or away."""
    if status.silent_since_ms:
        since = _rounded_up(status.silent_since_ms)
        sentence = f"server {name!r} has not answered its health check in time since {since}"
        yield Blocker("server_silent", f"{sentence}; it gets jobs only if no other server can run them", name)
    if status.away_since_ms:
        yield _server_blocker(name, "away", status)


def _explain_queued(dispatcher: Dispatcher, workers: WorkerCapacity, job: Job) -> Explanation:
    """Return why a queued job waits.  Raises redis errors and DatabaseUnavailable."""
    model, queues = dispatcher.catalog.resolve(job.model), dispatcher.queues
    commands: list[Command[Any]] = [
        queues.job_status_command(model.fleet, job.queued),
        queues.model_status_command(model.fleet, job.model),
    ]
    status, model_status = queues.run_all(commands)
    no_worker = () if workers.is_any_alive() else (Blocker("no_worker", NO_WORKER),)
    if status.location == "offered" and no_worker:
        return _waiting_for(*no_worker)
    if status.location == "offered":
        sentence = "It has a slot and is being started; if no worker claims it, it returns to its place."
        return Explanation(sentence, estimate=estimate_start(dispatcher, job.queued, OFFERED))
    if status.location != "waiting":
        sentence = f"it is not in the queue of model {job.model!r} yet; the next sweep enqueues it"
        return _waiting_for(Blocker("not_in_room", sentence))
    catalog = dispatcher.catalog.get()
    candidates = _list_candidates(dispatcher, catalog, job, model.fleet)
    blockers = [
        *no_worker,
        *_blockers_of_tenant_and_model(job, status, model_status, catalog),
        *_blockers_of_servers(job, candidates, status.ahead),
    ]
    if not blockers:
        blockers = [_turn(status.ahead)]
    codes = {blocker.code for blocker in blockers}
    position = Position(status.ahead, status.run_ms or None)
    can_estimate = codes <= _TEMPORARY and codes & _PROGRESSING
    return Explanation(
        _sum_up(blockers),
        tuple(blockers),
        status.ahead,
        status.jobs_before,
        model.config.policy,
        longest_overtaking_s(job.priority, model.config),
        {candidate.server.name: candidate.blocked_by for candidate in candidates},
        estimate_start(dispatcher, job.queued, position) if can_estimate else None,
    )


def _list_candidates(dispatcher: Dispatcher, catalog: CatalogSnapshot, job: Job, fleet: str) -> list[_Candidate]:
    """Return all servers of the job's model.  Raises redis errors and DatabaseUnavailable."""
    statuses = server_status.read_servers(dispatcher.slots, fleet)
    quarantined = quarantine.list_by_server(dispatcher.store.database)
    connections = _read_connections(dispatcher, statuses)
    candidates = []
    for server in catalog.servers.values():
        if job.model in server.endpoints:
            status, slots = statuses.get(server.name), quarantined.get(server.name, ())
            blocked_by = _blocked_by(job, server, status, len(slots))
            if blocked_by == NOT_CONNECTED:
                blocked_by = _describe_absence(server, connections)
            candidates.append(_Candidate(server, status, slots, blocked_by))
    return candidates


def _read_connections(dispatcher: Dispatcher, statuses: Mapping[str, ServerStatus]) -> PresenceSnapshot | None:
    """Return the connections of nodes; None: all nodes are connected, or there are none.  Raises redis errors."""
    is_any_absent = any(status.absent for status in statuses.values())
    return Presence(dispatcher.slots.scripts).read() if is_any_absent else None


def _describe_absence(server: Server, connections: PresenceSnapshot | None) -> str:
    """Return why a node takes no jobs, as what it `is`."""
    found = connections.state_of(server.node.id) if connections is not None and server.node is not None else None
    if found is None:
        return "a node that has not connected yet"
    since = _rounded_up(found.since_ms)
    if found.state is NodeState.ABSENT:
        return f"a node that is not connected since {since}"
    if found.state is NodeState.PAUSED:
        return f"a node that is paused by its owner since {since}" + (f" ({found.reason})" if found.reason else "")
    return NOT_CONNECTED  # It has connected in this moment.


def _blocked_by(job: Job, server: Server, status: ServerStatus | None, quarantined: int) -> str:
    """Return why a server cannot take this job now; "": it can."""
    if unmet := constraints.unmet_conditions(job.constraints, server, job.model):
        return f"does not meet {', '.join(unmet)}"
    if server.state != "online":
        return _stopped("server", server.name, server).split(" is ", 1)[1]
    if status is None:
        return "not in Redis yet"
    return server_status.blocked_by(status, quarantined)


def _blockers_of_tenant_and_model(
    job: Job, status: JobStatus, model_status: ModelStatus, catalog: CatalogSnapshot
) -> Iterator[Blocker]:
    """Yield the blockers that hold for all jobs of the tenant or of the model."""
    if status.blocked_by == "tenant_slots":
        sentence = f"its tenant holds {_count(status.held, 'slot')} and may hold no more"
        yield Blocker("tenant_slots", sentence, job.tenant)
    elif status.blocked_by == "max_slots":
        most = catalog.limits_of(job.tenant).max_slots
        sentence = f"its tenant may hold {_count(most or 0, 'slot')} at once, of all models that share these servers"
        yield Blocker("max_slots", sentence, job.tenant)
    elif status.blocked_by:
        yield Blocker("tenant_paused", _stopped("tenant", job.tenant, catalog.tenants.get(job.tenant)), job.tenant)
    if model_status.state in STOPPED_STATES:
        yield Blocker("model_paused", _stopped("model", job.model, catalog.models.get(job.model)), job.model)
    if model_status.breaker == "open":
        yield _model_breaker_open(job.model, model_status.open_why, model_status.open_until_ms)
    elif model_status.breaker == "probing":
        sentence = f"one trial job is running on model {job.model!r}, whose breaker was open"
        yield Blocker("model_probing", sentence, job.model)


def _blockers_of_servers(job: Job, candidates: Sequence[_Candidate], ahead: int) -> list[Blocker]:
    """Return why no server of the model can take the job; nothing if one can."""
    if not candidates:
        return [Blocker("no_server", f"no server serves model {job.model!r}; POST /admin/register adds one", job.model)]
    if not all(candidate.blocked_by for candidate in candidates):
        return []
    eligible = [one for one in candidates if constraints.meets(job.constraints, one.server, job.model)]
    if not eligible:
        servers = [candidate.server for candidate in candidates]
        sentence = constraints.no_server_message(servers, job.model, job.constraints)
        return [Blocker("constraints_unmet", sentence, job.model)]
    eligible.sort(key=lambda one: one.server.name)
    in_use = [one for one in eligible if one.blocked_by in ("busy", "withheld")]
    running = sum(
        slot_use(one.server.state, one.status, len(one.quarantined)).running
        for one in in_use
        if one.blocked_by == "busy" and one.status is not None
    )
    return [
        *([_slots_busy(running, ahead)] if running else ()),
        *(_server_blocker(one.server.name, one.blocked_by, one.status) for one in eligible if one not in in_use),
        *(_quarantine_blocker(slot, job.tenant) for one in in_use for slot in one.quarantined),
    ]


def _slots_busy(running: int, ahead: int) -> Blocker:
    slots = f"all {running} slots that could run it are" if running > 1 else "the slot that could run it is"
    rank = f", and {_jobs_before(ahead)}" if ahead else ", and it is next"
    return Blocker("slots_busy", f"{slots} taken{rank}")


def _turn(ahead: int) -> Blocker:
    return Blocker("turn", _jobs_before(ahead) if ahead else "it is next, and is being offered a slot")


def _waiting_for(*blockers: Blocker) -> Explanation:
    return Explanation(_sum_up(blockers), blockers)


def _sum_up(blockers: Sequence[Blocker]) -> str:
    parts = [
        one.sentence if one.until_ms is None else f"{one.sentence} until {_rounded_up(one.until_ms)}"
        for one in blockers
    ]
    return f"It waits: {'; '.join(parts)}."


# -- a server --------------------------------------------------------------------------------------------------


def explain_idle_server(dispatcher: Dispatcher, workers: WorkerCapacity, server: Server) -> tuple[Blocker, ...]:
    """Return why a server gets no jobs, the most lasting cause first; nothing: it gets each job that comes.

    While Redis does not answer, the causes from the database stay and one is added.  Raises DatabaseUnavailable.
    """
    catalog = dispatcher.catalog.get()
    blockers = [*_from_catalog(server, catalog), *_misconfigured(dispatcher, server)]
    try:
        return (
            *blockers,
            *dispatcher.queues.call_if_available(lambda: [*_from_redis(dispatcher, workers, server, catalog)]),
        )
    except RedisError:
        sentence = "Redis does not answer, so no job is offered; jobs are safe in the database"
        return (*blockers, Blocker("redis_away", sentence))


def _from_catalog(server: Server, catalog: CatalogSnapshot) -> Iterator[Blocker]:
    if server.state != "online":
        yield Blocker("server_paused", _stopped("server", server.name, server), server.name)
    if not server.endpoints:
        yield Blocker("no_model", "it serves no model; register one", server.name)
    for name in sorted(server.endpoints):
        model = catalog.models.get(name)
        if model is not None and model.state in STOPPED_STATES:
            yield Blocker("model_paused", _stopped("model", name, model), name)


def _misconfigured(dispatcher: Dispatcher, server: Server) -> Iterator[Blocker]:
    """Yield the models with a delayed job whose last attempt failed because of the configuration."""
    for name in sorted(server.endpoints):
        delayed = job_list.find_jobs(dispatcher.store.database, state=State.DELAYED, model=name, limit=_MAX_JOBS)
        job = next((job for job in delayed if job.error_code == "misconfigured"), None)
        if job is not None:
            sentence = f"model {name!r}, or the address of its server, is misconfigured: {job.error_message}"
            yield Blocker("misconfigured", sentence, name)


def _from_redis(
    dispatcher: Dispatcher, workers: WorkerCapacity, server: Server, catalog: CatalogSnapshot
) -> Iterator[Blocker]:
    """Yield the causes that Redis knows.  Raises redis errors and DatabaseUnavailable."""
    status = server_status.read_servers(dispatcher.slots, server.fleet).get(server.name)
    if status is None:
        yield Blocker("not_in_room", "it is not in Redis yet; the next sweep adds it", server.name)
        return
    yield from _slots_in_use(dispatcher, server, status)
    loads = {name: read_model_load(dispatcher, catalog.models[name]) for name in sorted(server.endpoints)}
    for name, load in loads.items():
        if load.breaker == "open":
            yield _model_breaker_open(name, load.open_why, load.open_until_ms)
    yield from _waiting_jobs(dispatcher, server, loads)
    if workers.total() == 0:
        yield Blocker("no_worker", "no worker has a free place: all are full" if workers.is_any_alive() else NO_WORKER)


def _slots_in_use(dispatcher: Dispatcher, server: Server, status: ServerStatus) -> Iterator[Blocker]:
    if status.breaker == "open":
        yield _server_blocker(server.name, "breaker open", status)
    elif status.breaker == "probing":
        yield Blocker("server_probing", "one trial job is running there, since its breaker was open", server.name)
    yield from _unwell(server.name, status)
    if status.absent:
        absence = _describe_absence(server, _read_connections(dispatcher, {server.name: status}))
        yield Blocker("server_unavailable", f"server {server.name!r} is {absence}", server.name)
    if status.cooling and not status.away_since_ms:
        yield _server_blocker(server.name, "in cooldown", status)
    quarantined = quarantine.list_by_server(dispatcher.store.database).get(server.name, ())
    use = slot_use(server.state, status, len(quarantined))
    if use.running and not status.free:
        yield Blocker("slots_busy", f"none of its {server.slots} slots is free: {use.running} run jobs", server.name)
    for slot, (job_id, sentence) in ProcessList(dispatcher.slots.scripts).read_awaits().items():
        if server_of_slot(slot) == server.name:
            yield Blocker("run_waits", f"job {job_id} on {slot}: {sentence}", slot)
    for row in quarantined:
        yield _quarantine_blocker(row, row.tenant)


def _waiting_jobs(dispatcher: Dispatcher, server: Server, loads: Mapping[str, ModelLoad]) -> Iterator[Blocker]:
    waiting = [name for name, load in loads.items() if load.waiting]
    if not waiting:
        yield Blocker("nothing_waits", "no job waits for a model that it serves")
    for name in waiting:
        jobs = dispatcher.store.list_queued([name], limit=_MAX_JOBS)
        unmet = [constraints.unmet_conditions(job.constraints, server, name) for job in jobs]
        if unmet and all(unmet):
            required = ", ".join(sorted({condition for conditions in unmet for condition in conditions}))
            sentence = f"the waiting jobs of model {name!r} require what it does not declare: {required}"
            yield Blocker("constraints_unmet", sentence, name)


# -- sentences about a server, a model or a slot ---------------------------------------------------------------


def describe_quarantine(slot: QuarantinedSlot, *, name_job: bool = True) -> str:
    """Return why a slot is quarantined and what ends that, for users.

    `name_job`: False hides the job's id, for a reader of another tenant.
    """
    job = f"job {slot.job_id!r}" if name_job else "another tenant's job"
    ended = _QUARANTINE_REASONS.get(slot.reason, "ended")
    # Only a server that gave the run an id can be asked for the run's status.
    by_status = "tells by its status that it has ended, " if slot.remote_id is not None else ""
    return (
        f"slot {slot.slot} is withheld: {job} {ended} here at {_rounded_down(slot.since_ms)}, and its server may still "
        f"run it; the slot is used again when the server answers the request, {by_status}no longer reports the run, or "
        f"was restarted, and at {_rounded_down(slot.until_ms)} at the latest"
    )


def _quarantine_blocker(slot: QuarantinedSlot, reader_tenant: str) -> Blocker:
    return Blocker("slot_withheld", describe_quarantine(slot, name_job=slot.tenant == reader_tenant), slot.slot)


def _server_blocker(name: str, blocked_by: str, status: ServerStatus | None) -> Blocker:
    """Return why a server takes no jobs.  `blocked_by`: in the words of Explanation.servers."""
    if blocked_by == "breaker open" and status is not None:
        sentence = f"server {name!r} {breaker_reason(status.open_why)} and its breaker is open"
        return Blocker("server_breaker_open", sentence, name, status.open_until_ms)
    if blocked_by == "away" and status is not None:
        since = _rounded_up(status.away_since_ms)
        sentence = f"server {name!r} could not be reached since {since}"
        if status.away_why:
            sentence = f"server {name!r} says since {since} that it cannot run jobs ({status.away_why})"
        if status.cooldown_until_ms:
            sentence = f"{sentence}; its slots are in cooldown"
        return Blocker("server_away", sentence, name, status.cooldown_until_ms or None)
    if blocked_by == "in cooldown" and status is not None:
        sentence = f"server {name!r} reported that it is busy, so its slots are in cooldown"
        return Blocker("server_cooling", sentence, name, status.cooldown_until_ms)
    return Blocker("server_unavailable", f"server {name!r} is {blocked_by}", name)


def _model_breaker_open(name: str, why: str, until_ms: int) -> Blocker:
    sentence = f"model {name!r} {breaker_reason(why)} and its breaker is open"
    return Blocker("model_breaker_open", sentence, name, until_ms)


def _stopped(kind: str, name: str, entry: Server | Model | TenantState | None) -> str:
    """Return a sentence with the state of a server, model or tenant, the operator who set it, and the reason."""
    if entry is None:
        return f"{kind} {name!r} is paused"
    reason = f" ({entry.reason})" if entry.reason else ""
    return f"{kind} {name!r} is {entry.state}{by_tenant(entry.changed_by)}{reason}"


def _jobs_before(ahead: int) -> str:
    return f"{_count(ahead, 'job')} of its model {'come' if ahead > 1 else 'comes'} before it"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _rounded_up(at_ms: int) -> str:
    """Return a time to the second, rounded up, so that the wait is over by then."""
    return _time(-(-at_ms // 1000))


def _rounded_down(at_ms: int) -> str:
    return _time(at_ms // 1000)


def _time(at_s: int) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
