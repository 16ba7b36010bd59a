"""Inject the faults of a schedule, each at its time, undo them, and note when that happened.

An act injects a fault and returns the function that undoes it.  To add one: write its function, and add it to ACTS.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psycopg
from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from app.up.errors import UpError
from slotkeeper.client import ApiError, Client, ClientError
from slotkeeper.db import Database
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.policies import POLICIES
from tools.cluster import process_clocks
from tools.cluster.cluster import Cluster, ServerSpec
from tools.cluster.protocol_filters import MessageFault
from tools.cluster.tcp_proxy import Direction
from tools.drill import evidence
from tools.drill.conduct_checks import Limit
from tools.drill.fault_schedule import BOTH, DEAD, REFUSING, Change, Fault, Kind

Undo = Callable[[], object]
Act = Callable[[Cluster, Fault], Undo]

_SHARE = 0.5  # of messages, or of COMMITs
_REFUSED_SHARE = 0.2  # of webhook messages
_LATE_S = 8.0  # the longest delay of a message: longer than an offer is open
_DELAY_S = 0.3
_SLOW_S = 3.0  # for each piece of a receiver's answer
_REVOKED_AT_ONCE = 4
_OPERATOR_S = 10.0
_UNDO_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.2


@dataclass(slots=True)
class InjectedFault:
    """A fault that was injected: when, on the monotonic clock (ns) and on the wall clock (ms)."""

    fault: Fault
    at_ns: int
    at_ms: int
    effect_ns: int = 0
    """When the act had been done."""
    undo_began_ns: int = 0
    """When undoing it began; 0: it has not."""
    undone_ns: int = 0
    """When it had been undone; 0: it has not."""
    killed: bool = False
    """A process that should have ended by itself had to be killed."""


class NotApplicable(Exception):
    """The fault cannot happen in the present state of the cluster, and nothing was changed."""


def _undo_nothing() -> None:
    """Undo nothing: the fault is over at once."""


# -- processes ---------------------------------------------------------------------------------------------


def _kill(cluster: Cluster, fault: Fault) -> Undo:
    cluster.kill(fault.target)
    return lambda: cluster.start_again(fault.target)


def _stop(cluster: Cluster, fault: Fault) -> Undo:
    cluster.freeze(fault.target)
    return lambda: cluster.thaw(fault.target)


def _restart(cluster: Cluster, fault: Fault) -> Undo:
    cluster.terminate(fault.target)
    return lambda: cluster.start_again(fault.target)


def _clock(cluster: Cluster, fault: Fault) -> Undo:
    cluster.set_clock(fault.target, fault.how)
    return lambda: cluster.set_clock(fault.target, process_clocks.RIGHT)


def _step(cluster: Cluster, fault: Fault) -> Undo:
    def set_clocks(offset_s: str) -> None:
        for name in cluster.clocked:
            cluster.set_clock(name, offset_s)

    set_clocks(fault.how)
    return lambda: set_clocks(process_clocks.RIGHT)


# -- Redis -------------------------------------------------------------------------------------------------


def _flush(cluster: Cluster, fault: Fault) -> Undo:
    try:
        cluster.flush(fault.target)
    except RedisError as error:  # Redis is still loading its file.
        raise NotApplicable from error
    return _undo_nothing


def _fill_memory(cluster: Cluster, fault: Fault) -> Undo:
    try:
        cluster.bound_memory(fault.target, 1)
    except RedisError as error:
        raise NotApplicable from error
    return lambda: cluster.bound_memory(fault.target, 0)


def _fall_behind(cluster: Cluster, fault: Fault) -> Undo:
    try:
        if not cluster.fall_behind():
            raise NotApplicable
    except RedisError as error:
        raise NotApplicable from error
    return cluster.fail_over


def _promote(cluster: Cluster, fault: Fault) -> Undo:
    try:
        if not cluster.promote_replica():
            raise NotApplicable
    except RedisError as error:
        raise NotApplicable from error
    return cluster.demote_old_primary


def _refuse_writes(cluster: Cluster, fault: Fault) -> Undo:
    try:
        cluster.refuse_writes(fault.target, refuse=True)
    except (RedisError, psycopg.Error) as error:
        raise NotApplicable from error
    return lambda: cluster.refuse_writes(fault.target, refuse=False)


# -- the network -------------------------------------------------------------------------------------------


def _silence(cluster: Cluster, fault: Fault) -> Undo:
    proxy_port = cluster.proxy_ports[fault.target]
    proxy_port.blackhole(*(() if fault.how == BOTH else (Direction(fault.how),)))
    return proxy_port.restore


def _cut(cluster: Cluster, fault: Fault) -> Undo:
    cluster.proxy_ports[fault.target].reset()
    return _undo_nothing


def _delay(cluster: Cluster, fault: Fault) -> Undo:
    proxy_port = cluster.proxy_ports[fault.target]
    proxy_port.delay(_DELAY_S)
    return proxy_port.restore


def _receivers(cluster: Cluster, fault: Fault) -> Undo:
    if fault.how == REFUSING:
        cluster.refuse_deliveries(_REFUSED_SHARE)
        return lambda: cluster.refuse_deliveries(0.0)
    proxy_port = cluster.proxy_ports["receivers"]
    if fault.how == DEAD:
        proxy_port.blackhole()
    else:
        proxy_port.delay(_SLOW_S)
    return proxy_port.restore


def _disturb_messages(cluster: Cluster, fault: Fault) -> Undo:
    cluster.broker_messages.inject(MessageFault(fault.how), _SHARE, _LATE_S)
    return cluster.broker_messages.stop


def _lose_commits(cluster: Cluster, fault: Fault) -> Undo:
    cluster.commits.lose(Direction(fault.how), _SHARE)
    return cluster.commits.stop


# -- operators and clients ---------------------------------------------------------------------------------


def _revoke(cluster: Cluster, fault: Fault) -> Undo:
    chosen = random.Random(repr(fault)).sample(active := _active_job_ids(cluster), min(_REVOKED_AT_ONCE, len(active)))
    if not chosen:
        raise NotApplicable
    try:
        with Celery(broker=cluster.broker_url, set_as_current=False) as celery:
            celery.control.revoke(chosen)
    except (OSError, OperationalError, RedisError) as error:
        raise NotApplicable from error
    cluster.revoked.update(chosen)
    return _undo_nothing


def _active_job_ids(cluster: Cluster) -> list[str]:
    """Return the ids of the queued and running jobs.  Raises NotApplicable: the database cannot be reached."""
    database = Database(cluster.database_url)
    try:
        waiting, running = evidence.active_jobs(database)
        return sorted({**waiting, **running})
    except DatabaseUnavailable as error:
        raise NotApplicable from error
    finally:
        database.close()


def _inject_nothing(_: Cluster, __: Fault) -> Undo:
    """Inject nothing: clients submit the jobs of this fault, or the cluster was started with it."""
    return _undo_nothing


def _change_as_operator(cluster: Cluster, fault: Fault) -> Undo:
    client, rng = Client(cluster.url), random.Random(repr(fault))
    try:
        undo = _make_change(cluster, client, operated(fault, cluster.servers), Change(fault.how), rng)
    except (ClientError, UpError) as error:
        raise NotApplicable from error
    return lambda: _undo_with_retries(undo)


def operated(fault: Fault, servers: Sequence[ServerSpec]) -> ServerSpec:
    """Return the server that an operator changes: one of the model that the fault targets.

    The target is a model, so that two changes never overlap in it: resuming a model would end another pause of it.
    """
    return random.Random(repr(fault)).choice([server for server in servers if server.model == fault.target])


def _make_change(cluster: Cluster, client: Client, server: ServerSpec, change: Change, rng: random.Random) -> Undo:
    """Make an operator's change, and return what undoes it.  Raises ClientError, UpError."""
    model, config = f"/admin/models/{server.model}", f"/admin/model-configs/{server.model}"

    def call(method: str, path: str, body: object = None) -> None:
        client.request(method, path, body=body, timeout_s=_OPERATOR_S)

    match change:
        case Change.SLOTS:
            cluster.register(server, max(server.slots // 2, 1))
            return lambda: cluster.register(server)
        case Change.REMOVAL:
            call("DELETE", f"/admin/servers/{server.name}?drain=true")
            return lambda: _register_again(cluster, call, server)
        case Change.DRAIN:
            call("PATCH", f"/admin/servers/{server.name}", {"state": "draining"})
            return lambda: call("PATCH", f"/admin/servers/{server.name}", {"state": "online"})
        case Change.PAUSE:
            call("PATCH", model, {"state": "paused"})
            return lambda: call("PATCH", model, {"state": "online"})
        case Change.POLICY:
            call("PUT", config, {**server.config, "policy": rng.choice(list(POLICIES))})
            return lambda: call("PUT", config, server.config)
        case Change.LIMIT:
            call("PUT", config, {**server.config, "tenant_slots": 1})
            return lambda: call("PUT", config, server.config)


def _register_again(cluster: Cluster, call: Callable[[str, str], None], server: ServerSpec) -> None:
    """Register a removed server again, whether its removal is complete or not."""
    try:
        call("DELETE", f"/admin/servers/{server.name}/removal")
    except ApiError as refused:
        if refused.status != 404:
            raise
    cluster.register(server)


def _undo_with_retries(undo: Undo) -> None:
    """Undo an operator's change, and try again while the API is away.  Raises the last error after _UNDO_TIMEOUT_S."""
    until = time.monotonic() + _UNDO_TIMEOUT_S
    while True:
        try:
            undo()
            return
        except (ClientError, UpError):
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


ACTS: Mapping[Kind, Act] = {
    Kind.WORKER: _kill,
    Kind.STOP: _stop,
    Kind.RESTARTS: _restart,
    Kind.IMPATIENT: _restart,
    Kind.MAINTENANCE: _kill,
    Kind.BEAT: _kill,
    Kind.WEB: _kill,
    Kind.REDIS: _kill,
    Kind.FLUSH: _flush,
    Kind.FULL: _fill_memory,
    Kind.DATABASE: _kill,
    Kind.SERVER: _kill,
    Kind.MESSAGES: _disturb_messages,
    Kind.SILENCE: _silence,
    Kind.CUTS: _cut,
    Kind.DELAYS: _delay,
    Kind.STALE: _fall_behind,
    Kind.FAILOVER: _promote,
    Kind.REFUSAL: _refuse_writes,
    Kind.COMMITS: _lose_commits,
    Kind.REVOKES: _revoke,
    Kind.CLOCK: _clock,
    Kind.STEP: _step,
    Kind.RECEIVERS: _receivers,
    Kind.DEADLINES: _inject_nothing,
    Kind.OPERATOR: _change_as_operator,
    Kind.UNREAD: _inject_nothing,
}


class FaultInjector(threading.Thread):
    """The thread that injects and undoes faults.

    Only this thread may use the cluster while it runs.  It ends when every fault is undone, or early after `stop`.
    on_injected: called after each fault.
    """

    def __init__(self, cluster: Cluster, faults: Sequence[Fault], on_injected: Callable[[Fault], None]) -> None:
        super().__init__(name="fault-injector", daemon=True)
        self._cluster, self._on_injected = cluster, on_injected
        acts = [(fault.at_s, 0, fault) for fault in faults]
        acts += [(fault.at_s + fault.lasts_s, 1, fault) for fault in faults]
        self._acts = sorted(acts, key=lambda act: act[:2])
        self._stop_requested = threading.Event()
        self._injected: dict[Fault, InjectedFault] = {}
        self._undos: dict[Fault, Undo] = {}
        self.error: Exception | None = None

    @property
    def injected(self) -> list[InjectedFault]:
        """The injected faults, in the order of their times."""
        return sorted(self._injected.values(), key=lambda fault: fault.at_ns)

    def stop(self) -> None:
        self._stop_requested.set()

    def run(self) -> None:
        began = time.monotonic()
        try:
            for at_s, is_undo, fault in self._acts:
                self._wait_until(began + at_s)
                if self._stop_requested.is_set():
                    return
                (self._undo if is_undo else self._inject)(fault)
        except Exception as error:  # The thread that joins this one reads it.
            self.error = error

    def _wait_until(self, at: float) -> None:
        while not self._stop_requested.is_set() and (left := at - time.monotonic()) > 0:
            self._stop_requested.wait(min(left, _LOOK_EVERY_S))
            self._cluster.restart_ended()

    def _inject(self, fault: Fault) -> None:
        self._injected[fault] = InjectedFault(fault, time.monotonic_ns(), time.time_ns() // 1_000_000)
        try:
            self._undos[fault] = ACTS[fault.kind](self._cluster, fault)
        except NotApplicable:
            del self._injected[fault]
            return
        self._injected[fault].effect_ns = time.monotonic_ns()
        self._on_injected(fault)

    def _undo(self, fault: Fault) -> None:
        if fault in self._undos:
            injected = self._injected[fault]
            injected.undo_began_ns = time.monotonic_ns()
            injected.killed = self._undos.pop(fault)() is True
            injected.undone_ns = time.monotonic_ns()


def find_killed(injected: Iterable[InjectedFault]) -> list[str]:
    """Return a line for each process that had enough time to shut down, and had to be killed."""
    return [
        f"{injection.fault.target} did not shut down in time, and was killed"
        for injection in injected
        if injection.killed and injection.fault.kind is Kind.RESTARTS
    ]


def limits_in_force(injected: Iterable[InjectedFault], servers: Sequence[ServerSpec]) -> list[Limit]:
    """Return the limits that runs must keep, and when they hold; a change of policy limits nothing."""
    limits = []
    for injection in injected:
        if injection.fault.kind is Kind.OPERATOR and injection.undo_began_ns:
            server = operated(injection.fault, servers)
            most, limited = _limit(Change(injection.fault.how), server, servers)
            if most is not None:
                what = f"{injection.fault.how} of {server.name}"
                limits.append(Limit(what, frozenset(limited), most, injection.effect_ns, injection.undo_began_ns))
    return limits


def _limit(change: Change, server: ServerSpec, servers: Sequence[ServerSpec]) -> tuple[int | None, list[str]]:
    """Return how many runs may be active at once (None: any number), and on which servers."""
    of_model = [other.name for other in servers if other.model == server.model]
    match change:
        case Change.SLOTS:
            return max(server.slots // 2, 1), [server.name]
        case Change.REMOVAL | Change.DRAIN:
            return 0, [server.name]
        case Change.PAUSE:
            return 0, of_model
        case Change.LIMIT:
            return 1, of_model
        case Change.POLICY:
            return None, []
