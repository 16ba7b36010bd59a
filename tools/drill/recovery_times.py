"""How long it took after each fault until work went on.  Pure."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from slotkeeper.jobs import events
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.values import Event
from tools.cluster.cluster import ServerSpec
from tools.drill.fault_schedule import Kind
from tools.drill.faults import InjectedFault
from tools.drill.history_checks import Receipt, Run

_STARTED = events.EVENT_TYPES[State.RUNNING]
_OF_WORKERS = frozenset({Kind.WORKER, Kind.STOP})
_NS = 1e9


def placed(trails: Mapping[str, Sequence[Event]]) -> dict[tuple[str, int], str]:
    """(job, attempt) -> the slot that Slotkeeper gave it.  A server counts its own slots as it likes."""
    return {
        (job_id, event.attempt): event.data["slot"]
        for job_id, trail in trails.items()
        for event in trail
        if event.type == _STARTED
    }


def slot_recovery(
    struck: Sequence[InjectedFault],
    runs: Sequence[Run],
    places: Mapping[tuple[str, int], str],
    receipts: Sequence[Receipt],
    servers: Sequence[ServerSpec],
) -> list[tuple[Kind, float]]:
    """For each fault the longest time for which a slot that it can have touched stood idle after it.

    Only slots count for which jobs waited all the while: an idle slot without a job is no harm.  Faults that follow
    soon count too: what is down for their sake is idle all the same.
    """
    by_slot: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.started_ns):
        by_slot[places.get((run.job_id, run.attempt), f"{run.server}-slot{run.slot}")].append(run)
    waiting = {server.model: _Waiting(server.model, receipts, runs) for server in servers}
    found = []
    for one in struck:
        touched = [s for s in servers if one.fault.kind is not Kind.SERVER or s.name == one.fault.target]
        idle = [
            _idle_s(by_slot[f"{server.name}-slot{slot}"], one.at_ns, waiting[server.model])
            for server in touched
            for slot in range(server.slots)
        ]
        known = [seconds for seconds in idle if seconds is not None]
        if known:
            found.append((one.fault.kind, max(known)))
    return found


class _Waiting:
    """When jobs of a model waited for their first start."""

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

    def always(self, since: int, until: int) -> bool:
        """Whether there was one at every moment; the start at `until` itself took one away."""
        low, high = bisect_right(self._times, since) - 1, bisect_left(self._times, until)
        return low >= 0 and all(count > 0 for count in self._counts[low:high])


def _idle_s(runs: Sequence[Run], at_ns: int, waiting: _Waiting) -> float | None:
    """How long the slot had nothing to do after the fault; None: there was not always something for it."""
    under_way = [run.ended_ns for run in runs if run.started_ns <= at_ns < run.ended_ns]
    since = max([at_ns, *under_way])
    following = next((run.started_ns for run in runs if run.started_ns > at_ns), None)
    if following is None or not waiting.always(since, following):
        return None
    return max(following - since, 0) / _NS


def rerun_after(struck: Sequence[InjectedFault], trails: Mapping[str, Sequence[Event]]) -> list[float]:
    """Seconds from the death (or sleep) of a worker to the next start of each job that was taken from it."""
    deaths = [one.at_ms for one in struck if one.fault.kind in _OF_WORKERS]
    found = []
    for trail in trails.values():
        for start, lost, again in zip(trail, trail[1:], trail[2:], strict=False):
            if start.type == again.type == _STARTED and lost.data.get("why") == Reason.LEASE_EXPIRED:
                death = max((at for at in deaths if at <= lost.at_ms), default=None)
                if death is not None:
                    found.append((again.at_ms - max(death, start.at_ms)) / 1000)
    return found


def summary(seconds: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """By name: how many there were, the middle one, the longest."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, value in seconds:
        by_name[str(name)].append(value)
    return {
        name: {"faults": len(values), "p50_s": round(median(values), 2), "max_s": round(max(values), 2)}
        for name, values in sorted(by_name.items())
    }
