"""A process whose end others on its machine can prove at once: it holds a lock that only its kernel takes away.

It writes, into a file that it has locked, which file of which kernel that is.  So whoever reads this in that very
file, under that very kernel, and gets the lock, knows that the process has ended, however that came: none of its
threads will do anything more.  One that is stopped or slow holds its lock; a child that has its descriptors holds it
for longer.

Nothing is proved by what another kernel wrote, as on a folder that machines share, or one before this machine was
started again; by a copy; by what is not ours, or was not written to its end.  Where there is no `boot_id`, as on
macOS, or the file system keeps no locks, no process begins.
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
    """Of processes, or what else has a name that nobody had before, in a folder of the state folder.

    `boot`: the file that says which kernel this is, and since which start.
    """

    def __init__(self, folder: Path, boot: Path = _BOOT) -> None:
        self._folder, self._boot = folder, boot
        self._held: dict[str, int] = {}  # bare numbers: nobody but `end` closes them
        self._stuck: set[str] = set()  # forgotten, though their files stay

    def acquire(self, name: str) -> None:
        """From now on the end of this process proves the end of `name`.  Raises OSError, HomeNotPrivate: it cannot."""
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
            if os.write(file, text) != len(text):  # The last that can fail: a part of it proves nothing.
                raise OSError(errno.ENOSPC, "There is no room for it")
        except BaseException:
            os.close(file)
            self.remove(name)
            raise
        self._held[name] = file

    def try_acquire(self, name: str) -> None:
        """Begin, if that is possible here: else the leases of `name` end by their own time, as on another machine."""
        try:
            self.acquire(name)
        except (OSError, SlotkeeperError) as error:
            log.warning("end_not_provable", because=str(error))

    def release(self, name: str) -> None:
        """`name` does nothing more, though this process lives: there is nothing to prove."""
        if (file := self._held.pop(name, None)) is not None:
            self.remove(name)
            os.close(file)

    def find_dead(self) -> list[str]:
        """All that are proved to have ended, and are not forgotten."""
        proved = [name for path in self._files() if (name := self._proved(path)) is not None]
        return [name for name in proved if name not in self._stuck]

    def remove(self, name: str) -> None:
        """What had to be done when it ended is done."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError:
            self._stuck.add(name)

    def _proved(self, path: Path) -> str | None:
        """Whose end this file proves."""
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
        """While its process lives no other file has this number, so that what says so of itself is the locked one."""
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
        """Take away what nobody else has, where no maintenance looks: what proves nothing, or is of no use any more."""
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
