"""A job's life afterwards: where its time went, and why, in one sentence.

The record holds when a job waited and ran, not what for.  That is seen from its neighbours, the jobs accepted shortly
before and after it: who held the slots while it waited, and how long runs like its own took elsewhere.  They are a
bounded number, read in order of acceptance, however many jobs there are.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from routing.queries.neighbours import NeighbourRun, load_neighbours
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES, Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import Event, Job
from slotkeeper.registry.snapshot import CatalogSnapshot

_WORTH_TELLING_MS = 1_000
_MOSTLY = 0.5  # of a wait, to name one cause for it
_SLOW = 2.0  # times as long as elsewhere
_FEW = 3  # runs that a comparison needs
_BEFORE_MS = 10 * 60_000  # in which failures explain a cooldown
# A run that came to nothing and cost the job nothing but time.
_MET_NOBODY = {Reason.SERVER_BUSY: "was busy", Reason.SERVER_UNREACHABLE: "could not be reached"}


class PhaseKind(StrEnum):
    WAITED = "waited"
    DELAYED = "delayed"
    RAN = "ran"


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a job's life.  `to_ms` None: it lasts still.

    Of a run: which one, where, how it ended and with what error; of a delay: why it was made.
    """

    part: PhaseKind
    from_ms: int
    to_ms: int | None
    attempt: int = 0
    server: str | None = None
    slot: str | None = None
    why: str | None = None
    error: str | None = None
    message: str | None = None

    def lasted_ms(self, now_ms: int) -> int:
        return max(0, (now_ms if self.to_ms is None else self.to_ms) - self.from_ms)


@dataclass(frozen=True, slots=True)
class Timeline:
    """`sentence`: why it took as long as it did; `spans` follow each other from its acceptance on."""

    sentence: str
    spans: tuple[Phase, ...]
    took_ms: int

    def total_ms(self, part: PhaseKind, now_ms: int) -> int:
        return sum(span.lasted_ms(now_ms) for span in self.spans if span.part is part)


def build_timeline(
    store: JobStore, catalog: CatalogSnapshot, job: Job, trail: Sequence[Event], now_ms: int
) -> Timeline:
    """Of any job, ended or not.  Raises DatabaseUnavailable."""
    spans = tuple(phases_of(trail))
    took_ms = (now_ms if job.finished_ms is None else job.finished_ms) - job.created_ms
    causes = sorted(_causes(store, catalog, job, spans, now_ms), key=lambda cause: -cause.took_ms)
    told = [cause for cause in causes if cause.took_ms >= _WORTH_TELLING_MS][:3] or causes[:1]
    lead = "It took" if job.state in FINAL_STATES else "So far it has taken"
    because = "; ".join(cause.sentence for cause in told)
    return Timeline(
        f"{lead} {format_duration(took_ms)}: {because}." if because else f"{lead} {format_duration(took_ms)}.",
        spans,
        took_ms,
    )


def phases_of(trail: Iterable[Event]) -> Iterator[Phase]:
    """What a job did between one event and the next."""
    last: Event | None = None
    for event in trail:
        if event.type not in _PARTS and event.type not in _ENDS:
            continue
        if last is not None and last.type in _PARTS:
            yield _span(last, event)
        last = event
    if last is not None and last.type in _PARTS:
        yield _span(last, None)


_PARTS = {
    EVENT_TYPES[State.QUEUED]: PhaseKind.WAITED,
    EVENT_TYPES[State.DELAYED]: PhaseKind.DELAYED,
    EVENT_TYPES[State.RUNNING]: PhaseKind.RAN,
}
_ENDS = {EVENT_TYPES[state] for state in FINAL_STATES}


def _span(began: Event, ended: Event | None) -> Phase:
    part = _PARTS[began.type]
    to_ms = ended.at_ms if ended else None
    if part is not PhaseKind.RAN:
        return Phase(part, began.at_ms, to_ms, began.attempt, why=began.data.get("why"))
    told = ended.data if ended else {}
    error = told.get("error") or {}
    place = (began.data.get("server"), began.data.get("slot"))
    return Phase(
        part, began.at_ms, to_ms, began.attempt, *place, told.get("why"), error.get("code"), error.get("message")
    )


# -- causes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cause:
    took_ms: int
    sentence: str


def _causes(
    store: JobStore, catalog: CatalogSnapshot, job: Job, spans: Sequence[Phase], now_ms: int
) -> Iterator[_Cause]:
    runs = load_neighbours(store, job)
    failed = [span for span in spans if span.part is PhaseKind.RAN and span.to_ms is not None and span.error]
    waits = [span for span in spans if span.part is PhaseKind.WAITED]
    if waits:
        yield _waiting(catalog, job, waits, runs, now_ms)
    if tries := [span for span in spans if span.why == Reason.SERVER_ERROR and span.part is PhaseKind.RAN]:
        yield _retrying(spans, tries, now_ms)
    elif delays := [span for span in spans if span.part is PhaseKind.DELAYED]:
        yield _Cause(
            _total(delays, now_ms), f"for {format_duration(_total(delays, now_ms))} it was not due, as it was submitted"
        )
    for span in failed:
        if span.why in _MET_NOBODY:
            lasted = span.lasted_ms(now_ms)
            yield _Cause(lasted, f"{span.server} {_MET_NOBODY[Reason(str(span.why))]} when it was sent there")
    last = next((span for span in reversed(spans) if span.part is PhaseKind.RAN), None)
    if last is not None and last not in tries:
        yield _running(job, last, runs, now_ms)


def _retrying(spans: Sequence[Phase], tries: Sequence[Phase], now_ms: int) -> _Cause:
    delays = [span for span in spans if span.part is PhaseKind.DELAYED and span.why == Reason.SERVER_ERROR]
    lost = _total([*tries, *delays], now_ms)
    errors = sorted({f"{span.error} on {span.server}" for span in tries})
    count = len(tries)
    times = {1: "once", 2: "twice"}.get(count, f"{count} times")
    return _Cause(lost, f"it was retried {times}, which cost {format_duration(lost)} ({', '.join(errors[:3])})")


def _running(job: Job, span: Phase, runs: Sequence[NeighbourRun], now_ms: int) -> _Cause:
    lasted = span.lasted_ms(now_ms)
    said = f"it ran for {format_duration(lasted)} on {span.server}"
    alike = [run for run in runs if run.model == job.model and run.completed]
    others = [run.lasted_ms for run in alike if run.server != span.server]
    own = [run.lasted_ms for run in alike if run.server == span.server]
    for found, where in ((others, "on other servers"), (own, "as a rule")):
        usual = median(found) if len(found) >= _FEW else None
        if usual is not None and lasted > _SLOW * max(usual, 1) and lasted - usual > _WORTH_TELLING_MS / 2:
            return _Cause(lasted, f"{said}, which was slow: such a run took {format_duration(usual)} {where}")
    return _Cause(lasted, said)


# -- what a job waited for ---------------------------------------------------------------------------------


def _waiting(
    catalog: CatalogSnapshot, job: Job, waits: Sequence[Phase], runs: Sequence[NeighbourRun], now_ms: int
) -> _Cause:
    waited = _total(waits, now_ms)
    said = f"it waited for {format_duration(waited)}"
    if waited < _WORTH_TELLING_MS:
        return _Cause(waited, said)
    longest = max(waits, key=lambda span: span.lasted_ms(now_ms))
    return _Cause(waited, f"{said}, {_why(catalog, job, longest, runs, now_ms)}")


def _why(catalog: CatalogSnapshot, job: Job, span: Phase, runs: Sequence[NeighbourRun], now_ms: int) -> str:
    """What kept it for most of its longest wait, in the light of what is configured now."""
    begins, ends = span.from_ms, now_ms if span.to_ms is None else span.to_ms
    model = catalog.models.get(job.model)
    servers = {it.name for it in catalog.servers.values() if job.model in it.endpoints}
    slots = sum(catalog.servers[name].slots for name in servers)
    elsewhere = [run for run in runs if run.server in servers]
    own = [run for run in runs if run.model == job.model and run.tenant == job.tenant]
    limit = model and (model.config.tenant_slot_limits.get(job.tenant) or model.config.tenant_slots)
    enough = _MOSTLY * (ends - begins)
    if limit and _time_with(own, limit, begins, ends) >= enough:
        what = "the one slot" if limit == 1 else f"all {limit} slots"
        return f"because its tenant {job.tenant!r} held {what} that it may hold at once"
    if slots and _time_with(elsewhere, slots, begins, ends) >= enough:
        what = "the only slot that could run it was" if slots == 1 else f"all {slots} slots that could run it were"
        return f"because {what} taken by other jobs"
    if troubled := _troubled(runs, job, begins, ends):
        return f"behind a breaker or a cooldown: {troubled}"
    if not servers:
        return "because no server serves its model"
    return "though not all slots were taken: something was paused, in cooldown, or did not meet its constraints"


def _troubled(runs: Sequence[NeighbourRun], job: Job, begins: int, ends: int) -> str:
    """Failures of its model's runs before it was started; "": there were none."""
    failed = [
        failure
        for run in runs
        if run.model == job.model
        for failure in run.failures
        if begins - _BEFORE_MS <= failure.at_ms <= ends
    ]
    if not failed:
        return ""
    servers = sorted({it.server for it in failed if it.server})
    count = "a run of its model had failed" if len(failed) == 1 else f"{len(failed)} runs of its model had failed"
    return f"{count} on {', '.join(servers[:3])}" if servers else count


def _time_with(runs: Iterable[NeighbourRun], count: int, begins: int, ends: int) -> int:
    """For how long of this time at least `count` of the runs were under way, ms."""
    turns = sorted(
        turn
        for run in runs
        if run.from_ms < ends and run.to_ms > begins
        for turn in ((max(run.from_ms, begins), 1), (min(run.to_ms, ends), -1))
    )
    found, under_way, since = 0, 0, begins
    for at, change in turns:
        if under_way >= count:
            found += at - since
        under_way, since = under_way + change, at
    return found


def _total(spans: Iterable[Phase], now_ms: int) -> int:
    return sum(span.lasted_ms(now_ms) for span in spans)


def format_duration(ms: float) -> str:
    """A length of time in words: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if ms < 9_950:
        return f"{ms / 1000:.1f} s"
    whole = round(ms / 1000)
    if whole < 60:
        return f"{whole} s"
    size, part, unit, small = next(it for it in _UNITS if whole >= it[0])
    return f"{whole // size} {unit} {whole % size // part} {small}"


_UNITS = ((86_400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s"))
