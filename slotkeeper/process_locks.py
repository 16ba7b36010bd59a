"""File locks with which other processes of this machine prove that a worker has died.

A worker locks a file and writes the file's inode and the id of the kernel's boot into it.  A process that finds this
text in that inode, under that kernel, and gets the lock, has proof that the worker's process has ended: no thread of it
does anything more.  A worker that is stopped or slow keeps its lock; a child with the descriptor keeps it longer.

A file proves nothing if another kernel wrote it (a shared folder, or before a reboot), if it is a copy, incomplete, or
owned by another user.  Without a `boot_id` (macOS), or where the file system keeps no locks, no lock is taken.
"""

import errno
import fcntl
import os
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import structlog

from slotkeeper.errors import SlotkeeperError
from slotkeeper.state_folder import is_private_folder, is_state_folder, make_private_folder

log = structlog.get_logger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_KEPT_S = 86_400
_OTHERS_WRITE = 0o022


class ProcessLocks:
    """The locks in one folder of the state folder, each under a name that is never used twice.

    boot: the file with the id of the kernel's boot.
    """

    def __init__(self, folder: Path, boot: Path = _BOOT) -> None:
        self._folder, self._boot = folder, boot
        self._held: dict[str, int] = {}  # plain descriptors: only `release` closes them
        self._stuck: set[str] = set()  # removed, although their files could not be deleted

    def acquire(self, name: str) -> None:
        """Lock `name` until this process ends.  Raises OSError or StateFolderNotPrivate if it cannot."""
        home = self._folder.parent
        if not is_state_folder(home) and not is_private_folder(home):
            raise FileNotFoundError(errno.ENOENT, "There is no state folder")
        make_private_folder(self._folder)
        self._sweep()
        path = self._path(name)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_locked(path):
                raise OSError(errno.ENOLCK, "Its file system does not keep locks")
            text = self._text(file, name)
            if os.write(file, text) != len(text):  # Last, since an incomplete text proves nothing.
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
        """Release `name`, which does nothing more, although this process goes on."""
        if (file := self._held.pop(name, None)) is not None:
            self.remove(name)
            os.close(file)

    def find_dead(self) -> list[str]:
        """Return the names whose processes are proved dead, without those that were removed."""
        proved = [name for path in self._files() if (name := self._proved(path)) is not None]
        return [name for name in proved if name not in self._stuck]

    def remove(self, name: str) -> None:
        """Remove a dead name, after its leases were seized."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError:
            self._stuck.add(name)

    def _proved(self, path: Path) -> str | None:
        """Return the name whose death this file proves, if it does."""
        with suppress(OSError, ValueError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                name, text = _name_in(file)
                if path == self._path(name) and text == self._text(file, name) and _is_ours(file):
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return name
            finally:
                os.close(file)
        return None

    def _text(self, file: int, name: str) -> bytes:
        """Return whether the text names this very inode; no other file has its number while the process lives."""
        found = os.fstat(file)
        return f"{self._kernel} {found.st_dev} {found.st_ino} {name}\n".encode()

    @cached_property
    def _kernel(self) -> str:
        """Which it is, and since which start.  Raises OSError."""
        return self._boot.read_text().strip()

    def _path(self, name: str) -> Path:
        return self._folder / quote(name, safe="")

    def _files(self) -> list[Path]:
        try:
            return sorted(self._folder.iterdir())
        except OSError:
            return []

    def _sweep(self) -> None:
        """Delete old files that are not locked, also where no maintenance runs."""
        for path in self._files():
            with suppress(OSError):
                if path.lstat().st_mtime < time.time() - _KEPT_S and not _is_locked(path):
                    path.unlink()


def _is_locked(path: Path) -> bool:
    """Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(file)


def _is_ours(file: int) -> bool:
    found = os.fstat(file)
    return found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE


def _name_in(file: int) -> tuple[str, bytes]:
    """Raises ValueError, OSError: there is none."""
    text = os.read(file, 4096)
    _, _, _, name = text.decode().split(" ", 3)
    return name.removesuffix("\n"), text
