"""The journal of a node's runs: what began and what ended, on disk.

A run is on disk before its request goes to the model, and its end before its slot is free.  So an agent that was
restarted knows which requests it has received, and still has their results.

    runs    what began, and when it ended      8 days
    ends    how it ended, with the result      a day, and 2 GiB together
    names   of later attempts of a run's job   8 days
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import orjson

from slotkeeper.agent.files import write_file
from slotkeeper.serve.logs import log_failure
from slotkeeper.serve.run_scheduler import Run, RunEnd, State

RESULT_AGE_S = 86_400.0
RESULT_BYTES = 2 << 30
BEGIN_AGE_S = 8 * 86_400.0  # longer than a run may take
_ENDING_FIELDS = ("state", "error", "retryable", "was_started")

_SCHEMA = """
    PRAGMA auto_vacuum = FULL;  -- The space of deleted results is given back.
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = FULL;  -- A commit is on the disk when it returns, with one sync.
    CREATE TABLE IF NOT EXISTS runs (
        name TEXT PRIMARY KEY, facts TEXT NOT NULL, began_ms INTEGER NOT NULL, ended_ms INTEGER
    );
    CREATE INDEX IF NOT EXISTS runs_by_end ON runs (ended_ms);
    CREATE TABLE IF NOT EXISTS ends (run TEXT PRIMARY KEY, ending TEXT NOT NULL, result BLOB NOT NULL);
    CREATE TABLE IF NOT EXISTS names (name TEXT PRIMARY KEY, run TEXT NOT NULL, added_ms INTEGER NOT NULL);
"""
_STORED_RUNS = "SELECT facts, ended_ms, ending, result FROM runs LEFT JOIN ends ON run = name"
_LATEST_ENDS = """
    SELECT name, ended_ms, sum(length(result)) OVER (ORDER BY ended_ms DESC, name) AS total
    FROM runs JOIN ends ON run = name ORDER BY ended_ms DESC, name
"""


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


class JournalFailed(Exception):
    """The journal cannot be written or read; the text says why."""


class RunJournal:
    """The runs of this and earlier processes, by the dispatcher's names, in an SQLite database.  Thread-safe.

    Raises JournalFailed if the folder cannot be used.
    """

    def __init__(self, folder: Path, now_s: Callable[[], float] = time.time) -> None:
        self._now_s, self._lock = now_s, threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (path := folder / "journal.db").touch(mode=0o600)
            self._connection = sqlite3.connect(path, check_same_thread=False)
            self._connection.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise JournalFailed(f"{folder} cannot be used: {error}") from None

    def begin(self, facts: RunFacts) -> None:
        """Store that a run begins.  Raises JournalFailed: then it must not."""
        text = orjson.dumps(facts._asdict()).decode()
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO runs (name, facts, began_ms) VALUES (?, ?, ?)",
                (facts.name, text, facts.started_ms),
            )

    def add_name(self, run: Run, name: str) -> None:
        """Store a further name of a run: that of a later attempt of its job.  Raises JournalFailed."""
        with self._transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?)", (name, name_of(run), self.now_ms()))

    def note(self, run: Run, ending: RunEnd, _: tuple[int, int]) -> None:
        """Store how a run has ended.  Without it, a result is lost with the process."""
        name, head = name_of(run), {field: getattr(ending, field) for field in _ENDING_FIELDS}
        try:
            with self._transaction() as connection:
                connection.execute("UPDATE runs SET ended_ms = ? WHERE name = ?", (self.now_ms(), name))
                connection.execute(
                    "INSERT OR REPLACE INTO ends VALUES (?, ?, ?)",
                    (name, orjson.dumps(head).decode(), ending.result),
                )
        except JournalFailed as error:
            log_failure(f"storing the end of run {run.id!r}", error)

    def has(self, name: str) -> bool:
        """Return whether a run with this name has begun here.  Raises JournalFailed."""
        with self._transaction() as connection:
            query = "SELECT 1 FROM runs WHERE name = ?1 UNION ALL SELECT 1 FROM names WHERE name = ?1"
            return connection.execute(query, (name,)).fetchone() is not None

    def find(self, name: str) -> StoredRun | None:
        """Return the run with this name, as it is stored.  Raises JournalFailed."""
        with self._transaction() as connection:
            other = connection.execute("SELECT run FROM names WHERE name = ?", (name,)).fetchone()
            row = connection.execute(f"{_STORED_RUNS} WHERE name = ?", other or (name,)).fetchone()
        return None if row is None else _read_row(row)

    def find_facts(self, run: Run) -> tuple[RunFacts, int] | None:
        """Return the facts of a run of this or an earlier process, and when it ended; now, if that is not known.

        Raises JournalFailed.
        """
        with self._transaction() as connection:
            query = "SELECT facts, ended_ms FROM runs WHERE name = ?"
            row = connection.execute(query, (name_of(run),)).fetchone()
        return None if row is None else (RunFacts(**orjson.loads(row[0])), row[1] or self.now_ms())

    def now_ms(self) -> int:
        return int(self._now_s() * 1000)

    def list_unended(self) -> list[RunFacts]:
        """Return the runs of earlier processes that have not ended.  Raises JournalFailed."""
        with self._transaction() as connection:
            rows = connection.execute("SELECT facts FROM runs WHERE ended_ms IS NULL ORDER BY began_ms").fetchall()
        return [RunFacts(**orjson.loads(facts)) for (facts,) in rows]

    def list_latest(self, runs: int, size: int, age_s: float) -> list[StoredRun]:
        """Return the runs that ended last: at most so many, of at most so many bytes together, and not older.

        Raises JournalFailed.
        """
        oldest_ms = self.now_ms() - int(age_s * 1000)
        with self._transaction() as connection:
            latest = connection.execute(f"{_LATEST_ENDS} LIMIT ?", (runs,)).fetchall()
            names = [name for name, ended_ms, total in latest if total <= size and ended_ms >= oldest_ms]
            query = f"{_STORED_RUNS} WHERE name IN ({','.join('?' * len(names))}) ORDER BY ended_ms DESC"
            return [_read_row(row) for row in connection.execute(query, names)]

    def prune(self) -> None:
        """Delete results that are old, or too many, and the facts of runs that no dispatcher can ask for any more.

        Raises JournalFailed.
        """
        oldest_ms = self.now_ms() - int(RESULT_AGE_S * 1000)
        forgotten_ms = self.now_ms() - int(BEGIN_AGE_S * 1000)
        with self._transaction() as connection:
            connection.execute(
                f"DELETE FROM ends WHERE run IN (SELECT name FROM ({_LATEST_ENDS}) WHERE total > ? OR ended_ms < ?)",
                (RESULT_BYTES, oldest_ms),
            )
            connection.execute("DELETE FROM runs WHERE coalesce(ended_ms, began_ms) < ?", (forgotten_ms,))
            connection.execute("DELETE FROM names WHERE added_ms < ?", (forgotten_ms,))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock, self._connection:
                yield self._connection
        except sqlite3.Error as error:
            raise JournalFailed(str(error)) from None


def _read_row(row: tuple[str, int | None, str | None, bytes | None]) -> StoredRun:
    facts, ended_ms, head, result = row
    ending = None
    if head is not None:
        fields = orjson.loads(head)
        ending = RunEnd(State(fields.pop("state")), result or b"", **fields)
    return StoredRun(RunFacts(**orjson.loads(facts)), ending, ended_ms or 0)


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
