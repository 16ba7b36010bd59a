"""The log of changes to the catalog: which of its parts each version changed.

A process that has an older version reads these parts alone, and the whole catalog if the log does not lead from its
version to the present one: after a change by a process of a release before this log, after a restore from a backup, or
where it is too far behind.
"""

import secrets
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import Connection, delete, insert, literal, select

from slotkeeper.db import Transaction
from slotkeeper.db.schema import add_to_counter, counters
from slotkeeper.registry.tables import catalog_changes

_VERSION = "catalog_version"
_KEPT_VERSIONS = 10_000
_MAX_ROWS = 2_000  # With more, the whole catalog is read as fast.

SELECT_VERSION = select(counters.c.value).where(counters.c.name == _VERSION)
_PRESENT = SELECT_VERSION.scalar_subquery()


class Part(StrEnum):
    """A part of the catalog; the first three are rows with names."""

    MODEL = "model"  # and whether its name is closed
    SERVER = "server"  # with its endpoints
    TENANT = "tenant"  # its state and its limits
    SECRETS = "secrets"
    DEFAULTS = "defaults"


class Change(NamedTuple):
    """A part that changed.  name: "" for parts that have none."""

    part: Part
    name: str = ""


class Edition(NamedTuple):
    """A version, with a random mark: after a restore from a backup another version may have the same number."""

    version: int
    mark: str | None = None


def raise_version(tx: Transaction, *changes: Change) -> None:
    """Raise the version, and note what changes.

    First in its transaction: on PostgreSQL the row's lock lets one change in at a time.
    """
    add_to_counter(tx.connection, _VERSION)
    tx.connection.execute(delete(catalog_changes).where(catalog_changes.c.version <= _PRESENT - _KEPT_VERSIONS))
    note_changes(tx, *changes)


def lock_version(tx: Transaction) -> None:
    """Keep other changes of the catalog out until this transaction has ended."""
    add_to_counter(tx.connection, _VERSION, 0)


def note_changes(tx: Transaction, *changes: Change) -> None:
    """Note further changes of the version that this transaction has raised."""
    for change in changes:
        values = select(_PRESENT, literal(change.part.value), literal(change.name), literal(secrets.token_hex(8)))
        tx.connection.execute(insert(catalog_changes).from_select(catalog_changes.c.keys(), values))


def read_edition(connection: Connection) -> Edition:
    """Return the present version."""
    version = connection.execute(SELECT_VERSION).scalar() or 0
    return Edition(version, _read_mark(connection, version))


def list_changes(connection: Connection, since: Edition, version: int) -> set[Change] | None:
    """Return what changed after an edition up to a version; None: the log does not say it, or it is too much."""
    rows = catalog_changes.c.version.between(since.version, version)
    found = connection.execute(select(catalog_changes).where(rows).limit(_MAX_ROWS + 1)).all()
    logged = {row.version for row in found}
    has_base = since.mark is not None and since.mark in {row.mark for row in found if row.version == since.version}
    if len(found) > _MAX_ROWS or not has_base or len(logged) != version - since.version + 1:
        return None
    return {Change(Part(row.part), row.name) for row in found if row.version > since.version}


def _read_mark(connection: Connection, version: int) -> str | None:
    of_version = catalog_changes.c.version == version
    return connection.execute(select(catalog_changes.c.mark).where(of_version).limit(1)).scalar()
