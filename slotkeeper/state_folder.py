"""Keep the state folder and its files private to their owner, since they hold payloads and secrets.

Folders have the mode 0700, files 0600, whatever the umask.  A state folder with more permissive modes is restricted.
Any other folder, such as /tmp, is refused.  So is a folder of another user: it may contain that user's secret.
"""

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from slotkeeper.errors import SlotkeeperError

if TYPE_CHECKING:
    from slotkeeper.config import StorageSettings

_OTHERS = 0o077
_STRANGERS = 0o007
_ROOT = 0
# Each of these names marks a folder as a state folder.
_MARKS = ("record.db", "secret", "up.lock", "flower-password", "valkey")


class StateFolderNotPrivate(SlotkeeperError):
    """Others can read the state folder, or have made it."""

    code = "home_not_private"


def make_private_folder(path: Path) -> Path:
    """Create the folder, or restrict it to its owner.  Raises StateFolderNotPrivate, OSError."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.stat()
    if found.st_uid not in (os.geteuid(), _ROOT):
        raise StateFolderNotPrivate(
            f"The folder {path.absolute()}, which is to hold payloads and secrets, belongs to another user (number "
            f"{found.st_uid}): set SLOTKEEPER_HOME to a folder of your own, or change its owner with chown."
        )
    if not found.st_mode & _OTHERS:
        return path
    if found.st_uid == os.geteuid() and _may_be_closed(path, found):
        path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
    elif found.st_mode & _STRANGERS:
        raise StateFolderNotPrivate(
            f"Others can read the folder {path.absolute()}, which is to hold payloads and secrets, and it is not "
            "Slotkeeper's own: set SLOTKEEPER_HOME to a folder that is, or close it with chmod 700."
        )
    return path


def restrict_state_folder(settings: "StorageSettings") -> None:
    """Restrict the state folder to its owner, if there is one.  Raises StateFolderNotPrivate, OSError.

    An installation whose database, Redis and secret are elsewhere has none, even if a folder has the name.
    """
    if is_state_folder(settings.home):
        make_private_folder(settings.home)


def is_state_folder(path: Path) -> bool:
    """Return whether it contains a file that only Slotkeeper creates."""
    return any((path / name).exists() for name in _MARKS)


def is_private_folder(path: Path) -> bool:
    """Return whether this user owns the folder and no other can enter it."""
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _may_be_closed(path: Path, found: os.stat_result) -> bool:
    if found.st_mode & stat.S_ISVTX:
        return False
    return is_state_folder(path) or not any(path.iterdir())


def make_private_file(path: Path) -> None:
    """Create the file, empty, or restrict it to its owner if this user owns it.  Raises OSError."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return
    restrict_to_owner(path)


def restrict_to_owner(path: Path) -> None:
    """Remove the rights of others from a file or folder that this user owns.  Links are not followed."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode) and found.st_mode & _OTHERS and found.st_uid == os.geteuid():
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)


def read_or_create(path: Path, make: Callable[[], str]) -> str:
    """Return the content of the file; the first process creates it, and all get the same.

    Raises StateFolderNotPrivate, OSError.
    """
    make_private_folder(path.parent)
    if not path.exists():
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")  # readable by its owner only
        with os.fdopen(handle, "w") as file:
            file.write(f"{make()}\n")
        with suppress(FileExistsError):
            os.link(draft, path)  # Only the first of several processes succeeds, with a whole text.
        os.unlink(draft)
    restrict_to_owner(path)
    return path.read_text().strip()
