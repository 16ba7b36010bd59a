"""Secrets that descriptions of servers name: what is sealed of them, and for which models.

Part of the catalog: each change raises its version, so that workers have it within two seconds.  What seals and opens
them is elsewhere; the record never holds one in the open.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson
from sqlalchemy import Connection, delete, insert, select, update

from slotkeeper.db import Transaction
from slotkeeper.registry.tables import secrets

Row: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Secret:
    """`models`: those whose descriptions may name it; None: all."""

    name: str
    models: frozenset[str] | None
    sealed: str
    set_by: str | None
    set_ms: int

    def is_for(self, model: str) -> bool:
        return self.models is None or model in self.models


def list_secrets(connection: Connection) -> dict[str, Secret]:
    return {row.name: _secret(row) for row in connection.execute(select(secrets).order_by(secrets.c.name))}


def put_secret(tx: Transaction, it: Secret) -> None:
    """Add a secret, or replace the one of this name."""
    remove_secret(tx, it.name)
    models = None if it.models is None else orjson.dumps(sorted(it.models)).decode()
    values = {"name": it.name, "models": models, "sealed": it.sealed, "set_by": it.set_by, "set_ms": it.set_ms}
    tx.connection.execute(insert(secrets), values)


def replace_seal(tx: Transaction, it: Secret, sealed: str) -> bool:
    """False: the secret does not stand as `it` says any more."""
    same = (secrets.c.name == it.name) & (secrets.c.sealed == it.sealed)
    return tx.connection.execute(update(secrets).where(same).values(sealed=sealed)).rowcount == 1


def remove_model_from_scopes(tx: Transaction, model: str) -> None:
    """Take a model out of the scopes of secrets: another that gets its name one day shall not have them."""
    for it in list_secrets(tx.connection).values():
        if it.models is not None and model in it.models:
            text = orjson.dumps(sorted(it.models - {model})).decode()
            tx.connection.execute(update(secrets).where(secrets.c.name == it.name).values(models=text))


def remove_secret(tx: Transaction, name: str) -> bool:
    """False: there was none."""
    return tx.connection.execute(delete(secrets).where(secrets.c.name == name)).rowcount == 1


def _secret(row: Row) -> Secret:
    models = None if row.models is None else frozenset(orjson.loads(row.models))
    return Secret(row.name, models, row.sealed, row.set_by, row.set_ms)
