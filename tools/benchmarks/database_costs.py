"""Measure a database of many jobs: python -m tools.benchmarks.database_costs [sqlite] [postgresql] [JOBS].

The database has JOBS (5,000,000) ended jobs of 10 models and 50 tenants.  Then 100,000 deadlines pass within one
second: another process expires those jobs while jobs are submitted.  A job takes about 1 KB of disk, in a temporary
folder.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable

from routing.queries import job_list
from slotkeeper.clock import now_ms
from slotkeeper.db import Database
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import NewJob, new_job_id
from slotkeeper.outbox import event_reader, retention
from slotkeeper.outbox.webhook_messages import MessageQueue
from tools.benchmarks.measuring import empty_database, print_line
from tools.cluster.direct_starts import store_start

_FIELDS = (
    "id, model, state, why, priority, tenant, created_ms, started_ms, finished_ms, deadline_ms, source, payload, result"
)
_NUMBERS = "WITH RECURSIVE n(i) AS (SELECT {first} UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {behind})"
_INSERT_ENDED = """
INSERT INTO jobs ({fields}) {numbers}
SELECT 'ended-' || i, 'model-' || (i - i / 10 * 10), 'completed', 'finished', 5, 'tenant-' || (i - i / 50 * 50),
       {now} - 86400000 + i / 100, {now} - 86400000 + i / 100, {now} - 86400000 + i / 100, NULL, 'rest',
       '{{"prompt":"a sunset over the sea","seconds":0.1}}', '{{"image":"https://images.example/1.png"}}' FROM n
"""
_INSERT_DEADLINES = """
INSERT INTO jobs ({fields}) {numbers}
SELECT 'late-' || i, 'model-1', 'queued', 'submitted', 5, 'tenant-1', {now}, NULL, NULL, {now} + i - i / 1000 * 1000,
       'rest', '{{}}', NULL FROM n
"""
_CHUNK = 250_000
_DEADLINE_JOBS = 100_000
_REPETITIONS = 300
# As in maintenance, whose calls of Redis between two batches take at least as long.
_BATCH = 200
_PAUSE_S = 0.01


def _fill(database: Database, statement: str, jobs: int) -> None:
    for first in range(0, jobs, _CHUNK):
        numbers = _NUMBERS.format(first=first, behind=min(first + _CHUNK, jobs))
        with database.engine.begin() as connection:
            connection.exec_driver_sql(statement.format(fields=_FIELDS, numbers=numbers, now=now_ms()))


def _measure(name: str, operation: Callable[[], object], repetitions: int = _REPETITIONS) -> None:
    times_ms = sorted(_time_ms(operation) for _ in range(repetitions))
    print_line(
        f"  {name:34} p50 {times_ms[len(times_ms) // 2]:8.2f} ms   p99 {times_ms[int(len(times_ms) * 0.99)]:8.2f} ms"
    )


def _time_ms(operation: Callable[[], object]) -> float:
    began = time.perf_counter()
    operation()
    return (time.perf_counter() - began) * 1000


def _expire_all(url: str) -> None:
    database = Database(url)
    store = JobStore(database)
    ended = 0
    while ended < _DEADLINE_JOBS:
        ended += len(store.expire_overdue(now_ms(), _BATCH))
        time.sleep(_PAUSE_S)
    database.close()


def _run_benchmark(backend: str, jobs: int) -> None:
    with empty_database(backend) as url:
        database = Database(url)
        store = JobStore(database)
        began = time.monotonic()
        _fill(database, _INSERT_ENDED, jobs)
        if backend == "postgresql":  # as autovacuum would
            with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("VACUUM ANALYZE")
        print_line(f"{backend}: {jobs} ended jobs, written in {time.monotonic() - began:.0f} s")
        _measure_operations(database, store)
        _measure_submits_during_expiry(url, database, store)
        database.close()


def _measure_operations(database: Database, store: JobStore) -> None:
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
    _measure("due jobs", lambda: store.promote_due(now_ms()))
    _measure("overdue jobs", lambda: store.expire_overdue(now_ms()))
    _measure("due webhooks", lambda: MessageQueue(database).list_due_callbacks(now_ms(), 1000))
    _measure("purge of 500", lambda: retention.delete_ended_jobs(store.database, now_ms() - 3_600_000), 20)
    _measure("ledger", lambda: ledger.read(database), 5)


def _measure_submits_during_expiry(url: str, database: Database, store: JobStore) -> None:
    """Measure submits while many deadlines pass."""
    _fill(database, _INSERT_DEADLINES, _DEADLINE_JOBS)
    other = multiprocessing.get_context("spawn").Process(target=_expire_all, args=(url,))
    other.start()
    times_ms = []
    while other.is_alive():
        times_ms.append(
            _time_ms(lambda: store.submit([NewJob(id=new_job_id(), model="model-2", payload="{}")], now_ms()))
        )
        time.sleep(0.002)
    other.join()
    times_ms.sort()
    print_line(
        f"  {_DEADLINE_JOBS} deadlines pass: {len(times_ms)} submits, p50 {times_ms[len(times_ms) // 2]:.1f} ms, "
    )
    print_line(f"  {'':34} p99 {times_ms[int(len(times_ms) * 0.99)]:.1f} ms, longest {times_ms[-1]:.1f} ms")


def main(arguments: list[str]) -> None:
    jobs = int(next((argument.replace(",", "") for argument in arguments if argument[0].isdigit()), "5000000"))
    for backend in [argument for argument in arguments if not argument[0].isdigit()] or ["sqlite", "postgresql"]:
        _run_benchmark(backend, jobs)


if __name__ == "__main__":
    main(sys.argv[1:])
