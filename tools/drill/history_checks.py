"""Compare clients' receipts, servers' journals and the database: each accepted job must end, and none else may run.

Pure.

lost         accepted, and not in the database or not ended there
unexpected   ran, and no client submitted it
duplicated   ran to its end more than once
overlaps     two runs at once in one slot, more runs at once than the server has slots, or two of one job
overtaken    a later job of its lane had its turn first (ORDER-1); only if the client had the answer for the first job
             before the second was sent: of two concurrent submits, either may be first
reversals    a transition followed a final state, other than an operator's retry of a dead job (JOB-1)

All times are nanoseconds of one machine's monotonic clock.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES, State
from tasks.periods import PERIODS_S

COMPLETED = "completed"
SWEEP_PERIOD_NS = round(PERIODS_S["sweep"] * 1e9)
_ENDS = frozenset(EVENT_TYPES[state] for state in FINAL_STATES)
_REVIVAL = (EVENT_TYPES[State.DEAD], EVENT_TYPES[State.QUEUED])


@dataclass(frozen=True, slots=True)
class Receipt:
    """A job that its client submitted.  `sent_ns`: of the first attempt; `answered_ns`: of the accepting answer."""

    job_id: str
    model: str
    priority: int
    sent_ns: int
    answered_ns: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run in the journal of its server.  `outcome` "cut": the server was killed during the run."""

    job_id: str
    attempt: int
    server: str
    slot: int
    started_ns: int
    ended_ns: int
    outcome: str = COMPLETED


@dataclass(frozen=True, slots=True)
class Recorded:
    """A job in the database.  `events`: the types of its events, oldest first.

    turn: (epoch of the queue, number of the offer) of the first offer with which the job was started.  This is more
    exact than the start of the run: of two jobs that leave the queue in order, the second may reach its server first.
    """

    state: State
    events: tuple[str, ...] = ()
    turn: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two runs that share `what`; `second` started before `first` had ended."""

    what: str
    first: Run
    second: Run


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A job `job_id` and a later one, `by`, that started first; and when the two were submitted and started."""

    job_id: str
    by: str
    by_started_ns: int
    started_ns: int
    answered_ns: int
    by_sent_ns: int


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of the comparison."""

    accepted: int
    ended: dict[State, int]
    lost: list[str]
    unexpected: list[str]
    duplicated: dict[str, int]
    """Job -> number of completed runs."""
    overlaps: list[Overlap]
    overtaken: list[Overtaken]
    reversals: list[str]

    @property
    def completed(self) -> int:
        return self.ended.get(State.COMPLETED, 0)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A fault that can have cost up to `most` jobs their turn, between `from_ns` and `until_ns`.

    unenqueued_until_ns: until then an accepted job may be missing in Redis until the next sweep, so that jobs of other
    processes start before it (the exception of ORDER-1).  None: the fault lets no enqueue fail.
    """

    from_ns: int
    until_ns: int
    most: int
    unenqueued_until_ns: int | None = None

    def excuses_overtaking(self, job: Overtaken) -> bool:
        """Return whether the job could not be enqueued, and the later one was sent before a sweep had to enqueue it."""
        until = self.unenqueued_until_ns
        if until is None:
            return False
        return self.from_ns <= job.answered_ns <= until and job.by_sent_ns <= until + SWEEP_PERIOD_NS


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that is compared.  `record`: job -> its row; `slots`: server -> slots."""

    receipts: Sequence[Receipt]
    runs: Sequence[Run]
    record: Mapping[str, Recorded]
    slots: Mapping[str, int] = field(default_factory=dict)


def check(evidence: Evidence) -> Findings:
    """Compare the evidence, and return all findings."""
    accepted = {receipt.job_id for receipt in evidence.receipts}
    states = {job_id: evidence.record[job_id].state for job_id in accepted if job_id in evidence.record}
    return Findings(
        accepted=len(accepted),
        ended=dict(Counter(state for state in states.values() if state in FINAL_STATES)),
        lost=sorted(job_id for job_id in accepted if states.get(job_id) not in FINAL_STATES),
        unexpected=sorted({run.job_id for run in evidence.runs} - accepted),
        duplicated=duplicated(evidence.runs),
        overlaps=overlaps(evidence.runs, evidence.slots),
        overtaken=overtaken(evidence.receipts, evidence.runs, evidence.record),
        reversals=sorted(job_id for job_id, job in evidence.record.items() if is_reversed(job.events)),
    )


def duplicated(runs: Iterable[Run]) -> dict[str, int]:
    """Return job -> number of completed runs, for the jobs with more than one."""
    ends = Counter(run.job_id for run in runs if run.outcome == COMPLETED)
    return {job_id: times for job_id, times in sorted(ends.items()) if times > 1}


def is_reversed(events: Sequence[str]) -> bool:
    """Return whether a transition that is not allowed followed a final state."""
    return any(event in _ENDS and (event, following) != _REVIVAL for event, following in pairwise(events))


# -- overlaps ----------------------------------------------------------------------------------------------


def overlaps(runs: Iterable[Run], slots: Mapping[str, int]) -> list[Overlap]:
    """Return the pairs of runs that were active together and must not have been (SLOT-1, LEASE-1)."""
    by_slot: dict[str, list[Run]] = defaultdict(list)
    by_job: dict[str, list[Run]] = defaultdict(list)
    by_server: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_slot[f"{run.server}-slot{run.slot}"].append(run)
        by_job[run.job_id].append(run)
        by_server[run.server].append(run)
    pairs = [Overlap(f"slot {slot}", *pair) for slot, group in by_slot.items() for pair in _beyond(group, 1)]
    pairs += [Overlap(f"job {job_id}", *pair) for job_id, group in by_job.items() for pair in _beyond(group, 1)]
    for server, group in by_server.items():
        if server in slots:
            what = f"the {slots[server]} slots of {server}"
            pairs += [Overlap(what, *pair) for pair in _beyond(group, slots[server])]
    return pairs


def _beyond(runs: list[Run], most: int) -> Iterator[tuple[Run, Run]]:
    """Yield each run that started while `most` others were active, after the one of them that started first."""
    active: list[Run] = []
    for run in sorted(runs, key=lambda run: (run.started_ns, run.ended_ns)):
        active = [other for other in active if other.ended_ns > run.started_ns]
        if len(active) >= most:
            yield active[0], run
        active.append(run)


# -- order -------------------------------------------------------------------------------------------------


def overtaken(receipts: Iterable[Receipt], runs: Iterable[Run], record: Mapping[str, Recorded]) -> list[Overtaken]:
    """Return the jobs that a later job of their lane overtook, judged by the first start of each (ORDER-1)."""
    first: dict[str, int] = {}
    for run in runs:
        first[run.job_id] = min(run.started_ns, first.get(run.job_id, run.started_ns))
    lanes: dict[tuple[str, int], list[Receipt]] = defaultdict(list)
    for receipt in receipts:
        if receipt.job_id in first:
            lanes[(receipt.model, receipt.priority)].append(receipt)
    return [job for lane in lanes.values() for job in _overtaken_in(lane, first, record)]


def _overtaken_in(lane: list[Receipt], first: Mapping[str, int], record: Mapping[str, Recorded]) -> Iterator[Overtaken]:
    turns = {receipt.job_id: _turn(record.get(receipt.job_id)) for receipt in lane}
    has_all_turns = None not in turns.values()

    def rank(receipt: Receipt) -> tuple[int, ...]:
        turn = turns[receipt.job_id]
        return turn if has_all_turns and turn is not None else (first[receipt.job_id],)

    lane = sorted(lane, key=lambda receipt: receipt.sent_ns)
    sent = [receipt.sent_ns for receipt in lane]
    earliest = list(lane)  # index -> of the receipts from there on, the one that had its turn first
    for i in range(len(lane) - 2, -1, -1):
        earliest[i] = min(lane[i], earliest[i + 1], key=rank)
    for receipt in lane:
        later = bisect_right(sent, receipt.answered_ns)
        if later < len(lane) and rank(earliest[later]) < rank(receipt):
            by = earliest[later]
            started, by_started = first[receipt.job_id], first[by.job_id]
            yield Overtaken(receipt.job_id, by.job_id, by_started, started, receipt.answered_ns, by.sent_ns)


def _turn(job: Recorded | None) -> tuple[int, int] | None:
    return None if job is None else job.turn


def unexplained(overtaken_jobs: Iterable[Overtaken], faults: Iterable[Disturbance]) -> list[Overtaken]:
    """Return the overtaken jobs that no fault excuses.

    The offers of a worker that dies are made again, so their jobs start late.  Each fault therefore excuses up to
    `most` jobs whose turn was late around its time.  It also excuses every job that it kept from being enqueued, within
    the bounds of the exception of ORDER-1.
    """
    faults = list(faults)
    left = [[fault.from_ns, fault.until_ns, fault.most] for fault in sorted(faults, key=lambda fault: fault.until_ns)]
    unexcused = []
    for job in sorted(overtaken_jobs, key=lambda job: job.started_ns):
        if any(fault.excuses_overtaking(job) for fault in faults):
            continue
        low, high = sorted((job.by_started_ns, job.started_ns))
        for fault in left:
            if fault[2] and fault[0] <= high and low <= fault[1]:
                fault[2] -= 1
                break
        else:
            unexcused.append(job)
    return unexcused
