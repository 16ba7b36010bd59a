"""Asks servers for their health, and about runs whose slots are quarantined, in one event loop.

Each server is asked once at a time, and each report can be read as soon as it has arrived.  A server that accepts the
connection and never responds takes a place until the request times out.  Servers that did so last time share a part of
the places, so that they never hold up the others.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, TypeAlias, TypeVar

import structlog
import uvloop

from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.maintenance import quarantined_slots
from routing.maintenance.server_checks import ServerChecks
from routing.maintenance.server_report import ServerReport
from slotkeeper.clock import now_ms
from slotkeeper.errors import SlotkeeperError
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.jobs.values import Job
from slotkeeper.process import singleton
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import AdminState, Server
from slotkeeper.urls import refuses_connections
from tasks import threads
from tasks.server_adapters import Misconfigured, adapter_for, health_adapter
from tasks.servers import HealthKind, HttpClient, RunDetails, ServerAdapter, ServerSession
from tasks.services import database, dispatcher

T = TypeVar("T")
log = structlog.get_logger(__name__)

MAX_CONCURRENT = 256
"""Servers that are asked at once."""
MAX_SLOW = 160
"""Of these, servers that were slow last time."""
_SLOW_S = 1.0
_REPORTS_LIMIT_S = 1.5  # A report that takes longer is applied by the next round.
_BATCH_DELAY_S = 0.1
_READ_LIMIT_S = 3.0
_STATUS_DEADLINE_S = 10.0  # of one question about a run
_END_KINDS = frozenset(
    {OutcomeKind.DONE, OutcomeKind.FAILED, OutcomeKind.RETRY, OutcomeKind.CANCELED, OutcomeKind.LOST}
)

PendingReports: TypeAlias = "dict[str, Future[ServerReport]]"
"""Name of a server -> its report to come."""


class HealthTarget(NamedTuple):
    """A server that is to be asked.

    adapter: None: no description of its models can be used.
    has_quarantine: a slot of it is quarantined, so that it matters whether its process has ended.
    """

    server: Server
    adapter: ServerAdapter | None
    has_quarantine: bool = False


async def read_report(target: HealthTarget, http: HttpClient) -> ServerReport:
    """Ask a server for its health."""
    asked_ms, server, adapter = now_ms(), target.server, target.adapter
    if adapter is None:
        return ServerReport(up=None, asked_ms=asked_ms, endpoints=server.endpoints)
    health = await ServerSession(adapter, http).health()
    may_have_ended = target.has_quarantine and health.kind in (HealthKind.DOWN, HealthKind.UNKNOWN)
    return ServerReport(
        up=None if health.kind is HealthKind.UNKNOWN else health.kind is not HealthKind.DOWN,
        active_jobs=health.active_jobs if health.running_count else None,
        job_ids=health.job_ids,
        asked_ms=asked_ms,
        endpoints=server.endpoints,
        connection_refused=may_have_ended and await asyncio.to_thread(refuses_connections, adapter.endpoint),
        process_started=health.started,
        why_down=health.message if health.kind is HealthKind.DOWN and health.answered else "",
        is_silent=health.is_silent,
        is_idle=health.is_idle,
    )


class HealthChecks:
    """The event loop in which servers are asked, with its thread.  Its methods are for other threads.

    check: asks one server.  Raises RuntimeError: no thread can be started now.
    """

    def __init__(self, check: Callable[[HealthTarget, HttpClient], Awaitable[ServerReport]] = read_report) -> None:
        self._check = check
        self._lock = threading.Lock()  # of the three that follow
        self._pending: PendingReports = {}
        self._late: PendingReports = {}  # what the last round did not wait for
        self._checked_runs: set[tuple[str, int]] = set()
        self._slow: set[str] = set()
        self._places, self._slow_places = asyncio.Semaphore(MAX_CONCURRENT), asyncio.Semaphore(MAX_SLOW)
        self._loop = uvloop.new_event_loop()
        self._http = HttpClient(self._loop)
        self._thread = threads.start_vital_thread("health-checks", self._loop.run_forever)

    def close(self) -> None:
        """End the loop, and cancel the checks that are under way."""
        self._submit(self._end())
        self._thread.join(5)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._http.close()
        self._loop.stop()

    # -- health ------------------------------------------------------------------------------------------------

    def start(self, targets: Iterable[HealthTarget]) -> PendingReports:
        """Ask these servers, unless that is under way, and return the reports to come."""
        found: PendingReports = {}
        with self._lock:
            for target in targets:
                name = target.server.name
                if name not in self._pending:
                    self._pending[name] = self._submit(self._read(target))
                found[name] = self._pending[name]
        return found

    def reports_as_they_arrive(self, pending: PendingReports) -> Iterator[Mapping[str, ServerReport]]:
        """Yield these reports, and those that came too late for the last round, some at a time."""
        with self._lock:
            pending, self._late = self._late | pending, {}
        until = time.monotonic() + _REPORTS_LIMIT_S
        while pending:
            done, _ = wait(pending.values(), max(until - time.monotonic(), 0), FIRST_COMPLETED)
            if not done:
                with self._lock:
                    self._late |= pending
                return
            wait(pending.values(), _BATCH_DELAY_S)
            yield take_arrived(pending)

    async def _read(self, target: HealthTarget) -> ServerReport:
        name = target.server.name
        try:
            async with AsyncExitStack() as places:
                if name in self._slow:
                    await places.enter_async_context(self._slow_places)
                await places.enter_async_context(self._places)
                started_s = time.monotonic()
                try:
                    return await self._check(target, self._http)
                finally:
                    is_slow = time.monotonic() - started_s > _SLOW_S
                    (self._slow.add if is_slow else self._slow.discard)(name)
        finally:
            with self._lock:
                del self._pending[name]

    # -- runs whose slots are quarantined ------------------------------------------------------------------------

    def check_quarantined_runs(self) -> None:
        """Ask for the status of runs whose slots are quarantined, where their servers have given them ids."""
        for row in quarantine.list_all(database()):
            run = (row.job_id, row.attempt)
            with self._lock:
                if row.remote_id is None or run in self._checked_runs:
                    continue
                self._checked_runs.add(run)
            self._submit(self._check_run(row))

    async def _check_run(self, row: QuarantinedSlot) -> None:
        try:
            async with self._places:
                await check_quarantined_run(row, self._http)
        except Exception:
            log.exception("quarantined_run_not_checked", job_id=row.job_id)
        finally:
            with self._lock:
                self._checked_runs.discard((row.job_id, row.attempt))

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


@singleton
def health_checks() -> HealthChecks:
    return HealthChecks()


@singleton
def server_checks() -> ServerChecks:
    return ServerChecks(dispatcher())


def start_checks(servers: Iterable[Server]) -> PendingReports:
    """Ask those of these servers that need to be asked, and return the reports to come."""
    return health_checks().start(select_targets(servers))


def read_reports(servers: Iterable[Server]) -> Mapping[str, ServerReport]:
    """Ask those of these servers that need to be asked; those that take long are left out."""
    pending = start_checks(servers)
    wait(pending.values(), _READ_LIMIT_S)
    return take_arrived(pending)


def take_arrived(pending: PendingReports) -> Mapping[str, ServerReport]:
    """Take out the reports that have arrived; a server that could not be asked at all has none."""
    arrived = {name: pending.pop(name) for name, report in list(pending.items()) if report.done()}
    for name, report in arrived.items():
        if (error := report.exception()) is not None:
            log.error("server_not_checked", server=name, error=repr(error))
    return {name: report.result() for name, report in arrived.items() if report.exception() is None}


def select_targets(servers: Iterable[Server]) -> list[HealthTarget]:
    """Return the servers that are asked: not those that are stopped, or have `health.only_when_used`, and run nothing.

    A health check counts as use where an endpoint sleeps, and is paid for, by its use.
    """
    catalog, quarantined = dispatcher().catalog.get(), quarantined_slots.servers_to_ask(dispatcher())
    targets = [
        HealthTarget(server, adapter, server.name in quarantined)
        for server, adapter in _with_adapters(catalog, servers)
    ]
    optional = {target.server.name for target in targets if _is_optional(target)}
    if not optional:
        return targets
    used = {job.server for job in dispatcher().store.list_running()} | quarantined
    return [target for target in targets if target.server.name in used or target.server.name not in optional]


def _with_adapters(
    catalog: CatalogSnapshot, servers: Iterable[Server]
) -> Iterator[tuple[Server, ServerAdapter | None]]:
    for server in servers:
        if not server.endpoints:
            continue
        try:
            adapter = health_adapter(catalog, server)
        except Exception as error:  # It concerns this server alone.
            log.error("server_not_checked", server=server.name, error=repr(error))
            continue
        yield server, adapter


def _is_optional(target: HealthTarget) -> bool:
    health = None if target.adapter is None else target.adapter.description.health
    return target.server.state != AdminState.ONLINE or (health is not None and health.only_when_used)


# -- a run whose slot is quarantined -----------------------------------------------------------------------------


async def check_quarantined_run(row: QuarantinedSlot, http: HttpClient) -> None:
    """Ask a server for the status of a run that it may still execute, and release the slot if the run has ended."""
    try:
        adapter = await asyncio.to_thread(_adapter_of_run, row)
        if adapter is None or row.remote_id is None or adapter.description.mode not in ("async", "auto"):
            return
        run = RunDetails(row.job_id, row.attempt, payload=None, deadline_s=_STATUS_DEADLINE_S)
        outcome = await ServerSession(adapter, http).status(run, row.remote_id)
        await asyncio.to_thread(_apply_status, row, outcome)
    except (Misconfigured, SlotkeeperError) as error:
        log.warning("quarantined_run_not_checked", job_id=row.job_id, error=str(error))


def _adapter_of_run(row: QuarantinedSlot) -> ServerAdapter | None:
    """Raises Misconfigured, DatabaseUnavailable, UnknownModel."""
    job = dispatcher().store.get(row.job_id)
    server = dispatcher().catalog.get().servers.get(row.server)
    url = None if server is None else server.endpoints.get(row.model)
    if job is None or url is None:
        return None
    return adapter_for(url, dispatcher().catalog.resolve(row.model), description_of_attempt(job, row))


def _apply_status(row: QuarantinedSlot, outcome: Outcome) -> None:
    if outcome.kind in _END_KINDS:
        quarantined_slots.release_run_slot(dispatcher(), row.job_id, row.attempt)
    elif outcome.kind is OutcomeKind.PENDING and not outcome.code:
        server_checks().note_running(row)


def description_of_attempt(job: Job, row: QuarantinedSlot) -> str | None:
    """Return the version of the description by which the run of a quarantined slot is asked.

    A later attempt may run on a server of another kind, and an ended job has none.
    """
    own = job.described_by if job.attempt == row.attempt else None
    return own or dispatcher().catalog.get().find_description(row.server, row.model)
