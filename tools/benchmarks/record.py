"""Measure CPU per database write, in µs: python -m tools.benchmarks.record [memory] [file] [postgresql] [JOBS].

One thread writes one job after the other, so group commit merges nothing.  The figures do not include the CPU of
PostgreSQL's processes; the last column includes the wait for them.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from migrations import migrate
from slotkeeper.db import Database
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import NewJob, Run, new_job_id
from tools.cluster.direct_starts import store_start
from tools.cluster.postgres_process import running_postgres

_PAYLOAD = '{"prompt":"a sunset","seconds":0.1}'
_ROUNDS = 5


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def _empty_store(backend: str) -> Iterator[JobStore]:
    with ExitStack() as stack:
        if backend == "postgresql":
            url = stack.enter_context(running_postgres()).create()
        else:
            folder = Path("/dev/shm") if backend == "memory" else None
            url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory(dir=folder))}/record.db"
        migrate.upgrade(url)
        database = Database(url)
        stack.callback(database.close)
        yield JobStore(database)


def _measure(name: str, operation: Callable[[int], object], times: int) -> None:
    """Print the best of some rounds: other load on the machine can only make a round slower."""
    cpu, wall = [], []
    for start in range(0, times * _ROUNDS, times):
        began, began_wall = time.thread_time(), time.perf_counter()
        for n in range(start, start + times):
            operation(n)
        cpu.append(time.thread_time() - began)
        wall.append(time.perf_counter() - began_wall)
    _print(f"  {name:28} {min(cpu) / times * 1e6:6.0f} µs of CPU {min(wall) / times * 1e6:6.0f} µs in all")


def _run_benchmark(backend: str, times: int) -> None:
    _print(backend)
    with _empty_store(backend) as store:
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
    for backend in [argument for argument in arguments if not argument.isdigit()] or ["memory", "file", "postgresql"]:
        _run_benchmark(backend, times)


if __name__ == "__main__":
    main(sys.argv[1:])
