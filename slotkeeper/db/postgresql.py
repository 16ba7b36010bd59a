"""Connections to PostgreSQL: each waits no longer than time_limits.py allows, whether the server is silent or busy."""

import math
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine, event, make_url

from slotkeeper.config import DatabaseTimeouts
from slotkeeper.db.time_limits import CONNECT_TIMEOUT_S, ENGINE_OPTIONS, POOL_TIMEOUT_S, time_left

_NO_JIT = "-c jit=off"  # The statements take milliseconds; compiling the most expensive one took 740 ms at each call.
_LEAST_CONNECT_S = 2  # libpq waits no shorter
# TCP notices a peer that has vanished, also while no query runs.  Seconds; milliseconds.
_KEEPALIVE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 5000}


def make_postgresql_engine(url: str, limits: DatabaseTimeouts, pool: dict[str, Any]) -> Engine:
    pool = pool or {"pool_size": 8, "max_overflow": 24, "pool_pre_ping": True, "pool_timeout": POOL_TIMEOUT_S}
    made = create_engine(url, connect_args=_arguments(url, limits), **ENGINE_OPTIONS, **pool)
    event.listen(made, "do_connect", _connect)
    return made


class _TimeLimitedConnection(psycopg.Connection[Any]):
    """A connection that waits for an answer as long as `time_limit` allows, whether the server is silent or busy."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        seconds = time_left()
        if math.isinf(seconds):
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, max(seconds, 0.0))
        except psycopg.OperationalError:
            if time_left() > 0:
                raise
            self.pgconn.finish()  # A late answer would be taken for the next one.
            raise psycopg.OperationalError("the server did not answer in time") from None


def _arguments(url: str, limits: DatabaseTimeouts) -> dict[str, Any]:
    """Return the arguments of libpq that the URL does not set."""
    given = make_url(url).query
    known: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT_S, **_KEEPALIVE}
    wanted = {name: value for name, value in known.items() if name not in given}
    timeouts = {
        "statement_timeout": limits.statement_s,
        "lock_timeout": limits.lock_s,
        "idle_in_transaction_session_timeout": limits.idle_s,
    }
    options = [f"-c {name}={round(seconds * 1000)}" for name, seconds in timeouts.items() if seconds]
    if not options:  # A pooler may give each transaction another connection, without the prepared statements.
        wanted["prepare_threshold"] = None
    else:
        options.append(_NO_JIT)
        own = given.get("options", "")
        wanted["options"] = " ".join([*options, own if isinstance(own, str) else " ".join(own)]).strip()
    return wanted


def _connect(_: object, __: object, arguments: Any, options: dict[str, Any]) -> Any:
    if time_left() < _LEAST_CONNECT_S:
        raise psycopg.OperationalError("no time is left for a new connection")
    seconds = min(float(options["connect_timeout"]), time_left())
    return _TimeLimitedConnection.connect(*arguments, **(options | {"connect_timeout": math.floor(seconds)}))
