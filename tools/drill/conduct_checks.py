"""Compare charges, ends, webhooks and limits with what happened to the processes.  Pure.

undue retries   a retry was charged more often than a server answered with an error
undue crashes   a crash was charged, and no process was killed during the run
undeserved      a job ended in a way that was not requested and that no fault explains
duplicates      one planned job became two jobs
over limits     a server, or a tenant, ran more jobs than an operator allowed
webhooks        not delivered, delivered under two ids, with a wrong status, or given up
stuck           jobs that do not move although nothing fails and a slot is free
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from slotkeeper.jobs.credits import CHARGED_ENDS
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES, Reason, State
from slotkeeper.jobs.values import Event
from tools.drill.history_checks import Run
from tools.drill.webhook_receiver import Delivery

_STARTED = EVENT_TYPES[State.RUNNING]
_RETRIES = frozenset({Reason.SERVER_ERROR, Reason.RETRIES_EXHAUSTED})
_CRASHES = frozenset({Reason.LEASE_EXPIRED, Reason.SERVER_LOST, Reason.CRASHES_EXHAUSTED})
_ERROR = "error"
_S = 1_000_000_000
# A worker that dies a moment after its server has answered has not stored the answer yet.  One that dies a moment
# before the server begins has already sent the request.
_TOLERANCE_NS = 5 * _S
_NEVER_NS = 1 << 63
_TAKES_EFFECT_NS = 3 * _S  # until an operator's change is in force in all processes

Span = tuple[int, int]
"""From, until: nanoseconds of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Limit:
    """From `from_ns` until `until_ns` no run may start on `servers` while `most` others are running there."""

    what: str
    servers: frozenset[str]
    most: int
    from_ns: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A message to a job's `callback_url`, as the database has it.  `state`: pending, given_up."""

    id: str
    job_id: str
    state: str
    overdue: bool = False
    """It is pending, and the time of its next attempt is long past."""
    put_off: bool = False
    """It is pending, and its next attempt is later than the number of its attempts allows."""


class Charge(NamedTuple):
    """A transfer of credits for a job.  why: the reason of its end."""

    kind: str
    amount: int
    why: str | None


@dataclass(frozen=True, slots=True)
class ConductReport:
    """All findings by the name of their check; each finding is one line."""

    findings: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not any(self.findings.values())


def undue_retries(events_by_job: Mapping[str, Sequence[Event]], runs: Iterable[Run]) -> list[str]:
    """Return a line for each job that was charged for more errors than servers answered with."""
    errors = Counter(run.job_id for run in runs if run.outcome == _ERROR)
    findings = []
    for job_id, events in sorted(events_by_job.items()):
        charged = sum(event.data.get("why") in _RETRIES for event in events)
        if charged > errors[job_id]:
            findings.append(f"{job_id} was charged for {charged} errors, servers answered with {errors[job_id]}")
    return findings


def undue_crashes(
    events_by_job: Mapping[str, Sequence[Event]], runs: Iterable[Run], deaths: Sequence[Span], wall_ns: int | None
) -> list[str]:
    """Return a line for each crash that was charged although no process died during the run.

    deaths: from the kill or stop of a process to its restart, for processes whose death ends runs.  wall_ns: the wall
    clock minus the monotonic clock, in ns.  None: the wall clock cannot be trusted.  Then a run ends at the latest when
    the next run of its job begins, and a run that no server recorded is skipped.
    """
    first_seen = _first_seen(runs)
    findings = []
    for job_id, events in sorted(events_by_job.items()):
        for start, end in pairwise(events):
            if start.type != _STARTED or end.data.get("why") not in _CRASHES:
                continue
            span = _run_span(first_seen.get(job_id, {}), start, end, wall_ns)
            if span is not None and not any(_overlaps(span, death) for death in deaths):
                findings.append(f"{job_id} attempt {start.attempt}: {end.data['why']}")
    return findings


def _first_seen(runs: Iterable[Run]) -> dict[str, dict[int, int]]:
    """Return job -> attempt -> when a server first started it, in ns of the monotonic clock."""
    first_seen: dict[str, dict[int, int]] = defaultdict(dict)
    for run in runs:
        attempts = first_seen[run.job_id]
        attempts[run.attempt] = min(attempts.get(run.attempt, run.started_ns), run.started_ns)
    return first_seen


def _run_span(first_seen: Mapping[int, int], start: Event, end: Event, wall_ns: int | None) -> Span | None:
    """Return from when until when a worker had the run; None if the times are not known.

    The span ends when the end is in the database, which can be long after the server has finished.
    """
    if wall_ns is not None:
        started_ns, ended_ns = (event.at_ms * 1_000_000 - wall_ns for event in (start, end))
        return first_seen.get(start.attempt, started_ns), ended_ns
    if start.attempt not in first_seen:
        return None
    later = (at_ns for attempt, at_ns in first_seen.items() if attempt > start.attempt)
    return first_seen[start.attempt], min(later, default=_NEVER_NS)


def _overlaps(span: Span, death: Span) -> bool:
    return span[0] - _TOLERANCE_NS <= death[1] and death[0] <= span[1] + _TOLERANCE_NS


def unexpected_ends(states: Mapping[str, State], revoked: Collection[str], with_deadline: Collection[str]) -> list[str]:
    """Return a line for each job that ended neither completed nor for a reason that the drill gave.

    revoked: jobs that the drill revoked; they may be canceled.  with_deadline: jobs that may expire.
    """
    allowed = {State.COMPLETED: states, State.CANCELED: revoked, State.EXPIRED: with_deadline}
    return [
        f"{job_id} is {state}"
        for job_id, state in sorted(states.items())
        if state in FINAL_STATES and job_id not in allowed.get(state, ())
    ]


def undue_charges(
    states: Mapping[str, State], charges: Mapping[str, Sequence[Charge]], unbalanced: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a line for each tenant whose credits do not balance, and for each job that was not charged once.

    Nothing is charged for a job that ended without a run that its server, its deadline or its cancellation ended.
    """
    findings = [f"{tenant}: {'; '.join(differences)}" for tenant, differences in sorted(unbalanced.items())]
    for job_id, state in sorted(states.items()):
        made = charges.get(job_id, ())
        if state in FINAL_STATES and [charge.kind for charge in made] != ["reserve", "settle"] * (len(made) // 2 or 1):
            findings.append(f"{job_id} is {state}, with the transfers {[charge.kind for charge in made]}")
        for charge in made:
            if charge.kind == "settle" and charge.amount and charge.why not in CHARGED_ENDS:
                findings.append(f"{job_id} cost {charge.amount} for {charge.why}")
    return findings


def duplicate_accepts(numbers: Mapping[str, int]) -> list[str]:
    """Return a line for each planned job that became several jobs.  `numbers`: job -> number of its planned job."""
    by_number: dict[int, list[str]] = defaultdict(list)
    for job_id, number in numbers.items():
        by_number[number].append(job_id)
    return [f"planned job {number}: {', '.join(ids)}" for number, ids in sorted(by_number.items()) if len(ids) > 1]


def over_limits(runs: Sequence[Run], limits: Iterable[Limit]) -> list[str]:
    """Return a line for each run that started although the limit had been reached."""
    findings = []
    for limit in limits:
        limited = [run for run in runs if run.server in limit.servers]
        for run in limited:
            if limit.from_ns + _TAKES_EFFECT_NS <= run.started_ns < limit.until_ns:
                others = sum(other.started_ns < run.started_ns < other.ended_ns for other in limited)
                if others >= limit.most:
                    findings.append(f"{run.job_id} on {run.server} beside {others} others: {limit.what}")
    return findings


def webhook_faults(
    states: Mapping[str, State | None], deliveries: Iterable[Delivery], messages: Iterable[PendingMessage]
) -> dict[str, list[str]]:
    """Return the wrong webhooks by the name of the check.

    states: the state of each job that has a receiver; None: the database does not have the job.  messages: those that
    the database has and that are not delivered.
    """
    delivered: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        delivered[delivery.job_id].append(delivery)
    stored: dict[str, list[PendingMessage]] = defaultdict(list)
    for message in messages:
        stored[message.job_id].append(message)
    ended = {job_id: state for job_id, state in states.items() if state in FINAL_STATES}
    all_stored = [message for of_job in stored.values() for message in of_job]
    return {
        "webhooks not told": sorted(
            job_id for job_id in ended if not delivered[job_id] and not _is_pending(stored[job_id])
        ),
        "webhooks given up": sorted(message.job_id for message in all_stored if message.state == "given_up"),
        "webhooks put off": sorted(message.job_id for message in all_stored if message.put_off),
        "webhooks with two ids": sorted(
            job_id for job_id, of_job in delivered.items() if len({delivery.id for delivery in of_job}) > 1
        ),
        "webhooks that are wrong": sorted(
            f"{job_id} is {states.get(job_id)}, delivered: {delivery.status}"
            for job_id, of_job in delivered.items()
            for delivery in of_job
            if delivery.status != states.get(job_id)
        ),
    }


def _is_pending(messages: Sequence[PendingMessage]) -> bool:
    """Return whether one of these messages may still be delivered."""
    return any(message.state == "pending" and not message.overdue for message in messages)


# -- stuck -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Jobs and slots at one moment: queued and running jobs in the database, runs and slots of servers."""

    waiting: Mapping[str, str]
    """Job -> model, of the queued jobs."""
    running: Mapping[str, str]
    """Job -> model."""
    at_servers: Mapping[str, Collection[str]]
    """Model -> jobs that its servers run."""
    slots: Mapping[str, int]
    """Model -> slots."""


class StuckWatch:
    """Finds jobs that did not move for `patience_s` although they could have."""

    def __init__(self, patience_s: float = 5.0) -> None:
        self._patience_s = patience_s
        self._since: dict[str, tuple[str, float]] = {}
        self._before = Snapshot({}, {}, {}, {})
        self.stuck: dict[str, str] = {}
        """Job -> what is wrong with it."""

    def observe(self, snapshot: Snapshot, now_s: float) -> None:
        """Note which jobs should have moved by now, and since when; add those that are stuck to `stuck`."""
        unmoved = _unmoved(snapshot, self._active_models(snapshot))
        self._since = {
            job_id: self._since[job_id] if self._since.get(job_id, ("",))[0] == problem else (problem, now_s)
            for job_id, problem in unmoved.items()
        }
        for job_id, (problem, since_s) in self._since.items():
            if now_s - since_s >= self._patience_s:
                self.stuck.setdefault(job_id, problem)

    def _active_models(self, snapshot: Snapshot) -> set[str]:
        """Return the models that started runs since the last snapshot: their slots are free only between two runs.

        Either their servers run other jobs, or fewer of their jobs wait: runs can be shorter than the time between
        two snapshots.
        """
        before, self._before = self._before, snapshot
        started = {
            model
            for model, jobs in snapshot.at_servers.items()
            if set(jobs).difference(before.at_servers.get(model, jobs))
        }
        return started | {model for job_id, model in before.waiting.items() if job_id not in snapshot.waiting}


def _unmoved(snapshot: Snapshot, active_models: Collection[str]) -> dict[str, str]:
    """Return job -> what is wrong with it, for the jobs that should have moved."""
    free = {model: slots - len(snapshot.at_servers.get(model, ())) for model, slots in snapshot.slots.items()}
    problems = {
        job_id: "waits beside a free slot"
        for job_id, model in snapshot.waiting.items()
        if free.get(model, 0) > 0 and model not in active_models
    }
    for job_id, model in snapshot.running.items():
        if job_id not in snapshot.at_servers.get(model, ()):
            problems[job_id] = "is running in the database, and no server runs it"
    return problems
