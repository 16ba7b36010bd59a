"""Measure the queues on a real Valkey: python -m tools.benchmarks.queue_costs [offer] [memory].

offer    the time of a release with hand-off inside the server (from INFO commandstats, which other load on the machine
         disturbs little), with 1,000 and 1,000,000 waiting jobs; under `fair` with 100,000 tenants also the round trip
memory   bytes of memory for each waiting job
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
from slotkeeper.registry.tenant_limits import TenantLimits
from slotkeeper.registry.values import Server
from tools.benchmarks.measuring import print_line
from tools.cluster.valkey_process import Valkey

MODEL = "bench"
SLOTS, RUNS, ROUNDS = 8, 400, 15
MOST_LIMITED = 100
T0 = 1_800_000_000_000


class _Bench:
    """A queue with one server and a policy, on an empty Valkey."""

    def __init__(self, client: Redis, policy: str, max_slots: int | None = None) -> None:
        """max_slots: a limit of each tenant that may have jobs."""
        self.client, settings = client, RoutingSettings()
        scripts = make_scripts(client, Keys("bench"))
        self.fleets = Fleets(scripts, settings)
        self.queues, self.leases = Queues(scripts, settings), Leases(scripts, settings)
        config = ModelConfig(policy=policy)
        server = Server("gpu", MODEL, SLOTS, "online", {MODEL: ""}, 0)
        limit = TenantLimits(max_slots=max_slots)
        limits = {f"tenant{n}": limit for n in range(MOST_LIMITED)} if max_slots else {}
        models = {MODEL: Model(MODEL, MODEL, {}, config)}
        catalog = CatalogSnapshot(1, models, {"gpu": server}, limits=limits)
        Slots(scripts, settings).sync_all([MODEL], catalog)
        self.seq = 0

    def fill(self, count: int, tenants: int) -> None:
        """Enqueue jobs of all tenants in turn, with the default priority."""
        for start in range(0, count, 1000):
            self.queues.enqueue(MODEL, [self._job(tenants) for _ in range(min(1000, count - start))], limit=0)

    def _job(self, tenants: int) -> QueuedJob:
        self.seq += 1
        return QueuedJob(new_job_id(), self.seq, MODEL, 5, f"tenant{self.seq % tenants}", T0 + self.seq, "")

    def start(self) -> list[Offer]:
        """Open the fleet, and return offers for all its slots."""
        self.fleets.begin_rebuild([MODEL], "")
        self.fleets.open({MODEL: 1})
        return self.queues.offer(MODEL)

    def hand_off(self, running: list[Offer]) -> float:
        """End the oldest run and claim the next job; return the round trip in ms."""
        ended = running.pop(0)
        lease = Lease(MODEL, ended.job_id, ended.lease, ended.owner, ended.slot)
        begin = time.perf_counter()
        command = self.leases.release_command(lease, return_to_lane=False, claimant="bench", signal="ok")
        ((_, offers),) = self.leases.scripts.run(command)
        took_s = time.perf_counter() - begin
        running += offers
        return took_s * 1000


@contextmanager
def _valkey() -> Iterator[Redis]:
    """Run an empty Valkey, and yield its client."""
    with (
        tempfile.TemporaryDirectory() as home,
        Valkey(Path(home), unix=True) as valkey,
        Redis(unix_socket_path=str(valkey.socket_path), socket_timeout=60) as client,
    ):
        yield client


def _run_round(bench: _Bench, running: list[Offer], tenants: int) -> tuple[float, float]:
    """Hand off RUNS times, with as many new jobs; return (mean us inside the server, median ms of the round trip)."""
    bench.fill(RUNS, tenants)
    bench.hand_off(running)
    bench.client.config_resetstat()
    trips = [bench.hand_off(running) for _ in range(RUNS - 1)]
    row = bench.client.info("commandstats")["cmdstat_fcall"]
    return float(row["usec"]) / float(row["calls"]), statistics.median(trips)


def _measure(policy: str, sizes: Sequence[tuple[int, int]], limits: Sequence[int | None] = ()) -> list[float]:
    """Print a line for each size (waiting, tenants), and return the costs inside the server, in us.

    limits: `max_slots` of the tenants, for each size.

    Each cost is the best of several rounds.  The rounds of all sizes alternate, so that other load on the machine
    affects all of them.
    """
    with ExitStack() as stack:
        chosen = limits or [None] * len(sizes)
        benches = [_Bench(stack.enter_context(_valkey()), policy, limit) for limit in chosen]
        running: list[list[Offer]] = []
        rounds: list[list[tuple[float, float]]] = [[] for _ in sizes]
        for bench, size in zip(benches, sizes, strict=True):
            bench.fill(*size)
            running.append(bench.start())
        for _ in range(ROUNDS):
            for n, (_, tenants) in enumerate(sizes):
                rounds[n].append(_run_round(benches[n], running[n], tenants))
    best = [(min(inside for inside, _ in each), min(trip for _, trip in each)) for each in rounds]
    for (waiting, tenants), (inside, trip) in zip(sizes, best, strict=True):
        print_line(f"{policy:10} {waiting:>10,} {tenants:>8,} {inside:>7.1f} us {trip:>8.3f} ms")
    return [inside for inside, _ in best]


def offer() -> None:
    """Compare an offer with 1,000,000 waiting jobs and one with 1,000, and measure one with 100,000 tenants."""
    print_line(f"{'policy':10} {'waiting':>10} {'tenants':>8} {'inside':>10} {'round trip':>11}")
    for policy, tenants in (("priority", 1), ("fair", 100)):
        small, large = _measure(policy, [(1_000, tenants), (1_000_000, tenants)])
        print_line(f"{policy:10} {large / small:.2f} times the cost at a thousand times the jobs (target: at most 1.3)")
    free, limited = _measure("priority", [(1_000, MOST_LIMITED)] * 2, [None, SLOTS])
    print_line(f"{'priority':10} {limited / free:.2f} times the cost with max_slots (target: at most 1.03)")
    _measure("fair", [(200_000, 100_000)])
    print_line("target with 100,000 tenants: a round trip of at most 0.5 ms")


def memory(count: int = 200_000) -> None:
    """Print the bytes of Redis' memory for each waiting job, by the number of tenants."""
    print_line(f"{'waiting':>10} {'tenants':>8} {'bytes a job':>12}   (target: at most 400)")
    for tenants in (1, 1_000, count // 2, count):
        with _valkey() as client:
            bench = _Bench(client, "fair")
            before = client.info("memory")["used_memory"]
            bench.fill(count, tenants)
            used = client.info("memory")["used_memory"] - before
        print_line(f"{count:>10,} {tenants:>8,} {used / count:>12.0f}")


PARTS: dict[str, Callable[[], None]] = {"offer": offer, "memory": memory}


def main(names: list[str]) -> None:
    for name in names or list(PARTS):
        PARTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
