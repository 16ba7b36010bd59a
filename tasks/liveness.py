"""Each process says that it lives: to this host by a file that it touches, and to all by a line in Redis.

The file needs nothing but the process itself, so a probe that looks at it restarts nobody because Redis is away.
"""

import atexit
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import structlog
from redis.exceptions import RedisError

from routing.queries.process_list import REPORT_EVERY_S, ProcessList
from slotkeeper import logs
from slotkeeper.clock import now_ms
from slotkeeper.errors import SlotkeeperError
from slotkeeper.state_folder import make_private_folder
from tasks import process_files
from tasks.security.keyring import fingerprints

log = structlog.get_logger(__name__)

ROLES = ("web", "worker", "maintenance", "webhooks", "relay", "beat")

Facts = Callable[[], dict[str, Any]]


class ProcessReport:
    """The sign of life of one process, in a thread of its own.  `facts`: what else it says of itself each time."""

    def __init__(self, role: str, processes: ProcessList, facts: Facts) -> None:
        self.role, self.host = role, socket.gethostname()
        self.name = f"{role}@{self.host}/{os.getpid()}"
        self._processes, self._facts = processes, facts
        self._constant_facts = {
            "role": role,
            "host": self.host,
            "pid": os.getpid(),
            "version": _version(),
            "since_ms": now_ms(),
            "secret": fingerprints()[0],
        }
        self._ended = threading.Event()
        self._file: Path | None = None

    def start_reporting(self) -> None:
        """Say it from now on, until this process ends."""
        self._file = process_files.own_file(self.role)
        process_files.remove_old(self._file.parent)
        threading.Thread(target=self._run, name="alive", daemon=True).start()
        atexit.register(self.end)

    def end(self) -> None:
        """This process ends, and is not to be missed."""
        if self._ended.is_set():
            return
        self._ended.set()
        with suppress(OSError):
            if self._file is not None:
                self._file.unlink(missing_ok=True)
                self._file.parent.rmdir()  # Only the last one can.
        with suppress(RedisError):
            self._processes.remove(self.name)

    def report(self) -> None:
        """Once."""
        with suppress(OSError, SlotkeeperError):
            if self._file is not None:
                make_private_folder(self._file.parent)  # Whoever left last has taken it away.
                self._file.touch(mode=0o600)
        try:
            dropped = {"log_lines_dropped": logs.count_dropped_lines()}
            self._processes.report(self.name, self._constant_facts | dropped | self._facts())
        except RedisError as error:
            log.debug("heartbeat_not_written", error=str(error))
        except Exception:  # What it says of itself is wrong; it lives all the same.
            log.exception("process_report_failed")

    def _run(self) -> None:
        while not self._ended.is_set():
            self.report()
            self._ended.wait(REPORT_EVERY_S)


def _version() -> str:
    try:
        return version("slotkeeper")
    except PackageNotFoundError:
        return "0"


def start_reporting(role: str, processes: ProcessList, facts: Facts = dict) -> ProcessReport:
    """Have this process say from now on that it lives."""
    report = ProcessReport(role, processes, facts)
    report.start_reporting()
    return report
