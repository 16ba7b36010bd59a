"""Measure how long after each fault jobs ran again.  Pure."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.values import Event
from tools.cluster.cluster import ServerSpec
from tools.drill.fault_injection import InjectedFault
from tools.drill.fault_schedule import Kind
from tools.drill.history_checks import Receipt, Run

_STARTED = EVENT_TYPES[State.RUNNING]
_WORKER_FAULTS = frozenset({Kind.WORKER, Kind.STOP})
_NS = 1e9


def assigned_slots(events_by_job: Mapping[str, Sequence[Event]]) -> dict[tuple[str, int], str]:
    """Return (job, attempt) -> the slot that Slotkeeper gave it.  A server numbers its slots independently."""
    return {
        (job_id, event.attempt): event.data["slot"]
        for job_id, events in events_by_job.items()
        for event in events
        if event.type == _STARTED
    }


def slot_recovery(
    injected: Sequence[InjectedFault],
    runs: Sequence[Run],
    assigned: Mapping[tuple[str, int], str],
    receipts: Sequence[Receipt],
    servers: Sequence[ServerSpec],
) -> list[tuple[Kind, float]]:
    """Return for each fault the longest time, in seconds, that an affected slot was idle after it.

    Only a slot for which jobs waited the whole time counts: without a waiting job it may be idle.  The time includes
    the effects of later faults.
    """
    by_slot: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.started_ns):
        by_slot[assigned.get((run.job_id, run.attempt), f"{run.server}-slot{run.slot}")].append(run)
    waiting = {server.model: _WaitingJobs(server.model, receipts, runs) for server in servers}
    results = []
    for injection in injected:
        affected = [
            server
            for server in servers
            if injection.fault.kind is not Kind.SERVER or server.name == injection.fault.target
        ]
        idle = [
            _idle_s(by_slot[f"{server.name}-slot{slot}"], injection.at_ns, waiting[server.model])
            for server in affected
            for slot in range(server.slots)
        ]
        measured = [seconds for seconds in idle if seconds is not None]
        if measured:
            results.append((injection.fault.kind, max(measured)))
    return results


class _WaitingJobs:
    """The number of jobs of a model that wait for their first start, over time."""

    def __init__(self, model: str, receipts: Iterable[Receipt], runs: Iterable[Run]) -> None:
        first: dict[str, int] = {}
        for run in runs:
            first[run.job_id] = min(run.started_ns, first.get(run.job_id, run.started_ns))
        steps = []
        for receipt in receipts:
            start = first.get(receipt.job_id)
            if receipt.model == model and (start is None or start > receipt.answered_ns):
                steps.append((receipt.answered_ns, 1))
                steps += [] if start is None else [(start, -1)]
        self._times: list[int] = []
        self._counts: list[int] = []
        count = 0
        for at, step in sorted(steps):
            count += step
            self._times.append(at)
            self._counts.append(count)

    def is_never_empty(self, since: int, until: int) -> bool:
        """Return whether a job waited at every moment from `since` until just before `until` (ns)."""
        low, high = bisect_right(self._times, since) - 1, bisect_left(self._times, until)
        return low >= 0 and all(count > 0 for count in self._counts[low:high])


def _idle_s(runs: Sequence[Run], at_ns: int, waiting: _WaitingJobs) -> float | None:
    """Return for how many seconds after the fault the slot was idle; None: jobs did not wait all the time."""
    active = [run.ended_ns for run in runs if run.started_ns <= at_ns < run.ended_ns]
    since = max([at_ns, *active])
    following = next((run.started_ns for run in runs if run.started_ns > at_ns), None)
    if following is None or not waiting.is_never_empty(since, following):
        return None
    return max(following - since, 0) / _NS


def rerun_after(injected: Sequence[InjectedFault], events_by_job: Mapping[str, Sequence[Event]]) -> list[float]:
    """Return the seconds from the kill (or stop) of a worker to the next start of each job whose lease expired then."""
    deaths = [injection.at_ms for injection in injected if injection.fault.kind in _WORKER_FAULTS]
    results = []
    for events in events_by_job.values():
        for start, requeued, again in zip(events, events[1:], events[2:], strict=False):
            if start.type == again.type == _STARTED and requeued.data.get("why") == Reason.LEASE_EXPIRED:
                death = max((at for at in deaths if at <= requeued.at_ms), default=None)
                if death is not None:
                    results.append((again.at_ms - max(death, start.at_ms)) / 1000)
    return results


def summary(seconds: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Return for each name the number of values, their median and their maximum, in seconds."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, value in seconds:
        by_name[str(name)].append(value)
    return {
        name: {"faults": len(values), "p50_s": round(median(values), 2), "max_s": round(max(values), 2)}
        for name, values in sorted(by_name.items())
    }
