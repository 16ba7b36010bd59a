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

MOST = 256  # servers asked at once
MOST_SLOW = 160  # of them, those that were slow last time
_SLOW_S = 1.0

PendingReports = dict[str, "Future[ServerReport]"]


class HealthChecks:
    """Asks by `ask`, in threads of its own that end with their calls."""

    def __init__(self, ask: Callable[[Server], ServerReport]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._asked: PendingReports = {}
        self._waiting: deque[Server] = deque()
        self._slow: set[str] = set()
        self._under_way: set[str] = set()

    def start(self, servers: Iterable[Server]) -> PendingReports:
        """Ask these servers, unless that is under way; answers where the report of each will be."""
        wanted = [server for server in servers if server.endpoints]
        with self._lock:
            for server in wanted:
                if server.name not in self._asked:
                    self._asked[server.name] = Future()
                    self._waiting.append(server)
            found = {server.name: self._asked[server.name] for server in wanted}
            begun = self._next()
        self._begin(begun)
        return found

    def _begin(self, servers: Iterable[Server]) -> None:
        for server in servers:
            try:
                threading.Thread(target=self._carry_out, args=(server,), name="ask", daemon=True).start()
            except RuntimeError as error:  # The system has no thread left; the next round may have one.
                with self._lock:
                    self._under_way.discard(server.name)
                    future = self._asked.pop(server.name)
                future.set_exception(error)

    def _next(self) -> list[Server]:
        """Those that may be asked now; the lock is held."""
        begun, kept = [], deque[Server]()
        slow = len(self._under_way & self._slow)
        while self._waiting and len(self._under_way) < MOST:
            server = self._waiting.popleft()
            if server.name in self._slow and slow >= MOST_SLOW:
                kept.append(server)
                continue
            slow += server.name in self._slow
            self._under_way.add(server.name)
            begun.append(server)
        self._waiting.extendleft(reversed(kept))
        return begun

    def _carry_out(self, server: Server | None) -> None:
        """Ask one server, then those that waited for a thread."""
        while server is not None:
            began = time.monotonic()
            try:
                report: ServerReport | Exception = self._ask(server)
            except Exception as error:
                report = error
            with self._lock:
                (self._slow.add if time.monotonic() - began > _SLOW_S else self._slow.discard)(server.name)
                self._under_way.discard(server.name)
                future = self._asked.pop(server.name)
                begun = self._next()
            server = begun.pop() if begun else None
            self._begin(begun)
            future.set_exception(report) if isinstance(report, Exception) else future.set_result(report)
