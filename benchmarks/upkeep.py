"""What maintenance owes while much comes at once: python -m benchmarks.upkeep [quiet] [deadlines] [all] [JOBS].

quiet      nothing else to do
deadlines  JOBS (100,000) deadlines pass in one second
all        that, 300 receivers of webhooks and 128 servers that accept and never answer, and 500 idle models

Each on real processes, with default settings: how late ten jobs are queued whose delay is over, how long after a
worker was killed its job is started again, and how long a webhook to a receiver that answers takes.
"""

import json
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import requests
from pytest_httpserver import HTTPServer

from jobs.catalog import Catalog
from jobs.db import Database
from jobs.record import now_ms
from jobs.store import Store
from tests.support.stack import Stack, eventually

_CROWD = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
INSERT INTO jobs (id, model, state, why, tier, tenant, created_ms, deadline_ms, source, payload)
SELECT printf('crowd-%08d', i), 'crowd', 'queued', 'submitted', 5, 'default', ?, ? + i % 1000, 'rest', '{}' FROM n
"""
_OWED = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
INSERT INTO webhooks (id, job_id, url, status, state, next_ms, created_ms)
SELECT printf('owed-%08d', i), ?, printf('http://127.1.%d.%d:%d/', i % 300 / 250, 1 + i % 300 % 250, ?), 'completed',
       'pending', ?, ? FROM n
"""


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def _silence() -> Iterator[int]:
    """A port, on every address of this machine, that takes connections and says nothing."""
    kept: list[socket.socket] = []
    with socket.create_server(("0.0.0.0", 0), backlog=4096) as listener:

        def accept() -> None:
            try:
                while True:
                    kept.append(listener.accept()[0])
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def _play(name: str, crowd: int, *, crowded: bool) -> None:
    with (
        tempfile.TemporaryDirectory() as home,
        Stack(Path(home), {"SLOTKEEPER_WEBHOOK_ALLOW": "127.0.0.0/8"}) as stack,
        HTTPServer() as receiver,
        _silence() as silent,
    ):
        receiver.expect_request("/hook").respond_with_data("ok")
        server = stack.server("bench-server", 2)
        for start in (stack.maintenance, stack.webhooks, stack.beat, stack.web):
            start()
        first = stack.worker("first", threads=1)
        _register(stack, "bench", server.endpoint, 1)
        victim = _submit(stack, {"seconds": 60})
        database = Database(f"sqlite:///{home}/record.db")
        store = Store(database)
        eventually(lambda: _events(store, victim, "job.started"), "it runs", 60)
        second = stack.worker("second", threads=4)
        eventually(lambda: " ready." in second.log, "another worker is ready", 60)
        if crowded:
            _crowd(database, victim, server.endpoint, silent)
        _overdue(Path(home) / "record.db", crowd)
        delayed = {_delayed(stack, 1 + n % 5) for n in range(10)}
        first.stop(signal.SIGKILL)
        killed = time.monotonic()
        eventually(lambda: len(_events(store, victim, "job.started")) == 2, "it runs again", 120, 0.02)
        again_s = time.monotonic() - killed
        hooked = _submit(stack, {"seconds": 0}, callback_url=receiver.url_for("/hook"))
        requests.post(f"{stack.url}/queue/jobs/{hooked}/cancel", timeout=10).raise_for_status()
        ended = time.monotonic()
        eventually(lambda: receiver.log, "the webhook arrives", 120, 0.02)
        told_s = time.monotonic() - ended
        eventually(lambda: all(_events(store, job, "job.enqueued") for job in delayed), "all are due", 120)
        late_s = max(_late_s(store, job) for job in delayed)
        _say(
            f"{name:10} killed worker's job again {again_s:.1f} s, due jobs late {late_s:.1f} s, webhook {told_s:.1f} s"
        )
        if crowd:
            began = time.monotonic()
            eventually(lambda: not store.overdue(now_ms(), 1), "all deadlines", 600, 0.5)
            _say(f"{'':10} {crowd} deadlines: dealt with {time.monotonic() - began:.0f} s after that")
        database.close()


def _register(stack: Stack, model: str, endpoint: str, slots: int) -> None:
    body = {"model": model, "server": f"{model}-server", "endpoint": endpoint, "slots": slots}
    requests.post(f"{stack.url}/admin/register", json=body, timeout=10).raise_for_status()


def _submit(stack: Stack, payload: dict[str, float], **more: object) -> str:
    body = {"model": "bench", "payload": payload} | more
    answer = requests.post(f"{stack.url}/queue/submit", json=body, timeout=30)
    answer.raise_for_status()
    return str(answer.json()["job_id"])


def _crowd(database: Database, job_id: str, endpoint: str, silent: int) -> None:
    catalog = Catalog(database)
    for n in range(128):
        catalog.register("hung", f"hung{n}", f"http://127.2.0.{n + 1}:{silent}/", 1, now_ms())
    for n in range(500):
        catalog.register(f"idle{n}", f"idle{n}", endpoint, 1, now_ms())
    with closing(sqlite3.connect(database.url.removeprefix("sqlite:///"), timeout=30)) as connection, connection:
        connection.execute(_OWED, (1500, job_id, silent, now_ms(), now_ms()))


def _overdue(path: Path, crowd: int) -> None:
    with closing(sqlite3.connect(path, timeout=30)) as connection, connection:
        connection.execute("INSERT INTO models (name, fleet, created_ms, state) VALUES ('crowd', 'crowd', 0, 'paused')")
        connection.execute("UPDATE counters SET value = value + 1 WHERE name = 'catalog_version'")
        if crowd:
            connection.execute(_CROWD, (crowd, now_ms(), now_ms() + 1000))


def _events(store: Store, job_id: str, kind: str) -> list[int]:
    return [event.at_ms for event in store.events_of(job_id) if event.type == kind]


def _delayed(stack: Stack, seconds: float) -> str:
    due = datetime.now(UTC) + timedelta(seconds=seconds)
    return _submit(stack, {"seconds": 0, "due": due.timestamp()}, not_before=due.isoformat())


def _late_s(store: Store, job_id: str) -> float:
    """By how much a delayed job was queued late; its payload says when it was due."""
    job = store.get(job_id)
    assert job is not None and job.payload is not None
    return _events(store, job_id, "job.enqueued")[0] / 1000 - json.loads(job.payload)["due"]


def main(words: list[str]) -> None:
    crowd = int(next((word.replace(",", "") for word in words if word[0].isdigit()), "100000"))
    parts = {"quiet": (0, False), "deadlines": (crowd, False), "all": (crowd, True)}
    for name in [word for word in words if word in parts] or parts:
        _play(name, parts[name][0], crowded=parts[name][1])


if __name__ == "__main__":
    main(sys.argv[1:])
