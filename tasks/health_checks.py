"""Rounds: servers are asked for their health, each once at a time, and every answer is there as soon as it has come.

A server that accepts a call and never answers costs a thread until the call times out; those that did so last time
share a part of the threads, so that they never hold up the others.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

import structlog

from routing.dispatch.outcome import OutcomeKind
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
from slotkeeper.registry.values import Server as ServerRow
from slotkeeper.urls import refuses_connections
from tasks.server_adapters import Misconfigured, adapter_for, health_adapter
from tasks.servers import Call, HealthKind, ServerSession, call_server
from tasks.services import database, dispatcher

MAX_CONCURRENT = 256  # servers asked at once
MAX_SLOW = 160  # of them, those that were slow last time
_SLOW_S = 1.0

PendingReports = dict[str, "Future[ServerReport]"]


class HealthChecks:
    """Asks by `ask`, in threads of its own that end with their calls."""

    def __init__(self, check: Callable[[Server], ServerReport]) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._pending: PendingReports = {}
        self._waiting: deque[Server] = deque()
        self._slow: set[str] = set()
        self._running: set[str] = set()

    def start(self, servers: Iterable[Server]) -> PendingReports:
        """Ask these servers, unless that is under way; answers where the report of each will be."""
        wanted = [server for server in servers if server.endpoints]
        with self._lock:
            for server in wanted:
                if server.name not in self._pending:
                    self._pending[server.name] = Future()
                    self._waiting.append(server)
            pending = {server.name: self._pending[server.name] for server in wanted}
            started = self._take_next()
        self._start_threads(started)
        return pending

    def _start_threads(self, servers: Iterable[Server]) -> None:
        for server in servers:
            try:
                threading.Thread(target=self._check_servers, args=(server,), name="ask", daemon=True).start()
            except RuntimeError as error:  # The system has no thread left; the next round may have one.
                with self._lock:
                    self._running.discard(server.name)
                    future = self._pending.pop(server.name)
                future.set_exception(error)

    def _take_next(self) -> list[Server]:
        """Those that may be asked now; the lock is held."""
        started, kept = [], deque[Server]()
        slow = len(self._running & self._slow)
        while self._waiting and len(self._running) < MAX_CONCURRENT:
            server = self._waiting.popleft()
            if server.name in self._slow and slow >= MAX_SLOW:
                kept.append(server)
                continue
            slow += server.name in self._slow
            self._running.add(server.name)
            started.append(server)
        self._waiting.extendleft(reversed(kept))
        return started

    def _check_servers(self, server: Server | None) -> None:
        """Ask one server, then those that waited for a thread."""
        while server is not None:
            started_s = time.monotonic()
            try:
                report: ServerReport | Exception = self._check(server)
            except Exception as error:
                report = error
            with self._lock:
                (self._slow.add if time.monotonic() - started_s > _SLOW_S else self._slow.discard)(server.name)
                self._running.discard(server.name)
                future = self._pending.pop(server.name)
                started = self._take_next()
            server = started.pop() if started else None
            self._start_threads(started)
            future.set_exception(report) if isinstance(report, Exception) else future.set_result(report)


log = structlog.get_logger(__name__)
# How long a round waits for servers; what comes later is heeded by the next.
_REPORTS_LIMIT_S = 1.5
_BATCH_DELAY_S = 0.1
_STATUS_DEADLINE_S = 10.0  # for one question about a run
_REPORTS_WAIT_S = 3.0


@singleton
def _server_checks() -> ServerChecks:
    return ServerChecks(dispatcher())


def _servers_to_ask(servers: Iterable[ServerRow]) -> list[ServerRow]:
    """Leave out servers that are stopped or have `health.only_when_used`, and that run nothing.

    A health check counts as use where an endpoint sleeps, and is paid for, by its use.
    """
    found, catalog = list(servers), dispatcher().catalog.get()
    optional = {
        server.name for server in found if server.state != AdminState.ONLINE or _only_when_used(catalog, server)
    }
    if not optional:
        return found
    used = {job.server for job in dispatcher().store.list_running()} | quarantined_slots.servers_to_ask(dispatcher())
    return [server for server in found if server.name in used or server.name not in optional]


def _only_when_used(catalog: CatalogSnapshot, server: ServerRow) -> bool:
    adapter = health_adapter(catalog, server)
    health = None if adapter is None else adapter.description.health
    return health is not None and health.only_when_used


# -- asking servers --------------------------------------------------------------------------------------------


@singleton
def _health_checks() -> HealthChecks:
    return HealthChecks(_read_report)


def start_checks(servers: Iterable[ServerRow]) -> PendingReports:
    """Ask those of these servers that need to be asked; answers where the report of each will be."""
    return _health_checks().start(_servers_to_ask(servers))


_late_reports: PendingReports = {}


def reports_as_they_arrive(pending: PendingReports) -> Iterator[Mapping[str, ServerReport]]:
    """The reports of these servers, and those that came too late for the last round, some at a time."""
    for name in list(_late_reports):
        pending.setdefault(name, _late_reports.pop(name))
    until = time.monotonic() + _REPORTS_LIMIT_S
    while pending:
        done, _ = wait(pending.values(), max(until - time.monotonic(), 0), FIRST_COMPLETED)
        if not done:
            _late_reports.update(pending)
            return
        wait(pending.values(), _BATCH_DELAY_S)
        yield _take_arrived(pending)


def _read_reports(servers: Iterable[ServerRow]) -> Mapping[str, ServerReport]:
    """Ask all these servers for their health; those that take long are left out."""
    pending = start_checks(servers)
    wait(pending.values(), _REPORTS_WAIT_S)
    return _take_arrived(pending)


def _take_arrived(pending: PendingReports) -> Mapping[str, ServerReport]:
    """Take out the reports that are there; a server that could not be asked at all has none."""
    arrived = {name: pending.pop(name) for name, report in list(pending.items()) if report.done()}
    for name, report in arrived.items():
        if (error := report.exception()) is not None:
            log.error("server_not_asked", server=name, error=repr(error))
    return {name: report.result() for name, report in arrived.items() if report.exception() is None}


def _read_report(server: ServerRow) -> ServerReport:
    asked_ms = now_ms()
    adapter = health_adapter(dispatcher().catalog.get(), server)
    if adapter is None:
        return ServerReport(up=True, asked_ms=asked_ms, endpoints=server.endpoints)
    health = call_server(adapter, ServerSession.health)
    has_quarantine = server.name in _servers_with_quarantine and health.kind in (HealthKind.DOWN, HealthKind.UNKNOWN)
    return ServerReport(
        up=health.kind is not HealthKind.DOWN,
        active_jobs=health.active_jobs if health.running_count else None,
        job_ids=health.job_ids,
        asked_ms=asked_ms,
        endpoints=server.endpoints,
        connection_refused=has_quarantine and refuses_connections(adapter.endpoint),
        process_started=health.started,
        why_down=health.message if health.kind is HealthKind.DOWN and health.answered else "",
        is_silent=health.is_silent,
        is_idle=health.is_idle,
    )


_servers_with_quarantine: frozenset[str] = frozenset()
"""Servers with quarantined slots, when servers were last asked."""


def note_servers_with_quarantine(names: Iterable[str]) -> None:
    """Note which servers have quarantined slots: their connections are looked at more closely."""
    global _servers_with_quarantine
    _servers_with_quarantine = frozenset(names)


def _check_quarantined_runs() -> None:
    """Ask for the status of runs whose slots are withheld, where their servers have given them ids."""
    for row in quarantine.list_all(database()):
        if row.remote_id is not None and (row.job_id, row.attempt) not in _runs_being_checked:
            _runs_being_checked.add((row.job_id, row.attempt))
            threading.Thread(target=_check_quarantined_run, args=(row,), name="ask", daemon=True).start()


_runs_being_checked: set[tuple[str, int]] = set()
_END_KINDS = frozenset(
    {OutcomeKind.DONE, OutcomeKind.FAILED, OutcomeKind.RETRY, OutcomeKind.CANCELED, OutcomeKind.LOST}
)


def _description_of_attempt(job: Job, row: QuarantinedSlot) -> str | None:
    """Return the version of the description by which the run of a quarantined slot is asked.

    A later attempt may run on a server of another kind, and an ended one no longer has its own.
    """
    own = job.described_by if job.attempt == row.attempt else None
    return own or dispatcher().catalog.get().find_description(row.server, row.model)


def _check_quarantined_run(row: QuarantinedSlot) -> None:
    try:
        job = dispatcher().store.get(row.job_id)
        server = dispatcher().catalog.get().servers.get(row.server)
        url = None if server is None else server.endpoints.get(row.model)
        if job is None or url is None or row.remote_id is None:
            return
        adapter = adapter_for(url, dispatcher().catalog.resolve(row.model), _description_of_attempt(job, row))
        if adapter.description.mode in ("async", "auto"):
            call = Call(row.job_id, row.attempt, payload=None, deadline_s=_STATUS_DEADLINE_S)
            outcome = call_server(adapter, partial(ServerSession.status, call=call, remote_id=row.remote_id))
            if outcome.kind in _END_KINDS:
                quarantined_slots.release_run_slot(dispatcher(), row.job_id, row.attempt)
            elif outcome.kind is OutcomeKind.PENDING and not outcome.code:
                _server_checks().note_running(row)
    except (Misconfigured, SlotkeeperError) as error:
        log.warning("run_not_asked_about", job_id=row.job_id, error=str(error))
    finally:
        _runs_being_checked.discard((row.job_id, row.attempt))
