"""The folder that holds all state of an installation on one machine."""

import fcntl
import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from app.up.errors import UpError
from routing.config import VALKEY_PASSWORD_FILE, VALKEY_PORT_FILE
from slotkeeper.state_folder import (
    StateFolderNotPrivate,
    make_private_file,
    make_private_folder,
    read_or_create,
)

URL_FILE = "url"
"""In the state folder: where this machine reaches the API."""
_LEAST_FREE_MB = 32


class InstallationFolder:
    """While entered, holds the lock of the state folder.  Raises UpError: it cannot be used, or is locked.

    The lock is released when this process ends for any reason.  The file only has the id of the process, for messages.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.logs = self.path / "logs"

    def __enter__(self) -> Self:
        try:
            self._prepare()
            make_private_file(self.path / "up.lock")
            self._lock = open(self.path / "up.lock", "a+")
        except StateFolderNotPrivate as error:
            raise UpError(error.detail) from error
        except OSError as error:
            raise UpError(
                f"The state folder {self.path} cannot be used ({error.strerror}): set SLOTKEEPER_HOME to one that can."
            ) from error
        try:
            self._take_lock()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def _prepare(self) -> None:
        make_private_folder(self.path)
        for folder in (self.logs, self.path / "valkey"):
            folder.mkdir(mode=0o700, exist_ok=True)
        free_mb = shutil.disk_usage(self.path).free >> 20
        if free_mb < _LEAST_FREE_MB:
            raise UpError(
                f"Only {free_mb} MB are free in the state folder {self.path}: "
                "make room, or set SLOTKEEPER_HOME to another folder."
            )

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            raise UpError(
                f"Another `slotkeeper up` (pid {holder}) runs on {self.path}: "
                "stop it, or set SLOTKEEPER_HOME to another folder."
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()


def flower_password(home: Path) -> str:
    """Return Flower's password, which is stored in `home`; the first call creates it."""
    return read_or_create(home / "flower-password", lambda: secrets.token_urlsafe(18))


def redis_password(home: Path) -> str:
    """Return the embedded Valkey's password, which all processes of this machine read in `home` (routing.config)."""
    return read_or_create(home / VALKEY_PASSWORD_FILE, lambda: secrets.token_urlsafe(32))


def write_addresses(home: Path, url: str, redis_port: int | None) -> None:
    """Store the addresses of the API and the embedded Valkey, for commands that know only the state folder.

    Raises OSError.
    """
    files = {URL_FILE: url} | ({} if redis_port is None else {VALKEY_PORT_FILE: str(redis_port)})
    for name, text in files.items():
        make_private_file(home / name)
        (home / name).write_text(f"{text}\n")
