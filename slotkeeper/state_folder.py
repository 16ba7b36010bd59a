"""What lies in the state folder is for its owner only, whoever makes it first: it holds payloads and secrets.

Folders have the mode 0700, files 0600, whatever the umask.  A folder that is too open is closed if it is ours, and
refused if it is not: a shared folder such as /tmp is no state folder.  Nor is one that belongs to somebody else, who
could have put a secret of his own there: only root and whom the process runs as are believed.
"""

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slotkeeper.config import StorageSettings
from slotkeeper.errors import SlotkeeperError

_OTHERS = 0o077
_STRANGERS = 0o007
_ROOT = 0
# One of these in it shows that a folder is a state folder.
_MARKS = ("record.db", "secret", "up.lock", "flower-password", "valkey")


class StateFolderNotPrivate(SlotkeeperError):
    """Others can read the state folder, or have made it."""

    code = "home_not_private"


def make_private_folder(path: Path) -> Path:
    """Make the folder, or close it to others.  Raises HomeNotPrivate: that is not ours to do; OSError."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.stat()
    if found.st_uid not in (os.geteuid(), _ROOT):
        raise StateFolderNotPrivate(
            f"The folder {path.absolute()}, which shall hold payloads and secrets, belongs to another user (number "
            f"{found.st_uid}): set SLOTKEEPER_HOME to a folder of your own, or change its owner with chown."
        )
    if not found.st_mode & _OTHERS:
        return path
    if found.st_uid == os.geteuid() and _may_be_closed(path, found):
        path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
    elif found.st_mode & _STRANGERS:
        raise StateFolderNotPrivate(
            f"Others can read the folder {path.absolute()}, which shall hold payloads and secrets, and it is not "
            "Slotkeeper's own: set SLOTKEEPER_HOME to a folder that is, or close it with chmod 700."
        )
    return path


def restrict_state_folder(settings: StorageSettings) -> None:
    """Close the state folder to others, if there is one.  Raises HomeNotPrivate, OSError.

    An installation whose record, Redis and secret are elsewhere has none, whatever folder bears the name.
    """
    if is_state_folder(settings.home):
        make_private_folder(settings.home)


def is_state_folder(path: Path) -> bool:
    """Something lies in it that only Slotkeeper puts there."""
    return any((path / name).exists() for name in _MARKS)


def is_private_folder(path: Path) -> bool:
    """Whether it is a folder of ours that nobody else can enter."""
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
    """Make the file, empty, or close it to others if it is ours.  Raises OSError."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return
    restrict_to_owner(path)


def restrict_to_owner(path: Path) -> None:
    """Take others' rights to a file or folder away if it is ours and there.  A link is not followed."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode) and found.st_mode & _OTHERS and found.st_uid == os.geteuid():
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)


def read_or_create(path: Path, make: Callable[[], str]) -> str:
    """What stands in the file, which the first to ask makes; all who ask get the same.

    Raises HomeNotPrivate, OSError.
    """
    make_private_folder(path.parent)
    if not path.exists():
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")  # for its owner only
        with os.fdopen(handle, "w") as file:
            file.write(f"{make()}\n")
        with suppress(FileExistsError):
            os.link(draft, path)  # Only the first of several processes succeeds, with a whole text.
        os.unlink(draft)
    restrict_to_owner(path)
    return path.read_text().strip()
