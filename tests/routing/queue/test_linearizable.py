"""Claim, renew, release and seize of one lease by many threads are linearizable.

The model is a register that holds (name, owner) of the lease.  Each act of a real history has the times of its
call and its response.  The check searches for a sequential order of the acts in which the register returns the
same responses; no act may come before its call or after its response.  The algorithm is by Wing & Gong (1993),
with a memory of the states already tried (Lowe 2017).
"""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from redis import Redis

from routing.queue import leases as routed
from routing.queue.fleets import Fleets
from routing.queue.leases import Leases, Renewal
from routing.queue.queues import Offer, Queues
from routing.queue.slots import Slots
from routing.scripts import LIBRARY, make_scripts
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.redis.keys import Keys
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import Server
from tests.support.ends import release
from tests.support.harness import SETTINGS
from tools.cluster.direct_starts import claim_offer

JOB, SLOT, FLEET = "one", "gpu-slot0", "zimg"


class Lease(NamedTuple):
    """What the register holds.  `owner` "": an open offer."""

    name: str
    owner: str


class Act(NamedTuple):
    """One call: with which lease in hand, what it made of it (None: refused), and when."""

    what: str
    given: Lease
    by: str
    made: Lease | None
    called: int
    answered: int


def step(state: Lease, act: Act) -> Lease | None:
    """The register after the act; None: it would have answered otherwise."""
    held = state == act.given
    match act.what:
        case "claim":
            wanted = Lease(act.given.name, act.by)
            allowed = state == Lease(act.given.name, "")
        case "renew":
            wanted, allowed = act.given, held
        case "release" | "seize":  # both give the lease a new name, which only the answer contains
            wanted, allowed = act.made or state, held
        case _:
            raise ValueError(act.what)
    if act.made is None:
        return None if allowed else state
    return wanted if allowed and act.made == wanted else None


def linearizable(history: Sequence[Act], start: Lease) -> bool:
    """Whether some order of the acts explains the history."""
    acts = sorted(history, key=lambda act: act.called)
    tried: set[tuple[int, Lease]] = set()
    stack = [(0, start)]  # acts that have been put in order, as bits; the register after them
    everything = (1 << len(acts)) - 1
    while stack:
        done, state = stack.pop()
        if done == everything:
            return True
        if (done, state) in tried:
            continue
        tried.add((done, state))
        for n in _may_be_next(acts, done):
            after = step(state, acts[n])
            if after is not None:
                stack.append((done | 1 << n, after))
    return False


def _may_be_next(acts: Sequence[Act], done: int) -> list[int]:
    """Acts that were called before the first answer to any that is not in order yet."""
    found, first_answer = [], None
    for n, act in enumerate(acts):
        if done >> n & 1:
            continue
        if first_answer is not None and act.called > first_answer:
            break
        found.append(n)
        first_answer = act.answered if first_answer is None else min(first_answer, act.answered)
    return found


# -- the checker -----------------------------------------------------------------------------------------------

OPEN, MINE, THEIRS = Lease("l1", ""), Lease("l1", "me"), Lease("l1", "you")
NEXT = Lease("l2", "")


def test_a_sequential_history_is_linearizable():
    history = [
        Act("claim", OPEN, "me", MINE, 1, 2),
        Act("claim", OPEN, "you", None, 3, 4),
        Act("renew", MINE, "me", MINE, 5, 6),
        Act("release", MINE, "me", NEXT, 7, 8),
        Act("renew", MINE, "me", None, 9, 10),
        Act("seize", NEXT, "you", Lease("l3", "you"), 11, 12),
    ]
    assert linearizable(history, OPEN)


def test_acts_at_the_same_time_may_have_happened_in_any_order():
    history = [
        Act("renew", MINE, "me", None, 1, 9),  # after the seizure, although it was called first
        Act("seize", MINE, "you", Lease("l2", "you"), 2, 8),
        Act("claim", OPEN, "me", MINE, 3, 4),
    ]
    assert linearizable(history, OPEN)
    assert not linearizable([history[0]._replace(answered=2), *history[1:]], MINE), "it was answered before"


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(
            [Act("claim", OPEN, "me", MINE, 1, 5), Act("claim", OPEN, "you", THEIRS, 2, 4)], id="two have claimed it"
        ),
        pytest.param(
            [Act("seize", OPEN, "you", Lease("l2", "you"), 1, 2), Act("claim", OPEN, "me", MINE, 3, 4)],
            id="claimed after it was seized",
        ),
        pytest.param(
            [Act("claim", OPEN, "me", MINE, 1, 2), Act("renew", MINE, "me", None, 3, 4)], id="lost without a cause"
        ),
        pytest.param(
            [
                Act("claim", OPEN, "me", MINE, 1, 2),
                Act("release", MINE, "me", NEXT, 3, 6),
                Act("release", MINE, "me", Lease("l3", ""), 4, 5),
            ],
            id="freed twice",
        ),
        pytest.param(
            [
                Act("claim", OPEN, "me", MINE, 1, 2),
                Act("seize", MINE, "you", Lease("l2", "you"), 3, 4),
                Act("renew", MINE, "me", MINE, 5, 6),
            ],
            id="renewed after it was seized",
        ),
    ],
)
def test_a_planted_bad_history_is_refused(history: list[Act]):
    assert not linearizable(history, OPEN)


# -- histories of real scripts ---------------------------------------------------------------------------------


class Game:
    """One job and one slot, for which threads compete with the latest lease that any of them received."""

    def __init__(self, redis: Redis, fragments: dict[str, str] | None = None) -> None:
        self.scripts = make_scripts(redis, Keys("game"), fragments)
        self.leases, queues = Leases(self.scripts, SETTINGS), Queues(self.scripts, SETTINGS)
        fleets = Fleets(self.scripts, SETTINGS)
        fleets.begin_rebuild([FLEET], "")
        server = Server("gpu", FLEET, 1, "online", {FLEET: ""}, 0)
        Slots(self.scripts, SETTINGS).sync_all([FLEET], CatalogSnapshot(1, {}, {"gpu": server}))
        fleets.open({FLEET: 1})
        (offer,) = queues.enqueue(FLEET, [QueuedJob(JOB, 1, FLEET, 5, "default")])

        self.start = Lease(offer.lease, "")
        self.latest = self.start

    def play(self, threads: int, acts: int, seed: int) -> list[Act]:
        gate = threading.Barrier(threads)

        def one(n: int) -> list[Act]:
            rng = random.Random(f"{seed}/{n}")
            gate.wait(10)
            return [self._act(f"w{n % 3}", rng) for _ in range(acts)]

        with ThreadPoolExecutor(threads) as pool:
            return [act for played in pool.map(one, range(threads)) for act in played]

    def _act(self, by: str, rng: random.Random) -> Act:
        latest = self.latest
        what = rng.choice(["claim", "claim", "renew", "renew", "release", "seize"])
        given = latest if what in ("claim", "seize") or rng.random() < 0.3 else Lease(latest.name, by)
        called = time.monotonic_ns()
        made = self._do(what, given, by)
        act = Act(what, given, by, made, called, time.monotonic_ns())
        if made is not None:
            self.latest = made  # The other threads use it too; their lease may be old.
        return act

    def _do(self, what: str, given: Lease, by: str) -> Lease | None:
        held = routed.Lease(FLEET, JOB, given.name, given.owner, SLOT)
        match what:
            case "claim":
                taken = claim_offer(self.leases, Offer(FLEET, JOB, given.name, SLOT, "gpu", FLEET, 1), by)
                return taken and Lease(taken.lease, taken.owner)
            case "renew":
                return given if self.leases.renew(FLEET, given.owner, [held]) == [Renewal.RENEWED] else None
            case "release":  # Its job goes back and is offered again, in the same step.
                freed, offers = release(self.leases, held, return_to_lane=True, limit=1)
                return Lease(offers[0].lease, "") if freed else None
            case _:
                seized = self.leases.seize(held, by, SETTINGS.lease_ms, only_expired=False)
                return seized and Lease(seized.name, seized.owner)


def _histories(client: Redis, seed: int, fragments: dict[str, str] | None = None) -> Iterator[tuple[list[Act], Lease]]:
    """Histories of games, one after another: which acts meet in one of them is up to the machine."""
    for number in range(30):
        client.flushall()
        game = Game(client, fragments)
        yield game.play(threads=6, acts=60, seed=100 * seed + number), game.start


def _is_contest(history: list[Act]) -> bool:
    """Whether every kind of act has succeeded in it, and many at the same moment."""
    succeeded = {act.what for act in history if act.made is not None}
    overlaps = sum(a.called < b.answered and b.called < a.answered for a in history for b in history if a is not b)
    return succeeded == {"claim", "renew", "release", "seize"} and overlaps > 100


@pytest.mark.parametrize("seed", range(5))
def test_lease_1_and_4_every_history_of_a_lease_is_linearizable(client: Redis, seed: int):
    for history, start in _histories(client, seed):
        assert linearizable(history, start)
        if _is_contest(history):
            return
    raise AssertionError("none of them was a real contest")


@pytest.mark.parametrize(
    ("guard", "without"),
    [
        pytest.param("lease.owner == owner", "true", id="the owner is not compared"),
        pytest.param("lease.name == name", "true", id="the lease's name is not compared"),
    ],
)
def test_a_script_without_its_guard_is_found(client: Redis, guard: str, without: str):
    broken = LIBRARY.read_source("lib/leases").replace(guard, without)
    assert broken != LIBRARY.read_source("lib/leases")
    assert not all(linearizable(history, start) for history, start in _histories(client, 0, {"lib/leases": broken}))
