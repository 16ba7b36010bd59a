"""Choose which faults happen and when: a pure function of the seed.

To add a kind of fault: a member of Kind, its line in _LASTS_S and in `targets`, and its act in fault_injection.py.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tools.cluster.protocol_filters import MessageFault
from tools.cluster.tcp_proxy import Direction

BOTH = "both"
_DIRECTIONS = (BOTH, *map(str, Direction))
DEAD, SLOW, REFUSING = "dead", "slow", "refusing"


class Kind(StrEnum):
    """A kind of fault that a drill can inject."""

    WORKER = "worker"  # SIGKILL
    STOP = "stop"  # SIGSTOP for longer than a lease, then SIGCONT: the old worker must change nothing
    RESTARTS = "restarts"  # SIGTERM of any process, which has enough time to shut down, and a start
    IMPATIENT = "impatient"  # SIGTERM, SIGKILL before its grace time is over, and a start
    MAINTENANCE = "maintenance"  # SIGKILL
    BEAT = "beat"  # SIGKILL
    WEB = "web"  # SIGKILL
    REDIS = "redis"  # SIGKILL; it starts again with its file
    FLUSH = "flush"  # FLUSHALL
    FULL = "full"  # a Redis has reached its maxmemory
    DATABASE = "database"  # SIGKILL of PostgreSQL
    SERVER = "server"  # SIGKILL of an inference server; it starts again without its jobs
    MESSAGES = "messages"  # a share of the broker's messages is doubled, delayed, or lost
    SILENCE = "silence"  # connections stay open and carry nothing, in one direction or in both
    CUTS = "cuts"  # all connections to one target are reset
    DELAYS = "delays"  # everything that passes is late
    STALE = "stale"  # Redis is replaced by a replica that lacks the latest writes
    FAILOVER = "failover"  # a replica that lacks nothing is promoted; connections stay with the old primary
    REFUSAL = "refusal"  # Redis or PostgreSQL answers and takes no writes
    COMMITS = "commits"  # a share of COMMITs is lost, or their answers are
    REVOKES = "revokes"  # Celery's revoke of jobs that wait or run
    CLOCK = "clock"  # a process's clock is wrong
    STEP = "step"  # the clock of all processes is wrong, for so long that it is followed
    RECEIVERS = "receivers"  # webhook receivers are slow, or dead, or refuse a share
    DEADLINES = "deadlines"  # many jobs with the same deadline
    OPERATOR = "operator"  # an operator changes slots, servers, policies, limits
    UNREAD = "unread"  # the log of maintenance goes into a pipe that is not read, from its start on


OUTSIDE = frozenset(
    {
        Kind.MESSAGES,
        Kind.SILENCE,
        Kind.CUTS,
        Kind.DELAYS,
        Kind.STALE,
        Kind.FAILOVER,
        Kind.COMMITS,
        Kind.RECEIVERS,
    }
)
"""Kinds of faults that need a proxy between the processes and their servers."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of `target` that begins at `at_s` and is undone `lasts_s` later.  `how`: its variant, or empty."""

    at_s: float
    kind: Kind
    target: str
    lasts_s: float
    how: str = ""


# Seconds until the fault is undone, at least and at most.
_LASTS_S: Mapping[Kind, tuple[float, float]] = {
    Kind.WORKER: (0.2, 1.0),
    Kind.STOP: (9.0, 14.0),  # a lease is 4 s
    Kind.RESTARTS: (9.0, 9.0),  # a little more than the grace time of 7 s
    Kind.IMPATIENT: (5.0, 5.0),  # as long as honcho waits
    Kind.MAINTENANCE: (0.2, 2.0),
    Kind.BEAT: (0.2, 5.0),
    Kind.WEB: (0.2, 1.5),
    Kind.REDIS: (0.5, 4.0),
    Kind.FLUSH: (0.0, 0.0),
    Kind.FULL: (3.0, 8.0),
    Kind.DATABASE: (0.5, 3.0),
    Kind.SERVER: (0.2, 3.0),
    Kind.MESSAGES: (3.0, 8.0),
    Kind.SILENCE: (4.0, 15.0),  # shorter and longer than the time-outs
    Kind.CUTS: (0.0, 0.0),
    Kind.DELAYS: (3.0, 8.0),
    Kind.STALE: (0.3, 2.0),  # the writes of this time are lost
    Kind.FAILOVER: (2.0, 10.0),  # Sentinel corrects the old primary after 10 s
    Kind.REFUSAL: (3.0, 8.0),
    Kind.COMMITS: (1.0, 4.0),
    Kind.REVOKES: (0.0, 0.0),
    Kind.CLOCK: (5.0, 20.0),
    Kind.STEP: (70.0, 90.0),  # It is followed after 60 s.
    Kind.RECEIVERS: (5.0, 20.0),
    Kind.DEADLINES: (3.0, 6.0),  # from the submits to the deadline
    Kind.OPERATOR: (2.0, 8.0),
    Kind.UNREAD: (0.0, 0.0),
}


class Change(StrEnum):
    """A change that an operator makes, and reverts."""

    SLOTS = "slots"  # a server gets half of its slots
    REMOVAL = "removal"  # a server is removed, and registered again
    DRAIN = "drain"  # a server
    PAUSE = "pause"  # a model
    POLICY = "policy"  # of a model
    LIMIT = "limit"  # of a tenant's slots for a model


_HOW: Mapping[Kind, Sequence[str]] = {
    Kind.MESSAGES: tuple(MessageFault),
    Kind.SILENCE: _DIRECTIONS,
    Kind.COMMITS: tuple(Direction),
    Kind.CLOCK: ("+30", "-30", "+3600", "-3600"),
    Kind.STEP: ("+7200", "-7200", "+315360000"),
    Kind.RECEIVERS: (DEAD, SLOW, REFUSING),
    Kind.OPERATOR: tuple(Change),
}


def targets(
    workers: Sequence[str],
    servers: Sequence[str],
    models: Sequence[str],
    helpers: Sequence[str] = ("maintenance",),
    valkeys: Sequence[str] = ("redis",),
    proxy_ports: Sequence[str] = (),
    databases: Sequence[str] = (),
) -> dict[Kind, Sequence[str]]:
    """Return the possible targets of each kind of fault; a kind without a target lasts for the whole drill.

    helpers: the processes beside workers, web and beat.  valkeys: those of the queues and of the broker.
    proxy_ports: the names of the proxy's ports.  databases: those that can refuse writes.
    """
    return {
        Kind.WORKER: workers,
        Kind.STOP: workers,
        Kind.RESTARTS: (*workers, *helpers, "beat", "web"),
        Kind.IMPATIENT: (*workers, *helpers, "beat", "web"),
        Kind.MAINTENANCE: helpers,
        Kind.BEAT: ("beat",),
        Kind.WEB: ("web",),
        Kind.REDIS: valkeys,
        Kind.FLUSH: valkeys,
        Kind.FULL: valkeys,
        Kind.DATABASE: ("database",),
        Kind.SERVER: servers,
        Kind.MESSAGES: ("broker",),
        Kind.SILENCE: proxy_ports,
        Kind.CUTS: proxy_ports,
        Kind.DELAYS: proxy_ports,
        Kind.STALE: ("redis",),
        Kind.FAILOVER: ("redis",),
        Kind.REFUSAL: (*valkeys, *databases),
        Kind.COMMITS: ("database",),
        Kind.REVOKES: ("jobs",),
        Kind.CLOCK: (*workers, *helpers, "beat"),
        Kind.STEP: ("clocks",),
        Kind.RECEIVERS: ("receivers",),
        Kind.DEADLINES: ("jobs",),
        Kind.OPERATOR: models,
        Kind.UNREAD: (),
    }


def schedule(
    seed: int,
    kinds: Sequence[Kind],
    among: Mapping[Kind, Sequence[str]],
    seconds: float,
    every_s: float,
    count: int | None = None,
) -> list[Fault]:
    """Return faults until `seconds`, about `every_s` seconds apart, each kind about equally often.

    among: the possible targets of each kind.  count: exactly so many faults, however long they take.  A target has no
    second fault before its first is undone.
    """
    rng = random.Random(seed)
    kinds = [kind for kind in kinds if among[kind]]
    faults: list[Fault] = []
    undone_at: dict[str, float] = {}
    deck: list[Kind] = []
    at = every_s * rng.uniform(0.5, 1.0)
    while kinds and (at < seconds if count is None else len(faults) < count):
        if not deck:
            deck = rng.sample(list(dict.fromkeys(kinds)), len(set(kinds)))
        fault = _next_fault(rng, deck, among, undone_at, at)
        if fault is not None:
            deck.remove(fault.kind)
            undone_at[fault.target] = fault.at_s + fault.lasts_s
            faults.append(fault)
        at += every_s * rng.uniform(0.5, 1.5)
    return faults


def _next_fault(
    rng: random.Random,
    deck: Sequence[Kind],
    among: Mapping[Kind, Sequence[str]],
    undone_at: Mapping[str, float],
    at: float,
) -> Fault | None:
    """Return a fault of the first kind in the deck that can happen now; None: none can."""
    at = round(at, 3)
    for kind in deck:
        available = [name for name in among[kind] if undone_at.get(name, -1.0) < at]
        if available:
            target, lasts_s = rng.choice(available), round(rng.uniform(*_LASTS_S[kind]), 3)
            return Fault(at, kind, target, lasts_s, rng.choice(_HOW[kind]) if kind in _HOW else "")
    return None
