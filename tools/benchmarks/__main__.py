"""Run the benchmarks: python -m tools.benchmarks [handoff] [throughput] [submit]."""

import http.client
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from tools.benchmarks import stack_calls
from tools.benchmarks.measuring import print_line
from tools.cluster.stack import RefServer, Stack, eventually

_PROCESSES = 2


def _journal(server: RefServer) -> list[dict[str, Any]]:
    if not server.journal.exists():
        return []
    return [json.loads(line) for line in server.journal.read_text().splitlines()]


def _run_ours(slots: int, seconds: float, jobs: int, threads: int) -> list[dict[str, Any]]:
    """Let one worker run `jobs` queued jobs, and return the server's journal."""
    with tempfile.TemporaryDirectory() as home, Stack(Path(home)) as stack:
        server = stack.server("bench-server", slots)
        stack.maintenance()
        stack.beat()
        stack.worker(threads=threads, level="warning")
        eventually(lambda: _workers_are_ready(stack), "the worker is ready")
        stack_calls.call(stack, "queue_then_serve", "bench", jobs, seconds, server.endpoint, slots)
        eventually(lambda: len(_journal(server)) >= jobs, "all jobs have run", 300, 0.2)
        return _journal(server)


def _workers_are_ready(stack: Stack) -> bool:
    """Return whether both workers, that for jobs and that for maintenance, are registered with the broker."""
    assert stack.valkey is not None
    with stack.valkey.client() as client:
        return len(client.smembers("_kombu.binding.celery.pidbox")) >= 2


def _run_bare(slots: int, seconds: float, jobs: int) -> float:
    """Return the jobs per second of bare Celery with as many threads as slots, measured at the server."""
    with tempfile.TemporaryDirectory() as home, Stack(Path(home)) as stack:
        server = stack.server("bare-server", slots, "--max-direct-queue", "10")
        assert stack.valkey is not None
        stack.env["BENCH_BROKER"] = os.environ["BENCH_BROKER"] = stack.valkey.url
        from tools.benchmarks.bare_celery import app, call

        app.conf.update(broker_url=stack.valkey.url)
        for _ in range(jobs):
            call.delay(server.endpoint, {"seconds": seconds})
        bare = Path(sys.executable).parent / "celery"
        stack.start(
            "bare", [str(bare), "-A", "tools.benchmarks.bare_celery", "worker", "-c", str(slots), "-l", "warning"]
        )
        eventually(lambda: len(_journal(server)) >= jobs, "all calls have been made", 300, 0.2)
        return _rate(_journal(server))


def _rate(runs: list[dict[str, Any]]) -> float:
    """Return the jobs that ended per second, without the first and the last tenth of the ends."""
    ends = sorted(run["ended_ns"] for run in runs)
    tenth = len(ends) // 10
    return (len(ends) - 2 * tenth - 1) / ((ends[-tenth - 1] - ends[tenth]) / 1e9)


def _gaps_ms(runs: list[dict[str, Any]]) -> list[float]:
    """Return how long each slot was idle between two runs, in ms."""
    by_slot: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run["started_ns"]):
        by_slot[run["slot"]].append(run)
    return [
        (after["started_ns"] - before["ended_ns"]) / 1e6
        for slot in by_slot.values()
        for before, after in pairwise(slot)
    ]


def _slot_use(runs: list[dict[str, Any]], slots: int, jobs: int) -> float:
    """Return the share of the slots' time that was spent in runs, from the first start until the queue was empty."""
    runs = sorted(runs, key=lambda run: run["started_ns"])[: jobs - slots]
    begin, end = runs[0]["started_ns"], runs[-1]["started_ns"]
    busy = sum(min(run["ended_ns"], end) - run["started_ns"] for run in runs)
    return busy / (slots * (end - begin))


def handoff() -> None:
    slots, seconds, jobs = 8, 0.1, 1000
    runs = _run_ours(slots, seconds, jobs, 64)
    gaps = sorted(_gaps_ms(runs))
    print_line(
        f"handoff     {slots} slots x {seconds * 1000:.0f} ms, {jobs} jobs: "
        f"slot use {_slot_use(runs, slots, jobs):.1%}, "
        f"gap p50 {statistics.median(gaps):.2f} ms, p99 {gaps[int(len(gaps) * 0.99)]:.1f} ms"
    )


def throughput() -> None:
    slots, seconds, jobs = 32, 0.005, 5000
    bare = _run_bare(slots, seconds, jobs)
    ours = _rate(_run_ours(slots, seconds, jobs, 64))
    print_line(
        f"throughput  {slots} slots x {seconds * 1000:.0f} ms, {jobs} jobs: {ours:.0f} jobs/s, "
        f"bare Celery {bare:.0f} jobs/s, ratio {ours / bare:.2f}"
    )


def submit() -> None:
    with tempfile.TemporaryDirectory() as home, Stack(Path(home)) as stack:
        stack.web()
        measured = measure_submits(stack.url, clients=16, seconds=8.0)
        print_line(f"submit      16 clients, one job a request: {measured:.0f} submits/s")


_ALL = {"handoff": handoff, "throughput": throughput, "submit": submit}

if __name__ == "__main__":
    started = time.monotonic()
    for name in sys.argv[1:] or _ALL:
        _ALL[name]()
    print_line(f"measured in {time.monotonic() - started:.0f} s")


def measure_submits(url: str, clients: int, seconds: float) -> float:
    """Return the accepted submits per second of `clients` clients with keep-alive connections."""
    requests.put(url + "/admin/model-configs/bench", json={}, timeout=10).raise_for_status()
    counts: multiprocessing.Queue[int] = multiprocessing.Queue()
    workers = [
        multiprocessing.Process(target=_submit_for, args=(url, clients // _PROCESSES, seconds, counts))
        for _ in range(_PROCESSES)
    ]
    for worker in workers:
        worker.start()
    total = sum(counts.get(timeout=seconds + 60) for _ in workers)
    for worker in workers:
        worker.join()
    return total / seconds


def _submit_for(url: str, clients: int, seconds: float, counts: "multiprocessing.Queue[int]") -> None:
    done: list[int] = []
    threads = [threading.Thread(target=_client, args=(url, seconds, done)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts.put(sum(done))


def _client(url: str, seconds: float, done: list[int]) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    body = json.dumps({"model": "bench", "payload": {"prompt": "a sunset", "seconds": 0.1}})
    end, accepted = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        connection.request("POST", "/queue/submit", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 202:
            raise RuntimeError(f"a submit was answered {answer.status}")
        accepted += 1
    done.append(accepted)
