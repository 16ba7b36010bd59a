"""Measure recovery times: python -m tools.benchmarks.recovery_benchmark [flush] [reap] [ledger] [kill] [JOBS].

flush   JOBS (100,000) wait, and Redis is emptied: the time until all are queued again, in order
reap    the leases of 1,000 workers expire at once: the time until all their jobs are queued again
ledger  1,000,000 jobs in the database: the time of one reading of the ledger
kill    a worker is killed during a job, with default settings: the time until the job starts again
"""

import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import requests

from migrations.migrate import upgrade
from routing.admission.admission import Admission
from routing.config import RoutingSettings
from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance.reaper import Reaper
from routing.maintenance.sweep import Sweeper
from routing.queue.fleets import Fleets
from routing.queue.leases import Leases
from routing.queue.queues import Offer, Queues
from routing.queue.slots import Slots
from routing.scripts import make_scripts
from slotkeeper.clock import now_ms
from slotkeeper.db import Database
from slotkeeper.jobs import ledger as job_ledger
from slotkeeper.jobs.store import JobStore, Transition
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.redis.connections import connect
from slotkeeper.redis.keys import Keys
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.catalog_cache import CatalogCache
from slotkeeper.registry.usage import SlotTimes
from tools.benchmarks.measuring import print_line
from tools.cluster.direct_starts import begin_run
from tools.cluster.stack import Stack, eventually
from tools.cluster.valkey_process import Valkey

_INSERT = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
INSERT INTO jobs (id, model, state, why, priority, tenant, created_ms, source, payload)
SELECT printf('%s-%012d', lower(hex(randomblob(8))), i), 'zimg', CASE WHEN i % ? THEN 'completed' ELSE 'queued' END,
       'submitted', 1 + i % 9, 'default', 0, 'rest', '{"prompt":"a sunset over the sea","steps":30}' FROM n
"""


class _NullNotifier:
    """Notifies no worker and no client."""

    def wake_worker(self, offer: Offer, new: QueuedJob | None) -> None: ...

    def notify_ended(self, moved: Transition) -> None: ...


@contextmanager
def _database_of(jobs: int, queued_every: int = 1) -> Iterator[Database]:
    """Yield a database with so many jobs: each n-th is queued, the others are completed."""
    with tempfile.TemporaryDirectory() as home:
        url = f"sqlite:///{home}/record.db"
        upgrade(url)
        with closing(sqlite3.connect(f"{home}/record.db")) as connection, connection:
            connection.execute(_INSERT, (jobs, queued_every))
        database = Database(url)
        yield database
        database.close()


@contextmanager
def _dispatcher(database: Database, slots: int) -> Iterator[tuple[Dispatcher, Valkey]]:
    settings = RoutingSettings()
    with tempfile.TemporaryDirectory() as home, Valkey(Path(home)) as valkey:
        scripts = make_scripts(connect(valkey.url, settings.redis_timeout_s), Keys("bench"))
        catalog = Catalog(database)
        catalog.register("zimg", "gpu", "http://127.0.0.1:9/generate", slots, now_ms())
        cache, queues = CatalogCache(catalog, settings.catalog_refresh_s), Queues(scripts, settings)
        yield (
            Dispatcher(
                store=JobStore(database),
                catalog=cache,
                queues=queues,
                leases=Leases(scripts, settings),
                slots=Slots(scripts, settings),
                fleets=Fleets(scripts, settings),
                admission=Admission(queues, settings, SlotTimes(database)),
                settings=settings,
                notifier=_NullNotifier(),
                check_url=lambda url: None,
            ),
            valkey,
        )


def _is_in_order(dispatcher: Dispatcher, valkey: Valkey) -> bool:
    """Return whether Redis has all queued jobs of the database, each in its lane, in the order of acceptance."""
    keys = dispatcher.queues.scripts.keys
    with valkey.client() as redis:
        queued = [
            (int(lane.rpartition(b":")[2].split(b"|")[0]), int(seq), member.partition(b"@")[0].decode())
            for lane in redis.scan_iter(f"{keys.fleet_key('zimg', 'lanes')}:[1-9]|*")
            for member, seq in redis.zrange(lane, 0, -1, withscores=True)
        ]
        offered = {job.decode() for job in redis.hvals(keys.fleet_key("zimg", "slots"))}
    stored, seq = [], 0
    while batch := dispatcher.store.list_queued(["zimg"], seq, 10_000):
        stored += [(job.priority, job.seq, job.id) for job in batch if job.id not in offered]
        seq = batch[-1].seq
    return sorted(queued) == sorted(stored)


def flush(jobs: int) -> None:
    with _database_of(jobs) as database, _dispatcher(database, 1) as (dispatcher, valkey):
        sweeper = Sweeper(dispatcher)
        for _ in range(3):  # as after maintenance has run for a while
            _sweep_until_filled(sweeper)
        valkey.flush()
        took_s = _time_s(lambda: _sweep_until_filled(sweeper))
        order = "in order" if _is_in_order(dispatcher, valkey) else "OUT OF ORDER"
        print_line(f"flush       {jobs:,} waiting jobs: all queued again in {took_s:.1f} s, {order}")
        idle_ms = _time_s(sweeper.sweep) * 1000
        print_line(f"            a sweep that finds nothing to do: {idle_ms:.0f} ms")
        print_line(f"            a reconcile that finds nothing to do: {_time_s(sweeper.reconcile) * 1000:.0f} ms")


def _sweep_until_filled(sweeper: Sweeper) -> None:
    sweeper.sweep()
    while sweeper.state.rebuilding or sweeper.state.filling:
        sweeper.sweep()


def _time_s(operation: Callable[[], object]) -> float:
    began = time.monotonic()
    operation()
    return time.monotonic() - began


def reap(jobs: int = 1000) -> None:
    with _database_of(jobs) as database, _dispatcher(database, jobs) as (dispatcher, valkey):
        Sweeper(dispatcher).sweep()
        while offers := [lease for lease, _ in dispatcher.leases.list_all(["zimg"])["zimg"] if not lease.owner]:
            for lease in offers:
                offer = Offer("zimg", lease.job_id, lease.name, lease.slot, lease.server, "zimg", 0)
                assert begin_run(dispatcher, offer, "dead worker") is not None
            dispatcher.queues.offer("zimg")
        with valkey.client() as redis:
            names = redis.zrange("bench:{zimg}:leases", 0, -1)
            redis.zadd("bench:{zimg}:leases", dict.fromkeys(names, 1))
        took_s = _time_s(lambda: _reap_all(dispatcher, jobs))
        print_line(f"reap        {jobs:,} leases that expired at once: all jobs queued again in {took_s:.2f} s")


def _reap_all(dispatcher: Dispatcher, jobs: int) -> None:
    reaper = Reaper(dispatcher)
    while jobs > 0:
        jobs -= reaper.reap()


def ledger(jobs: int = 1_000_000) -> None:
    with _database_of(jobs, queued_every=10) as database:
        assert job_ledger.read(database).balanced
        took = [_time_s(lambda: job_ledger.read(database)) * 1000 for _ in range(5)]
        print_line(f"ledger      {jobs:,} jobs: {statistics.median(took):.0f} ms")


def kill() -> None:
    with tempfile.TemporaryDirectory() as home, Stack(Path(home)) as stack:
        server = stack.server("bench-server", 1)
        stack.maintenance()
        stack.beat()
        stack.web()
        first = stack.worker("first")
        body = {"model": "bench", "server": "bench-server", "endpoint": server.endpoint, "slots": 1}
        requests.post(f"{stack.url}/admin/register", json=body, timeout=10).raise_for_status()
        job = {"model": "bench", "payload": {"seconds": 30}}
        job_id = requests.post(f"{stack.url}/queue/submit", json=job, timeout=10).json()["job_id"]
        store = JobStore(Database(f"sqlite:///{home}/record.db"))
        eventually(lambda: _count_starts(store, job_id) == 1, "it runs", 60)
        second = stack.worker("second")
        eventually(lambda: " ready." in second.log, "another worker is ready", 60)
        first.stop(signal.SIGKILL)
        took_s = _time_s(lambda: eventually(lambda: _count_starts(store, job_id) == 2, "it runs again", 60, 0.01))
        print_line(f"kill        a worker, default settings: its job is started again after {took_s:.1f} s")
        store.database.close()


def _count_starts(store: JobStore, job_id: str) -> int:
    return len([event for event in store.list_events(job_id) if event.type == "job.started"])


def main(arguments: list[str]) -> None:
    jobs = int(next((argument.replace(",", "") for argument in arguments if argument[0].isdigit()), "100000"))
    parts: dict[str, Callable[[], None]] = {"flush": lambda: flush(jobs), "reap": reap, "ledger": ledger, "kill": kill}
    for name in [argument for argument in arguments if argument in parts] or parts:
        parts[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
