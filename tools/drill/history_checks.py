"""What goes in must come out: clients' receipts against servers' journals against the record.  Pure.

lost         accepted, and the record does not know it or has not ended it
unexpected   ran, and nobody submitted it
duplicated   ran to its end more than once
overlaps     two runs at once in one slot, more runs at once than the server has slots, or two of one job
overtaken    a later job of its lane had its turn first (ORDER-1); only if the job's acceptance had been answered
             before the other was sent: of two that were under way together, either may be first
reversals    something followed a final state, but for a person's retry of a dead job (JOB-1)

All times are nanoseconds of one machine's monotonic clock.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES, State

COMPLETED = "completed"
SWEEP_PERIOD_NS = 2_000_000_000  # tasks/beat.py
_ENDS = frozenset(EVENT_TYPES[state] for state in FINAL_STATES)
_REVIVAL = (EVENT_TYPES[State.DEAD], EVENT_TYPES[State.QUEUED])


@dataclass(frozen=True, slots=True)
class Receipt:
    """A job as its client knows it.  `sent_ns`: of the first try, `answered_ns`: of the answer that accepted it."""

    job_id: str
    model: str
    priority: int
    sent_ns: int
    answered_ns: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run as its server knows it.  `outcome` "cut": the server was killed under it."""

    job_id: str
    attempt: int
    server: str
    slot: int
    started_ns: int
    ended_ns: int
    outcome: str = COMPLETED


@dataclass(frozen=True, slots=True)
class Recorded:
    """A job as the record knows it.  `trail`: the types of its events, oldest first.

    `turn`: when the waiting room first gave it to a worker that started it, as (epoch of the room, number).  More
    exact than the run's start: of two jobs that leave the room in order, the second may reach its server first.
    """

    state: State
    trail: tuple[str, ...] = ()
    turn: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Overlap:
    """`second` started before `first` had ended, and `what` they share."""

    what: str
    first: Run
    second: Run


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A job, one that had its turn before it though it came later, and when the two were submitted and started."""

    job_id: str
    by: str
    by_started_ns: int
    started_ns: int
    answered_ns: int
    by_sent_ns: int


@dataclass(frozen=True, slots=True)
class Findings:
    """What the journals say together."""

    accepted: int
    ended: dict[State, int]
    lost: list[str]
    unexpected: list[str]
    duplicated: dict[str, int]
    """Job -> runs that went to their end."""
    overlaps: list[Overlap]
    overtaken: list[Overtaken]
    reversals: list[str]

    @property
    def completed(self) -> int:
        return self.ended.get(State.COMPLETED, 0)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A fault that can have taken the turn away from up to `most` jobs, between `from_ns` and `until_ns`.

    unenqueued_until_ns: until then jobs may be accepted that Redis does not have before the next sweep, so that jobs of
    other processes start before them (the exception of ORDER-1); None: it keeps no job from Redis.
    """

    from_ns: int
    until_ns: int
    most: int
    unenqueued_until_ns: int | None = None

    def lets_overtake(self, one: Overtaken) -> bool:
        """Return whether the job could not be enqueued, and the other came before a sweep must have mended that."""
        until = self.unenqueued_until_ns
        if until is None:
            return False
        return self.from_ns <= one.answered_ns <= until and one.by_sent_ns <= until + SWEEP_PERIOD_NS


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that is compared.  `slots`: of each server."""

    receipts: Sequence[Receipt]
    runs: Sequence[Run]
    record: Mapping[str, Recorded]
    slots: Mapping[str, int] = field(default_factory=dict)


def check(seen: Evidence) -> Findings:
    """Compare it all."""
    accepted = {receipt.job_id for receipt in seen.receipts}
    states = {job_id: seen.record[job_id].state for job_id in accepted if job_id in seen.record}
    return Findings(
        accepted=len(accepted),
        ended=dict(Counter(state for state in states.values() if state in FINAL_STATES)),
        lost=sorted(job_id for job_id in accepted if states.get(job_id) not in FINAL_STATES),
        unexpected=sorted({run.job_id for run in seen.runs} - accepted),
        duplicated=duplicated(seen.runs),
        overlaps=overlaps(seen.runs, seen.slots),
        overtaken=overtaken(seen.receipts, seen.runs, seen.record),
        reversals=sorted(job_id for job_id, job in seen.record.items() if is_reversed(job.trail)),
    )


def duplicated(runs: Iterable[Run]) -> dict[str, int]:
    """Jobs that ran to their end more than once, and how often."""
    ends = Counter(run.job_id for run in runs if run.outcome == COMPLETED)
    return {job_id: times for job_id, times in sorted(ends.items()) if times > 1}


def is_reversed(trail: Sequence[str]) -> bool:
    """Whether something followed a final state that must not."""
    return any(one in _ENDS and (one, then) != _REVIVAL for one, then in pairwise(trail))


# -- overlaps ----------------------------------------------------------------------------------------------


def overlaps(runs: Iterable[Run], slots: Mapping[str, int]) -> list[Overlap]:
    """Runs that were under way together and must not have been (SLOT-1, LEASE-1)."""
    by_slot: dict[str, list[Run]] = defaultdict(list)
    by_job: dict[str, list[Run]] = defaultdict(list)
    by_server: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_slot[f"{run.server}-slot{run.slot}"].append(run)
        by_job[run.job_id].append(run)
        by_server[run.server].append(run)
    found = [Overlap(f"slot {slot}", *pair) for slot, those in by_slot.items() for pair in _beyond(those, 1)]
    found += [Overlap(f"job {job_id}", *pair) for job_id, those in by_job.items() for pair in _beyond(those, 1)]
    for server, those in by_server.items():
        if server in slots:
            what = f"the {slots[server]} slots of {server}"
            found += [Overlap(what, *pair) for pair in _beyond(those, slots[server])]
    return found


def _beyond(runs: list[Run], room: int) -> Iterator[tuple[Run, Run]]:
    """Each run that started while `room` others were under way, with the one of them that started first."""
    active: list[Run] = []
    for run in sorted(runs, key=lambda run: (run.started_ns, run.ended_ns)):
        active = [other for other in active if other.ended_ns > run.started_ns]
        if len(active) >= room:
            yield active[0], run
        active.append(run)


# -- order -------------------------------------------------------------------------------------------------


def overtaken(receipts: Iterable[Receipt], runs: Iterable[Run], record: Mapping[str, Recorded]) -> list[Overtaken]:
    """Jobs that a later one of their lane has overtaken, judged by the first start of each (ORDER-1)."""
    first: dict[str, int] = {}
    for run in runs:
        first[run.job_id] = min(run.started_ns, first.get(run.job_id, run.started_ns))
    lanes: dict[tuple[str, int], list[Receipt]] = defaultdict(list)
    for receipt in receipts:
        if receipt.job_id in first:
            lanes[(receipt.model, receipt.priority)].append(receipt)
    return [one for lane in lanes.values() for one in _overtaken_in(lane, first, record)]


def _overtaken_in(lane: list[Receipt], first: Mapping[str, int], record: Mapping[str, Recorded]) -> Iterator[Overtaken]:
    turns = {receipt.job_id: _turn(record.get(receipt.job_id)) for receipt in lane}
    known = None not in turns.values()

    def rank(receipt: Receipt) -> tuple[int, ...]:
        turn = turns[receipt.job_id]
        return turn if known and turn is not None else (first[receipt.job_id],)

    lane = sorted(lane, key=lambda receipt: receipt.sent_ns)
    sent = [receipt.sent_ns for receipt in lane]
    quickest = list(lane)  # of those from here on, the one that had its turn first
    for i in range(len(lane) - 2, -1, -1):
        quickest[i] = min(lane[i], quickest[i + 1], key=rank)
    for receipt in lane:
        later = bisect_right(sent, receipt.answered_ns)
        if later < len(lane) and rank(quickest[later]) < rank(receipt):
            by = quickest[later]
            started, by_started = first[receipt.job_id], first[by.job_id]
            yield Overtaken(receipt.job_id, by.job_id, by_started, started, receipt.answered_ns, by.sent_ns)


def _turn(job: Recorded | None) -> tuple[int, int] | None:
    return None if job is None else job.turn


def unexplained(found: Iterable[Overtaken], faults: Iterable[Disturbance]) -> list[Overtaken]:
    """Those that no fault excuses.

    A worker that dies takes down the offers that it held, and those jobs have their turn late: so each fault
    excuses a few jobs, as many as it can have hit, of those that lost and regained their turn around it.  Besides, it
    excuses every job that could not be enqueued, within the bound of that exception.
    """
    faults = list(faults)
    left = [[fault.from_ns, fault.until_ns, fault.most] for fault in sorted(faults, key=lambda it: it.until_ns)]
    guilty = []
    for one in sorted(found, key=lambda it: it.started_ns):
        if any(fault.lets_overtake(one) for fault in faults):
            continue
        low, high = sorted((one.by_started_ns, one.started_ns))
        for fault in left:
            if fault[2] and fault[0] <= high and low <= fault[1]:
                fault[2] -= 1
                break
        else:
            guilty.append(one)
    return guilty
