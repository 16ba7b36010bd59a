"""What each kind of fault does, and how it is mended.

An act strikes and answers what mends it.  To add one: its function and its line in ACTS.
"""

import random
import time
from collections.abc import Callable, Mapping

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
from tools.cluster.cluster import Cluster, ServerSpec, operated
from tools.cluster.protocol_filters import MessageFault
from tools.cluster.tcp_proxy import Direction
from tools.drill import evidence
from tools.drill.fault_schedule import BOTH, DEAD, REFUSING, Change, Fault, Kind

Undo = Callable[[], object]
Act = Callable[[Cluster, Fault], Undo]

_SHARE = 0.5  # of messages, or of COMMITs
_REFUSED_SHARE = 0.2  # of webhook messages
_LATE_S = 8.0  # a message, at most: longer than an offer stands
_DELAY_S = 0.3
_SLOW_S = 3.0  # for each piece of a receiver's answer
_REVOKED_AT_ONCE = 4
_OPERATOR_S = 10.0
_MENDING_S = 60.0


class NotApplicable(Exception):
    """It cannot happen as things are, and has not."""


def _nothing() -> None:
    """It is over as soon as it has happened."""


# -- processes ---------------------------------------------------------------------------------------------


def _kill(stack: Cluster, fault: Fault) -> Undo:
    stack.kill(fault.target)
    return lambda: stack.start_again(fault.target)


def _stop(stack: Cluster, fault: Fault) -> Undo:
    stack.freeze(fault.target)
    return lambda: stack.thaw(fault.target)


def _restart(stack: Cluster, fault: Fault) -> Undo:
    stack.terminate(fault.target)
    return lambda: stack.start_again(fault.target)


def _clock(stack: Cluster, fault: Fault) -> Undo:
    stack.set_clock(fault.target, fault.how)
    return lambda: stack.set_clock(fault.target, process_clocks.RIGHT)


def _step(stack: Cluster, fault: Fault) -> Undo:
    def set_clocks(offset_s: str) -> None:
        for name in stack.clocked:
            stack.set_clock(name, offset_s)

    set_clocks(fault.how)
    return lambda: set_clocks(process_clocks.RIGHT)


# -- Redis -------------------------------------------------------------------------------------------------


def _flush(stack: Cluster, fault: Fault) -> Undo:
    try:
        stack.flush(fault.target)
    except RedisError as error:  # It is still loading its file.
        raise NotApplicable from error
    return _nothing


def _fill(stack: Cluster, fault: Fault) -> Undo:
    try:
        stack.bound_memory(fault.target, 1)
    except RedisError as error:
        raise NotApplicable from error
    return lambda: stack.bound_memory(fault.target, 0)


def _stale(stack: Cluster, fault: Fault) -> Undo:
    try:
        if not stack.fall_behind():
            raise NotApplicable
    except RedisError as error:
        raise NotApplicable from error
    return stack.fail_over


def _promote(stack: Cluster, fault: Fault) -> Undo:
    try:
        if not stack.promote_replica():
            raise NotApplicable
    except RedisError as error:
        raise NotApplicable from error
    return stack.demote_old_primary


def _refuse(stack: Cluster, fault: Fault) -> Undo:
    try:
        stack.refuse_writes(fault.target, refuse=True)
    except (RedisError, psycopg.Error) as error:
        raise NotApplicable from error
    return lambda: stack.refuse_writes(fault.target, refuse=False)


# -- the network -------------------------------------------------------------------------------------------


def _silence(stack: Cluster, fault: Fault) -> Undo:
    door = stack.proxy_ports[fault.target]
    door.blackhole(*(() if fault.how == BOTH else (Direction(fault.how),)))
    return door.restore


def _cut(stack: Cluster, fault: Fault) -> Undo:
    stack.proxy_ports[fault.target].reset()
    return _nothing


def _delay(stack: Cluster, fault: Fault) -> Undo:
    door = stack.proxy_ports[fault.target]
    door.delay(_DELAY_S)
    return door.restore


def _receivers(stack: Cluster, fault: Fault) -> Undo:
    if fault.how == REFUSING:
        stack.refuse_deliveries(_REFUSED_SHARE)
        return lambda: stack.refuse_deliveries(0.0)
    door = stack.proxy_ports["receivers"]
    if fault.how == DEAD:
        door.blackhole()
    else:
        door.delay(_SLOW_S)
    return door.restore


def _twist_messages(stack: Cluster, fault: Fault) -> Undo:
    stack.broker_messages.inject(MessageFault(fault.how), _SHARE, _LATE_S)
    return stack.broker_messages.stop


def _lose_commits(stack: Cluster, fault: Fault) -> Undo:
    stack.commits.lose(Direction(fault.how), _SHARE)
    return stack.commits.stop


# -- people ------------------------------------------------------------------------------------------------


def _revoke(stack: Cluster, fault: Fault) -> Undo:
    chosen = random.Random(repr(fault)).sample(among := _going_on(stack), min(_REVOKED_AT_ONCE, len(among)))
    if not chosen:
        raise NotApplicable
    try:
        with Celery(broker=stack.broker_url, set_as_current=False) as celery:
            celery.control.revoke(chosen)
    except (OSError, OperationalError, RedisError) as error:
        raise NotApplicable from error
    stack.revoked.update(chosen)
    return _nothing


def _going_on(stack: Cluster) -> list[str]:
    """Jobs that wait or run.  Raises NotApplicable."""
    database = Database(stack.database_url)
    try:
        waiting, running = evidence.active_jobs(database)
        return sorted({**waiting, **running})
    except DatabaseUnavailable as error:
        raise NotApplicable from error
    finally:
        database.close()


def _no_act(_: Cluster, __: Fault) -> Undo:
    """The clients submit the jobs that this is about, or the cluster is started so."""
    return _nothing


def _operate(stack: Cluster, fault: Fault) -> Undo:
    client, chance = Client(stack.url), random.Random(repr(fault))
    try:
        undo = _change(stack, client, operated(fault, stack.servers), Change(fault.how), chance)
    except (ClientError, UpError) as error:
        raise NotApplicable from error
    return lambda: _patiently(undo)


def _change(stack: Cluster, client: Client, server: ServerSpec, change: Change, chance: random.Random) -> Undo:
    """Raises ClientError, UpError."""
    model, config = f"/admin/models/{server.model}", f"/admin/model-configs/{server.model}"

    def call(method: str, path: str, body: object = None) -> None:
        client.request(method, path, body=body, timeout_s=_OPERATOR_S)

    match change:
        case Change.SLOTS:
            stack.register(server, max(server.slots // 2, 1))
            return lambda: stack.register(server)
        case Change.REMOVAL:
            call("DELETE", f"/admin/servers/{server.name}?drain=true")
            return lambda: _bring_back(stack, call, server)
        case Change.DRAIN:
            call("PATCH", f"/admin/servers/{server.name}", {"state": "draining"})
            return lambda: call("PATCH", f"/admin/servers/{server.name}", {"state": "online"})
        case Change.PAUSE:
            call("PATCH", model, {"state": "paused"})
            return lambda: call("PATCH", model, {"state": "online"})
        case Change.POLICY:
            call("PUT", config, {**server.config, "policy": chance.choice(list(POLICIES))})
            return lambda: call("PUT", config, server.config)
        case Change.LIMIT:
            call("PUT", config, {**server.config, "tenant_slots": 1})
            return lambda: call("PUT", config, server.config)


def _bring_back(stack: Cluster, call: Callable[[str, str], None], server: ServerSpec) -> None:
    """Whether it is gone by now or not."""
    try:
        call("DELETE", f"/admin/servers/{server.name}/removal")
    except ApiError as refused:
        if refused.status != 404:
            raise
    stack.register(server)


def _patiently(undo: Undo) -> None:
    """What an operator has changed is put right again, even if the API is away just now.  Raises the last error."""
    until = time.monotonic() + _MENDING_S
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
    Kind.FULL: _fill,
    Kind.DATABASE: _kill,
    Kind.SERVER: _kill,
    Kind.MESSAGES: _twist_messages,
    Kind.SILENCE: _silence,
    Kind.CUTS: _cut,
    Kind.DELAYS: _delay,
    Kind.STALE: _stale,
    Kind.FAILOVER: _promote,
    Kind.REFUSAL: _refuse,
    Kind.COMMITS: _lose_commits,
    Kind.REVOKES: _revoke,
    Kind.CLOCK: _clock,
    Kind.STEP: _step,
    Kind.RECEIVERS: _receivers,
    Kind.DEADLINES: _no_act,
    Kind.OPERATOR: _operate,
    Kind.UNREAD: _no_act,
}
