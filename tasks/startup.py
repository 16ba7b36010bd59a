"""What each process of an installation does first.

It configures the logs, makes the state folder private, and checks its secret and the settings of Redis.
Celery's processes do this by a signal handler (tasks/extensions/signal_handlers.py).
"""

import structlog
from redis import Redis
from redis.exceptions import RedisError

from routing.config import RoutingSettings
from slotkeeper import logs
from slotkeeper.config import StorageSettings
from slotkeeper.redis.connections import (
    UnsuitableRedis,
    connect,
    explain_no_persistence,
    explain_not_single,
    explain_unsuitable,
)
from slotkeeper.state_folder import restrict_state_folder
from tasks.config import TaskSettings
from tasks.security.keyring import fingerprints
from tasks.services import scripts

log = structlog.get_logger(__name__)

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
_OTHER_SECRET = (
    "Pushed results will be refused and webhooks signed wrongly: give all hosts one SLOTKEEPER_SECRET. If it was "
    "replaced, set SLOTKEEPER_FORMER_SECRET to the one before; if that is lost, delete the key {key!r} in Redis."
)


def check_secret() -> bool:
    """Return whether this process has the secret whose fingerprint is in Redis; log an error if it has not.

    The first process stores its fingerprint.  A process whose former secret is stored replaces the fingerprint.
    True also while Redis is unavailable, because then the secrets cannot be compared.
    """
    redis, key = scripts().redis, scripts().keys.secret()
    try:
        matches = _matches_shared_secret(redis, key, *fingerprints())
    except RedisError as error:
        log.warning("secret_not_compared", error=str(error))
        return True
    if not matches:
        log.error("other_secret", advice=_OTHER_SECRET.format(key=key))
    return matches


def _matches_shared_secret(redis: Redis, key: str, present: str, *former: str) -> bool:
    redis.set(key, present, nx=True)
    stored = redis.get(key)
    if stored in [fingerprint.encode() for fingerprint in former]:
        redis.set(key, present)
        return True
    return stored == present.encode()


def check_redis() -> None:
    """Refuse a Redis whose settings Slotkeeper cannot work with.  An unavailable Redis is not refused.

    Raises UnsuitableRedis.
    """
    try:
        redis = scripts().redis
        _refuse(explain_unsuitable(redis))
        if (advice := explain_no_persistence(redis)) is not None:
            log.warning("redis_unsuited", advice=advice)
        _check_celery_redis()
    except RedisError as error:
        log.warning("redis_not_checked", error=str(error))


def _check_celery_redis() -> None:
    """Refuse a Redis Cluster or a Sentinel as Celery's broker or result backend, if that is not the queue's Redis."""
    settings, queue_url = TaskSettings(), RoutingSettings().effective_redis_url
    others = {settings.broker: "SLOTKEEPER_BROKER_URL", settings.results: "SLOTKEEPER_RESULT_URL"}
    for url, variable in others.items():
        # Not checked: the queue's own Redis, another transport, or several brokers (";").
        if url == queue_url or not url.startswith(_REDIS_SCHEMES) or ";" in url:
            continue
        with connect(url, RoutingSettings().redis_timeout_s) as redis:
            _refuse(explain_not_single(redis, variable))


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise UnsuitableRedis(reason)


def prepare() -> None:
    """Configure the logs, and check the state folder, Redis and the secret.

    Raises InvalidSetting; StateFolderNotPrivate, OSError: the state folder cannot be used; UnsuitableRedis.
    """
    settings = TaskSettings()
    logs.configure(settings.log_level, settings.log_format)
    _ = settings.broker  # It refuses a URL that Celery cannot use.
    restrict_state_folder(StorageSettings())
    check_redis()
    check_secret()
