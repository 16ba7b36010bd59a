"""Measure what credits cost: python -m tools.benchmarks.credit_costs [memory] [sqlite] [postgresql] [SECONDS].

One thread submits and ends jobs in turns, of a tenant that pays and of one that does not.  Then, on PostgreSQL, 4
processes submit and 4 run the jobs of one tenant for SECONDS (20), in turns without and with an account.  At last
CREDIT-1 is checked over 1,000,000 transfers.
"""

import multiprocessing
import statistics
import sys
import time
from contextlib import closing
from typing import Any

from slotkeeper.db import Database
from slotkeeper.jobs import credits
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import NewJob, new_job_id
from slotkeeper.registry.credit_accounts import MAX_AMOUNT, Act, CreditAccounts
from slotkeeper.registry.identity import Tenant
from slotkeeper.registry.tenants import Tenants
from tools.benchmarks.measuring import empty_database, print_line
from tools.cluster.direct_starts import store_start

_PAYS, _FREE = "pays", "free"
_TURNS, _JOBS = 10, 200
_PROCESSES, _AT_ONCE = 4, 8
_HELD, _PRICE = 1_000_000, 20_000
_TRANSFERS = 1_000_000
_FILL = """
INSERT INTO transfers (tenant, kind, amount, at_ms, seq, number, reserved, slot_ms)
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})
SELECT 'tenant-' || (i - i / 50 * 50), CASE i - i / 2 * 2 WHEN 0 THEN 'reserve' ELSE 'settle' END, 5, 1, i + 100000000,
       0, 7, 1000 FROM n
"""


def _job(tenant: str) -> NewJob:
    pays = tenant == _PAYS
    return NewJob(
        id=new_job_id(),
        model="bench",
        payload='{"prompt":"a sunset"}',
        tenant=tenant,
        reserved=_HELD if pays else None,
        price=_PRICE if pays else None,
    )


def _open(database: Database, tenant: str) -> None:
    Tenants(database).add(Tenant(tenant), 1)
    if tenant == _PAYS:
        CreditAccounts(database).open(tenant, 0, None, 1)
        CreditAccounts(database).act(tenant, Act("grant", MAX_AMOUNT, "bench", "bench"), 1)


def _end(store: JobStore, job_id: str) -> bool:
    run = store_start(store, job_id, "gpu", "gpu-slot0", "lease owner", 2, price=_PRICE)
    if run is None:
        return False
    ended = store.settle_write(job_id, run.attempt, Reason.FINISHED, 3, result="{}", run_ended_ms=3)
    return store.database.commit(ended) is not None


def _measure_turns(backend: str) -> None:
    with empty_database(backend) as url, closing(Database(url)) as database:
        store = JobStore(database)
        for tenant in (_FREE, _PAYS):
            _open(database, tenant)
        taken: dict[tuple[str, str], list[float]] = {}
        for turn in range(2 * _TURNS):
            tenant = (_FREE, _PAYS)[turn % 2]
            new = [_job(tenant) for _ in range(_JOBS)]
            taken.setdefault((tenant, "submit"), []).append(_time_us(lambda job: store.submit([job], 1), new))
            ids = [job.id for job in new]
            taken.setdefault((tenant, "start and end"), []).append(_time_us(lambda job: _end(store, job), ids))
            credits.fold_all(database)
        for what in ("submit", "start and end"):
            # The best turn of each: other load can only make one slower.
            free, pays = (min(taken[tenant, what]) for tenant in (_FREE, _PAYS))
            print_line(f"  {backend} {what:14} {free:6.0f} µs without credits, {pays:6.0f} with: + {pays - free:.0f}")


def _time_us(act: Any, over: list[Any]) -> float:
    began = time.perf_counter()
    for item in over:
        act(item)
    return (time.perf_counter() - began) / len(over) * 1e6


# -- one tenant, several processes ---------------------------------------------------------------------------------


def _submit_for(url: str, tenant: str, until: float, done: "multiprocessing.Queue[Any]", ids: Any) -> None:
    with closing(Database(url)) as database:
        store, count = JobStore(database), 0
        while time.monotonic() < until:
            new = [_job(tenant) for _ in range(_AT_ONCE)]
            results = database.commit_all([store.submit_write([job], 1) for job in new])
            failed = [result for result in results if isinstance(result, Exception)]
            if failed:
                raise failed[0]
            ids.put([job.id for job in new])
            count += len(new)
        done.put(count)


def _run_for(url: str, until: float, done: "multiprocessing.Queue[Any]", ids: Any) -> None:
    with closing(Database(url)) as database:
        store, count = JobStore(database), 0
        while time.monotonic() < until:
            if ids.empty():
                time.sleep(0.001)
            else:
                count += sum(_end(store, job_id) for job_id in ids.get())
        done.put(count)


def _measure_processes(url: str, tenant: str, seconds: float) -> tuple[float, float]:
    """Return the submits and the ends per second of 4 and 4 processes."""
    context = multiprocessing.get_context("spawn")
    submitted, ended, ids = context.Queue(), context.Queue(), context.Queue()
    until = time.monotonic() + 2 + seconds
    workers = [
        context.Process(target=_submit_for, args=(url, tenant, until, submitted, ids)) for _ in range(_PROCESSES)
    ]
    workers += [context.Process(target=_run_for, args=(url, until, ended, ids)) for _ in range(_PROCESSES)]
    for worker in workers:
        worker.start()
    sums = [sum(queue.get(timeout=seconds + 60) for _ in range(_PROCESSES)) for queue in (submitted, ended)]
    for worker in workers:
        ids.cancel_join_thread()
        worker.terminate()
        worker.join()
    return sums[0] / seconds, sums[1] / seconds


def _measure_contention(seconds: float) -> None:
    with empty_database("postgresql") as url, closing(Database(url)) as database:
        for tenant in (_FREE, _PAYS):
            _open(database, tenant)
        rates: dict[str, list[tuple[float, float]]] = {_FREE: [], _PAYS: []}
        for turn in range(6):
            tenant = (_FREE, _PAYS)[turn % 2]
            rates[tenant].append(_measure_processes(url, tenant, seconds))
            credits.fold_all(database)
        for tenant, measured in rates.items():
            submits, ends = (statistics.median(rate[n] for rate in measured) for n in range(2))
            rate = f"{submits:.0f} submits, {ends:.0f} ends a second"
            print_line(f"  postgresql, 4 + 4 processes, tenant {tenant!r}: {rate}")
        unbalanced = credits.find_unbalanced(database, with_transfers=True)
        print_line(f"  CREDIT-1 afterwards: {unbalanced or 'holds'}")


def _measure_check(backend: str) -> None:
    with empty_database(backend) as url, closing(Database(url)) as database:
        with database.engine.begin() as connection:
            connection.exec_driver_sql(_FILL.format(count=_TRANSFERS))
        for with_transfers in (False, True):
            began = time.perf_counter()
            credits.read_books(database, with_transfers=with_transfers)
            what = f"with {_TRANSFERS:,} transfers" if with_transfers else "without transfers"
            print_line(f"  {backend} check of CREDIT-1 {what}: {time.perf_counter() - began:.2f} s")


def main(arguments: list[str]) -> None:
    seconds = float(next((argument for argument in arguments if argument[0].isdigit()), "20"))
    for backend in [argument for argument in arguments if not argument[0].isdigit()] or ["sqlite", "postgresql"]:
        _measure_turns(backend)
        _measure_check(backend)
        if backend == "postgresql":
            _measure_contention(seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
