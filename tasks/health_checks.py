"""Rounds: servers are asked for their health, each once at a time, and every answer is there as soon as it has come.

A server that accepts a call and never answers costs a thread until the call times out; those that did so last time
share a part of the threads, so that they never hold up the others.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from routing.maintenance.server_report import ServerReport
from slotkeeper.registry.values import Server

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
