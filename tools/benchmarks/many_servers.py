"""Measure what many servers cost Redis: python -m tools.benchmarks.many_servers.

One fleet of servers with four slots each; every server serves one of its models.  Times are those inside Redis (from
INFO commandstats), which other load on the machine disturbs little.

enqueue     one job for an idle model, with the offer that follows
release     of one run, while nothing waits
offer       one offer while jobs of all models wait and all slots are free
hand-off    a release with the next claim, in the same situation
catalog     make the fleet equal to the whole catalog: the first time, and again
one more    bring one more server to the fleet

At last, how long the registration of one more server takes as a whole, on SQLite: its transaction, the reading of the
change, and Redis.
"""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from redis import Redis

from routing.config import RoutingSettings
from routing.queue.fleets import Fleets
from routing.queue.leases import Lease, Leases
from routing.queue.queues import Offer, Queues
from routing.queue.slots import Slots
from routing.scripts import make_scripts
from slotkeeper.db import Database
from slotkeeper.jobs.values import QueuedJob, new_job_id
from slotkeeper.redis.keys import Keys
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.catalog_cache import CatalogCache
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import Server
from tools.benchmarks.measuring import empty_database, print_line
from tools.cluster.valkey_process import Valkey

SIZES = ((10, 1), (5_000, 1), (5_000, 50), (5_000, 1_000))  # servers, models
SLOTS, FLEET = 4, "fleet"
T0 = 1_800_000_000_000


class _Bench:
    """A fleet on an empty Valkey."""

    def __init__(self, client: Redis, servers: int, models: int) -> None:
        self._client, self._servers, self._models = client, servers, [f"model{n}" for n in range(models)]
        scripts, settings = make_scripts(client, Keys("bench")), RoutingSettings()
        self.fleets, self.slots = Fleets(scripts, settings), Slots(scripts, settings)
        self.queues, self.leases = Queues(scripts, settings), Leases(scripts, settings)
        self._calls = min(servers * SLOTS * 3 // 4, 600)
        self._seq = 0

        config = ModelConfig()
        self._catalog = {name: Model(name, FLEET, {}, config) for name in self._models}
        self._listed: dict[str, Server] = {}
        for n in range(servers):
            self.add_server(n)

    def add_server(self, n: int) -> None:
        """Add a server to the catalog; the k-th serves the k-th model, and so on in turn."""
        model = self._models[n % len(self._models)]
        self._listed[f"gpu{n}"] = Server(f"gpu{n}", FLEET, SLOTS, "online", {model: f"http://gpu{n}"}, 0)

    def job(self, model: str) -> QueuedJob:
        self._seq += 1
        return QueuedJob(new_job_id(), self._seq, model, 5, "default", T0 + self._seq, "")

    def inside(self, act: Callable[[], object]) -> float:
        """Return the ms that scripts took inside Redis during `act`."""
        self._client.config_resetstat()
        act()
        return float(self._client.info("commandstats")["cmdstat_fcall"]["usec"]) / 1000

    def sync(self, version: int) -> float:
        """Bring what has changed."""
        catalog = CatalogSnapshot(version, self._catalog, dict(self._listed))
        return self.inside(lambda: self.slots.sync_all([FLEET], catalog))

    def sync_whole(self, version: int) -> float:
        catalog = CatalogSnapshot(version, self._catalog, dict(self._listed))
        return self.inside(lambda: self.slots.scripts.run(self.slots.sync_command(FLEET, catalog)))

    def measure(self) -> dict[str, float]:
        """Return ms by what was measured; see the head of this file."""
        self.fleets.begin_rebuild([FLEET], "")
        found = {"catalog": self.sync(1), "catalog again": self.sync_whole(2)}
        self.fleets.open({FLEET: 1})
        self.add_server(self._servers)
        found["one more"] = self.sync(3)
        offers: list[Offer] = []
        found["enqueue"] = self.inside(lambda: self._enqueue_each(offers)) / self._calls
        found["release"] = self.inside(lambda: self._release_each(offers)) / self._calls
        for _ in range(2 + self._calls // len(self._models)):
            self.queues.fill(FLEET, [self.job(model) for model in self._models])
        offers.clear()
        found["offer"] = self.inside(lambda: self._offer_each(offers)) / self._calls
        found["hand-off"] = self.inside(lambda: self._release_each(offers)) / self._calls
        return found

    def _enqueue_each(self, offers: list[Offer]) -> None:
        for n in range(self._calls):
            command = self.queues.enqueue_command(FLEET, [self.job(self._models[n % len(self._models)])])
            offers.extend(self.queues.scripts.run(command).offers)

    def _offer_each(self, offers: list[Offer]) -> None:
        for _ in range(self._calls):
            offers.extend(self.queues.offer(FLEET, limit=1))

    def _release_each(self, offers: list[Offer]) -> None:
        for offer in offers[: self._calls]:
            lease = Lease(FLEET, offer.job_id, offer.lease, offer.owner, offer.slot)
            self.leases.scripts.run(self.leases.release_command(lease, return_to_lane=False, claimant="w", limit=1))


def _time_registration(client: Redis, servers: int) -> tuple[float, float]:
    """Return the ms that the registration of one more server takes, and those of it inside Redis."""
    with empty_database("sqlite") as url:
        database, url_of_server = Database(url), "http://127.0.0.1:9/generate"
        catalog, slots = Catalog(database), Slots(make_scripts(client, Keys("registration")), RoutingSettings())
        cache = CatalogCache(catalog, 1)
        for n in range(servers - 1):
            catalog.register(FLEET, f"gpu{n}", url_of_server, SLOTS, T0)
        slots.sync_all([FLEET], cache.get())
        client.config_resetstat()
        began = time.perf_counter()
        catalog.register(FLEET, "one more", url_of_server, SLOTS, T0)
        slots.sync_all([FLEET], cache.refresh())
        took = time.perf_counter() - began
        database.close()
    return 1000 * took, float(client.info("commandstats")["cmdstat_fcall"]["usec"]) / 1000


def main() -> None:
    began = time.monotonic()
    for servers, models in SIZES:
        with TemporaryDirectory() as home, Valkey(Path(home), unix=True) as valkey:
            client = Redis(unix_socket_path=str(valkey.socket_path), socket_timeout=60)
            found = _Bench(client, servers, models).measure()
            client.close()
        figures = "   ".join(f"{name} {ms:.3f}" for name, ms in found.items())
        print_line(f"{servers:>6,} servers {models:>6,} models   {figures}   (ms)")
    with TemporaryDirectory() as home, Valkey(Path(home), unix=True) as valkey:
        client = Redis(unix_socket_path=str(valkey.socket_path), socket_timeout=60)
        took, inside = _time_registration(client, SIZES[-1][0])
        client.close()
    print_line(f"registration of the {SIZES[-1][0]:,}th server {took:.1f} ms, of it {inside:.2f} in Redis")
    print_line(f"measured in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
