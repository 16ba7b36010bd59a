"""Read what a drill leaves behind: the servers' files, the database, and the leases in Redis."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import requests
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import select

from routing.config import RoutingSettings
from slotkeeper.db import Database
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.notifications import make_message_id
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import events as _events_table
from slotkeeper.jobs.tables import jobs as _jobs_table
from slotkeeper.jobs.tables import messages as _messages_table
from slotkeeper.jobs.tables import transfers as _transfers_table
from slotkeeper.jobs.values import Event
from slotkeeper.redis.keys import FLEET_KEYS, Keys
from tools.cluster.cluster import Cluster
from tools.drill.conduct_checks import Charge, PendingMessage
from tools.drill.history_checks import Receipt, Recorded, Run

CUT = "cut"
_OVERDUE_MS = 60_000
# An attempt may last _LEAST_WAIT_MS; the wait after it starts at _FIRST_WAIT_MS and grows.
_LEAST_WAIT_MS, _FIRST_WAIT_MS = 60_000, 5_500
_STARTED = EVENT_TYPES[State.RUNNING]
_SLOTS_KEY = FLEET_KEYS.index("slots")  # slot -> job
_TIMEOUT_S = 2.0
HeldSlots = set[tuple[str, str]]  # (server, job)


def server_runs(server: str, journal: Path, starts: Path, killed_ns: Sequence[int], now_ns: int) -> list[Run]:
    """Return all runs of a server: from its journal those that ended, from its starts those without an end.

    killed_ns: when the server was killed.  A run without an end lasted until the next kill; without one, until now_ns.
    """
    runs = [
        Run(
            line["job_id"],
            line["attempt"] or 0,
            server,
            line["slot"],
            line["started_ns"],
            line["ended_ns"],
            line["outcome"],
        )
        for line in _lines(journal)
    ]
    ended: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in runs:
        ended[(run.job_id, run.slot)].append(run)
    for line in _lines(starts):
        at = line["at_ns"]
        if any(run.started_ns <= at <= run.ended_ns for run in ended[(line["job_id"], line["slot"])]):
            continue
        end = next((killed for killed in sorted(killed_ns) if killed >= at), now_ns)
        runs.append(Run(line["job_id"], line["attempt"] or 0, server, line["slot"], at, max(end, at), CUT))
    return runs


def crowded_starts(server: str, starts: Path, slots: int) -> list[str]:
    """Return a line for each run that a server began while it had no free slot, by its own count (`at_once`)."""
    return [
        f"{line['job_id']} attempt {line['attempt']} on {server}: {line['at_once']} runs, {slots} slots"
        for line in _lines(starts)
        if line["at_once"] > slots
    ]


def write_receipts(path: Path, receipts: Iterable[Receipt]) -> None:
    """Write one JSON line for each receipt, for a closer look after the drill."""
    path.write_bytes(b"".join(orjson.dumps(receipt, option=orjson.OPT_APPEND_NEWLINE) for receipt in receipts))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError:  # The server was killed while it wrote this line.
            continue


def job_events(database: Database) -> dict[str, list[Event]]:
    """Return each job's transitions, oldest first, without the findings of audits: those can follow a job's end."""
    query = (
        select(_events_table).where(_events_table.c.type.in_(set(EVENT_TYPES.values()))).order_by(_events_table.c.id)
    )
    events_by_job: dict[str, list[Event]] = defaultdict(list)
    with database.read() as connection:
        for row in connection.execute(query):
            event = Event(row.id, row.job_id, row.type, row.at_ms, row.attempt, orjson.loads(row.data))
            events_by_job[row.job_id].append(event)
    return events_by_job


def states(database: Database) -> dict[str, State]:
    """Return the state of each job."""
    with database.read() as connection:
        return {row.id: State(row.state) for row in connection.execute(select(_jobs_table.c.id, _jobs_table.c.state))}


def recorded(states: Mapping[str, State], events_by_job: Mapping[str, Sequence[Event]]) -> dict[str, Recorded]:
    """Return the jobs of the database as the checks of the history take them."""
    return {
        job_id: Recorded(
            state, tuple(event.type for event in events_by_job.get(job_id, ())), _turn(events_by_job.get(job_id, ()))
        )
        for job_id, state in states.items()
    }


def _turn(events: Iterable[Event]) -> tuple[int, int] | None:
    """Return the epoch of the queue that first offered the job, and the number of that offer."""
    started = next((event for event in events if event.type == _STARTED), None)
    if started is None or not started.data.get("offer"):
        return None
    return int(started.data["epoch"]), int(started.data["offer"])


def charges(database: Database) -> dict[str, list[Charge]]:
    """Return the transfers of each job, the oldest first."""
    query = select(_transfers_table).where(_transfers_table.c.seq.is_not(None)).order_by(_transfers_table.c.id)
    found: dict[str, list[Charge]] = defaultdict(list)
    with database.read() as connection:
        for row in connection.execute(query):
            found[row.job_id].append(Charge(row.kind, row.amount, row.why))
    return found


def job_numbers(database: Database) -> dict[str, int]:
    """Return job -> number of its planned job."""
    with database.read() as connection:
        rows = connection.execute(select(_jobs_table.c.id, _jobs_table.c.payload)).all()
    return {row.id: int(orjson.loads(row.payload)["number"]) for row in rows}


def pending_messages(database: Database, now_ms: int) -> list[PendingMessage]:
    """Return the messages to jobs' `callback_url` that are not delivered, judged at `now_ms`."""
    names = ("job_id", "event", "state", "next_ms", "tries")
    columns = (_messages_table.c[name] for name in names)
    with database.read() as connection:
        rows = connection.execute(select(*columns).where(_messages_table.c.receiver == _messages_table.c.job_id)).all()
    messages = []
    for row in rows:
        wait_ms = row.next_ms - now_ms if row.state == "pending" else 0
        longest_ms = _LEAST_WAIT_MS + _FIRST_WAIT_MS * 2.5 ** max(row.tries - 1, 0)
        messages.append(
            PendingMessage(
                make_message_id(row.job_id, row.event),
                row.job_id,
                row.state,
                wait_ms < -_OVERDUE_MS,
                wait_ms > longest_ms,
            )
        )
    return messages


def active_jobs(database: Database) -> tuple[dict[str, str], dict[str, str]]:
    """Return two mappings of job -> model: the queued jobs, and the running ones."""
    query = select(_jobs_table.c.id, _jobs_table.c.model, _jobs_table.c.state).where(
        _jobs_table.c.state.in_([State.QUEUED, State.RUNNING])
    )
    with database.read() as connection:
        rows = connection.execute(query).all()
    models: dict[str, dict[str, str]] = {State.QUEUED: {}, State.RUNNING: {}}
    for row in rows:
        models[row.state][row.id] = row.model
    return models[State.QUEUED], models[State.RUNNING]


class LeaseComparison:
    """Reads the leases and the servers' reports, and remembers the last difference."""

    def __init__(self, cluster: Cluster) -> None:
        self._redis = Redis.from_url(cluster.redis_url, socket_timeout=_TIMEOUT_S, decode_responses=True)
        self._keys = Keys(RoutingSettings.model_fields["redis_prefix"].default)
        self._servers = cluster.servers
        self._requests = [cluster.health_request(server) for server in cluster.servers]
        self._before: HeldSlots | None = None

    def leases(self) -> HeldSlots:
        """Return the slots that have a lease.  Raises redis errors."""
        leases: HeldSlots = set()
        for fleet in {server.model for server in self._servers}:
            held: dict[str, str] = self._redis.hgetall(self._keys.fleet_keys(fleet)[_SLOTS_KEY])  # type: ignore[assignment]
            leases |= {(slot.rsplit("-slot", 1)[0], job) for slot, job in held.items()}
        return leases

    def running(self) -> HeldSlots:
        """Return what the servers run.  Raises requests errors."""
        with ThreadPoolExecutor(len(self._servers)) as pool:
            reports = list(pool.map(_running_jobs, self._requests))
        return {(server.name, job) for server, jobs in zip(self._servers, reports, strict=True) for job in jobs}

    def lasting_difference(self) -> HeldSlots | None:
        """Return what only one side had in both this and the last comparison; None: one of them failed.

        A difference in one comparison alone can be a run that starts or ends at this moment.
        """
        try:
            difference = self.leases() ^ self.running()
        except (RedisError, requests.RequestException, ValueError, KeyError):
            self._before = None
            return None
        before, self._before = self._before, difference
        return None if before is None else difference & before


def _running_jobs(request: tuple[str, dict[str, str]]) -> list[str]:
    url, headers = request
    jobs: list[str] = requests.get(url, headers=headers, timeout=_TIMEOUT_S).json()["job_ids"]
    return jobs
