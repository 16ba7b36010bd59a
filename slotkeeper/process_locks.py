"""File locks that prove to other processes of this machine that a worker has died.

A worker locks a file and writes the file's inode and the id of the kernel's boot into it.  A process that finds this
text in that inode, under that kernel, and gets the lock, has proof that the worker's process has ended: no thread of it
does anything more.  A worker that is stopped or slow keeps its lock; a child with the descriptor keeps it longer.

A file proves nothing if another kernel wrote it (a shared folder, or before a reboot), if it is a copy, or incomplete.
Without a boot id (macOS), or where the file system keeps no locks, nothing is locked, and leases expire by time.  The
folder is private to its owner.
"""

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import structlog

from slotkeeper.errors import SlotkeeperError
from slotkeeper.process import read_boot_id
from slotkeeper.state_folder import is_private_folder, is_state_folder, make_private_folder

log = structlog.get_logger(__name__)

_KEEP_S = 86_400


class ProcessLocks:
    """The locks in one folder of the state folder, each under a name that is never used twice."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}  # plain descriptors: only `release` closes them

    def acquire(self, name: str) -> None:
        """Lock `name` until this process ends.  Raises OSError or StateFolderNotPrivate if it cannot."""
        home = self._folder.parent
        if not is_state_folder(home) and not is_private_folder(home):
            raise FileNotFoundError(errno.ENOENT, "There is no state folder")
        if not read_boot_id():
            raise OSError(errno.ENOTSUP, "The kernel has no boot id")
        make_private_folder(self._folder)
        self._delete_old_files()
        path = self._path(name)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_locked(path):  # Otherwise a living worker would be taken for dead.
                raise OSError(errno.ENOLCK, "Its file system does not keep locks")
            text = _proof(file, name)
            if os.write(file, text) != len(text):  # An incomplete text proves nothing.
                raise OSError(errno.ENOSPC, "There is no room for it")
        except BaseException:
            os.close(file)
            self.remove(name)
            raise
        self._held[name] = file

    def try_acquire(self, name: str) -> None:
        """Lock `name` if that is possible here; otherwise its leases expire by time, as on another machine."""
        try:
            self.acquire(name)
        except (OSError, SlotkeeperError) as error:
            log.warning("end_not_provable", because=str(error))

    def release(self, name: str) -> None:
        """Release `name` in a process that goes on."""
        if (file := self._held.pop(name, None)) is not None:
            self.remove(name)
            os.close(file)

    def find_dead(self) -> list[str]:
        """Return the names whose processes are proved dead."""
        return [name for path in self._list_files() if (name := self._find_dead(path)) is not None]

    def remove(self, name: str) -> None:
        """Remove a dead name, after its leases were seized."""
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _find_dead(self, path: Path) -> str | None:
        """Return the name whose death this file proves, if it does."""
        with suppress(OSError, ValueError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                name, text = _read_name(file)
                if path == self._path(name) and text == _proof(file, name):
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return name
            finally:
                os.close(file)
        return None

    def _path(self, name: str) -> Path:
        return self._folder / quote(name, safe="")

    def _list_files(self) -> list[Path]:
        try:
            return sorted(self._folder.iterdir())
        except OSError:
            return []

    def _delete_old_files(self) -> None:
        """Delete old files that are not locked, also where no maintenance runs."""
        for path in self._list_files():
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - _KEEP_S and not _is_locked(path):
                    path.unlink()


def _proof(file: int, name: str) -> bytes:
    """Return the text that names this inode; no other file has its number while the process lives."""
    found = os.fstat(file)
    return f"{read_boot_id()} {found.st_dev} {found.st_ino} {name}\n".encode()


def _read_name(file: int) -> tuple[str, bytes]:
    """Return the name in a file, and its whole text.  Raises ValueError if it holds none."""
    text = os.read(file, 4096)
    _, _, _, name = text.decode().split(" ", 3)
    return name.removesuffix("\n"), text


def _is_locked(path: Path) -> bool:
    """Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(file)
