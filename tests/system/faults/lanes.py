"""Inference servers that write down what they ran, and lanes in which lives are lived (tests/system/faults/life.py)."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from slotkeeper.db import Database
from slotkeeper.jobs.tables import events, jobs
from tests.support.scripted import Scripted, Seen, answer
from tests.system.faults import life as a_life
from tools.cluster.stack import REPO
from tools.cluster.valkey_process import Valkey

_RUNS_FOR_S = 0.03  # a polled job


class Oracle(Scripted):
    """An inference server and a client's webhook receiver in one, which record all requests."""

    def __init__(self) -> None:
        super().__init__(self._says)
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self.seen.clear()
            self.asked: Counter[str] = Counter()  # job -> number of requests
            self.runs: Counter[str] = Counter()  # job -> number of runs
            self.hooks: list[tuple[str, dict[str, Any]]] = []
            self.events: list[tuple[str, dict[str, Any]]] = []
            self.until: dict[str, tuple[str, float]] = {}  # remote id -> job, when it ends
            self.most_at_once = 0

    def _says(self, seen: Seen) -> bytes:
        _, place, *name = seen.path.split("/", 2)
        with self._lock:
            match place:
                case "hook" | "events":
                    received = self.hooks if place == "hook" else self.events
                    received.append((seen.headers["webhook-id"], seen.json))
                    return answer({})
                case "cancel":
                    return answer({"status": "not_found"}, 404)
                case "health":
                    return answer({"active_jobs": len(self._running()), "job_ids": self._running()})
                case "status":
                    return self._status(*name)
                case _:
                    return self._run(seen.headers["x-job-id"], seen.json, polled=place == a_life.ASYNC)

    def _run(self, job: str, payload: dict[str, Any], *, polled: bool) -> bytes:
        self.asked[job] += 1
        if self.asked[job] <= payload.get("times", 0):
            return answer({}, 503) if payload["do"] == "busy" else answer({"status": "error"}, 500)
        if payload["do"] == "invalid":
            return answer({"status": "error"}, 422)
        self.runs[job] += 1
        if not polled:
            return answer({"status": "success", "result": {"job": job}})
        remote = f"r-{job}-{self.runs[job]}"
        self.until[remote] = job, time.monotonic() + payload.get("seconds", _RUNS_FOR_S)
        self.most_at_once = max(self.most_at_once, len(self._running()))
        return answer({"status": "processing", "job_id": remote})

    def _status(self, remote: str) -> bytes:
        job, until = self.until.get(remote, ("", 0.0))
        if not job:
            return answer({"status": "not_found"}, 404)
        return answer({"status": "processing" if time.monotonic() < until else "completed", "result": {"job": job}})

    def _running(self) -> list[str]:
        now = time.monotonic()
        return [job for job, until in self.until.values() if until > now]


@dataclass
class Ended:
    """How one life ended, and what it left: the last event's number, and the runs that it was at."""

    life: str
    code: int
    last_event: int
    running: dict[str, str | None]  # job -> the server's own id of it


@dataclass
class Aftermath:
    """The data of a case after its last life."""

    home: Path
    record: str  # its URL
    oracle: Oracle
    ended: list[Ended] = field(default_factory=list)
    passed: dict[str, int] = field(default_factory=dict)  # points, by the first life, if it was not cut short
    log: str = ""

    def report(self, life: str = "last") -> dict[str, Any]:
        """Return the report of a life that ended normally."""
        return json.loads((self.home / f"report-{life}.json").read_text())


class Lane:
    """A place where one case at a time is lived: a database of the Valkey, an oracle, a nursery.

    `fresh_record` makes an empty record for the case that lives in a folder, and answers its URL.
    """

    def __init__(self, number: int, valkey: Valkey, fresh_record: Callable[[Path], str]) -> None:
        self.redis_url = f"{valkey.url.removesuffix('/0')}/{number}"
        self.oracle = Oracle().__enter__()
        self._fresh_record = fresh_record
        self._record = ""
        self._valkey = valkey
        self._number = number
        self._nursery: subprocess.Popen[str] | None = None

    def live(self, home: Path, crashes: list[str]) -> Aftermath:
        """Live one life for each of `crashes`, a story that dies there, and a last one that only recovers."""
        self.prepare(home)
        self.oracle.clear()
        case = Aftermath(home, self._record, self.oracle)
        for n, crash in enumerate(crashes):
            case.ended.append(self._one(home, f"life{n}", "story", crash))
        case.ended.append(self._one(home, "last", "recover", ""))
        if case.ended[0].code == 0:
            case.passed = case.report(case.ended[0].life)["passed"]
        case.log = (home / "log").read_text()[-3000:]
        return case

    def prepare(self, home: Path) -> None:
        """A fresh record, an empty Redis."""
        home.mkdir(parents=True, exist_ok=True)
        self._record = self._fresh_record(home)
        self._flush()

    def env(self, home: Path, name: str, crash: str) -> dict[str, str]:
        return {
            **a_life.SETTINGS,
            "SLOTKEEPER_HOME": str(home),
            "SLOTKEEPER_DATABASE_URL": self._record,
            "SLOTKEEPER_REDIS_URL": self.redis_url,
            "SLOTKEEPER_CRASH_AT": crash,
            "LIFE_NAME": name,
            "LIFE_SERVER": self.oracle.url,
        }

    def close(self) -> None:
        self.oracle.__exit__()
        if self._nursery is not None and self._nursery.stdin is not None:
            self._nursery.stdin.close()
            self._nursery.wait(30)

    def _one(self, home: Path, name: str, step: str, crash: str) -> Ended:
        return ended(self._record, name, self._born(step, self.env(home, name, crash)))

    def _born(self, step: str, env: dict[str, str]) -> int:
        if self._nursery is None:
            clean = {name: value for name, value in os.environ.items() if not name.startswith("SLOTKEEPER_")}
            command = [sys.executable, "-m", "tests.system.faults.life", "nursery"]
            self._nursery = subprocess.Popen(
                command, cwd=REPO, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        self._nursery.stdin.write(json.dumps({"step": step, "env": env}) + "\n")
        self._nursery.stdin.flush()
        return int(self._nursery.stdout.readline())

    def _flush(self) -> None:
        with self._valkey.client() as connection:
            connection.select(self._number)
            connection.flushdb()


def ended(record: str, life: str, code: int) -> Ended:
    """Read the database after a life has ended."""
    with closing(Database(record)) as database, database.read() as connection:
        last = connection.execute(events.select().order_by(events.c.id.desc()).limit(1)).first()
        running = connection.execute(jobs.select().where(jobs.c.state == "running")).all()
        return Ended(life, code, last.id if last else 0, {row.id: row.remote_id for row in running})


@contextmanager
def free_lanes(lanes: Iterable[Lane]) -> Iterator["SimpleQueue[Lane]"]:
    free: SimpleQueue[Lane] = SimpleQueue()
    with ExitStack() as stack:
        for lane in lanes:
            stack.callback(lane.close)
            free.put(lane)
        yield free
