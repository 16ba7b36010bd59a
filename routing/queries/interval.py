"""When a waiting job will start: a plain prediction, and an interval learned from how earlier ones turned out.

The prediction is what arithmetic says: (jobs ahead + 1) × mean slot time / slots.  How wrong it is depends on the
load, the spread of durations and the policy, so none of them is modelled: the interval comes from the ratios
actual / predicted of recent jobs, taken at the 5th and the 95th percentile.

Percentiles of the past hold only while the future is like it.  Therefore each side keeps a balance of how often it
was missed beyond its due 5 %, and moves its percentile against that balance (adaptive conformal inference), so that
over a day of some thousand jobs about 90 % of the intervals hold.  A priority that starves for hours for the first time
is beyond that; from the second time on it is known.  Four details make this work with hours between a promise and
its outcome:

- the correction is the smaller the more jobs are still under way, for their outcomes are not in the balance yet;
- ratios are taken at a distance, for jobs that waited together were wrong together, and 256 of them tell one story;
- of a long queue only a sample is remembered, and each of it counts for those that it stands for;
- a few made-up ratios always stand among the measured ones, for what a young sample has not seen yet.

What is learned when a job starts is done in Redis (lua/learn.lua).  Logarithms of ratios are kept as whole
ten-thousandths, so that it and this file agree exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

UNIT = 10_000  # of a ratio's natural logarithm
KEPT = 256  # ratios for each size
MOST = 10_000  # furthest that a balance goes, in twentieths of a job: 500 jobs
PARTS = 16  # a ratio is kept if the last one is older than this part of the job's wait
HEAVIEST = 6  # a promise of a sample of one in 2^n jobs counts for 2^n, up to this n

_DUE = 0.05
_PERCENTILES = (0.002, 0.5)
_OWN_GAIN, _COMMON_GAIN = 0.001, 0.004  # by how much a job too many moves the percentile: of its size, of all
_LOOP_GAIN = 0.2  # … and at most so much for all jobs that are under way
_ROUNDS = (1, 8)
SIZES = range(len(_ROUNDS) + 1)
_PRIOR = (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 10.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """When a job starts, in ms from now: 5 % start before `low_ms`, 5 % after `high_ms`."""

    mid_ms: int
    low_ms: int
    high_ms: int


SOON = Estimate(0, 0, 1000)
"""A slot is offered to the job already."""


@dataclass(frozen=True, slots=True)
class Promise:
    """An estimate that was given, and what to learn from its outcome.

    `predicted_ms` is at least 1; `level`: it was one of a sample of one in 2^level jobs.
    """

    size: int
    predicted_ms: int
    low_ms: int
    high_ms: int
    at_ms: int
    level: int = 0


@dataclass(frozen=True)
class Seen:
    """Outcomes of predictions of one size.  `ratios`: oldest first, `at_ms`: of the last; balances in twentieths."""

    ratios: tuple[int, ...] = ()
    at_ms: int = 0
    low: int = 0
    high: int = 0

    @cached_property
    def ordered(self) -> list[int]:
        """The ratios and the made-up ones, smallest first."""
        return sorted([*self.ratios, *_MADE_UP])


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known of a model's promises: by size, and the balances of all sizes together, in twentieths."""

    sizes: tuple[Seen, ...] = field(default_factory=lambda: (Seen(),) * len(SIZES))
    low: int = 0
    high: int = 0


@dataclass(frozen=True, slots=True)
class Truth:
    """Estimates of one size held against what came: starts seen, and actual over foretold waits.

    `middle`: in half of the cases it was less; nine of ten lie between `low` and `high`.
    """

    seen: int
    low: float
    middle: float
    high: float


def truths(memory: Memory) -> list[Truth | None]:
    """By size, the shortest waits first; None: nothing was seen of it."""
    return [_truth(sorted(seen.ratios)) if seen.ratios else None for seen in memory.sizes]


def _truth(ordered: Sequence[int]) -> Truth:
    return Truth(len(ordered), _at(ordered, 0.05), _at(ordered, 0.5), _at(ordered, 0.95))


def predict_ms(ahead: int, slots: int, run_ms: float | None) -> int | None:
    """How long a job with `ahead` others before it waits until one of `slots` is free; None: not known."""
    if slots <= 0 or run_ms is None:
        return None
    return max(1, round((ahead + 1) * run_ms / slots))


def size_of(ahead: int, slots: int) -> int:
    """Which predictions err alike: 0: within the first round of all slots, 1: within eight rounds, 2: beyond."""
    return sum(ahead + 1 > rounds * slots for rounds in _ROUNDS)


def promise(memory: Memory, ahead: int, slots: int, run_ms: float | None, now_ms: int) -> Promise | None:
    """The interval for a job with `ahead` others before it; None: there is no slot, or no run was measured."""
    predicted = predict_ms(ahead, slots, run_ms)
    if predicted is None:
        return None
    size = size_of(ahead, slots)
    seen = memory.sizes[size]
    low = _at(seen.ordered, _percentile(seen.low, memory.low, ahead))
    high = _at(seen.ordered, 1 - _percentile(seen.high, memory.high, ahead))
    return Promise(size, predicted, math.floor(predicted * low), math.ceil(predicted * high), now_ms)


def estimate(memory: Memory, given: Promise) -> Estimate:
    """What the client is told of a promise."""
    middle = round(given.predicted_ms * _at(memory.sizes[given.size].ordered, 0.5))
    return Estimate(min(max(middle, given.low_ms), given.high_ms), given.low_ms, given.high_ms)


def _percentile(own: int, common: int, ahead: int) -> float:
    """The share of jobs to leave out on one side, by its balances in twentieths."""
    most = _LOOP_GAIN / (ahead + 1)
    share = _DUE - (min(_OWN_GAIN, most) * own + min(_COMMON_GAIN, most) * common) * _DUE
    return min(max(share, _PERCENTILES[0]), _PERCENTILES[1])


def _at(ordered: Sequence[int], share: float) -> float:
    """The ratio below which this share lies, between two of them in proportion."""
    place = min(max((len(ordered) + 1) * share - 1, 0), len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return math.exp((ordered[below] + (place - below) * (ordered[above] - ordered[below])) / UNIT)


_MADE_UP = tuple(math.floor(math.log(ratio) * UNIT + 0.5) for ratio in _PRIOR)
