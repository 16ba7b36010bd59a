"""Show where a job's time went: its attempts, its phases, and why it waited.

The database holds when a job waited and ran, but not why.  The cause is derived from the job's neighbours, the jobs
accepted shortly before and after it: which of them held the slots while the job waited, and how long similar runs took
on other servers.  At most 2,000 neighbours are read, however many jobs there are.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any

from sqlalchemy import bindparam, select

from slotkeeper.db import Database
from slotkeeper.jobs.events import EVENT_TYPES, TRANSITION_TYPES
from slotkeeper.jobs.states import FINAL_STATES, TRANSITIONS, Budget, Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import jobs
from slotkeeper.jobs.values import Event, Job
from slotkeeper.registry.snapshot import CatalogSnapshot

_MIN_SHOWN_MS = 1_000  # shorter causes are left out
_MAX_CAUSES = 3
_MAIN_SHARE = 0.5  # of a wait, for one cause to explain it
_SLOW_FACTOR = 2.0  # times as long as similar runs
_MIN_COMPARED = 3  # similar runs that a comparison needs
_NEIGHBOURS = 1_000  # on each side
# Ends of a run that the server never began: the job loses only time.
_NOT_BEGUN = {Reason.SERVER_BUSY: "was busy", Reason.SERVER_UNREACHABLE: "could not be reached"}
# Ends of starts that met no server; they do not count as attempts (Job.attempts).
_UNREACHED = {reason for (_, reason), edge in TRANSITIONS.items() if edge.costs is Budget.WAITS}
_UNITS = ((86_400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s"))
_NEIGHBOUR_RUNS = (
    select(jobs.c.id, jobs.c.model, jobs.c.tenant, jobs.c.state, jobs.c.server, jobs.c.started_ms, jobs.c.finished_ms)
    .where(jobs.c.seq >= bindparam("p_from"), jobs.c.seq <= bindparam("p_to"))
    .order_by(jobs.c.seq)
)


class PhaseKind(StrEnum):
    WAITED = "waited"
    DELAYED = "delayed"
    RAN = "ran"


_PHASE_KINDS = {
    EVENT_TYPES[State.QUEUED]: PhaseKind.WAITED,
    EVENT_TYPES[State.DELAYED]: PhaseKind.DELAYED,
    EVENT_TYPES[State.RUNNING]: PhaseKind.RAN,
}
_END_TYPES = {EVENT_TYPES[state] for state in FINAL_STATES}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a job and its result.  `ended_ms` None: it is still running.

    unreached: how many starts in a row met no server, which are one Attempt, with the number of the last; 0: it is an
    attempt.
    """

    attempt: int
    server: str | None
    slot: str | None
    started_ms: int
    ended_ms: int | None
    outcome: str | None
    error: dict[str, Any] | None
    unreached: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a job's life.  `to_ms` None: it is not over.

    `why`: the reason for a wait or a delay, or for the end of a run.  `server`, `slot`, `error` (its code) and
    `message` are set for runs only.  `unreached`: of a wait, the starts in it that met no server (`merge_unreached`).
    """

    kind: PhaseKind
    from_ms: int
    to_ms: int | None
    attempt: int = 0
    server: str | None = None
    slot: str | None = None
    why: str | None = None
    error: str | None = None
    message: str | None = None
    unreached: int = 0

    def lasted_ms(self, now_ms: int) -> int:
        return max(0, (now_ms if self.to_ms is None else self.to_ms) - self.from_ms)


@dataclass(frozen=True, slots=True)
class Timeline:
    """`sentence`: why the job took as long as it did.  `phases`: in order, without gaps, from its acceptance on."""

    sentence: str
    phases: tuple[Phase, ...]
    took_ms: int

    def total_ms(self, kind: PhaseKind, now_ms: int) -> int:
        return sum(phase.lasted_ms(now_ms) for phase in self.phases if phase.kind is kind)


@dataclass(frozen=True, slots=True)
class NeighbourRun:
    """The last run of a job that was accepted shortly before or after another."""

    model: str
    tenant: str
    server: str | None
    from_ms: int
    to_ms: int
    completed: bool

    @property
    def lasted_ms(self) -> int:
        return self.to_ms - self.from_ms


@dataclass(frozen=True, slots=True)
class _Cause:
    took_ms: int
    sentence: str


@dataclass(frozen=True, slots=True)
class _Context:
    """The job, and the facts that explain its phases.  The catalog is the present one."""

    job: Job
    catalog: CatalogSnapshot
    runs: Sequence[NeighbourRun]
    now_ms: int

    def total_ms(self, phases: Iterable[Phase]) -> int:
        return sum(phase.lasted_ms(self.now_ms) for phase in phases)


def build_timeline(
    store: JobStore, catalog: CatalogSnapshot, job: Job, events: Sequence[Event], now_ms: int
) -> Timeline:
    """Return the timeline of a job, ended or not, from all its events.  Raises DatabaseUnavailable."""
    phases = tuple(phases_of(events))
    took_ms = (now_ms if job.finished_ms is None else job.finished_ms) - job.created_ms
    context = _Context(job, catalog, load_neighbours(store.database, job, now_ms), now_ms)
    causes = sorted(_causes(context, phases), key=lambda cause: -cause.took_ms)
    shown = [cause for cause in causes if cause.took_ms >= _MIN_SHOWN_MS][:_MAX_CAUSES] or causes[:1]
    sentence = f"{'It took' if job.state in FINAL_STATES else 'So far it has taken'} {format_duration(took_ms)}"
    if shown:
        sentence += f": {'; '.join(cause.sentence for cause in shown)}"
    return Timeline(f"{sentence}.", phases, took_ms)


def format_duration(ms: float) -> str:
    """Return a duration in words: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if ms < 9_950:
        return f"{ms / 1000:.1f} s"
    seconds = round(ms / 1000)
    if seconds < 60:
        return f"{seconds} s"
    size, small_size, unit, small_unit = next(row for row in _UNITS if seconds >= row[0])
    return f"{seconds // size} {unit} {seconds % size // small_size} {small_unit}"


# -- from events -----------------------------------------------------------------------------------------------


def attempts_of(events: Iterable[Event]) -> list[Attempt]:
    """Return the attempts of a job, oldest first, from all its events.

    Starts in a row that met no server are one: while a server is away, there may be thousands.
    """
    attempts: list[Attempt] = []
    for start in _starts_of(events):
        last = attempts[-1] if attempts else None
        if last is not None and last.unreached and start.unreached:
            start = replace(start, started_ms=last.started_ms, unreached=last.unreached + 1)
            attempts.pop()
        attempts.append(start)
    return attempts


def _starts_of(events: Iterable[Event]) -> Iterator[Attempt]:
    started: Event | None = None
    for event in events:
        if event.type == EVENT_TYPES[State.RUNNING]:
            if started is not None:
                yield _attempt(started, None)
            started = event
        elif started is not None and event.type in TRANSITION_TYPES:
            yield _attempt(started, event)
            started = None
    if started is not None:
        yield _attempt(started, None)


def _attempt(started: Event, ended: Event | None) -> Attempt:
    return Attempt(
        attempt=started.attempt,
        server=started.data.get("server"),
        slot=started.data.get("slot"),
        started_ms=started.at_ms,
        ended_ms=ended.at_ms if ended else None,
        outcome=ended.data.get("why") if ended else None,
        error=ended.data.get("error") if ended else None,
        unreached=int(ended is not None and ended.data.get("why") in _UNREACHED),
    )


def phases_of(events: Iterable[Event]) -> Iterator[Phase]:
    """Yield one phase for each time between two changes of the job's state; the last may not be over."""
    last: Event | None = None
    for event in events:
        if event.type not in _PHASE_KINDS and event.type not in _END_TYPES:
            continue
        if last is not None and last.type in _PHASE_KINDS:
            yield _phase(last, event)
        last = event
    if last is not None and last.type in _PHASE_KINDS:
        yield _phase(last, None)


def merge_unreached(phases: Iterable[Phase]) -> list[Phase]:
    """Return the phases with starts that met no server as parts of the wait around them."""
    merged: list[Phase] = []
    for phase in phases:
        last = merged[-1] if merged else None
        is_unreached = phase.kind is PhaseKind.RAN and phase.to_ms is not None and phase.why in _UNREACHED
        if is_unreached:
            phase = Phase(PhaseKind.WAITED, phase.from_ms, phase.to_ms, phase.attempt, why=phase.why, unreached=1)
        if last is not None and last.kind is phase.kind is PhaseKind.WAITED:
            merged[-1] = replace(last, to_ms=phase.to_ms, why=phase.why, unreached=last.unreached + phase.unreached)
        else:
            merged.append(phase)
    return merged


def _phase(began: Event, ended: Event | None) -> Phase:
    kind = _PHASE_KINDS[began.type]
    to_ms = ended.at_ms if ended else None
    if kind is not PhaseKind.RAN:
        return Phase(kind, began.at_ms, to_ms, began.attempt, why=began.data.get("why"))
    end = ended.data if ended else {}
    error = end.get("error") or {}
    return Phase(
        kind,
        began.at_ms,
        to_ms,
        began.attempt,
        began.data.get("server"),
        began.data.get("slot"),
        end.get("why"),
        error.get("code"),
        error.get("message"),
    )


def load_neighbours(database: Database, job: Job, now_ms: int) -> list[NeighbourRun]:
    """Return the runs of the jobs accepted just before and after a job, in order of acceptance.

    Reads up to 1,000 jobs on each side.  A run that is not over lasts until `now_ms`.  Raises DatabaseUnavailable.
    """
    with database.read() as connection:
        params = {"p_from": job.seq - _NEIGHBOURS, "p_to": job.seq + _NEIGHBOURS}
        rows = connection.execute(_NEIGHBOUR_RUNS, params).all()
    return [_neighbour_run(row, now_ms) for row in rows if row.id != job.id and row.started_ms is not None]


def _neighbour_run(row: Any, now_ms: int) -> NeighbourRun:
    state = State(row.state)
    ended_ms = None if state is State.RUNNING else row.finished_ms
    return NeighbourRun(row.model, row.tenant, row.server, row.started_ms, ended_ms or now_ms, state is State.COMPLETED)


# -- causes ----------------------------------------------------------------------------------------------------


def _causes(context: _Context, phases: Sequence[Phase]) -> Iterator[_Cause]:
    runs = [phase for phase in phases if phase.kind is PhaseKind.RAN]
    retried = [run for run in runs if run.why == Reason.SERVER_ERROR]
    delays = [phase for phase in phases if phase.kind is PhaseKind.DELAYED]
    if waits := [phase for phase in phases if phase.kind is PhaseKind.WAITED]:
        yield _waiting(context, waits)
    if retried:
        yield _retrying(context, retried, delays)
    elif delays:
        delayed_ms = context.total_ms(delays)
        yield _Cause(delayed_ms, f"for {format_duration(delayed_ms)} it was not due, as it was submitted")
    for run in runs:
        if run.to_ms is not None and run.error and run.why in _NOT_BEGUN:
            sentence = f"{run.server} {_NOT_BEGUN[Reason(str(run.why))]} when it was sent there"
            yield _Cause(run.lasted_ms(context.now_ms), sentence)
    if runs and runs[-1] not in retried:
        yield _running(context, runs[-1])


def _retrying(context: _Context, runs: Sequence[Phase], delays: Sequence[Phase]) -> _Cause:
    lost_ms = context.total_ms([*runs, *(delay for delay in delays if delay.why == Reason.SERVER_ERROR)])
    errors = sorted({f"{run.error} on {run.server}" for run in runs})
    times = {1: "once", 2: "twice"}.get(len(runs), f"{len(runs)} times")
    return _Cause(lost_ms, f"it was retried {times}, which cost {format_duration(lost_ms)} ({', '.join(errors[:3])})")


def _running(context: _Context, run: Phase) -> _Cause:
    """Return how long the last run took, compared with similar runs elsewhere, or else on the same server."""
    lasted_ms = run.lasted_ms(context.now_ms)
    sentence = f"it ran for {format_duration(lasted_ms)} on {run.server}"
    similar = [other for other in context.runs if other.model == context.job.model and other.completed]
    elsewhere = [other.lasted_ms for other in similar if other.server != run.server]
    same_server = [other.lasted_ms for other in similar if other.server == run.server]
    for durations, where in ((elsewhere, "on other servers"), (same_server, "as a rule")):
        if len(durations) < _MIN_COMPARED:
            continue
        usual_ms = median(durations)
        if lasted_ms > _SLOW_FACTOR * max(usual_ms, 1) and lasted_ms - usual_ms > _MIN_SHOWN_MS / 2:
            return _Cause(lasted_ms, f"{sentence}, which was slow: such a run took {format_duration(usual_ms)} {where}")
    return _Cause(lasted_ms, sentence)


def _waiting(context: _Context, waits: Sequence[Phase]) -> _Cause:
    waited_ms = context.total_ms(waits)
    sentence = f"it waited for {format_duration(waited_ms)}"
    if waited_ms < _MIN_SHOWN_MS:
        return _Cause(waited_ms, sentence)
    longest = max(waits, key=lambda wait: wait.lasted_ms(context.now_ms))
    return _Cause(waited_ms, f"{sentence}, {_wait_reason(context, longest)}")


def _wait_reason(context: _Context, wait: Phase) -> str:
    """Return the main cause of a wait.  Slots and limits of that time are not stored: the present ones are used."""
    job, catalog = context.job, context.catalog
    model = catalog.models.get(job.model)
    servers = {server.name for server in catalog.servers.values() if job.model in server.endpoints}
    slots = sum(catalog.servers[name].slots for name in servers)
    limit = model and (model.config.tenant_slot_limits.get(job.tenant) or model.config.tenant_slots)
    of_tenant = [run for run in context.runs if run.model == job.model and run.tenant == job.tenant]
    of_servers = [run for run in context.runs if run.server in servers]
    begins_ms, ends_ms = wait.from_ms, context.now_ms if wait.to_ms is None else wait.to_ms
    most_ms = _MAIN_SHARE * (ends_ms - begins_ms)
    if limit and _time_with(of_tenant, limit, begins_ms, ends_ms) >= most_ms:
        held = "the one slot" if limit == 1 else f"all {limit} slots"
        return f"because its tenant {job.tenant!r} held {held} that it may hold at once"
    if slots and _time_with(of_servers, slots, begins_ms, ends_ms) >= most_ms:
        taken = "the only slot that could run it was" if slots == 1 else f"all {slots} slots that could run it were"
        return f"because {taken} taken by other jobs"
    if not servers:
        return "because no server serves its model"
    return "though not all slots were taken: something was paused, in cooldown, or did not meet its constraints"


def _time_with(runs: Iterable[NeighbourRun], count: int, begins_ms: int, ends_ms: int) -> int:
    """Return for how many ms of an interval at least `count` of the runs were running at the same time."""
    changes = sorted(
        change
        for run in runs
        if run.from_ms < ends_ms and run.to_ms > begins_ms
        for change in ((max(run.from_ms, begins_ms), 1), (min(run.to_ms, ends_ms), -1))
    )
    total_ms, running, since_ms = 0, 0, begins_ms
    for at_ms, change_by in changes:
        if running >= count:
            total_ms += at_ms - since_ms
        running, since_ms = running + change_by, at_ms
    return total_ms
