"""List the processes of an installation that are alive.

Each process reports to Redis every few seconds.  The page, the health checks and the metrics read the reports; no
guarantee depends on them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from slotkeeper.redis.scripts import Command, Scripts

REPORT_EVERY_S = 2.0
SHOWN_MS = 60_000
"""For how long a process is listed after its last report."""
DEAD_AFTER_MS = 10_000
"""A process without a report for this long counts as dead."""
MAX_PROCESSES = 1000


class ProcessReport(NamedTuple):
    """The last report of a process, as JSON, and its age."""

    process: str
    age_ms: int
    facts: str


class ProcessScripts(Protocol):
    """The script in routing/lua for the list of processes, which belongs to no fleet."""

    def report_process(
        self, key: str, *, process: str, facts: str, ttl_ms: int, most: int
    ) -> Command[list[ProcessReport]]: ...


@dataclass(frozen=True, slots=True)
class Process:
    """A process that has reported within the last minute.

    `role`: web, worker, maintenance, webhooks, relay, beat.  `facts`: the other fields of the report: `pid`, `version`,
    `since_ms`, `secret` (its fingerprint).  A worker also reports `runs`, `capacity`, `takes`, `canary_ms` (duration of
    the last canary), `canary_age_ms` and `awaits`.
    """

    name: str
    role: str
    host: str
    age_ms: int
    facts: dict[str, Any]

    @property
    def is_alive(self) -> bool:
        return self.age_ms < DEAD_AFTER_MS

    @property
    def canary_age_ms(self) -> int | None:
        """The time since a worker last received a canary; None: it has received none."""
        age_ms = self.facts.get("canary_age_ms")
        return None if age_ms is None else int(age_ms) + self.age_ms


class ProcessList:
    """The list of processes in Redis.  All methods raise redis errors."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._lua: ProcessScripts = scripts.bind(ProcessScripts)

    def report(self, process: str, facts: dict[str, Any]) -> None:
        """Report that a process is alive.  `facts`: `role`, `host` and the fields of Process.facts."""
        self._run(process, orjson.dumps(facts).decode())

    def remove(self, process: str) -> None:
        """Remove a process that ends normally, so that it is not shown as dead."""
        self._run(process, "")

    def read_all(self) -> list[Process]:
        """Return the processes by role, host and name."""
        processes = [_process_from_report(report) for report in self._run("", "")]
        return sorted(processes, key=lambda process: (process.role, process.host, process.name))

    def read_awaits(self) -> dict[str, tuple[str, str]]:
        """Return slot -> (job id, sentence) of runs that wait for more than their server's response."""
        workers = (process for process in self.read_all() if process.is_alive)
        return {
            slot: (job_id, sentence)
            for worker in workers
            for slot, (job_id, sentence) in worker.facts.get("awaits", {}).items()
        }

    def _run(self, process: str, facts: str) -> list[ProcessReport]:
        """Return all reports, after storing one; `facts` "": after removing it; `process` "": unchanged."""
        key = self._scripts.keys.processes()
        command = self._lua.report_process(key, process=process, facts=facts, ttl_ms=SHOWN_MS, most=MAX_PROCESSES)
        return self._scripts.run(command)


def _process_from_report(report: ProcessReport) -> Process:
    facts = orjson.loads(report.facts)
    return Process(report.process, facts.pop("role", ""), facts.pop("host", ""), report.age_ms, facts)
