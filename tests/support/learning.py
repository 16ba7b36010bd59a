"""What lua/learn.lua does to a model's memory, said once more in Python, so that the two can be compared."""

import math
from dataclasses import replace

from routing.queries.interval import HEAVIEST, KEPT, MOST, PARTS, SIZES, UNIT, Memory, Promise

MISSED, HELD = 19, -1  # what an outcome adds to the balance of a side, in twentieths: it sums to 0 at 5 %


def learn(memory: Memory, given: Promise, now_ms: int, level: int = 0) -> Memory:
    """The job of this promise starts now, when one in 2^`level` is in the sample."""
    waited = max(1, now_ms - given.at_ms)
    weight = 1 << min(max(given.level, level), HEAVIEST)
    low = weight * (MISSED if waited < given.low_ms else HELD)
    high = weight * (MISSED if waited > given.high_ms else HELD)
    seen = memory.sizes[given.size]
    changed = replace(seen, low=_bounded(seen.low + low), high=_bounded(seen.high + high))
    if (now_ms - seen.at_ms) * PARTS >= waited:
        ratio = math.floor(math.log(waited / given.predicted_ms) * UNIT + 0.5)
        changed = replace(changed, ratios=(*seen.ratios[1 - KEPT :], ratio), at_ms=now_ms)
    sizes = tuple(changed if size == given.size else memory.sizes[size] for size in SIZES)
    return Memory(sizes, _bounded(memory.low + low), _bounded(memory.high + high))


def _bounded(balance: int) -> int:
    return min(max(balance, -MOST), MOST)
