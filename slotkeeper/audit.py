"""The audit log: write who did what beside the change, and search it.

An entry is one event, in the transaction of what it changes; its type begins with `act.`.  The interface that lets a
client in sets the actor (`acting_as`).  Entries can only be added: triggers refuse to change them
(migrations/versions/0001_initial.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from sqlalchemy import Select, select

from slotkeeper.clock import clock
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import storable_text
from slotkeeper.errors import SlotkeeperError
from slotkeeper.jobs.events import add_row, encode_data
from slotkeeper.jobs.tables import events

T = TypeVar("T")

ACTION_PREFIX = "act."
ACTIONS = frozenset(
    {
        *("job.cancel", "job.retry", "job.delete", "job.read_payload"),
        *(f"batch.{word}" for word in ("cancel", "pause", "resume")),
        *("server.register", "server.remove", "server.keep", "server.reset", "server.release"),
        *("model.remove", "model.keep"),
        *("defaults.set", "defaults.remove", "price.set", "validation.set", "validation.remove"),
        *(f"credit.{word}" for word in ("open", "close", "grant", "withdraw", "refund")),
        *(f"node.{word}" for word in ("token", "remove_token", "enroll", "rotate", "revoke", "remove")),
        *("key.add", "key.change", "key.rotate", "key.revoke"),
        *("model.configure", "tenant.add", "tenant.change", "tenant.remove"),
        *("webhook_secret.rotate", "secret.set", "secret.remove", "callback.replay"),
        *(f"webhook.{word}" for word in ("add", "change", "rotate", "enable", "disable", "replay", "test", "remove")),
        *(
            f"{kind}.{word}"
            for kind in ("server", "model", "tenant")
            for word in ("pause", "drain", "freeze", "resume")
        ),
    }
)
"""The actions.  The event of an action has the type `act.<action>`."""

_MAX_LENGTH = 500
_COLUMNS = ("model", "tenant", "server")
_FILTER_COLUMNS = ("actor", "job_id", "model", "server", "tenant")


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts.  name: of the key, never the key itself.  interface: api, page, …  origin: the client's address."""

    name: str
    interface: str
    origin: str | None = None


SYSTEM = Actor("slotkeeper", "process")
"""This process itself."""

_actor: ContextVar[Actor] = ContextVar("actor", default=SYSTEM)


@contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    """Attribute what this thread does in the block to `actor`."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


def set_actor(actor: Actor) -> None:
    """Attribute what this thread does from now on to `actor`."""
    _actor.set(actor)


def get_actor() -> Actor:
    """Return the actor of this thread."""
    return _actor.get()


# -- writing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One entry, made before the transaction, which another thread may run."""

    row: Mapping[str, Any]

    def write(self, transaction: Transaction, /, **about: str) -> None:
        """Write the entry in a transaction.  about: model, tenant or server, if only the transaction knows it."""
        add_row(transaction, {**self.row, **about})


def make_entry(
    action: str, *, job_id: str = "", now_ms: int | None = None, reason: str | None = None, **about: Any
) -> AuditEntry:
    """Make the entry of an action of this thread's actor.

    about: `model`, `tenant`, `server`, and any further facts.  Raises ValueError for an action that is not in ACTIONS.
    """
    if action not in ACTIONS:
        raise ValueError(f"{action!r} is no action")
    actor = get_actor()
    columns = {name: about.pop(name, None) for name in _COLUMNS}
    data = {
        "interface": actor.interface,
        "origin": actor.origin,
        "reason": reason and storable_text(reason, _MAX_LENGTH),
        **about,
    }
    row = {
        "job_id": job_id,
        "type": f"{ACTION_PREFIX}{action}",
        "at_ms": clock.now_ms() if now_ms is None else now_ms,
        "attempt": 0,
        "data": encode_data({name: value for name, value in data.items() if value is not None}),
        **columns,
        "priority": None,
        "actor": storable_text(actor.name, _MAX_LENGTH),
    }
    return AuditEntry(row)


def commit_audited(database: Database, entry: AuditEntry, unit: Callable[[Transaction], T | SlotkeeperError]) -> T:
    """Run a unit, and write the entry in its transaction if the unit changed something.

    A unit that changed nothing returns a false value, or a SlotkeeperError to refuse (slotkeeper.db.Write).

    Returns what the unit returned.  Raises as `Database.write`.
    """

    def audited(tx: Transaction) -> T | SlotkeeperError:
        result = unit(tx)
        if result and not isinstance(result, SlotkeeperError):
            entry.write(tx)
        return result

    return database.write(audited)


def write_entry(database: Database, entry: AuditEntry) -> None:
    """Write the entry of an action that changes nothing in the database, or in several transactions.

    Raises DatabaseUnavailable.
    """
    database.write(entry.write)


# -- searching ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditRow:
    """An entry as stored.  data: its further facts."""

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
    """Which entries to find; None: any value.  Times are ms since the epoch, `until_ms` is exclusive."""

    actor: str | None = None
    act: str | None = None
    job_id: str | None = None
    model: str | None = None
    server: str | None = None
    tenant: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None


def find_entries(database: Database, wanted: AuditFilter, before: int | None = None, limit: int = 50) -> list[AuditRow]:
    """Return entries, newest first.  before: the `id` of the last one of the page before."""
    query = _select(wanted).order_by(events.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(events.c.id < before)
    with database.read(unbounded=True) as connection:
        return [_from_row(row) for row in connection.execute(query)]


def _select(wanted: AuditFilter) -> Select[Any]:
    query = select(events).where(events.c.actor.is_not(None))  # the condition of the index
    for name in _FILTER_COLUMNS:
        if (value := getattr(wanted, name)) is not None:
            query = query.where(events.c[name] == value)
    if wanted.act is not None:
        query = query.where(events.c.type == f"{ACTION_PREFIX}{wanted.act}")
    if wanted.since_ms is not None:
        query = query.where(events.c.at_ms >= wanted.since_ms)
    if wanted.until_ms is not None:
        query = query.where(events.c.at_ms < wanted.until_ms)
    return query


def _from_row(row: Any) -> AuditRow:
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
