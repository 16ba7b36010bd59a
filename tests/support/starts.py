"""Claims and starts for tests, by the commands and writes with which a worker claims and starts."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from database.db import Database, Write
from dispatch.dispatcher import ActiveRun, Dispatcher
from jobs.record import Run
from jobs.store import Store
from routing.leases import Lease, Leases
from routing.queues import Offer
from tasks.engine import Engine
from tasks.heartbeat import Watch
from tasks.starts import Starts
from tasks.ways import Ways

T = TypeVar("T")


class EngineInPlace:
    """Does in the caller's thread, at once, what a worker's engine does in its loop and its threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def store(self, write: Write[T]) -> T:
        return self._database.do(write)

    async def rarely(self, act: Callable[..., T], *args: Any) -> T:
        return act(*args)


def _run_in_place(life: Coroutine[Any, Any, T]) -> T:
    """Run what waits for nothing, also where a loop is running already."""
    try:
        life.send(None)
    except StopIteration as ended:
        return cast(T, ended.value)
    raise AssertionError("It waits, and here is no loop that would go on with it.")


def claim_offer(leases: Leases, offer: Offer, owner: str) -> Offer | None:
    """Make an open offer `owner`'s own; None: it is gone, another's, or its own already."""
    return leases.scripts.run(leases.claiming(offer, owner))


def begin_run(dispatcher: Dispatcher, offer: Offer, owner: str) -> ActiveRun | None:
    """Begin the offered job as a worker does; None: the offer or the job is gone.  An open offer is claimed first."""
    claimed = offer if offer.owner == owner else claim_offer(dispatcher.leases, offer, owner)
    if claimed is None:
        return None
    lease = Lease(claimed.fleet, claimed.job_id, claimed.lease, owner, claimed.slot)
    engine = cast(Engine, EngineInPlace(dispatcher.store.database))
    starts = Starts(dispatcher, Ways(dispatcher.catalog), engine)
    run = _run_in_place(starts.store(claimed, Watch(lease), ""))
    return None if run is None else dispatcher.begun(claimed, run, lease)


def store_start(
    store: Store,
    job_id: str,
    server: str,
    slot: str,
    lease: str,
    now_ms: int,
    offer: int = 0,
    described_by: str | None = None,
    sent_to: str | None = None,
) -> Run | None:
    """Give a queued job to the caller; None: it is not queued."""
    write = store.starting(job_id, server, slot, lease, now_ms, offer, described_by, sent_to=sent_to)
    return store.database.do(write)


def store_remote_id(store: Store, job_id: str, attempt: int, remote_id: str, now_ms: int) -> bool:
    """Store the server's own id of a running job.  False: this run is over."""
    return store.database.do(store.noting_remote(job_id, attempt, remote_id, now_ms))
