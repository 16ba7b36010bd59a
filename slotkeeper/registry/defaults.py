"""The stored defaults of model configurations: of the installation, and of kinds of models."""

from typing import Any

import orjson
from sqlalchemy import Connection, delete, select

from slotkeeper.db import Transaction
from slotkeeper.db.schema import upsert
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.registry.model_config import KIND, Defaults, check_config
from slotkeeper.registry.server_descriptions import VERSION_FIELD, find_version
from slotkeeper.registry.tables import defaults, models


def list_defaults(connection: Connection) -> dict[str, Defaults]:
    found = {}
    for row in connection.execute(select(defaults).order_by(defaults.c.name)):
        overrides = orjson.loads(row.overrides)
        version = find_version(overrides)
        overrides.pop(VERSION_FIELD, None)
        found[row.name] = Defaults(row.name, overrides, row.changed_ms, row.changed_by, version)
    return found


def put_defaults(tx: Transaction, given: Defaults) -> None:
    """Set the defaults of this name.  Raises InvalidJob if they and a model's own fields do not fit together."""
    stored = dict(given.overrides) | ({VERSION_FIELD: given.described_by} if given.described_by else {})
    values = {
        "overrides": orjson.dumps(stored).decode(),
        "changed_by": given.changed_by,
        "changed_ms": given.changed_ms,
    }
    upsert(tx.connection, defaults, {"name": given.name}, values)
    known = list_defaults(tx.connection)
    for model, own in _list_overrides(tx):
        check_config(model, own, known)


def remove_kind(tx: Transaction, kind: str) -> None:
    """Remove a kind of models.  Raises NotFound; Conflict if models are of this kind."""
    members = sorted(name for name, own in _list_overrides(tx) if own.get(KIND) == kind)
    if members:
        shown = ", ".join(members[:5])
        raise Conflict(f"{len(members)} models are of kind {kind!r} ({shown}); give them another first.", kind=kind)
    if tx.connection.execute(delete(defaults).where(defaults.c.name == kind)).rowcount == 0:
        raise NotFound("There is no such kind; GET /admin/kinds lists them.", kind=kind)


def _list_overrides(tx: Transaction) -> list[tuple[str, dict[str, Any]]]:
    """Return each model with the fields that it sets."""
    rows = tx.connection.execute(select(models.c.name, models.c.overrides).order_by(models.c.name))
    return [(row.name, _without_version(orjson.loads(row.overrides))) for row in rows]


def _without_version(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in stored.items() if name != VERSION_FIELD}
