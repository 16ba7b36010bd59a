"""Measure the waiting room on a real Valkey: python -m tools.benchmarks.queue_costs [offer] [memory].

offer    what a release with hand-off costs inside the server (INFO commandstats, so that a loaded machine disturbs
         little), at 1,000 and 1,000,000 waiting jobs, and under `fair` with 100,000 tenants also the round trip
memory   bytes that a waiting job takes
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redis import Redis

from routing.config import RoutingSettings
from routing.queue.fleets import Fleets
from routing.queue.leases import Lease, Leases
from routing.queue.queues import Offer, Queues
from routing.queue.slots import Slots
from routing.scripts import make_scripts
from slotkeeper.jobs.values import QueuedJob, new_job_id
from slotkeeper.redis.keys import Keys
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import Server
from tools.cluster.valkey_process import Valkey

MODEL = "bench"
SLOTS, RUNS, ROUNDS = 8, 400, 15
T0 = 1_800_000_000_000


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class _Bench:
    """A room with one server and a policy, on an empty Valkey."""

    def __init__(self, client: Redis, policy: str) -> None:
        self.client, settings = client, RoutingSettings()
        scripts = make_scripts(client, Keys("bench"))
        self.fleets = Fleets(scripts, settings)
        self.queues, self.leases = Queues(scripts, settings), Leases(scripts, settings)
        config = ModelConfig(policy=policy)
        server = Server("gpu", MODEL, SLOTS, "online", {MODEL: ""}, 0)
        catalog = CatalogSnapshot(1, {MODEL: Model(MODEL, MODEL, {}, config)}, {"gpu": server})
        Slots(scripts, settings).sync_all([MODEL], catalog)
        self.seq = 0

    def fill(self, count: int, tenants: int) -> None:
        """Jobs of all tenants in turn, of the usual priority."""
        for start in range(0, count, 1000):
            self.queues.enqueue(MODEL, [self._job(tenants) for _ in range(min(1000, count - start))], limit=0)

    def _job(self, tenants: int) -> QueuedJob:
        self.seq += 1
        return QueuedJob(new_job_id(), self.seq, MODEL, 5, f"tenant{self.seq % tenants}", T0 + self.seq, "")

    def start(self) -> list[Offer]:
        self.fleets.begin_rebuild([MODEL], "")
        self.fleets.open({MODEL: 1})
        return self.queues.offer(MODEL)

    def hand_off(self, running: list[Offer]) -> float:
        """End the run that has gone on for longest and take the next job; answers ms of the round trip."""
        was = running.pop(0)
        lease = Lease(MODEL, was.job_id, was.lease, was.owner, was.slot)
        begin = time.perf_counter()
        command = self.leases.release_command(lease, return_to_lane=False, claimant="bench", signal="ok")
        ((_, offers),) = self.leases.scripts.run(command)
        took = time.perf_counter() - begin
        running += offers
        return took * 1000


@contextmanager
def _valkey() -> Iterator[Redis]:
    """One with the memory of that which `slotkeeper up` starts."""
    with (
        tempfile.TemporaryDirectory() as home,
        Valkey(Path(home), unix=True) as valkey,
        Redis(unix_socket_path=str(valkey.socket_path), socket_timeout=60) as client,
    ):
        yield client


def _round(bench: _Bench, running: list[Offer], tenants: int) -> tuple[float, float]:
    """(mean us inside, median ms of the round trip) of some hand-offs; as many jobs come as go."""
    bench.fill(RUNS, tenants)
    bench.hand_off(running)
    bench.client.config_resetstat()
    trips = [bench.hand_off(running) for _ in range(RUNS - 1)]
    row = bench.client.info("commandstats")["cmdstat_fcall"]
    return float(row["usec"]) / float(row["calls"]), statistics.median(trips)


def _measured(policy: str, sizes: Sequence[tuple[int, int]]) -> list[float]:
    """Prints a line for each (waiting, tenants), and answers the costs inside: each the best of several rounds.

    The rounds take turns, so that whatever else the machine does, it does to all of them.
    """
    with ExitStack() as stack:
        benches = [_Bench(stack.enter_context(_valkey()), policy) for _ in sizes]
        running: list[list[Offer]] = []
        rounds: list[list[tuple[float, float]]] = [[] for _ in sizes]
        for bench, size in zip(benches, sizes, strict=True):
            bench.fill(*size)
            running.append(bench.start())
        for _ in range(ROUNDS):
            for n, (_, tenants) in enumerate(sizes):
                rounds[n].append(_round(benches[n], running[n], tenants))
    best = [(min(inside for inside, _ in each), min(trip for _, trip in each)) for each in rounds]
    for (waiting, tenants), (inside, trip) in zip(sizes, best, strict=True):
        _say(f"{policy:10} {waiting:>10,} {tenants:>8,} {inside:>7.1f} us {trip:>8.3f} ms")
    return [inside for inside, _ in best]


def offer() -> None:
    """An offer at 1,000,000 waiting jobs against one at 1,000; and with 100,000 tenants."""
    _say(f"{'policy':10} {'waiting':>10} {'tenants':>8} {'inside':>10} {'round trip':>11}")
    for policy, tenants in (("priority", 1), ("fair", 100)):
        small, large = _measured(policy, [(1_000, tenants), (1_000_000, tenants)])
        _say(f"{policy:10} {large / small:.2f} times the cost at a thousand times the jobs (wanted: at most 1.3)")
    _measured("fair", [(200_000, 100_000)])
    _say("wanted with 100,000 tenants: a round trip of at most 0.5 ms")


def memory(count: int = 200_000) -> None:
    """Bytes of Redis's memory for each waiting job, by how many tenants they belong to."""
    _say(f"{'waiting':>10} {'tenants':>8} {'bytes a job':>12}   (wanted: at most 400)")
    for tenants in (1, 1_000, count // 2, count):
        with _valkey() as client:
            bench = _Bench(client, "fair")
            before = client.info("memory")["used_memory"]
            bench.fill(count, tenants)
            used = client.info("memory")["used_memory"] - before
        _say(f"{count:>10,} {tenants:>8,} {used / count:>12.0f}")


PARTS: dict[str, Callable[[], None]] = {"offer": offer, "memory": memory}


def main(chosen: list[str]) -> None:
    for name in chosen or list(PARTS):
        PARTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
