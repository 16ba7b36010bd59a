"""How servers are spoken to, as stored: descriptions that never change, each under the hash of its text.

A configuration names the version that its new runs begin with, and each run the one that it began with, so that a
worker who resumes it goes on in the same words.  What nothing names any more is removed after a while.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson
from sqlalchemy import bindparam, delete, insert, or_, select, update

from slotkeeper.db import Database, Transaction
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs
from slotkeeper.registry.tables import defaults, descriptions, endpoints, models

VERSION_FIELD = "described_by"
"""Under which a configuration, and a registration, keep the version that is in force, beside what was given."""
KEEP_UNUSED_MS = 15 * 60_000
"""How long one is kept that nothing names: for so long a worker may still begin runs with a catalog that is old."""

_VERSION_SIGNS = 32  # of SHA-256 in hex
_BODY = select(descriptions.c.body).where(descriptions.c.version == bindparam("p_version"))


def hash_body(body: str) -> str:
    """The name of a description with this text."""
    return hashlib.sha256(body.encode()).hexdigest()[:_VERSION_SIGNS]


def store_description(tx: Transaction, body: str, now_ms: int) -> str:
    """Store a description unless it is there; answers its version.  Under the lock of the catalog."""
    version = hash_body(body)
    named = update(descriptions).where(descriptions.c.version == version).values(idle_ms=None)
    if tx.connection.execute(named).rowcount == 0:
        tx.connection.execute(insert(descriptions), {"version": version, "body": body, "created_ms": now_ms})
    return version


def read_description(database: Database, version: str) -> str | None:
    """The text of a description; None: it is not there (any more).  Raises RecordUnavailable."""
    with database.read() as connection:
        found: str | None = connection.execute(_BODY, {"p_version": version}).scalar()
    return found


def find_version(stored: Mapping[str, Any]) -> str | None:
    """The version that a stored configuration or registration names."""
    version = stored.get(VERSION_FIELD)
    return version if isinstance(version, str) else None


def delete_unused(database: Database, now_ms: int) -> int:
    """Remove versions that nothing has named for KEPT_MS; answers how many.

    A version is first marked as idle, and removed by a later call unless it has been named meanwhile.
    """
    with database.read() as connection:
        known = {row.version: row.idle_ms for row in connection.execute(select(descriptions.c.version, _IDLE))}
        texts = [*connection.execute(select(models.c.overrides)).scalars()]
        texts += connection.execute(select(endpoints.c.overrides)).scalars()
        texts += connection.execute(select(defaults.c.overrides)).scalars()
        idle = known.keys() - {find_version(orjson.loads(text)) for text in texts if VERSION_FIELD in text}
        idle -= set(connection.execute(_of_runs(sorted(idle))).scalars()) if idle else set()
    old = [version for version in idle if (since := known[version]) is not None and now_ms - since >= KEEP_UNUSED_MS]
    new = [version for version in idle if known[version] is None]
    again = [version for version in known.keys() - idle if known[version] is not None]
    if not (old or new or again):
        return 0
    return database.write(lambda tx: _mark(tx, old, new, again, now_ms))


_IDLE = descriptions.c.idle_ms


def _mark(tx: Transaction, old: list[str], new: list[str], again: list[str], now_ms: int) -> int:
    version = descriptions.c.version
    tx.connection.execute(update(descriptions).where(version.in_(new)).values(idle_ms=now_ms))
    tx.connection.execute(update(descriptions).where(version.in_(again)).values(idle_ms=None))
    # Unless it has been stored again since it was read.
    return tx.connection.execute(delete(descriptions).where(version.in_(old), _IDLE.is_not(None))).rowcount


def _of_runs(versions: list[str]) -> Any:
    """Which of these are named by runs that go on, or will be resumed."""
    goes_on = or_(
        jobs.c.state == State.RUNNING.value,
        (jobs.c.state == State.QUEUED.value) & jobs.c.remote_id.is_not(None),
    )
    return select(jobs.c.described_by).where(jobs.c.described_by.in_(versions), goes_on).distinct()
