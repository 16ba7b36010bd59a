"""A cluster of real processes with short leases, for tests that break some of them.

All tests share one, the fixture `cluster`.  It has beat, maintenance and the API; each test starts the workers that it
needs, and registers a separate model.
"""

import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from redis import Redis

from routing.queue.worker_capacity import WorkerCapacity
from routing.scripts import make_scripts
from slotkeeper.db import Database
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import Job
from slotkeeper.redis.keys import FLEET_KEYS, Keys
from tests.support.gated import Gate
from tests.support.http_api import HttpApi
from tools.cluster.stack import Process, RefServer, Stack, eventually
from tools.cluster.valkey_process import NoValkey

# Short, but long enough that a worker on a busy machine does not lose its leases.
LEASE_MS, RENEW_EVERY_MS, OFFER_MS = 3_000, 500, 3_000
LEASE_S = LEASE_MS / 1000
GATED = "tests.support.gated:model"
ENV = {
    "SLOTKEEPER_LEASE_MS": str(LEASE_MS),
    "SLOTKEEPER_RENEW_EVERY_MS": str(RENEW_EVERY_MS),
    "SLOTKEEPER_OFFER_MS": str(OFFER_MS),
    "SLOTKEEPER_REDIS_TIMEOUT_S": "1",
    "SLOTKEEPER_GRACE_S": "1",
}
_numbers = itertools.count(1)


def _key(fleet: str, name: str) -> str:
    """Return the name of a key of a fleet's queue."""
    return Keys("slotkeeper").fleet_keys(fleet)[FLEET_KEYS.index(name)]


class Cluster:
    """Real processes.  Tests send requests to the API, and read the database and the servers' journals."""

    def __init__(self, stack: Stack, record_url: str) -> None:
        self.stack, self.api = stack, HttpApi(stack)
        self.servers: dict[str, RefServer] = {}
        self.store = JobStore(Database(record_url))
        self._workers: list[Process] = []

    # -- workers -----------------------------------------------------------------------------------------------

    def ensure_workers(self, count: int = 1) -> list[Process]:
        """Return exactly so many ready workers; running ones are used again."""
        self._workers = [worker for worker in self._workers if worker.popen.poll() is None]
        while len(self._workers) > count:
            self._workers.pop().kill()
        while len(self._workers) < count:
            self.start_worker()
        return list(self._workers)

    def start_worker(self, **env: str) -> Process:
        """Start one more worker with these settings, and wait until it is ready."""
        (worker,) = self.start_workers(1, **env)
        return worker

    def start_workers(self, count: int, **env: str) -> list[Process]:
        before = self.stack.env
        self.stack.env = before | env
        hired = [self.stack.worker(f"worker{next(_numbers)}", threads=8) for _ in range(count)]
        self.stack.env = before
        self._workers += hired
        for worker in hired:
            ready(worker)
        return hired

    def cut_off(self) -> None:
        """Report the capacity of a worker that does not exist."""
        with self.redis() as redis:
            WorkerCapacity(make_scripts(redis, Keys("slotkeeper"))).report("cut-off", 1)

    # -- jobs --------------------------------------------------------------------------------------------------

    def model(self, slots: int = 1, *options: str, **config: Any) -> str:
        """Register a model with a separate reference server of the same name, and return the name."""
        name = f"fault{next(_numbers)}"
        server = self.stack.server(name, slots, *options, function=GATED)
        self.servers[name] = server
        self.api.register(name, server, **config)
        return name

    def polled_model(self, slots: int = 1, **config: Any) -> str:
        """Register a model whose server is polled for the result."""
        config = {"model_type": "async", "poll_interval": 0.1} | config
        return self.model(slots, "--async", **config)

    def gate(self) -> Gate:
        """Return a gate for runs that end when the test opens it."""
        return Gate(self.stack.home / f"gate{next(_numbers)}")

    def submit(self, model: str, run: float | Gate, **fields: Any) -> str:
        """Submit a job that takes so many seconds, or until its gate is opened, and return its id."""
        takes = run.payload if isinstance(run, Gate) else {"seconds": run}
        return self.api.submit(model, takes | {"prompt": "a cat"}, **fields)

    def row(self, job_id: str) -> Job:
        found = self.store.get(job_id)
        assert found is not None
        return found

    def until(self, job_id: str, state: str, within_s: float = 60) -> Job:
        eventually(lambda: self.row(job_id).state == state, f"{job_id} is {state}", within_s)
        return self.row(job_id)

    def starts(self, job_id: str) -> int:
        """Return how often workers have started the job."""
        return len([event for event in self.store.list_events(job_id) if event.type == "job.started"])

    def started(self, job_id: str, times: int, every_s: float = 0.05) -> None:
        """Wait until the job has been started so often."""
        eventually(lambda: self.starts(job_id) >= times, f"{job_id} is started {times} times", every_s=every_s)

    def why(self, job_id: str) -> list[str]:
        """Return the reasons of the job's transitions, in order."""
        return [event.data["why"] for event in self.store.list_events(job_id)]

    def sent(self, model: str, count: int = 1) -> None:
        """Wait until the model's server runs so many jobs."""
        url = self.servers[model].endpoint.replace("/generate", "/health")
        eventually(lambda: requests.get(url, timeout=5).json()["active_jobs"] == count, f"{model} runs {count}")

    def lease(self, model: str, job_id: str) -> dict[bytes, bytes]:
        """Return the job's lease in Redis; empty: there is none."""
        with self.redis() as redis:
            return redis.hgetall(f"{_key(model, 'leases')}:{job_id}")

    def taken(self, model: str) -> dict[bytes, bytes]:
        """Return the taken slots of the model in Redis, and their jobs."""
        with self.redis() as redis:
            return redis.hgetall(_key(model, "slots"))

    def redis(self) -> Redis:
        """Return a client of the cluster's Valkey, which the caller closes."""
        assert self.stack.valkey is not None
        return self.stack.valkey.client()

    def sent_later(self, job_id: str) -> None:
        """Wait until the database has the server's id of the job."""
        eventually(lambda: self.row(job_id).remote_id, f"{job_id} has been taken up")

    def runs(self, model: str) -> list[dict[str, Any]]:
        """Return the runs in the journal of the model's server, in the order of their starts."""
        lines = self.servers[model].journal.read_text().splitlines()
        return sorted((json.loads(line) for line in lines), key=lambda run: run["started_ns"])

    @contextmanager
    def maintenance_stopped(self) -> Iterator[None]:
        """Stop maintenance during the block, so that it repairs nothing before the test has set up all."""
        freeze(self.stack.processes["maintenance"])
        try:
            yield
        finally:
            thaw(self.stack.processes["maintenance"])

    def restart_server(self, model: str) -> None:
        """Start the model's server again, on the port that it had."""
        server = self.servers[model]
        server.process.kill()
        command = server.process.command
        server.process = self.stack.start(server.name, command)
        url = server.endpoint.replace("/generate", "/health")
        server.process.source(lambda: _answers(url), "it answers again")


def ready(process: Process, within_s: float = 60) -> None:
    process.source(lambda: re.search(r"@\S+ ready\.", process.log), "it is ready", within_s)


def freeze(process: Process) -> None:
    os.killpg(process.popen.pid, signal.SIGSTOP)


def thaw(process: Process) -> None:
    os.killpg(process.popen.pid, signal.SIGCONT)


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=1).ok
    except requests.RequestException:
        return False


def _kill_all(stack: Stack) -> None:
    """Kill all processes; they have nothing to save."""
    for process in stack.processes.values():
        process.kill()


@contextmanager
def started_cluster(home: Path, **env: str) -> Iterator[Cluster]:
    """Run all processes but workers during the block."""
    with ExitStack() as ends:
        try:
            stack = ends.enter_context(Stack(home, ENV | env))
        except NoValkey as missing:
            pytest.skip(str(missing))
        ends.callback(lambda: [process.kill() for process in stack.processes.values()])  # They have nothing to save.
        cluster = Cluster(stack, env.get("SLOTKEEPER_DATABASE_URL") or f"sqlite:///{home / 'record.db'}")
        ends.callback(cluster.store.database.close)
        maintenance = stack.maintenance()
        stack.beat()
        stack.web()
        ready(maintenance)
        yield cluster
