"""Measure maintenance under load: python -m tools.benchmarks.maintenance_load [PART ...] [JOBS].

quiet      no other load
deadlines  JOBS (100,000) deadlines pass in one second
all        that, 300 webhook receivers and 128 servers that accept and never answer, and 500 idle models
servers    1,000 more servers of the model, which all answer
variety    20,000 jobs of the model wait, each with different constraints that no server meets

Each part runs on real processes with default settings (`variety` raises the limit on constraints).  It measures how
late ten delayed jobs are queued, how long after the kill of a worker its job starts again, how long a webhook to a
receiver that answers takes, the time of a submit, and the mean time of a script call in Redis.
"""

import json
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import requests
from pytest_httpserver import HTTPServer

from slotkeeper.clock import now_ms
from slotkeeper.db import Database
from slotkeeper.jobs.store import JobStore
from slotkeeper.registry.catalog import Catalog
from tools.benchmarks.measuring import print_line
from tools.cluster.stack import Stack, eventually

_SETTINGS = {
    "SLOTKEEPER_WEBHOOK_ALLOW": "127.0.0.0/8",
    "SLOTKEEPER_MOST_CONSTRAINTS": "100000",
    "SLOTKEEPER_MOST_CONSTRAINTS_OF_ALL": "100000",
}
_INSERT_OVERDUE = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
INSERT INTO jobs (id, model, state, why, priority, tenant, created_ms, deadline_ms, source, payload)
SELECT printf('crowd-%08d', i), 'crowd', 'queued', 'submitted', 5, 'default', ?, ? + i % 1000, 'rest', '{}' FROM n
"""
_INSERT_HOOKED = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
INSERT INTO jobs (id, model, state, why, priority, tenant, attempt, created_ms, source, payload, callback_url)
SELECT printf('owed-%08d', i), 'crowd', 'completed', 'finished', 5, 'default', 1, ?, 'rest', '{}',
       printf('http://127.1.%d.%d:%d/', i % 300 / 250, 1 + i % 300 % 250, ?) FROM n
"""
_INSERT_MESSAGES = """
INSERT INTO messages (receiver, event, job_id, type, at_ms, next_ms, owed_ms)
SELECT id, 11, id, 'job.completed', created_ms, created_ms, created_ms FROM jobs WHERE id LIKE 'owed-%'
"""


@contextmanager
def _silent_port() -> Iterator[int]:
    """Yield a port, on every address of this machine, that accepts connections and never answers."""
    connections: list[socket.socket] = []
    with socket.create_server(("0.0.0.0", 0), backlog=4096) as listener:

        def accept() -> None:
            try:
                while True:
                    connections.append(listener.accept()[0])
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


class _Server(BaseHTTPRequestHandler):
    """Many inference servers in one, distinguished by the address of the request; each reports its runs."""

    protocol_version = "HTTP/1.1"
    running: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        ids = [job for host, job in self.running.copy().items() if host == self.headers["Host"]]
        self._answer({"active_jobs": len(ids), "job_ids": ids})

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.running[self.headers["Host"]] = self.headers["X-Job-Id"]
        self.server.stopped.wait(payload["seconds"])  # type: ignore[attr-defined]
        self.running.pop(self.headers["Host"], None)
        self._answer({"status": "success", "result": {}})

    def _answer(self, document: dict[str, object]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@contextmanager
def _answering_port() -> Iterator[int]:
    """Yield a port, on every address of this machine, where an inference server answers."""
    with ThreadingHTTPServer(("0.0.0.0", 0), _Server) as server:
        server.daemon_threads, server.block_on_close = True, False
        server.stopped = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.stopped.set()  # type: ignore[attr-defined]
        server.shutdown()


def _run_part(name: str, deadline_jobs: int, add_load: "AddLoad") -> None:
    with (
        tempfile.TemporaryDirectory() as home,
        Stack(Path(home), _SETTINGS) as stack,
        HTTPServer() as receiver,
        _silent_port() as silent,
        _answering_port() as answering,
    ):
        receiver.expect_request("/hook").respond_with_data("ok")
        server = stack.server("bench-server", 2)
        for start in (stack.maintenance, stack.webhooks, stack.beat, stack.web):
            start()
        first = stack.worker("first", threads=1)
        _register(stack, "bench", server.endpoint, 1)
        victim = _submit(stack, {"seconds": 60})
        database = Database(f"sqlite:///{home}/record.db")
        store = JobStore(database)
        eventually(lambda: _event_times_ms(store, victim, "job.started"), "it runs", 60)
        second = stack.worker("second", threads=4)
        eventually(lambda: " ready." in second.log, "another worker is ready", 60)
        add_load(stack, database, victim, {"busy": server.port, "silent": silent, "answering": answering})
        calls_before = _script_calls(stack)
        submits = sorted(_time_s(lambda: _submit(stack, {"seconds": 0})) for _ in range(200))
        _insert_overdue(Path(home) / "record.db", deadline_jobs)
        delayed = {_submit_delayed(stack, 1 + n % 5) for n in range(10)}
        first.stop(signal.SIGKILL)
        killed = time.monotonic()
        eventually(lambda: len(_event_times_ms(store, victim, "job.started")) == 2, "it runs again", 120, 0.02)
        again_s = time.monotonic() - killed
        hooked = _submit(stack, {"seconds": 0}, callback_url=receiver.url_for("/hook"))
        requests.post(f"{stack.url}/queue/jobs/{hooked}/cancel", timeout=10)  # if it has not ended by itself
        ended = time.monotonic()
        eventually(lambda: receiver.log, "the webhook arrives", 120, 0.02)
        webhook_s = time.monotonic() - ended
        eventually(lambda: all(_event_times_ms(store, job, "job.enqueued") for job in delayed), "all are due", 120)
        late_s = max(_late_s(store, job) for job in delayed)
        print_line(
            f"{name:10} job of the killed worker started again after {again_s:.1f} s, due jobs late by {late_s:.1f} s, "
            f"webhook after {webhook_s:.1f} s"
        )
        calls, took_us = (now - before for now, before in zip(_script_calls(stack), calls_before, strict=True))
        print_line(
            f"{'':10} submit p50 {submits[100] * 1000:.1f} ms, p99 {submits[198] * 1000:.1f} ms; "
            f"{calls} script calls, {took_us / calls / 1000:.2f} ms each"
        )
        if deadline_jobs:
            began = time.monotonic()
            eventually(lambda: not store.list_queued(["crowd"], limit=1), "all deadlines", 600, 0.5)
            print_line(
                f"{'':10} {deadline_jobs} deadlines: all jobs expired {time.monotonic() - began:.0f} s after that"
            )
        database.close()


def _register(stack: Stack, model: str, endpoint: str, slots: int) -> None:
    body = {"model": model, "server": f"{model}-server", "endpoint": endpoint, "slots": slots}
    requests.post(f"{stack.url}/admin/register", json=body, timeout=10).raise_for_status()


def _submit(stack: Stack, payload: dict[str, float], **more: object) -> str:
    body = {"model": "bench", "payload": payload} | more
    answer = requests.post(f"{stack.url}/queue/submit", json=body, timeout=30)
    answer.raise_for_status()
    return str(answer.json()["job_id"])


def _time_s(operation: Callable[[], object]) -> float:
    began = time.monotonic()
    operation()
    return time.monotonic() - began


def _script_calls(stack: Stack) -> tuple[int, int]:
    """Return the number of script calls, and their total time in microseconds."""
    assert stack.valkey is not None
    with stack.valkey.client() as redis:
        seen = redis.info("commandstats").get("cmdstat_fcall", {"calls": 0, "usec": 0})
    return int(seen["calls"]), int(seen["usec"])


AddLoad = Callable[[Stack, Database, str, dict[str, int]], None]
"""Adds load to an installation that has this running job.  Ports by name: busy, silent, answering."""


def _add_nothing(stack: Stack, database: Database, job_id: str, ports: dict[str, int]) -> None: ...


def _add_everything(stack: Stack, database: Database, job_id: str, ports: dict[str, int]) -> None:
    catalog = Catalog(database)
    for n in range(128):
        catalog.register("hung", f"hung{n}", f"http://127.2.0.{n + 1}:{ports['silent']}/", 1, now_ms())
    for n in range(500):
        catalog.register(f"idle{n}", f"idle{n}", f"http://127.0.0.1:{ports['busy']}/generate", 1, now_ms())
    with closing(sqlite3.connect(database.url.removeprefix("sqlite:///"), timeout=30)) as connection, connection:
        connection.execute(_INSERT_HOOKED, (1500, now_ms(), ports["silent"]))
        connection.execute(_INSERT_MESSAGES)


def _add_servers(stack: Stack, database: Database, job_id: str, ports: dict[str, int]) -> None:
    catalog = Catalog(database)
    for n in range(1000):
        address = f"http://127.3.{n // 250}.{1 + n % 250}:{ports['answering']}/"
        catalog.register("bench", f"one-of-many-{n}", address, 1, now_ms())


def _add_constraints(stack: Stack, database: Database, job_id: str, ports: dict[str, int]) -> None:
    for first in range(0, 20_000, 500):
        jobs = [{"model": "bench", "payload": {}, "constraints": {"memory": {"min": first + n}}} for n in range(500)]
        requests.post(f"{stack.url}/queue/submit-batch", json=jobs, timeout=60).raise_for_status()


def _insert_overdue(path: Path, deadline_jobs: int) -> None:
    with closing(sqlite3.connect(path, timeout=30)) as connection, connection:
        connection.execute("INSERT INTO models (name, fleet, created_ms, state) VALUES ('crowd', 'crowd', 0, 'paused')")
        connection.execute("UPDATE counters SET value = value + 1 WHERE name = 'catalog_version'")
        if deadline_jobs:
            connection.execute(_INSERT_OVERDUE, (deadline_jobs, now_ms(), now_ms() + 1000))


def _event_times_ms(store: JobStore, job_id: str, kind: str) -> list[int]:
    return [event.at_ms for event in store.list_events(job_id) if event.type == kind]


def _submit_delayed(stack: Stack, seconds: float) -> str:
    due = datetime.now(UTC) + timedelta(seconds=seconds)
    return _submit(stack, {"seconds": 0, "due": due.timestamp()}, not_before=due.isoformat())


def _late_s(store: JobStore, job_id: str) -> float:
    """Return how late a delayed job was queued, in seconds; its payload has the time when it was due."""
    job = store.get(job_id)
    assert job is not None and job.payload is not None
    return _event_times_ms(store, job_id, "job.enqueued")[0] / 1000 - json.loads(job.payload)["due"]


def main(arguments: list[str]) -> None:
    deadline_jobs = int(next((argument.replace(",", "") for argument in arguments if argument[0].isdigit()), "100000"))
    parts: dict[str, tuple[int, AddLoad]] = {
        "quiet": (0, _add_nothing),
        "deadlines": (deadline_jobs, _add_nothing),
        "all": (deadline_jobs, _add_everything),
        "servers": (0, _add_servers),
        "variety": (0, _add_constraints),
    }
    for name in [argument for argument in arguments if argument in parts] or parts:
        _run_part(name, *parts[name])


if __name__ == "__main__":
    main(sys.argv[1:])
