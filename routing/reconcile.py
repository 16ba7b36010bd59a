"""Maintenance: bring Redis to what the record says, and both to what really happens.

Every function may run twice at once, late, or not at all for a while: each act in it is guarded by itself.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import structlog

from jobs.crash import crash_at
from jobs.record import Job, Server, now_ms
from jobs.states import State, Why
from jobs.store import Error
from routing import runs
from routing.dispatcher import Dispatcher
from routing.leases import Held
from routing.policies import identity
from routing.policies.identity import LeaseView, ServerReport
from routing.policies.verdict import crashed

log = structlog.get_logger(__name__)

_REAPER = "reaper"
_CHUNK = 1000
# How long slots that others use are withheld before the server is asked again, and how long after its end
# a job may still stand in a server's report.
_OCCUPIED_MS = 12_000
_JUST_ENDED_MS = 2_000
_ATTEMPT = re.compile(r"[-.]\d+$")  # that some servers know a job of ours by


# -- the sweep: offers -------------------------------------------------------------------------------------


def sweep(dispatcher: Dispatcher) -> int:
    """Offer whatever can be offered, in every fleet; rebuild a room that is new (SLOT-2).  Answers offers made."""
    catalog = dispatcher.fleet.snapshot()
    made = 0
    for fleet in catalog.fleets():
        if not dispatcher.queues.depths(fleet).open:
            rebuild(dispatcher, fleet)
        _catch_up(dispatcher, fleet)
        dispatcher.slots.sync(fleet, catalog)
        offers = dispatcher.queues.offer(fleet)
        dispatcher.publish(offers)
        made += len(offers)
    return made


def refresh_fleet(dispatcher: Dispatcher, fleet: str) -> None:
    """After a change of the catalog: bring it to Redis now, and offer what it makes possible."""
    catalog = dispatcher.fleet.refresh()
    if not dispatcher.queues.depths(fleet).open:
        rebuild(dispatcher, fleet)
    dispatcher.slots.sync(fleet, catalog)
    dispatcher.publish(dispatcher.queues.offer(fleet))


# -- time: delays and deadlines ----------------------------------------------------------------------------


def promote_due(dispatcher: Dispatcher) -> int:
    """Queue the delayed jobs whose time has come; answers how many."""
    promoted = 0
    while batch := dispatcher.store.promote_due(now_ms(), _CHUNK):
        crash_at("promote_committed")
        dispatcher.enqueue(batch)
        promoted += len(batch)
    return promoted


def expire_overdue(dispatcher: Dispatcher) -> int:
    """End the jobs whose deadline has passed, whatever they are doing; answers how many.

    The deadlines stand in the record, so however long nobody looked, none is missed (R122).
    """
    now, expired = now_ms(), 0
    while overdue := dispatcher.store.overdue(now, _CHUNK):
        ended = sum(_expire(dispatcher, job, now) for job in overdue)
        if not ended:
            break  # Somebody else is at it, too.
        expired += ended
    return expired


def _expire(dispatcher: Dispatcher, job: Job, now: int) -> bool:
    error = Error("deadline_passed", f"Its deadline passed while it was {job.state}.")
    if job.state is State.RUNNING:
        moved = dispatcher.store.settle(job.id, job.attempt, Why.DEADLINE_PASSED, now, error=error)
    else:
        moved = dispatcher.store.end_waiting(job.id, Why.DEADLINE_PASSED, now, error)
    if moved is None:
        return False
    crash_at("expire_committed")
    dispatcher.withdraw(moved.job)  # or tells its worker, who frees the slot
    dispatcher.announce_end(moved)
    return True


# -- leases whose holder is gone ---------------------------------------------------------------------------


def reap(dispatcher: Dispatcher) -> int:
    """Take back offers that nobody took up and leases that nobody renewed; answers how many."""
    reaped = 0
    for fleet in dispatcher.fleet.snapshot().fleets():
        for held in dispatcher.leases.expired(fleet):
            reaped += _reap_offer(dispatcher, held) if held.owner == "" else _reap_lease(dispatcher, held)
    return reaped


def _reap_offer(dispatcher: Dispatcher, held: Held) -> bool:
    """An offer that nobody has taken up keeps its slot and its message: its job is not overtaken by later ones.

    Workers look by themselves for those whose message is lost.
    """
    job = dispatcher.store.get(held.job_id)
    resumes = job is not None and job.server == held.server
    if job is not None and job.state is State.QUEUED and dispatcher.leases.keep(held, resumes=resumes) != "closed":
        return False
    _put_back(dispatcher, held, job)
    return True


def _reap_lease(dispatcher: Dispatcher, held: Held) -> bool:
    """Seize the lease first, so that its holder, should it wake, can neither renew nor free it."""
    mine = dispatcher.leases.seize(held, _REAPER, dispatcher.settings.offer_ms, only_expired=True)
    if mine is None:
        return False
    crash_at("reap_seized")
    job = dispatcher.store.get(held.job_id)
    # The reaper's own lease expires only if a reaper died before it had written the end of the run.
    if job is not None and job.state is State.RUNNING and (job.lease == held.tag or held.owner == _REAPER):
        _end_lost_run(dispatcher, mine, job)
    else:  # Its holder died before the start or after the end was written.
        _put_back(dispatcher, mine, job)
    return True


def _put_back(dispatcher: Dispatcher, held: Held, job: Job | None) -> None:
    """A job that is not running: to its place, or on with the same slot where its server still has it."""
    if job is None or job.state is not State.QUEUED:
        dispatcher.free(held, back=False)
    elif job.server == held.server:
        dispatcher.offer_again(held, job.model)
    else:
        dispatcher.free(held, back=True)


def _end_lost_run(dispatcher: Dispatcher, mine: Held, job: Job) -> None:
    """The worker died under the job, and its server may still be at work on it: straight on in the same slot."""
    moved = dispatcher.store.settle(
        job.id,
        job.attempt,
        _lost_why(dispatcher, job),
        now_ms(),
        error=Error("worker_lost", f"The worker that ran it on {job.slot} stopped renewing its lease."),
    )
    crash_at("reap_committed")
    if moved is None:
        dispatcher.free(mine, back=False)
    elif moved.to is State.QUEUED:
        # Anywhere else it could run twice at once.  Here another worker resumes the polling, or repeats the call:
        # the server joins it to the run, answers from memory, or says that it is busy, and then the job goes back.
        dispatcher.offer_again(mine, job.model)
    else:
        dispatcher.free(mine, back=False)
        dispatcher.announce_end(moved)


def _lost_why(dispatcher: Dispatcher, job: Job) -> Why:
    if job.cancel_requested_ms is not None:
        return Why.CANCEL_REQUESTED
    return crashed(job.crashes, dispatcher.fleet.model(job.model).config, Why.LEASE_EXPIRED)


# -- the record against Redis ------------------------------------------------------------------------------


def reconcile(dispatcher: Dispatcher) -> int:
    """Bring back what the record knows and Redis does not; answers how many jobs (QUEUE-1)."""
    fleets = dispatcher.fleet.refresh().fleets()
    found = runs.restore_missing(dispatcher)
    for fleet in fleets:
        if dispatcher.queues.depths(fleet).open:
            found += _fill(dispatcher, fleet)[0]
            crash_at("reconcile_filled")
        else:
            found += rebuild(dispatcher, fleet)
    return found


def rebuild(dispatcher: Dispatcher, fleet: str) -> int:
    """Fill an empty room from the record: leases of running jobs, then queued jobs in order; then open it.

    Until it is open it offers nothing, so no late job overtakes an early one that is not back yet (ORDER-1).
    """
    catalog = dispatcher.fleet.snapshot()
    dispatcher.leases.restore(fleet, runs.recorded(dispatcher)[fleet])
    crash_at("rebuild_leases")
    dispatcher.slots.sync(fleet, catalog)
    filled, _ = _fill(dispatcher, fleet)
    crash_at("rebuild_filled")
    # Once more: of runs that began after the first look, their start was on its way when Redis was emptied.
    dispatcher.leases.restore(fleet, runs.recorded(dispatcher)[fleet])
    if dispatcher.queues.open(fleet):
        log.info("room_rebuilt", fleet=fleet, jobs=filled)
    dispatcher.publish(dispatcher.queues.offer(fleet))
    return filled


def _catch_up(dispatcher: Dispatcher, fleet: str) -> None:
    """Enqueue what was accepted since the sweep before the last: who accepted it may have died, or found Redis away.

    Each job is looked at twice, since on PostgreSQL a smaller `seq` may become visible after a larger one (QUEUE-1).
    """
    before, last = dispatcher.swept.get(fleet, (0, 0))
    _, seen = _fill(dispatcher, fleet, before)
    dispatcher.swept[fleet] = last, max(last, seen)


def _fill(dispatcher: Dispatcher, fleet: str, seq: int = 0) -> tuple[int, int]:
    """Enqueue a fleet's queued jobs from `seq` on; those that are there already stay as they are (R30).

    Answers how many there are, and the last one's `seq`.
    """
    models = dispatcher.fleet.snapshot().models_of(fleet)
    added = 0
    while batch := dispatcher.store.queued(models, seq, _CHUNK):
        dispatcher.publish(dispatcher.queues.enqueue(fleet, batch))
        seq, added = batch[-1].seq, added + len(batch)
    return added, seq


# -- the servers' own reports ------------------------------------------------------------------------------


def note_health(dispatcher: Dispatcher, reports: Mapping[str, ServerReport]) -> None:
    """Let the slots of servers that are down rest, and wake those of servers that are well again."""
    for server, report in _known(dispatcher, reports):
        if not report.up:
            dispatcher.slots.rest(server.fleet, server.name)
        elif dispatcher.slots.failing(server.fleet, server.name):
            dispatcher.slots.wake(server.fleet, server.name)
            dispatcher.publish(dispatcher.queues.offer(server.fleet))


def urgent_servers(dispatcher: Dispatcher) -> set[str]:
    """Servers that should be asked now: those that were down or busy, and those of leases gone silent."""
    catalog, found = dispatcher.fleet.snapshot(), set()
    silent_ms = 2 * dispatcher.settings.renew_every_ms
    for fleet in catalog.fleets():
        found |= {name for name, it in dispatcher.slots.standings(fleet).items() if it.resting}
        found |= {server.name for server in catalog.servers_of(fleet) if dispatcher.slots.failing(fleet, server.name)}
        for held, silent in dispatcher.leases.all(fleet):
            if held.owner and silent > silent_ms:
                found.add(held.server)
    return found


def heed_reports(dispatcher: Dispatcher, reports: Mapping[str, ServerReport]) -> int:
    """Hold the leases against the servers' reports; answers how many were freed.

    A ghost is freed at once only if its worker has been silent too: a living worker finds out by itself, and
    its answer may be on the way just now.
    """
    freed = 0
    silent_ms = 2 * dispatcher.settings.renew_every_ms
    running, known = _by_server(dispatcher), _known(dispatcher, reports)
    silent = {
        (held.server, held.job_id): ms
        for fleet in {server.fleet for server, _ in known}
        for held, ms in dispatcher.leases.all(fleet)
        if held.owner
    }
    for server, report in known:
        jobs = running[server.name]
        found = identity.compare(_views(jobs), report)
        for job in jobs:
            if job.id in found.ghosts and silent.get((server.name, job.id), 0) > silent_ms:
                freed += _free_ghost(dispatcher, job)
        strange = _strangers(dispatcher, found)
        if strange:
            dispatcher.slots.occupy(server.fleet, server.name, strange, _OCCUPIED_MS)
        elif report.tells_what_runs:
            _wake_rested(dispatcher, server)
    return freed


def _wake_rested(dispatcher: Dispatcher, server: Server) -> None:
    """Nobody else uses the server: slots that rest because it was busy can be tried again (R64)."""
    standing = dispatcher.slots.standings(server.fleet).get(server.name)
    if standing is not None and standing.resting:
        dispatcher.slots.wake(server.fleet, server.name)
        dispatcher.publish(dispatcher.queues.offer(server.fleet))


def suspects(dispatcher: Dispatcher, reports: Mapping[str, ServerReport]) -> list[Job]:
    """Running jobs that their server does not know.  No proof: the answer may be on its way to the worker."""
    found: list[Job] = []
    running = _by_server(dispatcher)
    for server, report in _known(dispatcher, reports):
        jobs = running[server.name]
        ghosts = set(identity.compare(_views(jobs), report).ghosts)
        found += [job for job in jobs if job.id in ghosts]
    return found


def free_ghosts(dispatcher: Dispatcher, before: Sequence[Job], reports: Mapping[str, ServerReport]) -> int:
    """Free the leases of runs that were suspects `before` and still are; answers how many (R114)."""
    known = {(job.id, job.attempt) for job in before}
    return sum(_free_ghost(dispatcher, job) for job in suspects(dispatcher, reports) if (job.id, job.attempt) in known)


def _known(dispatcher: Dispatcher, reports: Mapping[str, ServerReport]) -> list[tuple[Server, ServerReport]]:
    servers = dispatcher.fleet.snapshot().servers
    return [(servers[name], report) for name, report in reports.items() if name in servers]


def _by_server(dispatcher: Dispatcher) -> defaultdict[str, list[Job]]:
    """All running jobs, by the server that runs them."""
    found = defaultdict[str, list[Job]](list)
    for job in dispatcher.store.running():
        found[job.server or ""].append(job)
    return found


def _views(jobs: Sequence[Job]) -> list[LeaseView]:
    now = now_ms()
    return [
        LeaseView(
            job.id,
            frozenset({job.id, f"{job.id}-{job.attempt}", f"{job.id}.{job.attempt}", job.remote_id or job.id}),
            now - (job.started_ms or now),
        )
        for job in jobs
    ]


def _strangers(dispatcher: Dispatcher, found: identity.Comparison) -> int:
    """How many of the server's slots others use.  A job of ours that has only just ended is none of them."""
    settled_before = now_ms() - _JUST_ENDED_MS
    strange = found.uncounted - len(found.strangers)
    for job_id in found.strangers:
        job = dispatcher.store.get(job_id) or dispatcher.store.get(_ATTEMPT.sub("", job_id))
        if job is None or (job.state is not State.RUNNING and (job.finished_ms or 0) < settled_before):
            strange += 1
    return strange


def _free_ghost(dispatcher: Dispatcher, job: Job) -> bool:
    model = dispatcher.fleet.model(job.model)
    if not job.lease or not job.slot:
        return False
    lease, owner = job.lease.split(" ", 1)
    held = Held(model.fleet, job.id, lease, owner, job.slot)
    mine = dispatcher.leases.seize(held, _REAPER, dispatcher.settings.offer_ms, only_expired=False)
    if mine is None:
        return False
    crash_at("ghost_seized")
    error = Error("server_lost", f"Server {job.server} does not know the job any more.")
    why = crashed(job.crashes, model.config)
    moved = dispatcher.store.settle(job.id, job.attempt, why, now_ms(), error=error)
    crash_at("ghost_committed")
    if moved is not None and moved.to is State.QUEUED:
        dispatcher.offer_again(mine, job.model)  # the server may remember the result of a run that has ended
        return True
    dispatcher.free(mine, back=False)
    if moved is not None:
        dispatcher.announce_end(moved)
    return moved is not None


# -- the end of things -------------------------------------------------------------------------------------


def purge(dispatcher: Dispatcher, retention_s: int) -> int:
    """Remove what ended longer ago than `retention_s`; answers how many jobs."""
    now, removed = now_ms(), 0
    dispatcher.store.forget_keys(now)
    while gone := dispatcher.store.purge(now - retention_s * 1000, _CHUNK):
        removed += gone
        crash_at("purge_committed")
    return removed
