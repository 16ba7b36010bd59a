"""Jobs for tests: each builder takes what matters to the test and fills in the rest.

Times count from T0.  A builder does the real acts, so what it gives is what the product would have made.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from sqlalchemy import Table, func, select

from routing.admission.job_request import REQUEST_FIELDS, JobRequest
from routing.admission.submission import Submission
from slotkeeper.db import Database
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import jobs
from slotkeeper.jobs.values import Job, JobError, NewJob, Run, new_job_id
from tests.support.ends import store_end
from tools.cluster.direct_starts import store_start

T0 = 1_800_000_000_000
SECOND = 1000
CALLBACK = "https://client.example/hook"

_ENDED_BY = {
    State.COMPLETED: Reason.FINISHED,
    State.FAILED: Reason.INVALID_REQUEST,
    State.EXPIRED: Reason.DEADLINE_PASSED,
    State.CANCELED: Reason.CANCEL_REQUESTED,
    State.DEAD: Reason.RETRIES_EXHAUSTED,
}


def a_job(**changes: Any) -> NewJob:
    """A job that has not been submitted."""
    return replace(NewJob(id=new_job_id(), model="zimg", payload='{"prompt":"a cat"}'), **changes)


def a_submission(**fields: Any) -> Submission:
    """A submission by the fields of its request, `ttl_s`, `delay_s`, and those that stand beside it."""
    named = {"ttl": fields.pop("ttl_s", None), "not_before": fields.pop("delay_s", None)}
    beside = {name: value for name, value in fields.items() if name not in REQUEST_FIELDS}
    requested = {name: value for name, value in fields.items() if name in REQUEST_FIELDS}
    return Submission(JobRequest.model_construct(**requested | named), **beside)


def a_queued_job(store: JobStore, *, now_ms: int = T0, **changes: Any) -> Job:
    return _read(store, store.submit([a_job(**changes)], now_ms)[0].id)


def a_delayed_job(store: JobStore, *, now_ms: int = T0, due_ms: int = T0 + SECOND, **changes: Any) -> Job:
    return a_queued_job(store, now_ms=now_ms, not_before_ms=due_ms, **changes)


def a_running_job(store: JobStore, *, now_ms: int = T0, server: str = "gpu1", **changes: Any) -> Run:
    return a_start(store, a_queued_job(store, now_ms=now_ms, **changes).id, now_ms=now_ms, server=server)


def a_start(store: JobStore, job_id: str, *, now_ms: int = T0, server: str = "gpu1", lease: str = "lease") -> Run:
    """The next start of a queued job."""
    run = store_start(store, job_id, server, f"{server}-slot0", lease, now_ms)
    assert run is not None, f"{job_id} is not queued"
    return run


def an_ended_job(store: JobStore, state: State = State.COMPLETED, *, now_ms: int = T0, **changes: Any) -> Job:
    """A job that ran once and ended in `state`."""
    run = a_running_job(store, now_ms=now_ms, **changes)
    result = '{"url":"https://cdn.example/1.png"}' if state is State.COMPLETED else None
    error = None if state is State.COMPLETED else JobError("model_error", "out of memory")
    assert store_end(store, run.job.id, run.attempt, _ENDED_BY[state], now_ms, result=result, error=error)
    return _read(store, run.job.id)


def a_job_in(store: JobStore, state: State, *, now_ms: int = T0, **changes: Any) -> Job:
    """A job in any state, by the shortest way there."""
    match state:
        case State.QUEUED:
            return a_queued_job(store, now_ms=now_ms, **changes)
        case State.DELAYED:
            return a_delayed_job(store, now_ms=now_ms, **changes)
        case State.RUNNING:
            return _read(store, a_running_job(store, now_ms=now_ms, **changes).job.id)
        case _:
            return an_ended_job(store, state, now_ms=now_ms, **changes)


def row_of(database: Database, job_id: str) -> dict[str, Any]:
    """Return all columns of a job in the database."""
    with database.read() as connection:
        return dict(connection.execute(select(jobs).where(jobs.c.id == job_id)).one()._mapping)


def rows_in(database: Database, table: Table) -> int:
    """Return the number of rows of a table."""
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def trail_of(store: JobStore, job_id: str) -> list[tuple[str, str, int]]:
    """The job's events: (type, why, attempt)."""
    return [(event.type, event.data["why"], event.attempt) for event in store.list_events(job_id)]


def at_once(*acts: Callable[[], Any], timeout_s: float = 30) -> list[Any]:
    """Do all acts at the same moment, each in a thread; their results, or the exceptions they raised, in order."""
    barrier = threading.Barrier(len(acts))

    def run(act: Callable[[], Any]) -> Any:
        barrier.wait(timeout_s)
        try:
            return act()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(run, acts, timeout=timeout_s))


def eventually(condition: Callable[[], Any], timeout_s: float = 10) -> None:
    """Wait until another thread has brought something about."""
    tick, looks = threading.Event(), int(timeout_s * 1000)
    for _ in range(looks):
        if condition():
            return
        tick.wait(0.001)
    raise AssertionError(f"did not happen within {timeout_s} s")


def _read(store: JobStore, job_id: str) -> Job:
    job = store.get(job_id)
    assert job is not None
    return job


def one_of(names: Iterable[str]) -> str:
    """Return how pydantic lists the values that a field may have."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"
