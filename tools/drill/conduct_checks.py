"""What was charged, ended and told, against what really happened.  Pure.

undue retries   a retry was charged more often than a server answered with an error
undue crashes   a crash was charged, and no process was killed under the run
undeserved      a job ended in a way that nobody asked for and nothing explains
doubled         one order became two jobs
over limits     a server, or a tenant, got more than an operator allowed
webhooks        not told at least once, told under two ids, told wrongly, given up
stuck           jobs that stay where they are although everything is well and a slot is free
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from slotkeeper.jobs import events
from slotkeeper.jobs.states import FINAL_STATES, Reason, State
from slotkeeper.jobs.values import Event
from tools.drill.history_checks import Run
from tools.drill.webhook_receiver import Delivery

_STARTED = events.EVENT_TYPES[State.RUNNING]
_RETRIES = frozenset({Reason.SERVER_ERROR, Reason.RETRIES_EXHAUSTED})
_CRASHES = frozenset({Reason.LEASE_EXPIRED, Reason.SERVER_LOST, Reason.CRASHES_EXHAUSTED})
_ERROR = "error"
_S = 1_000_000_000
# A worker that dies a moment after its server has answered has not stored the answer yet, and one that dies a moment
# before the server begins has sent the request.
_AROUND_NS = 5 * _S
_FOR_EVER_NS = 1 << 63
_TAKES_EFFECT_NS = 3 * _S  # an operator's change, everywhere

Span = tuple[int, int]
"""From, until: nanoseconds of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Limit:
    """From some time on these servers may not start a run while `most` others are under way on them."""

    what: str
    servers: frozenset[str]
    most: int
    from_ns: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A message to a job's `callback_url` as the record knows it.  `state`: pending, given_up."""

    id: str
    job_id: str
    state: str
    overdue: bool = False
    """It is pending, and should have been tried a while ago."""
    put_off: bool = False
    """It is pending, and its next try is later than after so many tries it may be."""


@dataclass(frozen=True, slots=True)
class ConductReport:
    """Everything that must not be, by name; each finding is one line."""

    found: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not any(self.found.values())


def undue_retries(trails: Mapping[str, Sequence[Event]], runs: Iterable[Run]) -> list[str]:
    """Jobs that paid for more errors than servers have answered with."""
    errors = Counter(run.job_id for run in runs if run.outcome == _ERROR)
    found = []
    for job_id, trail in sorted(trails.items()):
        paid = sum(event.data.get("why") in _RETRIES for event in trail)
        if paid > errors[job_id]:
            found.append(f"{job_id} paid for {paid} errors, servers answered with {errors[job_id]}")
    return found


def undue_crashes(
    trails: Mapping[str, Sequence[Event]], runs: Iterable[Run], deaths: Sequence[Span], wall_ns: int | None
) -> list[str]:
    """Crashes that were charged for runs under which nothing had died.

    `deaths`: from when until when a process that can take a run along was away.  `wall_ns`: what the wall's clock is
    ahead of the monotonic one; None: it cannot be trusted, so a run ends at the latest where the job's next one begins,
    and one that no server knows of is passed over.
    """
    sightings = _sightings(runs)
    found = []
    for job_id, trail in sorted(trails.items()):
        for start, end in pairwise(trail):
            if start.type != _STARTED or end.data.get("why") not in _CRASHES:
                continue
            span = _span(sightings.get(job_id, {}), start, end, wall_ns)
            if span is not None and not any(_meet(span, death) for death in deaths):
                found.append(f"{job_id} attempt {start.attempt}: {end.data['why']}")
    return found


def _sightings(runs: Iterable[Run]) -> dict[str, dict[int, int]]:
    """Job -> attempt -> when a server first saw it, ns of the monotonic clock."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for run in runs:
        found[run.job_id][run.attempt] = min(found[run.job_id].get(run.attempt, run.started_ns), run.started_ns)
    return found


def _span(sightings: Mapping[int, int], start: Event, end: Event, wall_ns: int | None) -> Span | None:
    """From when until when the run was its worker's, None if nobody can tell.

    It lasts beyond its server's work, until the record has its end: the answer may be long on its way.
    """
    if wall_ns is not None:
        started_ns, ended_ns = (event.at_ms * 1_000_000 - wall_ns for event in (start, end))
        return sightings.get(start.attempt, started_ns), ended_ns
    if start.attempt not in sightings:
        return None
    later = (at_ns for attempt, at_ns in sightings.items() if attempt > start.attempt)
    return sightings[start.attempt], min(later, default=_FOR_EVER_NS)


def _meet(span: Span, death: Span) -> bool:
    return span[0] - _AROUND_NS <= death[1] and death[0] <= span[1] + _AROUND_NS


def unexpected_ends(states: Mapping[str, State], revoked: Collection[str], mortal: Collection[str]) -> list[str]:
    """Jobs that ended other than well.  `revoked`: somebody asked for that; `mortal`: they have a deadline."""
    excuses = {State.COMPLETED: states, State.CANCELED: revoked, State.EXPIRED: mortal}
    return [
        f"{job_id} is {state}"
        for job_id, state in sorted(states.items())
        if state in FINAL_STATES and job_id not in excuses.get(state, ())
    ]


def doubled(numbers: Mapping[str, int]) -> list[str]:
    """Orders that became more than one job.  `numbers`: job -> the number of its order."""
    by_number: dict[int, list[str]] = defaultdict(list)
    for job_id, number in numbers.items():
        by_number[number].append(job_id)
    return [f"order {number}: {', '.join(ids)}" for number, ids in sorted(by_number.items()) if len(ids) > 1]


def over_limits(runs: Sequence[Run], limits: Iterable[Limit]) -> list[str]:
    """Runs that were started although the limit had been reached."""
    found = []
    for limit in limits:
        those = [run for run in runs if run.server in limit.servers]
        for run in those:
            if limit.from_ns + _TAKES_EFFECT_NS <= run.started_ns < limit.until_ns:
                others = sum(it.started_ns < run.started_ns < it.ended_ns for it in those)
                if others >= limit.most:
                    found.append(f"{run.job_id} on {run.server} beside {others} others: {limit.what}")
    return found


def webhook_faults(
    hooked: Mapping[str, State | None], deliveries: Iterable[Delivery], owed: Iterable[PendingMessage]
) -> dict[str, list[str]]:
    """What is wrong with the messages.  `hooked`: jobs with a receiver, and where they stand."""
    told: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        told[delivery.job_id].append(delivery)
    rows: dict[str, list[PendingMessage]] = defaultdict(list)
    for one in owed:
        rows[one.job_id].append(one)
    ended = {job_id: state for job_id, state in hooked.items() if state in FINAL_STATES}
    return {
        "webhooks not told": sorted(job_id for job_id in ended if not told[job_id] and not _may_come(rows[job_id])),
        "webhooks given up": sorted(one.job_id for those in rows.values() for one in those if one.state == "given_up"),
        "webhooks put off": sorted(one.job_id for those in rows.values() for one in those if one.put_off),
        "webhooks with two ids": sorted(job_id for job_id, those in told.items() if len({it.id for it in those}) > 1),
        "webhooks that are wrong": sorted(
            f"{job_id} is {hooked.get(job_id)}, told: {it.status}"
            for job_id, those in told.items()
            for it in those
            if it.status != hooked.get(job_id)
        ),
    }


def _may_come(rows: Sequence[PendingMessage]) -> bool:
    return any(one.state == "pending" and not one.overdue for one in rows)


# -- stuck -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is to be seen at one moment: jobs that wait or run by the record, and runs and slots of servers."""

    waiting: Mapping[str, str]
    """Job -> model, of those that are queued and may start."""
    running: Mapping[str, str]
    """Job -> model."""
    at_servers: Mapping[str, Collection[str]]
    """Model -> jobs that its servers run."""
    slots: Mapping[str, int]
    """Model -> slots."""


class StuckWatch:
    """Names jobs that did not move in `patience_s` although they could have."""

    def __init__(self, patience_s: float = 5.0) -> None:
        self._patience_s = patience_s
        self._since: dict[str, tuple[str, float]] = {}
        self._before = Snapshot({}, {}, {}, {})
        self.stuck: dict[str, str] = {}
        """Job -> what is wrong with it."""

    def see(self, sight: Snapshot, now_s: float) -> None:
        still = _unmoved(sight, self._going_on(sight))
        self._since = {
            job_id: self._since[job_id] if self._since.get(job_id, ("",))[0] == what else (what, now_s)
            for job_id, what in still.items()
        }
        for job_id, (what, since_s) in self._since.items():
            if now_s - since_s >= self._patience_s:
                self.stuck.setdefault(job_id, what)

    def _going_on(self, sight: Snapshot) -> set[str]:
        """Models that began other runs since the last look: there a slot is free between two runs.

        Their servers run other jobs now, or, if runs are shorter than what is between them, jobs have ceased to wait.
        """
        before, self._before = self._before, sight
        began = {
            model
            for model, jobs in sight.at_servers.items()
            if set(jobs).difference(before.at_servers.get(model, jobs))
        }
        return began | {model for job_id, model in before.waiting.items() if job_id not in sight.waiting}


def _unmoved(sight: Snapshot, going_on: Collection[str]) -> dict[str, str]:
    free = {model: slots - len(sight.at_servers.get(model, ())) for model, slots in sight.slots.items()}
    found = {
        job_id: "waits beside a free slot"
        for job_id, model in sight.waiting.items()
        if free.get(model, 0) > 0 and model not in going_on
    }
    for job_id, model in sight.running.items():
        if job_id not in sight.at_servers.get(model, ()):
            found[job_id] = "is said to run, and no server knows it"
    return found
