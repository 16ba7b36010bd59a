"""Which fault comes when: a pure function of the seed.

To add a kind of fault: a member of Kind, its line in _LASTS_S and in `targets`, and how it begins and ends in
faults.py.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What can be done to a Slotkeeper."""

    WORKER = "worker"  # SIGKILL
    STOP = "stop"  # SIGSTOP for longer than a lease, then SIGCONT: a zombie that wakes must change nothing
    TERM = "term"  # SIGTERM: it drains
    MAINTENANCE = "maintenance"  # SIGKILL
    BEAT = "beat"  # SIGKILL
    WEB = "web"  # SIGKILL
    REDIS = "redis"  # SIGKILL; it comes back with its file
    FLUSH = "flush"  # FLUSHALL
    SERVER = "server"  # SIGKILL of an inference server; it comes back and knows nothing


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s` it happens to `target`; `lasts_s` later that is started again, or woken."""

    at_s: float
    kind: Kind
    target: str
    lasts_s: float


# Seconds from the fault to the mending, at least and at most.
_LASTS_S: Mapping[Kind, tuple[float, float]] = {
    Kind.WORKER: (0.2, 1.0),
    Kind.STOP: (9.0, 14.0),  # a lease is 8 s
    Kind.TERM: (9.0, 9.0),  # its grace time and a little
    Kind.MAINTENANCE: (0.2, 2.0),
    Kind.BEAT: (0.2, 5.0),
    Kind.WEB: (0.2, 1.5),
    Kind.REDIS: (0.5, 4.0),
    Kind.FLUSH: (0.0, 0.0),
    Kind.SERVER: (0.2, 3.0),
}


def targets(workers: Sequence[str], servers: Sequence[str]) -> dict[Kind, Sequence[str]]:
    """The processes that each kind of fault can happen to."""
    return {
        Kind.WORKER: workers,
        Kind.STOP: workers,
        Kind.TERM: workers,
        Kind.MAINTENANCE: ("maintenance",),
        Kind.BEAT: ("beat",),
        Kind.WEB: ("web",),
        Kind.REDIS: ("valkey",),
        Kind.FLUSH: ("valkey",),
        Kind.SERVER: servers,
    }


def schedule(
    seed: int,
    kinds: Sequence[Kind],
    among: Mapping[Kind, Sequence[str]],
    seconds: float,
    every_s: float,
    count: int | None = None,
) -> list[Fault]:
    """Faults from the first `every_s` on until `seconds`, about `every_s` apart, each kind about equally often.

    `count`: exactly so many, however long that takes.  Nothing happens to a process that is down already.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    up_again: dict[str, float] = {}
    deck: list[Kind] = []
    at = every_s * chance.uniform(0.5, 1.0)
    while kinds and (at < seconds if count is None else len(faults) < count):
        if not deck:
            deck = chance.sample(list(dict.fromkeys(kinds)), len(set(kinds)))
        fault = _next(chance, deck, among, up_again, at)
        if fault is not None:
            deck.remove(fault.kind)
            up_again[fault.target] = fault.at_s + fault.lasts_s
            faults.append(fault)
        at += every_s * chance.uniform(0.5, 1.5)
    return faults


def _next(
    chance: random.Random,
    deck: Sequence[Kind],
    among: Mapping[Kind, Sequence[str]],
    up_again: Mapping[str, float],
    at: float,
) -> Fault | None:
    """The first of the deck that can happen now."""
    for kind in deck:
        up = [name for name in among[kind] if up_again.get(name, -1.0) < at]
        if up:
            return Fault(round(at, 3), kind, chance.choice(up), round(chance.uniform(*_LASTS_S[kind]), 3))
    return None
