"""Connect to Redis from threads and event loops, and explain why a Redis is unsuitable.

A Redis that has reached its maxmemory refuses each plain command that needs memory, but runs a script with the flag
allow-oom.  Celery's messages, the bindings of its queues and the heartbeats of maintenance are small, and without them
nothing frees memory: OomTolerantRedis sends these as such scripts.

Suitability is read with INFO: managed Redis services forbid CONFIG.
"""

import re
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio import connection as asyncio_connection
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import BusyLoadingError, NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError
from redis.retry import Retry

from slotkeeper.errors import SlotkeeperError

ALLOW_OOM = "#!lua flags=allow-oom\n"
_ONE_COMMAND = f"{ALLOW_OOM}return redis.call(unpack(ARGV))"
_ALL_COMMANDS = f"""{ALLOW_OOM}
local replies, at = {{}}, 1
while ARGV[at] do
  local first = at + 1
  at = first + ARGV[at]
  replies[#replies + 1] = redis.call(unpack(ARGV, first, at - 1))
end
return replies"""
# What Celery and maintenance write.  Not FCALL: the header of each script says whether a full Redis refuses it.
_TOLERATED = frozenset({"HINCRBY", "HSET", "LPUSH", "RPUSH", "SADD", "SET", "ZADD"})
_NEVER_REFUSED = frozenset({"DEL", "EXPIRE", "GET", "HDEL", "HGET", "LLEN", "LREM", "PEXPIRE", "PUBLISH", "ZREM"})


URL_VARIABLE = "SLOTKEEPER_REDIS_URL"
_WRONG_URL = "{variable} is not the URL of a Redis, such as redis://:PASSWORD@host:6379/0."
_CLUSTER = (
    "{variable} leads to a Redis Cluster, each of whose nodes holds a part of the keys, and Slotkeeper's scripts need "
    "all keys on one server: give the URL of a single Redis, or of a primary with its replicas, without cluster mode."
)
_SENTINEL = (
    "{variable} leads to a Redis Sentinel, which holds no keys: give the URL of the primary that it watches, by an "
    "address that follows the primary, such as a proxy's or a service's."
)
_EVICTS = (
    "Redis may evict keys when its memory is full (maxmemory-policy {policy}), among them leases and waiting "
    "jobs: set maxmemory-policy noeviction."
)
# Error code -> why a Redis that answers refuses writes, and what to do.
_REFUSALS = {
    "READONLY": "it is a replica. Let its address lead to the primary",
    "MISCONF": "it cannot save to its disk. See that disk's free space, and Redis' log",
    "NOPERM": "its user lacks the rights. See docs/reference/dependencies.md for those that Slotkeeper needs",
    "NOREPLICAS": "fewer replicas are connected than min-replicas-to-write. See its replicas",
    "OOM": "its memory is full. Raise maxmemory",
    "LOADING": "it is still loading its data. It takes writes when it has",
}
_CODES: dict[type[ResponseError] | type[BusyLoadingError], str] = {
    ReadOnlyError: "READONLY",
    NoPermissionError: "NOPERM",
    OutOfMemoryError: "OOM",
    BusyLoadingError: "LOADING",
}
_WRITE_CHECK_MS = 10_000
_FORGETS = (
    "Redis keeps no append-only file: after each restart the queue is filled from the database again, and "
    "messages at the broker, if that is the same Redis, are lost: set appendonly yes."
)


_ASYNC_CONNECTIONS: dict[type, type[asyncio_connection.AbstractConnection]] = {
    Connection: asyncio_connection.Connection,
    SSLConnection: asyncio_connection.SSLConnection,
    UnixDomainSocketConnection: asyncio_connection.UnixDomainSocketConnection,
}
_ADDRESS = re.compile(r"host|port|path|db|username|password|protocol|client_name|ssl_\w+")


class UnsuitableRedis(SlotkeeperError):
    """Slotkeeper cannot work with the Redis that it was given."""

    code = "unsuited_redis"


# -- clients -----------------------------------------------------------------------------------------------------


class OomTolerantPipeline(Pipeline):
    """Sends commands that a full Redis has refused once more: those of a transaction together, others one by one.

    A transaction with other commands than Celery's and maintenance's stays refused, and none of it is run.
    """

    def __init__(self, pool: Any, callbacks: Any, transaction: bool, shard_hint: Any) -> None:
        super().__init__(pool, callbacks, transaction, shard_hint)
        self._is_transaction = transaction

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        stack, client = list(self.command_stack), OomTolerantRedis(connection_pool=self.connection_pool)
        is_transaction = self._is_transaction or self.explicit_transaction
        try:
            found = super().execute(raise_on_error=raise_on_error and is_transaction)
        except OutOfMemoryError:  # Redis ran no command of the transaction.
            if any(args[0] not in _TOLERATED | _NEVER_REFUSED for args, _ in stack):
                raise
            return client.execute_command("EVAL", _ALL_COMMANDS, 0, *(word for a, _ in stack for word in (len(a), *a)))
        for n, (args, options) in enumerate(stack):
            if isinstance(found[n], OutOfMemoryError) and args[0] in _TOLERATED:
                found[n] = client.execute_command(*args, **options)
        if raise_on_error:
            self.raise_first_error(stack, found)
        return found


class OomTolerantRedis(Redis):
    """Sends a command that a full Redis has refused once more, as a script with allow-oom."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute_command(*args, **options)
        except OutOfMemoryError:
            if args[0] not in _TOLERATED:
                raise
            return super().execute_command("EVAL", _ONE_COMMAND, 0, *args)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> OomTolerantPipeline:
        return OomTolerantPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    def register_script(self, script: Any) -> Any:
        """Register a script with allow-oom."""
        return super().register_script(ALLOW_OOM + script)


def connect(url: str, timeout_s: float) -> Redis:
    """Return a client that never repeats a command that Redis may have run.

    redis-py retries by default, and a script that was only slow would run again and again.
    Raises UnsuitableRedis if this is not the URL of a single Redis.
    """
    try:
        return OomTolerantRedis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=30,
        )
    except ValueError:  # Its text may hold the password.
        raise UnsuitableRedis(explain_wrong_url(url)) from None


def make_async_connection(redis: Redis) -> asyncio_connection.AbstractConnection:
    """Return a connection for an event loop, to the Redis of this client."""
    pool = redis.connection_pool
    found = {name: value for name, value in pool.connection_kwargs.items() if _ADDRESS.fullmatch(name)}
    return _ASYNC_CONNECTIONS[pool.connection_class](socket_timeout=None, **found)


def make_async_client(redis: Redis) -> AsyncRedis:
    """Return a client for an event loop, to the Redis of this client."""
    pool = redis.connection_pool
    found = {name: value for name, value in pool.connection_kwargs.items() if _ADDRESS.fullmatch(name)}
    timeout_s = pool.connection_kwargs.get("socket_timeout")
    return AsyncRedis(
        connection_pool=asyncio_connection.ConnectionPool(
            connection_class=_ASYNC_CONNECTIONS[pool.connection_class],
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            **found,
        )
    )


# -- suitability -------------------------------------------------------------------------------------------------


def explain_wrong_url(url: str, variable: str = URL_VARIABLE) -> str:
    """Return why this URL, which redis-py refuses, cannot be used, and what to do.  It does not repeat the URL."""
    scheme = url.partition("://")[0].lower()
    sentence = _CLUSTER if "cluster" in scheme else _SENTINEL if "sentinel" in scheme else _WRONG_URL
    return sentence.format(variable=variable)


def explain_unsuitable(redis: Redis) -> str | None:
    """Return why Slotkeeper cannot work with this Redis, and what to do, or None if it can.  Raises redis errors."""
    return explain_not_single(redis) or explain_eviction(redis)


def explain_not_single(redis: Redis, variable: str = URL_VARIABLE) -> str | None:
    """Return why a Cluster or a Sentinel cannot be used, and what to do, or None.  Raises redis errors."""
    info = redis.info("server")
    mode = info.get("redis_mode") or info.get("server_mode")  # in Valkey
    if mode == "sentinel":
        return _SENTINEL.format(variable=variable)
    is_cluster = mode == "cluster" or redis.info("cluster").get("cluster_enabled")
    return _CLUSTER.format(variable=variable) if is_cluster else None


def explain_refused_writes(redis: Redis, key: str) -> str | None:
    """Return why a Redis that answers takes no writes, and what to do, or None.  Raises redis errors.

    key: is written, and expires.
    """
    try:
        Redis.execute_command(redis, "SET", key, 1, "PX", _WRITE_CHECK_MS)  # not as a script that a full Redis allows
    except (ResponseError, BusyLoadingError) as error:
        code = _CODES.get(type(error)) or str(error).partition(" ")[0]
        because = _REFUSALS.get(code, "see its log")
        return f"Redis answers and refuses writes ({code}): {because}."
    return None


def explain_eviction(redis: Redis) -> str | None:
    """Return why Redis may lose keys, and what to do, or None.  Raises redis errors."""
    policy = redis.info("memory").get("maxmemory_policy", "noeviction")
    return None if policy == "noeviction" else _EVICTS.format(policy=policy)


def explain_no_persistence(redis: Redis) -> str | None:
    """Return what a restart of Redis would lose, and what to do, or None.  Raises redis errors."""
    return None if redis.info("persistence").get("aof_enabled", 1) else _FORGETS
