"""Liveness and readiness of the processes.

Each process reports that it is alive: on its host by a file that it touches, and to all hosts by an entry in Redis.
The file depends on no other system, so that an outage of Redis makes no liveness probe restart a process.
"""

import atexit
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from redis.exceptions import RedisError

from routing.config import RoutingSettings
from routing.maintenance import task_runs
from routing.queries.process_list import REPORT_EVERY_S, Process, ProcessList
from routing.scripts import make_scripts
from slotkeeper import logs
from slotkeeper.clock import now_ms
from slotkeeper.errors import SlotkeeperError
from slotkeeper.process import package_version
from slotkeeper.redis.connections import connect
from slotkeeper.redis.keys import Keys
from slotkeeper.redis.scripts import Scripts
from tasks import process_files
from tasks.periods import PERIODS_S
from tasks.security.keyring import fingerprints

log = structlog.get_logger(__name__)


Facts = Callable[[], dict[str, Any]]


class ProcessReport:
    """Reports from a thread that this process is alive.  `facts`: called each time, returns further fields."""

    def __init__(self, role: str, processes: ProcessList, facts: Facts) -> None:
        self.role, self.host = role, socket.gethostname()
        self.name = f"{role}@{self.host}/{os.getpid()}"
        self._processes, self._facts = processes, facts
        self._constant_facts = {
            "role": role,
            "host": self.host,
            "pid": os.getpid(),
            "version": package_version(),
            "since_ms": now_ms(),
            "secret": fingerprints()[0],
        }
        self._ended = threading.Event()
        self._file: Path | None = None

    def start_reporting(self) -> None:
        """Start a thread that reports until this process ends."""
        self._file = process_files.own_file(self.role)
        process_files.remove_old(self._file.parent)
        threading.Thread(target=self._run, name="liveness", daemon=True).start()
        atexit.register(self.end)

    def end(self) -> None:
        """Stop reporting, and remove the file and the entry: this process ends as it should."""
        if self._ended.is_set():
            return
        self._ended.set()
        with suppress(OSError):
            if self._file is not None:
                self._file.unlink(missing_ok=True)
                self._file.parent.rmdir()  # It fails until the host's last process ends.
        with suppress(RedisError):
            self._processes.remove(self.name)

    def report(self) -> None:
        """Touch the file and write the entry once."""
        with suppress(OSError, SlotkeeperError):
            if self._file is not None:
                process_files.touch(self._file)
        try:
            dropped = {"log_lines_dropped": logs.count_dropped_lines()}
            self._processes.report(self.name, self._constant_facts | dropped | self._facts())
        except RedisError as error:
            log.debug("heartbeat_not_written", error=str(error))
        except Exception:  # `facts` failed, but the process is alive: go on reporting.
            log.exception("process_report_failed")

    def _run(self) -> None:
        while not self._ended.is_set():
            self.report()
            self._ended.wait(REPORT_EVERY_S)


def start_reporting(role: str, processes: ProcessList, facts: Facts = dict) -> ProcessReport:
    """Start to report that this process is alive."""
    report = ProcessReport(role, processes, facts)
    report.start_reporting()
    return report


_MAX_CANARY_AGE_MS = 20_000
_MAX_FREQUENT_PERIOD_S = 10.0  # Less frequent tasks may not have run since maintenance was restarted.


def readiness_problem(role: str) -> str | None:
    """Return why the processes of this role on this host are not ready; None: they are."""
    settings = RoutingSettings()
    scripts = make_scripts(connect(settings.effective_redis_url, settings.redis_timeout_s), Keys(settings.redis_prefix))
    try:
        own_processes = [
            process
            for process in ProcessList(scripts).read_all()
            if process.role == role and process.host == socket.gethostname()
        ]
        problem = maintenance_problem(scripts) if role == "maintenance" else None
    except RedisError:
        return "Redis does not answer."
    alive = [process for process in own_processes if process.is_alive]
    if not alive:
        return f"No process {role} of this host has reported lately that it is alive."
    if problem is not None:
        return problem
    return next(filter(None, map(worker_problem, alive)), None)


def maintenance_problem(scripts: Scripts) -> str | None:
    """Return which part of maintenance is overdue: its sweep, or its frequent tasks; None: none.

    Raises redis errors.
    """
    if task_runs.has_sweep_stopped(scripts):
        return f"Maintenance has not swept for {task_runs.SWEEP_MARK_TTL_S} s: deadlines and retries wait for it."
    frequent = {name: period_s for name, period_s in PERIODS_S.items() if period_s <= _MAX_FREQUENT_PERIOD_S}
    if late := task_runs.find_late_tasks(task_runs.read_task_runs(scripts), frequent):
        return f"Maintenance tasks have not finished for a long time: {', '.join(sorted(late))}."
    return None


def worker_problem(process: Process) -> str | None:
    """Return why a worker is not ready; None: it is ready, or the process is no worker."""
    if process.role != "worker":
        return None
    if not process.facts.get("takes", True):
        return f"{process.name} takes no more jobs: it is about to end."
    if process.canary_age_ms is None:
        return f"No canary has come through {process.name} yet."
    if process.canary_age_ms > _MAX_CANARY_AGE_MS:
        return f"No canary has come through {process.name} for {process.canary_age_ms / 1000:.0f} s."
    return None


def workers_problem(processes: Sequence[Process]) -> str | None:
    """Return what is wrong with the installation's workers: none can start jobs, or some are silent; None: nothing.

    The sentence is public, so it names no host.
    """
    workers = [process for process in processes if process.role == "worker"]
    alive = [process for process in workers if process.is_alive]
    if not alive:
        return "No worker has reported lately that it is alive: jobs wait, and none starts."
    if all(worker_problem(process) for process in alive):
        return "No worker can take jobs: they are accepted, and none starts.  `slotkeeper doctor` says why."
    if silent := len(workers) - len(alive):
        return f"{silent} of {len(workers)} workers are silent.  `slotkeeper processes` names them."
    return None


def processes_with_other_secret(processes: Sequence[Process]) -> list[Process]:
    """Return the live processes whose secret differs from this one's: each rejects what the other has signed."""
    own = fingerprints()
    return [process for process in processes if process.is_alive and process.facts.get("secret", own[0]) not in own]
