"""The files that this host's processes touch while they turn, so that whoever starts or probes them knows that they do.

They lie in the state folder, or without one in the system's folder for what is temporary.
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
STALE_S = 20.0
"""A file that was not touched for so long is that of a process which does not turn any more."""


def own_file(role: str) -> Path:
    """That of this process."""
    private, shared = _folders()
    return (private if is_state_folder(private.parent) else shared) / _name(role, os.getpid())


def touch(file: Path) -> None:
    """Touch the file of this process.  Raises OSError, StateFolderNotPrivate: the folder is another user's."""
    make_private_folder(file.parent)  # Whoever left last has taken it away.
    if _is_own_folder(file.parent):
        file.touch(mode=0o600)


def live_pids(role: str) -> list[int]:
    """The process numbers of this role, on this host, that turn."""
    oldest = time.time() - STALE_S
    found = []
    for folder in filter(_is_own_folder, _folders()):
        for file in folder.glob(_name(role, "*")):
            with suppress(OSError, ValueError):
                if file.stat().st_mtime > oldest:
                    found.append(int(file.name.rpartition(".")[2]))
    return sorted(found)


def remove_stale(role: str, pid: int) -> None:
    """Take away what another process of this number left that was killed, for whoever has just started this one.

    Times are not compared: clocks are set, most of all when a machine starts.
    """
    for folder in filter(_is_own_folder, _folders()):
        with suppress(OSError):
            (folder / _name(role, pid)).unlink()


def has_started(role: str, pid: int) -> bool:
    """Whether this process has come to its work."""
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
    """Whether it is a folder of this user.  In the system's folder anybody may put a link, or a folder, of its name."""
    with suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def _name(role: str, pid: int | str) -> str:
    return f"{role}.{socket.gethostname()}.{pid}"


def _folders() -> tuple[Path, Path]:
    """Of this installation: in the state folder, and without one in the system's."""
    home = StorageSettings().home.absolute()
    suffix = hashlib.sha256(str(home).encode()).hexdigest()[:8]
    return home / "alive", Path(tempfile.gettempdir()) / f"slotkeeper-{os.geteuid()}-{suffix}"
