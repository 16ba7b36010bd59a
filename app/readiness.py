"""Probes of the parts that this process needs.  A probe returns None, or a sentence that names the problem.

Each client may read the sentences, so they have no addresses; those are in the log.  Concurrent requests share one
result: each probe of the broker opens a connection, so many requests must not cause many probes.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import structlog
from kombu.exceptions import OperationalError as BrokerError
from redis.exceptions import RedisError

from migrations import migrate
from slotkeeper.clock import MAX_SKEW_MS, clock
from slotkeeper.db.driver_errors import explain_refusal
from slotkeeper.errors import SlotkeeperError
from slotkeeper.redis.connections import explain_refused_writes, explain_unsuitable
from tasks import liveness
from tasks.celery_app import celery
from tasks.services import catalog, database, processes, scripts

log = structlog.get_logger(__name__)

_BROKER_TIMEOUT_S = 2
_checked_urls: set[str] = set()  # A schema that is current stays so while this process runs.
CACHE_S = 1.0
"""How long a result is cached for all clients."""
PROBE_TIMEOUT_S = 0.6
"""How long a request waits for a probe: probes of orchestrators time out after a second."""


def probe_database() -> str | None:
    """Check that the database answers, has the schema of this release, and accepts writes."""
    try:
        catalog().get_version()
        if (problem := _schema_problem(database().url)) is not None:
            return problem
        database().check_writable()
    except SlotkeeperError as error:
        log.warning("database_away", error=error.detail)
        if (refusal := explain_refusal(error)) is not None:
            return f"The database takes no writes: {refusal}.  Jobs are accepted again when it does."
        return "The database does not answer, or has no tables yet."
    return None


def probe_redis() -> str | None:
    """Check that Redis answers, is a single server, evicts no keys, and accepts writes."""
    redis = scripts().redis
    try:
        if (refusal := explain_refused_writes(redis, scripts().keys.write_check())) is not None:
            return f"{refusal}  Jobs wait, and start when it takes writes again."
        return explain_unsuitable(redis)
    except RedisError as error:
        log.warning("redis_away", error=str(error))
        return "Redis does not answer; jobs wait, and start when it is back."


def probe_broker() -> str | None:
    """Check that the broker answers, and accepts writes if it is a Redis."""
    try:
        with celery.connection_for_write(connect_timeout=_BROKER_TIMEOUT_S) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=_BROKER_TIMEOUT_S)
            if connection.transport.driver_type == "redis":
                channel: Any = connection.default_channel
                refusal = explain_refused_writes(channel.client, scripts().keys.write_check())
                return refusal and f"The broker: {refusal}  Jobs wait, and start when it takes writes again."
    except (BrokerError, OSError, RedisError) as error:
        log.warning("broker_away", error=str(error))
        return "The broker does not answer; jobs wait, and start when it is back."
    return None


def probe_maintenance() -> str | None:
    """Check that maintenance runs.  Without it no deadline is enforced, and no lost job is found."""
    try:
        problem = liveness.maintenance_problem(scripts())
    except RedisError:
        return None  # probe_redis reports it.
    return problem and f"{problem}  See that beat and a worker of the queue `maintenance` run."


def probe_workers() -> str | None:
    """Check that a worker can take jobs, and that no worker has stopped its heartbeat."""
    try:
        return liveness.workers_problem(processes().read_all())
    except RedisError:
        return None  # probe_redis reports it.


def probe_secret() -> str | None:
    """Check that all processes have the same secret."""
    try:
        reported = processes().read_all()
    except RedisError:
        return None  # probe_redis reports it.
    if not (others := liveness.processes_with_other_secret(reported)):
        return None
    which = f"{len(others)} of {len(reported)} processes have another secret than this one"
    return f"{which}.  Give all hosts the same SLOTKEEPER_SECRET."


def probe_clocks() -> str | None:
    """Check that the clocks of this host and of Redis agree with the database's."""
    if abs(clock.skew_ms) > MAX_SKEW_MS:
        return f"This host's clock is {clock.skew_ms / 1000:+.1f} s from the database's."
    try:
        seconds, microseconds = scripts().redis.time()
    except RedisError:
        return None  # probe_redis reports it.
    skew_s = seconds + microseconds / 1e6 - clock.now_ms() / 1000
    return f"Redis' clock is {skew_s:+.1f} s from the database's." if abs(skew_s) * 1000 > MAX_SKEW_MS else None


def _schema_problem(url: str) -> str | None:
    if url in _checked_urls:
        return None
    problem = migrate.check(url)
    if problem is None:
        _checked_urls.add(url)
    return problem


PROBES: Mapping[str, Callable[[], str | None]] = {
    "database": probe_database,
    "redis": probe_redis,
    "broker": probe_broker,
    "maintenance": probe_maintenance,
    "workers": probe_workers,
    "secret": probe_secret,
    "clocks": probe_clocks,
}


class Readiness:
    """Runs the probes, and caches their results.  Thread-safe."""

    def __init__(
        self, probes: Mapping[str, Callable[[], str | None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probes, self._clock = probes, clock
        self._lock = threading.Lock()
        self._running: dict[str, Future[str | None]] = {}
        self._threads = ThreadPoolExecutor(len(probes), "readiness")
        self._problems: Mapping[str, str | None] = {}
        self._until = -1.0

    def parts(self) -> Mapping[str, str | None]:
        """Return the problem of each part; None: it has none.  Concurrent callers wait for the same result.

        The probes run in parallel.  A probe that takes too long goes on, and is not started again until it has ended.
        """
        with self._lock:
            if self._clock() >= self._until:
                self._problems = self._probe()
                self._until = self._clock() + CACHE_S
            return self._problems

    def _probe(self) -> dict[str, str | None]:
        for name, probe in self._probes.items():
            if name not in self._running:
                self._running[name] = self._threads.submit(probe)
        wait(self._running.values(), PROBE_TIMEOUT_S)
        problems: dict[str, str | None] = {}
        for name in self._probes:
            future = self._running[name]
            if future.done():
                del self._running[name]
                problems[name] = future.result()
            else:
                problems[name] = f"It could not be checked within {PROBE_TIMEOUT_S:g} s."
        return problems
