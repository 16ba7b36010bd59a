"""Keeps processes running, and stops them in order.  Signals are bytes on a socket: none is lost.

One loop in the main thread waits for signals, polls the children, and restarts those that have ended.  Slow functions
run in another thread, by `run_beside`.
"""

import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from app.up.errors import Stopped, UpError
from app.up.guardian import Guardian
from app.up.managed_process import ManagedProcess, Role

T = TypeVar("T")

_TICK_S = 0.02
_LOGS_EVERY_S = 5.0
_CLEANUP_S = 0.5  # for the thread of run_beside after a stop
_RESTARTS_A_MINUTE = 5
_LONGEST_BACKOFF_S = 8.0
_HASTE_AFTER_S = 1.0  # Some parents send a signal twice at once; that is one request to stop.
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDLED = (*_STOPPING, signal.SIGCHLD)


class Signals:
    """While entered: each SIGINT, SIGTERM, SIGHUP and SIGCHLD of this process can be read here.

    The system may deliver a signal to any thread, and a Python handler runs only when the main thread wakes up.  So a
    wait that has just begun would miss the signal.  The interpreter writes the byte at once, and that wakes the select
    of the main thread.
    """

    def __enter__(self) -> Self:
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        # With nohup the process must outlive its terminal.  A shell that starts it with & ignores SIGINT for it; it is
        # handled nevertheless, since a SIGINT is then sent to this process on purpose.
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [number for number in _HANDLED if not (nohup and number == signal.SIGHUP)]
        self._former_handlers = {number: signal.signal(number, lambda *_: None) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._read_end.close()
        self._write_end.close()

    def fileno(self) -> int:
        return self._read_end.fileno()

    def read(self) -> set[int]:
        """Return the signals that have arrived since the last call."""
        try:
            return set(self._read_end.recv(4096))
        except BlockingIOError:
            return set()


def restart_delay_s(restarts: Sequence[float], now_s: float) -> float:
    """Return the delay of the next restart, given the former ones: 0.5 s, doubled each time, at most five a minute."""
    recent = [at for at in restarts if now_s - at < 60]
    backoff = min(0.5 * 2 ** len(recent), _LONGEST_BACKOFF_S)
    if len(recent) < _RESTARTS_A_MINUTE:
        return backoff
    return max(backoff, recent[-_RESTARTS_A_MINUTE] + 60 - now_s)


def how_it_ended(status: int) -> str:
    """Return the exit status as text."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class Supervisor:
    """Runs at most one process for each role.  Use it only from the thread that entered `signals`."""

    def __init__(
        self,
        signals: Signals,
        guardian: Guardian,
        environment: Mapping[str, str],
        folder: Path,
        logs: Path,
        say: Callable[[str], None],
    ) -> None:
        self._signals, self._guardian = signals, guardian
        self._environment, self._folder, self._logs = environment, folder, logs
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._children: dict[str, ManagedProcess] = {}
        self._restarts: dict[str, deque[float]] = {}
        self._due: dict[str, float] = {}  # when to restart a role, monotonic
        self._logs_due = 0.0
        self._stopping = False
        self.restarts = False
        """False: a child that ends is an error.  True: it is restarted."""

    @property
    def running(self) -> list[str]:
        """The names of the roles that run."""
        return [name for name, child in self._children.items() if child.pid is not None]

    def start(self, role: Role) -> None:
        """Start a role.  Raises UpError if its process cannot be created."""
        child = ManagedProcess(role, self._environment, self._folder, self._logs / f"{role.name}.log")
        child.trim_log()
        self._children[role.name] = child
        self._restarts[role.name] = deque(maxlen=_RESTARTS_A_MINUTE)
        try:
            self._guardian.add(child.start())
        except OSError as error:
            raise UpError(f"{role.name} cannot be started: {error.strerror}.") from error

    def pid(self, role: Role) -> int | None:
        """Return the pid of a role; None: it does not run."""
        return self._children[role.name].pid

    def run_to_end(self, role: Role) -> None:
        """Start a role that ends by itself, and supervise all children until it ends.

        Raises UpError: it failed; Stopped.
        """
        self.start(role)
        while self._children[role.name].pid is not None:
            self._run_once(_TICK_S)

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Supervise the children until `condition` returns True.  Raises UpError after `timeout_s`; Stopped.

        what: the beginning of the error message, such as "The API did not become ready".
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise UpError(f"{what} within {timeout_s:.0f} s: see the logs in {self._logs}.")
            self._run_once(_TICK_S)

    def run_beside(self, function: Callable[[], T], on_stop: Callable[[], object] | None = None) -> T:
        """Run `function` in a thread, supervise the children meanwhile, and return its result or raise its exception.

        Raises Stopped after a stop signal.  Before that it calls `on_stop`, and gives the thread 0.5 s to clean up.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="beside", daemon=True).start()
        try:
            while not future.done():
                self._run_once(_TICK_S)
        except Stopped:
            if on_stop is not None:
                on_stop()
                wait([future], _CLEANUP_S)
            raise
        return future.result()

    def supervise(self) -> NoReturn:
        """Supervise the children until a stop signal.  Raises Stopped."""
        while True:
            self._run_once(min([_LOGS_EVERY_S, *(at - time.monotonic() for at in self._due.values())]))

    def stop(self) -> list[str]:
        """End all children, the lowest `Role.stop_order` first, and return the names of those that were killed.

        A second stop signal, more than a second after the first, kills all children but those with `Role.stops_last`.
        """
        began, self._stopping, killed = time.monotonic(), True, []
        self._due.clear()
        running = [child for child in self._children.values() if child.pid is not None]
        running.sort(key=lambda child: child.role.stop_order)
        kill_now = False
        for _, group in groupby(running, key=lambda child: child.role.stop_order):
            children = list(group)
            for child in children:
                child.terminate()
            since = time.monotonic()
            while remaining := [child for child in children if child.pid is not None]:
                if self._wait_for_stop_signal(_TICK_S) and time.monotonic() - began > _HASTE_AFTER_S:
                    kill_now = True
                self._poll_children()
                now = time.monotonic()
                for child in remaining:
                    late = now - since > child.role.stop_timeout_s
                    if child.pid is not None and (late or (kill_now and not child.role.stops_last)):
                        child.kill()
                        killed.append(child.role.name)
        self._selector.close()
        return sorted(set(killed))

    def _run_once(self, timeout_s: float) -> None:
        """Wait for a signal for `timeout_s` at most, then restart ended children and rotate logs.  Raises Stopped."""
        if self._wait_for_stop_signal(timeout_s):
            raise Stopped
        self._poll_children()
        self._start_due()
        self._trim_logs()

    def _wait_for_stop_signal(self, timeout_s: float) -> bool:
        """Wait for a signal, and return whether it requests a stop."""
        self._selector.select(max(timeout_s, 0))
        return bool(self._signals.read() & set(_STOPPING))

    def _poll_children(self) -> None:
        for name, child in self._children.items():
            pid = child.pid
            if pid is None:
                continue
            status = child.poll()
            if status is not None:
                self._guardian.drop(pid)
                self._on_exit(name, child, status)

    def _on_exit(self, name: str, child: ManagedProcess, status: int) -> None:
        if self._stopping or (child.role.exits and status == 0):
            return
        if not self.restarts:
            raise UpError(
                f"{name} ended ({how_it_ended(status)}) while it started: {child.last_log_line()} ({child.log})"
            )
        now = time.monotonic()
        delay_s = restart_delay_s(self._restarts[name], now)
        self._due[name] = now + delay_s
        self._say(f"{name} ended ({how_it_ended(status)}); it starts again in {delay_s:.1f} s.  Its log: {child.log}")

    def _start_due(self) -> None:
        now = time.monotonic()
        for name in [name for name, at in self._due.items() if at <= now]:
            del self._due[name]
            self._restarts[name].append(now)
            try:
                self._guardian.add(self._children[name].start())
            except OSError as error:
                delay_s = restart_delay_s(self._restarts[name], now)
                self._due[name] = now + delay_s
                self._say(f"{name} cannot be started ({error.strerror}); the next try is in {delay_s:.1f} s.")

    def _trim_logs(self) -> None:
        if time.monotonic() < self._logs_due:
            return
        self._logs_due = time.monotonic() + _LOGS_EVERY_S
        for child in self._children.values():
            child.trim_log()
