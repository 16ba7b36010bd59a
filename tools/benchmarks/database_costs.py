"""Measure a database of many jobs: python -m tools.benchmarks.database_costs [sqlite] [postgresql] [JOBS].

JOBS (5,000,000) jobs have ended, of 10 models and 50 tenants; then 100,000 deadlines pass within one second, which a
process of its own deals with, while jobs are submitted.  Takes about 1 KB of disk a job, in a temporary folder.
"""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from migrations import migrate
from routing.queries import job_list
from slotkeeper.clock import now_ms
from slotkeeper.db import Database
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import NewJob, new_job_id
from slotkeeper.outbox import event_reader, retention
from slotkeeper.outbox.webhook_messages import MessageQueue
from tools.cluster.direct_starts import store_start
from tools.cluster.postgres_process import running_postgres

_FIELDS = (
    "id, model, state, why, priority, tenant, created_ms, started_ms, finished_ms, deadline_ms, source, payload, result"
)
_NUMBERS = "WITH RECURSIVE n(i) AS (SELECT {first} UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {behind})"
_ENDED = """
INSERT INTO jobs ({fields}) {numbers}
SELECT 'ended-' || i, 'model-' || (i - i / 10 * 10), 'completed', 'finished', 5, 'tenant-' || (i - i / 50 * 50),
       {now} - 86400000 + i / 100, {now} - 86400000 + i / 100, {now} - 86400000 + i / 100, NULL, 'rest',
       '{{"prompt":"a sunset over the sea","seconds":0.1}}', '{{"image":"https://images.example/1.png"}}' FROM n
"""
_DEADLINES = """
INSERT INTO jobs ({fields}) {numbers}
SELECT 'late-' || i, 'model-1', 'queued', 'submitted', 5, 'tenant-1', {now}, NULL, NULL, {now} + i - i / 1000 * 1000,
       'rest', '{{}}', NULL FROM n
"""
_CHUNK = 250_000
_LATE = 100_000
_TIMES = 300
# As maintenance does it; what it tells Redis between two batches takes no less.
_BATCH = 200
_BETWEEN_S = 0.01


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def _record(where: str) -> Iterator[str]:
    with ExitStack() as stack:
        if where == "postgresql":
            url = stack.enter_context(running_postgres()).create()
        else:
            url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/record.db"
        migrate.upgrade(url)
        yield url


def _fill(database: Database, statement: str, jobs: int) -> None:
    for first in range(0, jobs, _CHUNK):
        numbers = _NUMBERS.format(first=first, behind=min(first + _CHUNK, jobs))
        with database.engine.begin() as connection:
            connection.exec_driver_sql(statement.format(fields=_FIELDS, numbers=numbers, now=now_ms()))


def _measure(name: str, act: Callable[[], object], times: int = _TIMES) -> None:
    took = sorted(_timed(act) for _ in range(times))
    _say(f"  {name:34} p50 {took[len(took) // 2]:8.2f} ms   p99 {took[int(len(took) * 0.99)]:8.2f} ms")


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def _expire_all(url: str) -> None:
    database = Database(url)
    store = JobStore(database)
    ended = 0
    while ended < _LATE:
        ended += len(store.expire_overdue(now_ms(), _BATCH))
        time.sleep(_BETWEEN_S)
    database.close()


def _play(where: str, jobs: int) -> None:
    with _record(where) as url:
        database = Database(url)
        store = JobStore(database)
        began = time.monotonic()
        _fill(database, _ENDED, jobs)
        if where == "postgresql":  # as autovacuum does
            with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("VACUUM ANALYZE")
        _say(f"{where}: {jobs} ended jobs, written in {time.monotonic() - began:.0f} s")
        _acts(database, store)
        _crowd(url, database, store)
        database.close()


def _acts(database: Database, store: JobStore) -> None:
    def submit() -> str:
        return store.submit([NewJob(id=new_job_id(), model="model-1", payload="{}", tenant="tenant-1")], now_ms())[0].id

    def run() -> None:
        job = submit()
        started = store_start(store, job, "gpu", "gpu-slot0", "lease owner", now_ms())
        assert started is not None
        store.database.commit(store.settle_write(job, started.attempt, Reason.FINISHED, now_ms(), result="{}"))

    with database.read() as connection:
        last = event_reader.get_last_id(connection)
    _measure("submit", submit)
    _measure("submit, start, settle", run)
    _measure("newest jobs", lambda: job_list.find_jobs(database))
    _measure("newest of a tenant", lambda: job_list.find_jobs(store.database, tenant="tenant-1"))
    _measure(
        "newest dead of a tenant and model",
        lambda: job_list.find_jobs(store.database, tenant="tenant-1", model="model-1", state=State.DEAD),
    )
    _measure("running jobs", store.list_running)
    _measure("queued of 10 models", lambda: store.list_queued([f"model-{n}" for n in range(10)]))
    _measure("outbox, all since the beginning", lambda: event_reader.list_queued_between(database, last, last + 10**6))
    _measure("what is due", lambda: store.promote_due(now_ms()))
    _measure("what is overdue", lambda: store.expire_overdue(now_ms()))
    _measure("webhooks that are due", lambda: MessageQueue(database).list_due_callbacks(now_ms(), 1000))
    _measure("purge of 500", lambda: retention.delete_ended_jobs(store.database, now_ms() - 3_600_000), 20)
    _measure("ledger", lambda: ledger.read(database), 5)


def _crowd(url: str, database: Database, store: JobStore) -> None:
    """Submits while many deadlines pass."""
    _fill(database, _DEADLINES, _LATE)
    other = multiprocessing.get_context("spawn").Process(target=_expire_all, args=(url,))
    other.start()
    took = []
    while other.is_alive():
        took.append(_timed(lambda: store.submit([NewJob(id=new_job_id(), model="model-2", payload="{}")], now_ms())))
        time.sleep(0.002)
    other.join()
    took.sort()
    _say(f"  {_LATE} deadlines pass: {len(took)} submits, p50 {took[len(took) // 2]:.1f} ms, ")
    _say(f"  {'':34} p99 {took[int(len(took) * 0.99)]:.1f} ms, longest {took[-1]:.1f} ms")


def main(words: list[str]) -> None:
    jobs = int(next((word.replace(",", "") for word in words if word[0].isdigit()), "5000000"))
    for where in [word for word in words if not word[0].isdigit()] or ["sqlite", "postgresql"]:
        _play(where, jobs)


if __name__ == "__main__":
    main(sys.argv[1:])
