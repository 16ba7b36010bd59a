"""What the waiting room asks of the Redis that it stands on, beside its version."""

from redis import Redis

_EVICTS = (
    "Redis may throw keys away when its memory is full (maxmemory-policy {policy}), leases and waiting jobs among "
    "them: set maxmemory-policy noeviction."
)
_FORGETS = (
    "Redis keeps no append-only file: after each restart the waiting room is filled anew from the record, and what "
    "stands at the broker, if that is the same Redis, is gone: set appendonly yes."
)


def evicts(redis: Redis) -> str | None:
    """Why its keys are not safe, and what to do; None: they are.  Raises redis errors."""
    policy = redis.info("memory").get("maxmemory_policy", "noeviction")
    return None if policy == "noeviction" else _EVICTS.format(policy=policy)


def forgets(redis: Redis) -> str | None:
    """What a restart of it costs, and what to do; None: nothing.  Raises redis errors."""
    return None if redis.info("persistence").get("aof_enabled", 1) else _FORGETS
