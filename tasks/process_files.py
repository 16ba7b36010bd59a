"""The files that this host's processes touch while they run, for the supervisor and for liveness probes.

They are in the state folder, or, if there is none, in the system's temporary folder.  This module loads neither redis
nor SQLAlchemy, which would cost the supervisor 34 MiB.
"""

import hashlib
import os
import re
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from slotkeeper.config import StorageSettings
from slotkeeper.state_folder import is_state_folder, make_private_folder

_NAME = re.compile(r"[a-z]+\.\S+\.[0-9]+")
ROLES = ("web", "worker", "maintenance", "webhooks", "relay", "beat", "gateway")
STALE_S = 20.0
"""A process whose file is older than this, in seconds, does not run any more."""


def own_file(role: str) -> Path:
    """Return the path of this process's file."""
    private, shared = _folders()
    return (private if is_state_folder(private.parent) else shared) / _name(role, os.getpid())


def touch(file: Path) -> None:
    """Touch the file of this process.  Raises OSError, StateFolderNotPrivate: the folder is another user's."""
    make_private_folder(file.parent)  # The last process to end has removed it.
    if _is_own_folder(file.parent):
        file.touch(mode=0o600)


def live_pids(role: str) -> list[int]:
    """Return the process ids of this role's live processes on this host."""
    oldest = time.time() - STALE_S
    pids = []
    for folder in filter(_is_own_folder, _folders()):
        for file in folder.glob(_name(role, "*")):
            with suppress(OSError, ValueError):
                if file.stat().st_mtime > oldest:
                    pids.append(int(file.name.rpartition(".")[2]))
    return sorted(pids)


def liveness_problem(role: str) -> str | None:
    """Return why no process of this role is alive on this host; None: one is.  Reads only files, never Redis."""
    if live_pids(role):
        return None
    return f"No process {role} of this host has reported for {STALE_S:.0f} s that it is running."


def remove_stale(role: str, pid: int) -> None:
    """Remove the file that a killed process with the same id left.  Call it after starting this process.

    Times are not compared, because the clock may be set, above all when a machine starts.
    """
    for folder in filter(_is_own_folder, _folders()):
        with suppress(OSError):
            (folder / _name(role, pid)).unlink()


def has_started(role: str, pid: int) -> bool:
    """Return whether this process has begun to report."""
    return any((folder / _name(role, pid)).exists() for folder in filter(_is_own_folder, _folders()))


def remove_old(folder: Path) -> None:
    """Delete files that killed processes left, if the folder belongs to this user."""
    if not _is_own_folder(folder):
        return
    for file in folder.glob("*.*"):
        with suppress(OSError):
            if _NAME.fullmatch(file.name) and file.stat().st_mtime < time.time() - STALE_S:
                file.unlink()


def _is_own_folder(folder: Path) -> bool:
    """Return whether this is a folder of this user.  In the system's folder any user can create one, or a link."""
    with suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _name(role: str, pid: int | str) -> str:
    return f"{role}.{socket.gethostname()}.{pid}"


def _folders() -> tuple[Path, Path]:
    """Return this installation's folders: the one in the state folder, and the one for when there is none."""
    home = StorageSettings().home.absolute()
    suffix = hashlib.sha256(str(home).encode()).hexdigest()[:8]
    return home / "alive", Path(tempfile.gettempdir()) / f"slotkeeper-{os.geteuid()}-{suffix}"
