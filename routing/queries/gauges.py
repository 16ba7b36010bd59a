"""What stands in the rooms, read for figures: in many small looks, so that nobody else waits for Redis.

The looks are not of one moment, so sums may be off by what moves meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slotkeeper.redis.scripts import Scripts

_AT_ONCE = 200
MOST_LANES = 20_000
"""That are looked at; more are left out, lest a look take seconds."""


@dataclass(frozen=True, slots=True)
class LaneDepth:
    """Jobs in a lane.  `oldest_ms`: when the first of them was accepted, ms since the epoch."""

    model: str
    priority: int
    jobs: int
    oldest_ms: int


def read_lane_depths(scripts: Scripts, fleets: Sequence[str]) -> list[LaneDepth]:
    """Of all lanes with jobs.  Raises redis errors."""
    found = _asked(scripts, "HKEYS", [(fleet, "") for fleet in fleets])
    accounts = [(fleet, it.decode()) for fleet, its in zip(fleets, found, strict=True) for it in its]
    marks = _asked(scripts, "HKEYS", accounts)
    lanes = [(fleet, f"{it.decode()}|{name}") for (fleet, name), its in zip(accounts, marks, strict=True) for it in its]
    del lanes[MOST_LANES:]
    counts, heads = _asked(scripts, "ZCARD", lanes), _asked(scripts, "ZRANGE", lanes, 0, 0)
    return [
        _depth(name, jobs, head[0].decode()) for (_, name), jobs, head in zip(lanes, counts, heads, strict=True) if head
    ]


def read_offer_counts(scripts: Scripts, fleets: Sequence[str]) -> dict[str, int]:
    """Fleet -> how many offers were made since its room was new.  Raises redis errors."""
    with scripts.redis.pipeline(transaction=False) as pipe:
        for fleet in fleets:
            pipe.hget(scripts.keys.fleet_key(fleet, "meta"), "offers")
        found = pipe.execute(raise_on_error=False)
    return {fleet: int(it or 0) for fleet, it in zip(fleets, found, strict=True) if not isinstance(it, Exception)}


def _depth(lane: str, jobs: int, head: str) -> LaneDepth:
    """`lane`: "<priority>|<digest>|<tenant>|<model>".  `head`: "<job>@<created>"."""
    priority, _, rest = lane.partition("|")
    return LaneDepth(rest.rpartition("|")[2], int(priority), jobs, int(head.rpartition("@")[2]))


def _asked(scripts: Scripts, command: str, members: Sequence[tuple[str, str]], *rest: int) -> list[Any]:
    """One command on a key below `lanes` of each fleet; "": on that key itself.  What cannot be read is empty."""
    answers: list[Any] = []
    for start in range(0, len(members), _AT_ONCE):
        with scripts.redis.pipeline(transaction=False) as pipe:
            for fleet, member in members[start : start + _AT_ONCE]:
                key = scripts.keys.fleet_key(fleet, "lanes")
                pipe.execute_command(command, f"{key}:{member}" if member else key, *rest)
            answers += pipe.execute(raise_on_error=False)
    return [() if isinstance(it, Exception) else it for it in answers]
