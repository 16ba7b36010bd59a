"""The reference server: configuration, start and graceful shutdown."""

import contextlib
import os
import re
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slotkeeper.serve import protocol_responses
from slotkeeper.serve.guard import HostGuard
from slotkeeper.serve.http_server import HttpServer
from slotkeeper.serve.journal import Journal
from slotkeeper.serve.protocol_routes import ProtocolRoutes
from slotkeeper.serve.result_push import Pusher
from slotkeeper.serve.run_executor import RunExecutor
from slotkeeper.serve.run_scheduler import ResultRetention, RunScheduler
from slotkeeper.serve.served_function import Function, TargetError, adapt, load, streams, takes_context

CANCEL_GRACE_S = 1.0  # after the grace time, for runs that observe the cancel
RESERVED = re.compile(r"/(health$|status(/|$)|cancel(/|$))")


class ServeError(Exception):
    """The server cannot start; the text is one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The settings of a server.  Raises ValueError for an invalid value."""

    slots: int = 1
    """Maximum number of runs at the same time."""
    asynchronous: bool = False
    """Answer with an id that the client polls, not with the result."""
    host: str = "127.0.0.1"
    port: int = 9001
    """0: any free port; `ReferenceServer.url` contains its number."""
    endpoint: str = "/generate"
    model: str | None = None
    """Name shown in /health; None: the name of the function."""
    max_direct_queue: int = 10
    """Maximum length of the direct queue."""
    memory: ResultRetention = field(default_factory=ResultRetention)
    """Limits for the ended runs that are kept."""
    max_body_bytes: int = 16 << 20
    allow_hosts: tuple[str, ...] = ()
    """Further host names that clients may use for the server; see slotkeeper/serve/guard.py."""
    push: bool = False
    """Obey X-Callback-Url.  Any client can then make the server POST to any address that it can reach."""
    journal: Path | None = None
    """A file that gets one JSON line per run."""
    grace_s: float = 10.0
    """How long a stopping server waits for processing runs, in seconds."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError("slots must be at least 1")
        if self.max_direct_queue < 0 or self.grace_s < 0:
            raise ValueError("max_direct_queue and grace_s must not be negative")
        if not 0 <= self.port <= 65535:
            raise ValueError("port must be between 0 and 65535")
        if not self.endpoint.startswith("/") or RESERVED.match(self.endpoint):
            raise ValueError("endpoint must start with / and be none of /health, /status, /cancel")


class ReferenceServer:
    """A server in this process that offers a function by the slot protocol.

    Raises ServeError if it cannot bind the address or open the journal.

    `with ReferenceServer(function, ServeConfig(port=0)) as server: requests.post(server.url + "/generate", json={})`
    """

    def __init__(self, function: Function, config: ServeConfig) -> None:
        self.config = config
        self.model_name = config.model or str(getattr(function, "__name__", type(function).__name__))
        self.engine = RunScheduler(config.slots, config.max_direct_queue, config.memory)
        self._guard = HostGuard(config.host, config.allow_hosts)
        self._http = self._listen()
        self._journal = _open_journal(config.journal)
        self._pusher = Pusher() if config.push else None
        self._executor = RunExecutor(self.engine, adapt(function), self._journal, self._pusher)
        self._routes = ProtocolRoutes(
            self.engine,
            self._executor,
            endpoint=config.endpoint,
            asynchronous=config.asynchronous,
            push=config.push,
            cancelable=takes_context(function) or streams(function),
            streams=streams(function),
            model=self.model_name,
        )

    @property
    def url(self) -> str:
        """The base URL, without the endpoint and without a slash at the end."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self._http.port}"

    def start(self) -> None:
        self._http.start()

    def stop(self, grace_s: float | None = None) -> None:
        """Shut down: start no more runs, wait for the processing ones, cancel those that are left, and close."""
        self.engine.close()
        if not self._wait_until_drained(self.config.grace_s if grace_s is None else grace_s):
            self.engine.cancel_all()
            self._wait_until_drained(CANCEL_GRACE_S)
        self._http.close()
        self._executor.close()
        if self._journal and self.engine.wait_idle(0):
            self._journal.close()

    def __enter__(self) -> "ReferenceServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _listen(self) -> HttpServer:
        config = self.config
        try:
            return HttpServer(
                config.host,
                config.port,
                lambda request: self._guard.refusal(request) or self._routes.handle(request),
                protocol_responses.refused,
                config.max_body_bytes,
            )
        except OSError as error:
            raise ServeError(
                f"cannot listen on port {config.port} of {config.host}: {error.strerror or error}"
            ) from error

    def _wait_until_drained(self, timeout_s: float) -> bool:
        """Wait until runs have ended and responses and pushes are sent.  Returns False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s

        def remaining_s() -> float:
            return max(0.0, deadline - time.monotonic())

        return (
            self.engine.wait_idle(remaining_s())
            and self._http.wait_answered(remaining_s())
            and (self._pusher is None or self._pusher.wait(remaining_s()))
        )


def serve(target: str | Function, config: ServeConfig, say: Callable[[str], Any] = print) -> None:
    """Serve a function until SIGTERM or SIGINT.  A second signal ends the process at once.

    `target` is a function or its name, `package.module:function`.  `say` is called with one line, the server's address.
    Raises ServeError if the server cannot start.
    """
    try:
        function = load(target) if isinstance(target, str) else target
    except TargetError as error:
        raise ServeError(str(error)) from error
    server = ReferenceServer(function, config)
    with _signal_socket() as events:
        server.start()
        mode = "async" if config.asynchronous else "sync"
        slots = f"{config.slots} slot{'s' * (config.slots != 1)}"
        say(f"{server.model_name}: {slots}, {mode}, at {server.url}{config.endpoint}")
        events.recv(1)
        _stop_unless_signaled(server, events)


def _stop_unless_signaled(server: ReferenceServer, events: socket.socket) -> None:
    """Stop the server in another thread, so that this thread can receive a second signal.  Exit if one arrives."""
    stopped, finished = socket.socketpair()

    def stop() -> None:
        server.stop()
        finished.close()

    threading.Thread(target=stop, name="stop", daemon=True).start()
    with selectors.DefaultSelector() as ready, stopped:
        ready.register(stopped, selectors.EVENT_READ)
        ready.register(events, selectors.EVENT_READ)
        if any(key.fileobj is events for key, _ in ready.select()):
            os._exit(128 + events.recv(1)[0])


@contextlib.contextmanager
def _signal_socket() -> Iterator[socket.socket]:
    """Yield a socket from which each SIGTERM or SIGINT can be read as one byte, the signal's number.

    The kernel may deliver a signal to any thread, but Python runs handlers only in the main thread, and only after that
    thread wakes up.  The byte is written immediately, whichever thread receives the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ServeError("serve() handles signals and needs the main thread; use ReferenceServer elsewhere")
    events, writer = socket.socketpair()
    writer.setblocking(False)
    with events, writer:
        previous_fd = signal.set_wakeup_fd(writer.fileno())
        previous_handlers = {
            number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield events
        finally:
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)


def _open_journal(path: Path | None) -> Journal | None:
    try:
        return Journal(path) if path else None
    except OSError as error:
        raise ServeError(f"cannot write the journal {path}: {error.strerror}") from error
