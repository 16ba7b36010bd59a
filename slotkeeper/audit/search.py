"""Acts of operators, read: who did what, when, and to which job, server, model or tenant."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import Select, select

from slotkeeper.audit.acts import ACTION_PREFIX
from slotkeeper.db import Database
from slotkeeper.jobs.tables import events

_SAME = ("actor", "job_id", "model", "server", "tenant")


@dataclass(frozen=True, slots=True)
class AuditRow:
    """An act, as the record keeps it.  `data`: what else is known of it."""

    id: int
    act: str
    at_ms: int
    actor: str
    interface: str | None
    origin: str | None
    reason: str | None
    job_id: str | None
    model: str | None
    server: str | None
    tenant: str | None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which acts are looked for; None: whichever.  Times are ms since the epoch, `until_ms` excluded."""

    actor: str | None = None
    act: str | None = None
    job_id: str | None = None
    model: str | None = None
    server: str | None = None
    tenant: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None


def find_entries(database: Database, wanted: AuditFilter, before: int | None = None, limit: int = 50) -> list[AuditRow]:
    """The newest first; `before` is the cursor: the last one's `id`."""
    query = _matching(wanted).order_by(events.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(events.c.id < before)
    with database.read(unbounded=True) as connection:
        return [_done(row) for row in connection.execute(query)]


def _matching(wanted: AuditFilter) -> Select[Any]:
    query = select(events).where(events.c.actor.is_not(None))  # As its index has it.
    for name in _SAME:
        if (value := getattr(wanted, name)) is not None:
            query = query.where(events.c[name] == value)
    if wanted.act is not None:
        query = query.where(events.c.type == f"{ACTION_PREFIX}{wanted.act}")
    if wanted.since_ms is not None:
        query = query.where(events.c.at_ms >= wanted.since_ms)
    if wanted.until_ms is not None:
        query = query.where(events.c.at_ms < wanted.until_ms)
    return query


def _done(row: Any) -> AuditRow:
    data = orjson.loads(row.data)
    interface, origin, reason = (data.pop(name, None) for name in ("interface", "origin", "reason"))
    return AuditRow(
        row.id,
        row.type.removeprefix(ACTION_PREFIX),
        row.at_ms,
        row.actor,
        interface,
        origin,
        reason,
        row.job_id or None,
        row.model,
        row.server,
        row.tenant,
        data,
    )
