"""A private Valkey for the simulator: in memory, on a Unix socket, and stopped when the simulation ends."""

import subprocess
import tempfile
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
from app.up.valkey_server import find_valkey

_START_S = 20.0
_MAX_FOLDER_LENGTH = 75  # characters; systems limit the path of a socket to 103 bytes or more


@contextmanager
def private_valkey() -> Iterator[Redis]:
    """Start an empty server and yield a client.  Raises UpError, and SimulationError if it does not start."""
    program = find_valkey()
    with Guardian() as guardian:
        folder = tempfile.TemporaryDirectory(prefix="slotkeeper-", dir=_short_folder())
        process = _launch(program, Path(folder.name))
        guardian.add(process.pid)
        try:
            with _connect(process, Path(folder.name)) as redis:
                # The connection stays open, so that the socket's folder can be removed at once.
                folder.cleanup()
                yield redis
        finally:
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
    command = [program, *(word for name, value in settings.items() for word in (f"--{name}", value))]
    devnull = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=devnull, stdout=devnull, stderr=devnull, start_new_session=True)


def _connect(process: "subprocess.Popen[bytes]", folder: Path) -> Redis:
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        try:
            redis = Redis(
                unix_socket_path=str(folder / "socket"),
                socket_timeout=None,  # This is the only client, and a slow machine is not an error.
                max_connections=1,
                retry=Retry(NoBackoff(), 0),
            )
            redis.ping()
            return redis
        except NotConnected:
            time.sleep(0.005)
    raise SimulationError(
        "The simulator's private Valkey did not start: see whether `slotkeeper up` runs on this machine."
    )


def _short_folder() -> str | None:
    """Return a folder with a path short enough for a socket; None: the default folder for temporary files."""
    return "/tmp" if len(tempfile.gettempdir().encode()) > _MAX_FOLDER_LENGTH else None
