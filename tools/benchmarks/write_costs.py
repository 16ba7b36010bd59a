"""Measure CPU per database write, in µs: python -m tools.benchmarks.write_costs [memory] [sqlite] [postgresql] [JOBS].

One thread writes one job after the other, so group commit merges nothing.  The figures do not include the CPU of
PostgreSQL's processes; the last column includes the wait for them.
"""

import sys
import time
from collections.abc import Callable
from contextlib import closing

from slotkeeper.db import Database
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import NewJob, Run, new_job_id
from tools.benchmarks.measuring import empty_database, print_line
from tools.cluster.direct_starts import store_start

_PAYLOAD = '{"prompt":"a sunset","seconds":0.1}'
_ROUNDS = 5


def _measure(name: str, operation: Callable[[int], object], times: int) -> None:
    """Print the best of some rounds: other load on the machine can only make a round slower."""
    cpu, wall = [], []
    for start in range(0, times * _ROUNDS, times):
        began, began_wall = time.thread_time(), time.perf_counter()
        for n in range(start, start + times):
            operation(n)
        cpu.append(time.thread_time() - began)
        wall.append(time.perf_counter() - began_wall)
    print_line(f"  {name:28} {min(cpu) / times * 1e6:6.0f} µs of CPU {min(wall) / times * 1e6:6.0f} µs in all")


def _run_benchmark(backend: str, times: int) -> None:
    print_line(backend)
    with empty_database(backend) as url, closing(Database(url)) as database:
        store = JobStore(database)
        ids = [new_job_id() for _ in range(times * _ROUNDS)]
        runs: list[Run] = []

        def start(n: int) -> None:
            run = store_start(store, ids[n], "gpu", "gpu-slot0", "lease owner", 2)
            assert run is not None
            runs.append(run)

        def settle(n: int) -> None:
            assert store.database.commit(store.settle_write(ids[n], runs[n].attempt, Reason.FINISHED, 3, result="{}"))

        _measure("an empty transaction", lambda _: store.database.write(lambda tx: None), times)
        _measure("submit", lambda n: store.submit([NewJob(id=ids[n], model="bench", payload=_PAYLOAD)], 1), times)
        _measure("start", start, times)
        _measure("settle", settle, times)
        _measure("state of a job", lambda n: store.get_state(ids[n]), times)
        _measure("a whole job", lambda n: store.get(ids[n]), times)


def main(arguments: list[str]) -> None:
    times = int(next((argument for argument in arguments if argument.isdigit()), "500"))
    for backend in [argument for argument in arguments if not argument.isdigit()] or ["memory", "sqlite", "postgresql"]:
        _run_benchmark(backend, times)


if __name__ == "__main__":
    main(sys.argv[1:])
