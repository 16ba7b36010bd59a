"""How servers are called: versioned descriptions, and the sealed secrets that they name.

A description never changes; its version is the hash of its text.  A configuration names the version for new runs, and
each run the one with which it began, so that a worker that resumes it goes on in the same way.  Versions that nothing
names are deleted after a while.

Secrets are part of the catalog: each change raises its version, so that workers have it within two seconds.
tasks/security seals and opens them; the database holds none in plain text.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson
from sqlalchemy import Connection, bindparam, delete, or_, select, update

from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import upsert
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs
from slotkeeper.registry.tables import defaults, descriptions, endpoints, models, secrets

Row: TypeAlias = Any

VERSION_FIELD = "described_by"
"""The field of a stored configuration or registration that holds the version, beside what was given."""
KEEP_UNUSED_MS = 15 * 60_000
"""How long a version is kept that nothing names: so long a worker may begin runs with an old catalog."""

_VERSION_LENGTH = 32  # hexadecimal digits of SHA-256
_BODY = select(descriptions.c.body).where(descriptions.c.version == bindparam("p_version"))
_IDLE_MS = descriptions.c.idle_ms


# -- descriptions ------------------------------------------------------------------------------------------------


def hash_body(body: str) -> str:
    """Return the version of a description with this text."""
    return hashlib.sha256(body.encode()).hexdigest()[:_VERSION_LENGTH]


def store_description(tx: Transaction, body: str, now_ms: int) -> str:
    """Store a description unless it is there, and return its version.  The transaction holds the catalog's lock."""
    version = hash_body(body)
    new = {"body": body, "created_ms": now_ms}
    upsert(tx.connection, descriptions, {"version": version}, {"idle_ms": None}, new)
    return version


def read_description(database: Database, version: str) -> str | None:
    """Return the text of a description; None if it is not there.  Raises DatabaseUnavailable."""
    with database.read() as connection:
        found: str | None = connection.execute(_BODY, {"p_version": version}).scalar()
    return found


def find_version(stored: Mapping[str, Any]) -> str | None:
    """Return the version that a stored configuration or registration names."""
    version = stored.get(VERSION_FIELD)
    return version if isinstance(version, str) else None


def delete_unused(database: Database, now_ms: int) -> int:
    """Delete versions that nothing has named for KEEP_UNUSED_MS, and return how many.

    A version is first marked as idle, and deleted by a later call unless something names it again.
    """
    with database.read() as connection:
        known = {row.version: row.idle_ms for row in connection.execute(select(descriptions.c.version, _IDLE_MS))}
        texts = [*connection.execute(select(models.c.overrides)).scalars()]
        texts += connection.execute(select(endpoints.c.overrides)).scalars()
        texts += connection.execute(select(defaults.c.overrides)).scalars()
        idle = known.keys() - {find_version(orjson.loads(text)) for text in texts if VERSION_FIELD in text}
        idle -= set(connection.execute(_select_versions_of_runs(sorted(idle))).scalars()) if idle else set()
    expired = [version for version in idle if (ms := known[version]) is not None and now_ms - ms >= KEEP_UNUSED_MS]
    newly_idle = [version for version in idle if known[version] is None]
    used_again = [version for version in known.keys() - idle if known[version] is not None]
    if not (expired or newly_idle or used_again):
        return 0

    def unit(tx: Transaction) -> int:
        version = descriptions.c.version
        tx.connection.execute(update(descriptions).where(version.in_(newly_idle)).values(idle_ms=now_ms))
        tx.connection.execute(update(descriptions).where(version.in_(used_again)).values(idle_ms=None))
        # Not one that was stored again since it was read.
        return tx.connection.execute(delete(descriptions).where(version.in_(expired), _IDLE_MS.is_not(None))).rowcount

    return database.write(unit)


def _select_versions_of_runs(versions: list[str]) -> Any:
    """Return the query for those of these versions that runs name: running ones, and those to be resumed."""
    active = or_(
        jobs.c.state == State.RUNNING.value,
        (jobs.c.state == State.QUEUED.value) & jobs.c.remote_id.is_not(None),
    )
    return select(jobs.c.described_by).where(jobs.c.described_by.in_(versions), active).distinct()


# -- secrets -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Secret:
    """A sealed secret.  models: those whose descriptions may name it; None: all."""

    name: str
    models: frozenset[str] | None
    sealed: str
    set_by: str | None
    set_ms: int

    def is_for(self, model: str) -> bool:
        return self.models is None or model in self.models


def list_secrets(connection: Connection) -> dict[str, Secret]:
    return {row.name: _secret_from_row(row) for row in connection.execute(select(secrets).order_by(secrets.c.name))}


def put_secret(tx: Transaction, secret: Secret) -> None:
    """Add a secret, or replace the one of this name."""
    models_text = None if secret.models is None else orjson.dumps(sorted(secret.models)).decode()
    values = {"models": models_text, "sealed": secret.sealed, "set_by": secret.set_by, "set_ms": secret.set_ms}
    upsert(tx.connection, secrets, {"name": secret.name}, values)


def replace_seal(tx: Transaction, secret: Secret, sealed: str) -> bool:
    """Store the same secret under another seal.  Returns False if it was set or removed in the meantime."""
    same = (secrets.c.name == secret.name) & (secrets.c.sealed == secret.sealed)
    return tx.connection.execute(update(secrets).where(same).values(sealed=sealed)).rowcount == 1


def remove_secret(tx: Transaction, name: str) -> bool:
    """Remove a secret.  Returns False if there is none."""
    return tx.connection.execute(delete(secrets).where(secrets.c.name == name)).rowcount == 1


def remove_model_from_scopes(tx: Transaction, model: str) -> None:
    """Remove a model from the scopes of secrets: a later model of this name must not have them."""
    for secret in list_secrets(tx.connection).values():
        if secret.models is not None and model in secret.models:
            text = orjson.dumps(sorted(secret.models - {model})).decode()
            tx.connection.execute(update(secrets).where(secrets.c.name == secret.name).values(models=text))


def _secret_from_row(row: Row) -> Secret:
    scope = None if row.models is None else frozenset(orjson.loads(row.models))
    return Secret(row.name, scope, row.sealed, row.set_by, row.set_ms)
