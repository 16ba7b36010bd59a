"""What Slotkeeper asks of the Redis that it stands on, beside its version.

All of it is read with INFO: managed Redis services forbid CONFIG.
"""

from redis import Redis

from slotkeeper.errors import SlotkeeperError

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
_FORGETS = (
    "Redis keeps no append-only file: after each restart the queue is filled from the database again, and "
    "messages at the broker, if that is the same Redis, are lost: set appendonly yes."
)


class UnsuitableRedis(SlotkeeperError):
    """Slotkeeper cannot work with the Redis that it was given."""

    code = "unsuited_redis"


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
    mode = info.get("redis_mode") or info.get("server_mode")  # Valkey's word
    if mode == "sentinel":
        return _SENTINEL.format(variable=variable)
    is_cluster = mode == "cluster" or redis.info("cluster").get("cluster_enabled")
    return _CLUSTER.format(variable=variable) if is_cluster else None


def explain_eviction(redis: Redis) -> str | None:
    """Why its keys are not safe, and what to do; None: they are.  Raises redis errors."""
    policy = redis.info("memory").get("maxmemory_policy", "noeviction")
    return None if policy == "noeviction" else _EVICTS.format(policy=policy)


def explain_no_persistence(redis: Redis) -> str | None:
    """What a restart of it costs, and what to do; None: nothing.  Raises redis errors."""
    return None if redis.info("persistence").get("aof_enabled", 1) else _FORGETS
