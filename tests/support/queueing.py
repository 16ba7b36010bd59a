"""A queue for whole simulated days: Poisson arrivals, slots, priorities, outages.  Runs in a second, by a seed.

    outcomes = simulate(Load(rate=lambda ms: 0.0004, peak=0.0004, run_ms=exponential(20_000)), seed=1, forecaster)

The forecaster is called in the order in which it is called for real: a promise when a job comes and finds no free
slot, its outcome when it starts.  Times are ms since midnight, rates jobs per ms.
"""

import heapq
import math
import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from routing.queries.interval import Estimate

SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
_LATEST = 200  # runs whose mean is the measured slot time …
_KEPT_MS = 10_000  # … which is read again this often

Duration = Callable[[random.Random, float], float]


class Forecaster(Protocol):
    """What is put to the test."""

    def promise(self, job_id: str, ahead: int, slots: int, run_ms: float | None, now_ms: int) -> Estimate | None: ...

    def started(self, job_id: str, now_ms: int) -> None: ...


@dataclass(frozen=True)
class Load:
    """What comes, and what serves it.  `peak`: an upper bound of `rate`; `slots`: (from when, how many), …

    A job's order key is `priority × step + number`, as in routing/queue/lanes.py: a large step is strict priority,
    a small one lets a job overtake those that came up to so many numbers before it.
    """

    rate: Callable[[float], float]
    peak: float
    run_ms: Duration
    slots: tuple[tuple[float, int], ...] = ((0, 8),)
    priority: Callable[[random.Random], int] = lambda draw: 5
    step: int = 1 << 49
    batch: Callable[[random.Random], int] = lambda draw: 1
    days: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """A started job.  `promised` None: it found a free slot, or nothing was known yet."""

    came_ms: int
    waited_ms: int
    priority: int
    promised: Estimate | None
    at_once: bool


@dataclass
class _Queue:
    load: Load
    draw: random.Random
    forecaster: Forecaster
    slots: int = 0
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (order key, number)
    running: dict[int, tuple[int, int, float]] = field(default_factory=dict)  # number -> run, order key, ms
    came: dict[int, tuple[int, int, Estimate | None, bool]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    events: list[tuple[float, int, str, Any]] = field(default_factory=list)
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    mean_ms: float | None = None
    read_ms: float = -math.inf
    jobs: int = 0
    pushed: int = 0

    def push(self, at_ms: float, kind: str, what: Any = None) -> None:
        self.pushed += 1
        heapq.heappush(self.events, (at_ms, self.pushed, kind, what))

    def next_arrival(self, now: float) -> None:
        end = self.load.days * DAY
        while True:
            now += self.draw.expovariate(self.load.peak)
            if now >= end:
                return
            if self.draw.random() * self.load.peak < self.load.rate(now % DAY):
                self.push(now, "arrival")
                return

    def arrival(self, now: float, _: Any) -> None:
        self.next_arrival(now)
        for _ in range(self.load.batch(self.draw)):
            self.submit(now)
            self.fill(now)

    def submit(self, now: float) -> None:
        self.jobs += 1
        priority = self.load.priority(self.draw)
        key = (priority * self.load.step + self.jobs, self.jobs)
        promised, at_once = None, len(self.running) < self.slots and not self.waiting
        if not at_once:
            ahead = bisect_left(self.waiting, key)
            promised = self.forecaster.promise(str(self.jobs), ahead, self.slots, self.mean(now), round(now))
        self.came[self.jobs] = (round(now), priority, promised, at_once)
        insort(self.waiting, key)

    def mean(self, now: float) -> float | None:
        if self.latest and now - self.read_ms > _KEPT_MS:
            self.read_ms, self.mean_ms = now, sum(self.latest) / len(self.latest)
        return self.mean_ms

    def fill(self, now: float) -> None:
        while self.waiting and len(self.running) < self.slots:
            key, job = self.waiting.pop(0)
            took = self.load.run_ms(self.draw, now)
            self.push(now + took, "end", (job, self.pushed + 1))
            self.running[job] = (self.pushed, key, took)
            self.first_start(job, round(now))

    def first_start(self, job: int, now_ms: int) -> None:
        if job not in self.came:
            return
        came, priority, promised, at_once = self.came.pop(job)
        self.outcomes.append(Outcome(came, now_ms - came, priority, promised, at_once))
        if promised is not None:
            self.forecaster.started(str(job), now_ms)

    def end(self, now: float, what: tuple[int, int]) -> None:
        job, run = what
        if job in self.running and self.running[job][0] == run:
            self.latest.append(self.running.pop(job)[2])
            self.fill(now)

    def change(self, now: float, slots: int) -> None:
        """Slots come or go; the youngest runs are lost with theirs and go back to their place."""
        self.slots = slots
        for job, (_, key, _ms) in sorted(self.running.items(), key=lambda it: it[1])[slots:]:
            del self.running[job]
            insort(self.waiting, (key, job))
        self.fill(now)


def simulate(load: Load, seed: int, forecaster: Forecaster) -> list[Outcome]:
    """Run the load's days, and then on until its queue is empty; answers outcomes in the order of starts."""
    queue = _Queue(load, random.Random(seed), forecaster)
    for at_ms, slots in load.slots:
        queue.push(at_ms, "change", slots)
    queue.next_arrival(0)
    kinds = {"arrival": queue.arrival, "end": queue.end, "change": queue.change}
    while queue.events:
        now, _, kind, what = heapq.heappop(queue.events)
        kinds[kind](now, what)
    return queue.outcomes


# -- durations and rates ---------------------------------------------------------------------------------------


def exponential(mean_ms: float) -> Duration:
    return lambda draw, _: draw.expovariate(1 / mean_ms)


def lognormal(mean_ms: float, spread: float) -> Duration:
    """`spread`: standard deviation of the logarithm; 0.3: most within a third of the mean."""
    middle = math.log(mean_ms) - spread**2 / 2
    return lambda draw, _: draw.lognormvariate(middle, spread)


def bimodal(short_ms: float, long_ms: float, share_of_short: float) -> Duration:
    return lambda draw, _: (short_ms if draw.random() < share_of_short else long_ms) * draw.uniform(0.9, 1.1)


def swing(night: float, noon: float) -> Callable[[float], float]:
    """A rate that rises from six o'clock to noon and falls until eighteen."""

    def rate(now_ms: float) -> float:
        by_day = math.sin(math.pi * (now_ms / DAY - 0.25) * 2) if DAY / 4 < now_ms < DAY * 3 / 4 else 0.0
        return night + (noon - night) * by_day**2

    return rate
