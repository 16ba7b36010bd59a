"""Whether this process can do its work, part by part.  None: yes; else a sentence for people.

Anybody may ask, so the sentences name no addresses; the log has the rest.  One looks for all who ask at about the same
time: a flood of questions must be no flood of looks, each of which takes a connection to the broker.
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
from tasks.services import catalog, processes, scripts
from tasks.services import database as record

log = structlog.get_logger(__name__)

_BROKER_TIMEOUT_S = 2
# A schema that was right once stays right while this process runs.
_checked_urls: set[str] = set()


def probe_database() -> str | None:
    """It answers, has the schema that this release needs, and takes writes."""
    try:
        catalog().get_version()
        if (problem := _schema_problem(record().url)) is not None:
            return problem
        record().check_writable()
    except SlotkeeperError as error:
        log.warning("database_away", error=error.detail)
        if (refusal := explain_refusal(error)) is not None:
            return f"The database takes no writes: {refusal}.  Jobs are accepted again when it does."
        return "The database does not answer, or has no tables yet."
    return None


def probe_redis() -> str | None:
    """It answers, is a single Redis, throws nothing away, and takes writes."""
    redis = scripts().redis
    try:
        if (refusal := explain_refused_writes(redis, scripts().keys.write_check())) is not None:
            return f"{refusal}  Jobs wait, and start when it takes writes again."
        return explain_unsuitable(redis)
    except RedisError as error:
        log.warning("redis_away", error=str(error))
        return "Redis does not answer; jobs wait, and start when it is back."


def probe_broker() -> str | None:
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
    """Maintenance runs: without it no deadline is kept, and nothing that was lost is found."""
    try:
        problem = liveness.maintenance_problem(scripts())
    except RedisError:
        return None  # It is said elsewhere.
    return problem and f"{problem}  See that beat and a worker of the queue `maintenance` run."


def probe_workers() -> str | None:
    """Some can take jobs, and none has fallen silent."""
    try:
        return liveness.workers_problem(processes().read_all())
    except RedisError:
        return None  # It is said elsewhere.


def probe_secret() -> str | None:
    """All processes have the same."""
    try:
        found = processes().read_all()
    except RedisError:
        return None  # It is said elsewhere.
    if not (others := liveness.processes_with_other_secret(found)):
        return None
    which = f"{len(others)} of {len(found)} processes have another secret than this one"
    return f"{which}.  Give all hosts the same SLOTKEEPER_SECRET."


def probe_clocks() -> str | None:
    """This host's clock, and Redis', go with the record's."""
    if abs(clock.skew_ms) > MAX_SKEW_MS:
        return f"This host's clock is {clock.skew_ms / 1000:+.1f} s from the database's."
    try:
        seconds, microseconds = scripts().redis.time()
    except RedisError:
        return None  # It is said elsewhere.
    apart_s = seconds + microseconds / 1e6 - clock.now_ms() / 1000
    return f"Redis' clock is {apart_s:+.1f} s from the record's." if abs(apart_s) * 1000 > MAX_SKEW_MS else None


def _schema_problem(url: str) -> str | None:
    if url in _checked_urls:
        return None
    why = migrate.check(url)
    if why is None:
        _checked_urls.add(url)
    return why


PROBES: Mapping[str, Callable[[], str | None]] = {
    "database": probe_database,
    "redis": probe_redis,
    "broker": probe_broker,
    "maintenance": probe_maintenance,
    "workers": probe_workers,
    "secret": probe_secret,
    "clocks": probe_clocks,
}


CACHE_S = 1.0
"""For so long an answer is everybody's."""
PROBE_TIMEOUT_S = 0.6
"""For so long a part is waited for: probes of orchestrators wait for a second."""


class Readiness:
    """What each part says.  Safe between threads."""

    def __init__(
        self, probes: Mapping[str, Callable[[], str | None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probes, self._clock = probes, clock
        self._lock = threading.Lock()
        self._looks: dict[str, Future[str | None]] = {}  # under way
        self._threads = ThreadPoolExecutor(len(probes), "readiness")
        self._found: Mapping[str, str | None] = {}
        self._until = -1.0

    def parts(self) -> Mapping[str, str | None]:
        """Of each part what is wrong; None: nothing is.  Who asks meanwhile waits for the same look.

        All parts are looked at side by side.  A look that takes longer goes on, and no other is begun meanwhile.
        """
        with self._lock:
            if self._clock() >= self._until:
                self._found = self._probe()
                self._until = self._clock() + CACHE_S
            return self._found

    def _probe(self) -> dict[str, str | None]:
        for name, probe in self._probes.items():
            if name not in self._looks:
                self._looks[name] = self._threads.submit(probe)
        wait(self._looks.values(), PROBE_TIMEOUT_S)
        found: dict[str, str | None] = {}
        for name in self._probes:
            look = self._looks[name]
            if look.done():
                del self._looks[name]
                found[name] = look.result()
            else:
                found[name] = f"It has not answered within {PROBE_TIMEOUT_S:g} s."
        return found
