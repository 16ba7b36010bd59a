"""Why a job stands where it stands: in one sentence, and in structure.

It looks at the record first, then at the room: the record says whether the job waits at all, the room for what.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from redis.exceptions import RedisError

from routing.admission import constraints
from routing.dispatch.dispatcher import Dispatcher
from routing.queries import server_status
from routing.queries.overtaking import longest_overtaking_s
from routing.queries.positions import StartEstimate, estimate_start
from routing.queries.process_list import ProcessList
from routing.queries.server_status import ServerStatus
from routing.queue.queues import OFFERED, JobStatus, ModelStatus, Position
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.jobs.states import State
from slotkeeper.jobs.values import Job
from slotkeeper.redis.scripts import Command
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import STOPPED_STATES, Server

# Of a server or model, by what opened its breaker.
_FAILED = {
    "failures": "failed several runs in a row",
    "rate": "failed most of its latest runs",
    "probe": "failed the trial run after its breaker was open",
}
# What passes by itself, so that a start can be estimated.
_IN_LINE = {"turn", "slots_busy", "slot_withheld"}
_MOVES = {"turn", "slots_busy"}  # while jobs run, the line moves


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

    `before`: those of its own tenant and priority that come just before it, at most five, the nearest last.
    `servers`: each server of its model, and what keeps it from taking this job now ("": nothing does).
    """

    sentence: str
    waits_for: tuple[Blocker, ...] = ()
    ahead: int | None = None
    before: Sequence[str] = ()
    policy: str | None = None
    longest_overtaking_s: float | None = None
    servers: Mapping[str, str] = field(default_factory=dict)
    estimate: StartEstimate | None = None


def explain_job_state(dispatcher: Dispatcher, job: Job) -> Explanation:
    """Where the job stands and what it waits for.  Redis away: the record's part, which says so."""
    if job.state is State.DELAYED:
        return _delayed(job)
    if job.state is not State.QUEUED:
        awaited = _awaited(dispatcher, job)
        return Explanation("  ".join([_outside(job), *(it.sentence for it in awaited)]), awaited)
    with suppress(RedisError):
        return dispatcher.queues.call_if_available(lambda: _in_room(dispatcher, job))
    return _waiting_for(Blocker("redis_away", "Redis does not answer; the job is safe in the database"))


def _in_room(dispatcher: Dispatcher, job: Job) -> Explanation:
    """Of a queued job.  Raises redis errors."""
    model = dispatcher.catalog.resolve(job.model)
    queues, fleet = dispatcher.queues, model.fleet
    commands: list[Command[Any]] = [
        queues.job_status_command(fleet, job.queued),
        queues.model_status_command(fleet, job.model),
    ]
    facts, status = queues.run_all(commands)
    if facts.location == "offered":
        sentence = "It has a slot and is being started; if no worker claims it, it returns to its place."
        return Explanation(sentence, estimate=estimate_start(dispatcher.catalog.get(), job.queued, OFFERED))
    if facts.location != "waiting":
        sentence = f"it is not in the queue of model {job.model!r} yet; the next sweep enqueues it"
        return _waiting_for(Blocker("not_in_room", sentence))
    standings = server_status.read_servers(dispatcher.slots, fleet)
    catalog = dispatcher.catalog.get()
    withheld = quarantine.list_by_server(dispatcher.store.database)
    hindrances = {
        it.name: _hindrance(job, it, standings.get(it.name), len(withheld.get(it.name, ())))
        for it in _servers(catalog, job)
    }
    found = [*_general(job, facts, status, catalog), *_placement(job, catalog, hindrances, standings, withheld, facts)]
    if not found:
        found = [_turn(facts)]
    position = Position(facts.ahead, facts.run_ms or None)
    codes = {it.code for it in found}
    estimate = estimate_start(catalog, job.queued, position) if codes <= _IN_LINE and codes & _MOVES else None
    return Explanation(
        _sum_up(found),
        tuple(found),
        facts.ahead,
        facts.jobs_before,
        model.config.policy,
        longest_overtaking_s(job.priority, model.config),
        hindrances,
        estimate,
    )


def _waiting_for(*blockers: Blocker) -> Explanation:
    return Explanation(_sum_up(blockers), blockers)


def _delayed(job: Job) -> Explanation:
    if job.failures:
        said = f"{job.error_code}: {(job.error_message or '').rstrip('.')}"
        failed = f"attempt {job.attempts} failed ({said}), and it returns to its place for the next"
        return _waiting_for(Blocker("retry", failed, until_ms=job.due_ms))
    return _waiting_for(Blocker("not_before", "it was submitted for later", until_ms=job.due_ms))


def _outside(job: Job) -> str:
    """Of a job that waits for nothing."""
    if job.state is State.RUNNING:
        canceling = ", and a cancel is requested" if job.cancel_requested_ms is not None else ""
        return f"It runs on {job.slot}, attempt {job.attempts}{canceling}."
    return f"It has ended: {job.state}, because of {job.why}."


def _awaited(dispatcher: Dispatcher, job: Job) -> tuple[Blocker, ...]:
    """Return what a run waits for beside its server's answer, as its worker says."""
    if job.state is State.RUNNING and job.slot is not None:
        with suppress(RedisError):
            known_job, sentence = ProcessList(dispatcher.slots.scripts).read_awaits().get(job.slot, ("", ""))
            if known_job == job.id:
                return (Blocker("run_waits", sentence, job.slot),)
    return ()


def _servers(catalog: CatalogSnapshot, job: Job) -> list[Any]:
    return [it for it in catalog.servers.values() if job.model in it.endpoints]


def _general(job: Job, facts: JobStatus, status: ModelStatus, catalog: CatalogSnapshot) -> list[Blocker]:
    """What holds up every job of its tenant or model."""
    found = []
    if facts.blocked_by == "tenant_slots":
        found.append(
            Blocker("tenant_slots", f"its tenant holds {_count(facts.held, 'slot')} and may hold no more", job.tenant)
        )
    elif facts.blocked_by:
        found.append(
            Blocker("tenant_paused", stopped("tenant", job.tenant, catalog.tenants.get(job.tenant)), job.tenant)
        )
    if status.state in STOPPED_STATES:
        found.append(Blocker("model_paused", stopped("model", job.model, catalog.models.get(job.model)), job.model))
    if status.breaker == "open":
        found.append(breaker_open(job.model, status.open_why, status.open_until_ms))
    elif status.breaker == "probing":
        found.append(
            Blocker(
                "model_probing", f"one trial job is running on model {job.model!r}, whose breaker was open", job.model
            )
        )
    return found


def breaker_open(name: str, why: str, until_ms: int) -> Blocker:
    """That a model's breaker is open; `why`: what opened it."""
    return Blocker("model_breaker_open", f"model {name!r} {failed(why)} and its breaker is open", name, until_ms)


def failed(why: str) -> str:
    """What opened a breaker, in words."""
    return _FAILED.get(why, _FAILED["failures"])


def stopped(kind: str, name: str, it: Any) -> str:
    """That a server, model or tenant does not take part, as a sentence: how, by whom and why."""
    if it is None:
        return f"{kind} {name!r} is paused"
    by = f" by {it.changed_by}" if it.changed_by else ""
    because = f" ({it.reason})" if it.reason else ""
    return f"{kind} {name!r} is {it.state}{by}{because}"


def _hindrance(job: Job, server: Server, standing: ServerStatus | None, withheld: int) -> str:
    """What keeps a server from taking this job now; "": nothing does."""
    if unmet := constraints.unmet_conditions(job.constraints, server, job.model):
        return f"does not meet {', '.join(unmet)}"
    if server.state != "online":
        return stopped("server", server.name, server).split(" is ", 1)[1]
    if standing is None:
        return "not in Redis yet"
    return server_status.blocked_by(standing, withheld)


def _placement(
    job: Job,
    catalog: CatalogSnapshot,
    hindrances: Mapping[str, str],
    standings: Mapping[str, ServerStatus],
    withheld: Mapping[str, Sequence[QuarantinedSlot]],
    facts: JobStatus,
) -> list[Blocker]:
    """What keeps all servers of its model from taking it; nothing, if one could."""
    if not hindrances:
        return [Blocker("no_server", f"no server serves model {job.model!r}; POST /admin/register adds one", job.model)]
    if "" in hindrances.values():
        return []
    eligible = {name for name in hindrances if constraints.meets(job.constraints, catalog.servers[name], job.model)}
    if not eligible:
        return [Blocker("constraints_unmet", constraints.no_server_message(job.model, job.constraints), job.model)]
    others = [name for name in sorted(eligible) if hindrances[name] not in ("busy", "withheld")]
    found = [of_server(name, hindrances[name], standings.get(name)) for name in others]
    busy = [name for name in eligible if hindrances[name] == "busy"]
    taken = sum(
        server_status.slot_use(catalog.servers[name].state, standings[name], len(withheld.get(name, ()))).running
        for name in busy
    )
    if taken:
        found.insert(0, _busy(taken, facts.ahead))
    return found + _withheld(job, sorted(eligible.difference(others)), withheld)


def _busy(taken: int, ahead: int) -> Blocker:
    slots = f"all {taken} slots that could run it are" if taken > 1 else "the slot that could run it is"
    behind = f", and {_before(ahead)}" if ahead else ", and it is next"
    return Blocker("slots_busy", f"{slots} taken{behind}")


def _withheld(job: Job, servers: Iterable[str], slots: Mapping[str, Sequence[QuarantinedSlot]]) -> list[Blocker]:
    """Slots that no run of ours holds any more."""
    return [
        Blocker("slot_withheld", quarantine_sentence(row, named=row.tenant == job.tenant), row.slot)
        for server in servers
        for row in slots.get(server, ())
    ]


def of_server(name: str, hindrance: str, standing: ServerStatus | None) -> Blocker:
    """What keeps a server from taking jobs; `hindrance` in the words of Explanation.servers."""
    if hindrance == "breaker open" and standing is not None:
        sentence = f"server {name!r} {failed(standing.open_why)} and its breaker is open"
        return Blocker("server_breaker_open", sentence, name, standing.open_until_ms)
    if hindrance == "away" and standing is not None:
        since = f"server {name!r} could not be reached since {_moment(standing.away_since_ms)}"
        sentence = f"{since}; its slots are in cooldown" if standing.cooldown_until_ms else since
        return Blocker("server_away", sentence, name, standing.cooldown_until_ms or None)
    if hindrance == "in cooldown" and standing is not None:
        sentence = f"server {name!r} reported that it is busy, so its slots are in cooldown"
        return Blocker("server_cooling", sentence, name, standing.cooldown_until_ms)
    return Blocker("server_unavailable", f"server {name!r} is {hindrance}", name)


def _turn(facts: JobStatus) -> Blocker:
    return Blocker("turn", _before(facts.ahead) if facts.ahead else "it is next, and is being offered a slot")


def _before(ahead: int) -> str:
    return f"{_count(ahead, 'job')} of its model {'come' if ahead > 1 else 'comes'} before it"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _sum_up(blockers: Sequence[Blocker]) -> str:
    said = [it.sentence if it.until_ms is None else f"{it.sentence} until {_moment(it.until_ms)}" for it in blockers]
    return f"It waits: {'; '.join(said)}."


def _moment(at_ms: int) -> str:
    """To the second, rounded up: by then it is over."""
    return f"{datetime.fromtimestamp(-(-at_ms // 1000), UTC):%Y-%m-%dT%H:%M:%SZ}"


def quarantine_sentence(row: QuarantinedSlot, *, named: bool = True) -> str:
    """For people: why the slot is withheld, and what would end that.  `named`: they may know which job it is."""
    whose = f"job {row.job_id!r}" if named else "another tenant's job"
    how = _HOW.get(row.reason, "ended")
    told = "tells by its status that it has ended, " if row.remote_id is not None else ""
    return (
        f"slot {row.slot} is withheld: {whose} {how} here at {_moment_before(row.since_ms)}, and its server may still "
        "run it; "
        f"the slot is used again when the server answers the request, {told}no longer reports the run, or was "
        f"restarted, and at {_moment_before(row.until_ms)} at the latest"
    )


def _moment_before(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms // 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"


_HOW = {
    "timed_out": "timed out",
    "canceled": "was canceled",
    "deadline_passed": "passed its deadline",
    "server_lost": "was lost",
    "connection_lost": "lost its connection",
    "worker_lost": "lost its worker",
}
