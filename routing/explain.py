"""Why a job stands where it stands: in one sentence, and in structure.

It looks at the record first, then at the room: the record says whether the job waits at all, the room for what.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from jobs.catalog import Snapshot
from jobs.record import Job
from jobs.states import State
from routing.dispatcher import Dispatcher
from routing.policies import order, placement
from routing.queues import WaitFacts
from routing.slots import ServerStanding

_STOPPED = ("paused", "frozen")


@dataclass(frozen=True, slots=True)
class Blocker:
    """One thing that a job waits for.  `code` is stable; `until_ms`: when it may be over, ms since the epoch."""

    code: str
    sentence: str
    subject: str | None = None
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """`sentence` sums `waits_for` up.  `ahead`: jobs of its model that come first; None: it does not wait in line.

    `servers`: each server of its model, and what keeps it from taking this job now ("": nothing does).
    """

    sentence: str
    waits_for: tuple[Blocker, ...] = ()
    ahead: int | None = None
    policy: str | None = None
    longest_overtaking_s: float | None = None
    servers: Mapping[str, str] = field(default_factory=dict)
    run_ms: int | None = None


def explain(dispatcher: Dispatcher, job: Job) -> Explanation:
    """Where the job stands and what it waits for.  Redis away: the record's part, which says so."""
    if job.state is not State.QUEUED:
        return Explanation(_outside(job))
    model = dispatcher.fleet.model(job.model)
    try:
        facts = dispatcher.queues.wait_facts(model.fleet, job.waiting)
        standings = dispatcher.slots.standings(model.fleet)
    except RedisError:
        away = Blocker("redis_away", "the waiting room cannot be reached; the job is safe in the record")
        return Explanation(_sum_up([away]), (away,))
    if facts.place != "waiting":
        return Explanation(_not_in_line(facts, job))
    catalog = dispatcher.fleet.snapshot()
    hindrances = {it.name: _hindrance(job, it.name, standings.get(it.name), catalog) for it in _servers(catalog, job)}
    found = [*_general(job, facts, catalog), *_placement(job, catalog, hindrances, standings, facts)]
    if not found:
        found = [_turn(facts)]
    return Explanation(
        _sum_up(found),
        tuple(found),
        facts.ahead,
        model.config.policy,
        order.longest_overtaking_s(job.tier, model.config),
        hindrances,
        facts.run_ms or None,
    )


def _outside(job: Job) -> str:
    """Of a job that does not wait in line."""
    match job.state:
        case State.DELAYED:
            tried = f"its last attempt failed ({job.error_code})" if job.failures else "it was submitted for later"
            return f"It is delayed: {tried}; it comes back to its place when its time has come."
        case State.RUNNING:
            canceling = ", and it shall be canceled" if job.cancel_requested_ms is not None else ""
            return f"It runs on {job.slot}, attempt {job.attempts}{canceling}."
        case _:
            return f"It has ended: {job.state}, because of {job.why}."


def _not_in_line(facts: WaitFacts, job: Job) -> str:
    if facts.place == "offered":
        return "It has a slot and is being started; if no worker takes it up, it comes back to its place."
    return f"It is on its way into the waiting room of model {job.model!r}; the next sweep brings it in."


def _servers(catalog: Snapshot, job: Job) -> list[Any]:
    return [it for it in catalog.servers.values() if job.model in it.endpoints]


def _general(job: Job, facts: WaitFacts, catalog: Snapshot) -> list[Blocker]:
    """What holds up every job of its tenant or model."""
    found = []
    if facts.obstacle == "tenant_slots":
        found.append(
            Blocker("tenant_slots", f"its tenant holds {facts.held} slots and may hold {facts.limit}", job.tenant)
        )
    elif facts.obstacle:
        found.append(
            Blocker("tenant_paused", _stopped("tenant", job.tenant, catalog.tenants.get(job.tenant)), job.tenant)
        )
    if facts.state in _STOPPED:
        found.append(Blocker("model_paused", _stopped("model", job.model, catalog.models.get(job.model)), job.model))
    if facts.breaker == "open":
        sentence = f"runs of model {job.model!r} failed one after another, so it rests before one job tries again"
        found.append(Blocker("model_breaker_open", sentence, job.model, facts.open_until_ms))
    elif facts.breaker == "probing":
        found.append(Blocker("model_probing", f"one job is trying whether model {job.model!r} works again", job.model))
    return found


def _stopped(kind: str, name: str, it: Any) -> str:
    if it is None:
        return f"{kind} {name!r} is paused"
    by = f" by {it.changed_by}" if it.changed_by else ""
    because = f" ({it.reason})" if it.reason else ""
    return f"{kind} {name!r} is {it.state}{by}{because}"


def _hindrance(job: Job, server: str, standing: ServerStanding | None, catalog: Snapshot) -> str:
    """What keeps a server from taking this job now; "": nothing does."""
    it = catalog.servers[server]
    if unmet := placement.unmet(job.needs, it, job.model):
        return f"does not meet {', '.join(unmet)}"
    if it.state != "online":
        return _stopped("server", server, it).split(" is ", 1)[1]
    if standing is None:
        return "not known to the waiting room yet"
    if standing.breaker in ("open", "probing"):
        return "breaker open" if standing.breaker == "open" else "one job is trying it"
    if standing.free:
        return ""
    return "resting" if standing.resting and not standing.taken else "busy"


def _placement(
    job: Job,
    catalog: Snapshot,
    hindrances: Mapping[str, str],
    standings: Mapping[str, ServerStanding],
    facts: WaitFacts,
) -> list[Blocker]:
    """What keeps all servers of its model from taking it; nothing, if one could."""
    if not hindrances:
        return [Blocker("no_server", f"no server serves model {job.model!r}; POST /admin/register adds one", job.model)]
    if "" in hindrances.values():
        return []
    eligible = {name for name in hindrances if placement.meets(job.needs, catalog.servers[name], job.model)}
    if not eligible:
        wanted = job.needs.replace("\n", ", ")
        return [Blocker("constraints_unmet", f"no server of model {job.model!r} meets {wanted}", job.model)]
    busy = [name for name in eligible if hindrances[name] == "busy"]
    if busy:
        taken = sum(standings[name].taken for name in busy)
        behind = f", and {facts.ahead} jobs come before it" if facts.ahead else "; it is next"
        return [Blocker("slots_busy", f"all {taken} slots that could run it are taken{behind}")]
    return [_server_blocker(name, hindrances[name], standings.get(name)) for name in sorted(eligible)]


def _server_blocker(name: str, hindrance: str, standing: ServerStanding | None) -> Blocker:
    if hindrance == "breaker open" and standing is not None:
        return Blocker(
            "server_breaker_open", f"server {name!r} failed run after run and rests", name, standing.open_until_ms
        )
    if hindrance == "resting" and standing is not None:
        sentence = f"the slots of server {name!r} rest, because it was busy or could not be reached"
        return Blocker("server_resting", sentence, name, standing.rested_ms)
    return Blocker("server_unavailable", f"server {name!r}: {hindrance}", name)


def _turn(facts: WaitFacts) -> Blocker:
    if facts.ahead:
        return Blocker("turn", f"{facts.ahead} jobs of its model come before it")
    return Blocker("turn", "it is next, and a slot is being given to it")


def _sum_up(blockers: list[Blocker]) -> str:
    return f"It waits: {'; '.join(it.sentence for it in blockers)}."
