"""A Valkey of the simulator's own: in memory, on a Unix socket, and gone with the simulation, however that ends."""

import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NotConnected
from redis.retry import Retry

from app.simulate.scenario import SimulationError
from app.up.guardian import Guardian
from app.up.signals import STOPPING
from app.up.valkey_server import find_valkey

_START_S = 20.0
_LONGEST_FOLDER = 75  # of the 103 bytes and more that a system takes for the path of a socket


@contextmanager
def private_valkey() -> Iterator[Redis]:
    """A client of a new, empty server.  Raises UpError if there is no program, Wrong if it does not start."""
    program = find_valkey()
    with Guardian() as guardian:
        with _in_peace():
            folder = tempfile.TemporaryDirectory(prefix="slotkeeper-", dir=_short_folder())
            process = _launch(program, Path(folder.name))
            guardian.add(process.pid)
        try:
            with _connected(process, Path(folder.name)) as redis:
                # One connection is all that is needed, so nothing is left on disk from here on.
                folder.cleanup()
                yield redis
        finally:
            with _in_peace():
                process.kill()
                process.wait()
                guardian.drop(process.pid)
                folder.cleanup()


def _launch(program: str, folder: Path) -> "subprocess.Popen[bytes]":
    settings = {
        "port": "0",
        "unixsocket": str(folder / "socket"),
        "unixsocketperm": "700",
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
    }
    words = [program, *(word for name, value in settings.items() for word in (f"--{name}", value))]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def _connected(process: "subprocess.Popen[bytes]", folder: Path) -> Redis:
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        try:
            redis = Redis(
                unix_socket_path=str(folder / "socket"),
                socket_timeout=None,  # Nobody else is served, and a slow machine is no error.
                single_connection_client=True,
                retry=Retry(NoBackoff(), 0),
            )
            redis.ping()
            return redis
        except NotConnected:
            time.sleep(0.005)
    raise SimulationError("The simulator's own Valkey did not start: see whether `slotkeeper up` runs on this machine.")


def _short_folder() -> str | None:
    """None: the usual one for temporary files."""
    return "/tmp" if len(tempfile.gettempdir().encode()) > _LONGEST_FOLDER else None


@contextmanager
def _in_peace() -> Iterator[None]:
    """A signal that asks to stop is heard when this is over, so that nothing stays half begun."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in (*STOPPING, signal.SIGALRM)}  # by which it may come again
    for number in before:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in heard[:1]:
        signal.raise_signal(late)
