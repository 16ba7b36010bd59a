"""The journal of a node's runs: what began and what ended, on disk.

A run is on disk before its request goes to the model, and its end before its slot is free.  So an agent that was
restarted knows which requests it has received, and still has their results.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from slotkeeper.agent.files import write_file
from slotkeeper.serve.logs import log_failure
from slotkeeper.serve.run_scheduler import Run, RunEnd, State

RESULT_AGE_S = 86_400.0
RESULT_BYTES = 2 << 30
BEGIN_AGE_S = 8 * 86_400.0  # longer than a run may take
_NAME_DIGITS = 40


class RunFacts(NamedTuple):
    """The facts of a run, without its result.  Times in ms, by the node's clock."""

    id: str
    """The scheduler's."""
    job_id: str
    attempt: int
    key: str | None
    model: str
    payload_sha256: str
    is_forwarded: bool
    """A local server runs it, and may go on with it although the agent was restarted."""
    started_ms: int

    @property
    def name(self) -> str:
        """The name that the dispatcher gave the run."""
        return run_name(self.job_id, self.attempt)


def run_name(job_id: str, attempt: int | str | None) -> str:
    """Return the name that the dispatcher gives a run."""
    return f"{job_id}-{attempt}"


def name_of(run: Run) -> str:
    """Return the name that the dispatcher gave a run."""
    return run_name(run.job_id, run.attempt)


class StoredRun(NamedTuple):
    """A run of an earlier process.  ending: None: it had not ended."""

    facts: RunFacts
    ending: RunEnd | None
    ended_ms: int


class RunJournal:
    """The files of all runs, by the dispatcher's names.  Thread-safe: a run has its own files."""

    def __init__(self, folder: Path, now_s: Callable[[], float] = time.time) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._now_s = folder, now_s
        self._facts: dict[str, RunFacts] = {}
        self._ended_ms: dict[str, int] = {}

    def begin(self, facts: RunFacts) -> None:
        """Store that a run begins.  Raises OSError: then it must not."""
        write_file(self._path(facts.name, "begin"), orjson.dumps(facts._asdict()))
        self._facts[facts.name] = facts

    def add_name(self, run: Run, name: str) -> None:
        """Store a further name of a run: that of a later attempt of its job.  Raises OSError."""
        write_file(self._path(name, "name"), name_of(run).encode())

    def note(self, run: Run, ending: RunEnd, _: tuple[int, int]) -> None:
        """Store how a run has ended.  Without it, a result is lost with the process."""
        name = name_of(run)
        self._ended_ms[name] = self.now_ms()
        head = {
            "state": ending.state,
            "error": ending.error,
            "retryable": ending.retryable,
            "was_started": ending.was_started,
            "ended_ms": self._ended_ms[name],
        }
        try:
            write_file(self._path(name, "end"), orjson.dumps(head) + b"\n" + ending.result)
        except OSError as error:
            log_failure(f"storing the end of run {run.id!r}", error)

    def has(self, name: str) -> bool:
        """Return whether a run with this name has begun here."""
        return self._path(name, "begin").exists() or self._path(name, "name").exists()

    def find(self, name: str) -> StoredRun | None:
        """Return the run with this name, as it is stored."""
        with suppress(OSError):
            name = self._path(name, "name").read_text()
        return self._read(self._path(name, "begin"))

    def facts(self, run: Run) -> RunFacts | None:
        """Return the facts of a run of this or an earlier process."""
        name = name_of(run)
        if name not in self._facts and (stored := self.find(name)) is not None:
            self._facts[name] = stored.facts
        return self._facts.get(name)

    def ended_ms(self, run: Run) -> int:
        """Return when a run ended; now, if that is not known."""
        name = name_of(run)
        if name not in self._ended_ms and (stored := self.find(name)) is not None:
            self._ended_ms[name] = stored.ended_ms
        return self._ended_ms.get(name, self.now_ms())

    def now_ms(self) -> int:
        return int(self._now_s() * 1000)

    def list_unended(self) -> Iterator[RunFacts]:
        """Yield the runs of earlier processes that have not ended."""
        for path in sorted(self._folder.glob("*.begin")):
            if not path.with_suffix(".end").exists() and (stored := self._read(path)) is not None:
                yield stored.facts

    def list_latest(self, runs: int, size: int, age_s: float) -> Iterator[StoredRun]:
        """Yield the runs that ended last: at most so many, of at most so many bytes together, and not older."""
        for path, path_age_s, path_size in sorted(self._with_age("end"), key=lambda each: each[1])[:runs]:
            size -= path_size
            if size < 0 or path_age_s > age_s:
                return
            if (stored := self._read(path.with_suffix(".begin"))) is not None:
                yield stored

    def prune(self) -> None:
        """Delete results that are old, or too many, and the facts of runs that no dispatcher can ask for any more."""
        ends = sorted(self._with_age("end"), key=lambda each: each[1])  # the newest first
        kept_bytes = 0
        for path, age_s, size in ends:
            kept_bytes += size
            if age_s > RESULT_AGE_S or kept_bytes > RESULT_BYTES:
                path.unlink(missing_ok=True)
        for kind in ("begin", "name"):
            for path, age_s, _ in self._with_age(kind):
                if age_s > BEGIN_AGE_S:
                    path.unlink(missing_ok=True)
        oldest_ms = self.now_ms() - int(RESULT_AGE_S * 1000)
        for name in [name for name, ended_ms in self._ended_ms.items() if ended_ms < oldest_ms]:
            self._ended_ms.pop(name, None)
            self._facts.pop(name, None)

    def _with_age(self, kind: str) -> list[tuple[Path, float, int]]:
        found = []
        for path in self._folder.glob(f"*.{kind}"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((path, self._now_s() - status.st_mtime, status.st_size))
        return found

    def _read(self, begin: Path) -> StoredRun | None:
        try:
            facts = RunFacts(**orjson.loads(begin.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        try:
            head, _, result = begin.with_suffix(".end").read_bytes().partition(b"\n")
            fields: dict[str, Any] = orjson.loads(head)
        except (OSError, ValueError):
            return StoredRun(facts, None, 0)
        ended_ms = int(fields.pop("ended_ms"))
        ending = RunEnd(State(fields.pop("state")), result, **fields)
        return StoredRun(facts, ending, ended_ms)

    def _path(self, name: str, kind: str) -> Path:
        """Return the file of a run; its name may hold any character."""
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]}.{kind}"


def read_or_make_start(folder: Path, *, keep: bool) -> str:
    """Return a text that differs for each process of the agent.

    keep: runs of the process before may still go on, so its text stays.  Raises OSError.
    """
    path = folder / "started"
    if keep:
        with suppress(OSError):
            return path.read_text()
    text = f"{time.time_ns()}"
    write_file(path, text.encode())
    return text
