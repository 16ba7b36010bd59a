"""Which processes of an installation live: each says so every few seconds, in Redis, and is forgotten when it does not.

Nothing that is promised hangs on it; people, probes and figures read it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from slotkeeper.redis.scripts import Command, Scripts

REPORT_EVERY_S = 2.0
SHOWN_MS = 60_000
"""For how long a process that says nothing more is still shown."""
MOST = 1000
DEAD_AFTER_MS = 10_000
"""Who has said nothing for so long is taken for dead."""


class ProcessReport(NamedTuple):
    """What one process said last, and how long ago."""

    process: str
    age_ms: int
    facts: str


class ProcessScripts(Protocol):
    """Of the list of processes, which belongs to no fleet."""

    def report_process(
        self, key: str, *, process: str, facts: str, ttl_ms: int, most: int
    ) -> Command[list[ProcessReport]]: ...


@dataclass(frozen=True, slots=True)
class Process:
    """One that lives, or did so a minute ago.

    `role`: web, worker, maintenance, webhooks, relay, beat.  `facts`: what else it says of itself: `pid`, `version`,
    `since_ms`, `secret` (its fingerprint), and a worker `runs` and `capacity`, `takes`, `canary_ms` (how long the last
    took), `canary_age_ms` and `awaits`.
    """

    name: str
    role: str
    host: str
    age_ms: int
    facts: dict[str, Any]

    @property
    def lives(self) -> bool:
        return self.age_ms < DEAD_AFTER_MS

    @property
    def canary_age_ms(self) -> int | None:
        """Since a canary last came through it; None: none has."""
        age_ms = self.facts.get("canary_age_ms")
        return None if age_ms is None else int(age_ms) + self.age_ms


class ProcessList:
    """Talks to the list of processes.  Redis errors pass through."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._lua: ProcessScripts = scripts.bind(ProcessScripts)

    def report(self, process: str, facts: dict[str, Any]) -> None:
        """A process lives.  `facts`: its role, its host, and what else there is to say."""
        self._ask(process, orjson.dumps(facts).decode())

    def remove(self, process: str) -> None:
        """A process ends, and is not to be missed."""
        self._ask(process, "")

    def read_all(self) -> list[Process]:
        """By role, host and name."""
        found = [_process(it) for it in self._ask("", "")]
        return sorted(found, key=lambda it: (it.role, it.host, it.name))

    def read_awaits(self) -> dict[str, tuple[str, str]]:
        """Return what runs wait for beside their servers' answers: slot -> job and sentence."""
        workers = (process for process in self.read_all() if process.lives)
        return {slot: (job, said) for it in workers for slot, (job, said) in it.facts.get("awaits", {}).items()}

    def _ask(self, process: str, facts: str) -> list[ProcessReport]:
        key = self._scripts.keys.processes()
        acts = self._lua.report_process(key, process=process, facts=facts, ttl_ms=SHOWN_MS, most=MOST)
        return self._scripts.run(acts)


def _process(said: ProcessReport) -> Process:
    facts = orjson.loads(said.facts)
    return Process(said.process, facts.pop("role", ""), facts.pop("host", ""), said.age_ms, facts)
