"""Acts: what people, and programs for them, do to jobs, servers, models, tenants and keys.

Each is one event, in the transaction of what it changes; its type begins with `act.`.  Whoever lets somebody in says
who it is (`acting`); whoever changes the record says what is done (`act`) and notes it when it has changed something.
Acts can only be added: triggers refuse to change them (migrations/versions/0001_initial.py).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from slotkeeper.clock import clock
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import storable_text
from slotkeeper.jobs.events import add_row, encode_data

ACTION_PREFIX = "act."
ACTIONS = frozenset(
    {
        *("job.cancel", "job.retry", "job.delete"),
        *("server.register", "server.remove", "server.keep", "server.reset", "server.release"),
        *("model.remove", "model.keep"),
        *("defaults.set", "defaults.remove"),
        *("model.configure", "tenant.add", "tenant.change", "tenant.rotate", "tenant.remove"),
        *("webhook_secret.rotate", "secret.set", "secret.remove", "callback.replay"),
        *(f"webhook.{word}" for word in ("add", "change", "rotate", "enable", "disable", "replay", "remove")),
        *(
            f"{kind}.{word}"
            for kind in ("server", "model", "tenant")
            for word in ("pause", "drain", "freeze", "resume")
        ),
    }
)
"""Their words, by which they are found; as events they are of the type `act.<word>`."""

_LONGEST = 500
_COLUMNS = ("model", "tenant", "server")


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts.  `name`: of the key, never the key; `interface`: how they came in; `origin`: from which address."""

    name: str
    interface: str
    origin: str | None = None


SYSTEM = Actor("slotkeeper", "process")
"""This process itself."""

_present: ContextVar[Actor] = ContextVar("actor", default=SYSTEM)


@contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    """What this thread does meanwhile is done by `actor`."""
    token = _present.set(actor)
    try:
        yield
    finally:
        _present.reset(token)


def set_actor(actor: Actor) -> None:
    """What this thread does from now on is done by `actor`."""
    _present.set(actor)


def write_entry(database: Database, entry: "AuditEntry") -> None:
    """Note what has changed nothing in the record.  Raises RecordUnavailable."""
    database.write(entry.write)


def get_actor() -> Actor:
    """Who acts in this thread now."""
    return _present.get()


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What somebody does.  Made by who asks for it, and noted in the transaction that does it."""

    row: Mapping[str, Any]

    def write(self, transaction: Transaction, /, **about: str) -> None:
        """Have it written before the transaction commits.  `about`: model, tenant, server, known only now."""
        add_row(transaction, {**self.row, **about})


def make_entry(
    word: str, *, job_id: str = "", now_ms: int | None = None, reason: str | None = None, **about: Any
) -> AuditEntry:
    """What the present actor does.  `about`: `model`, `tenant`, `server`, and whatever else is to be known of it.

    Make it before the transaction, which another thread may run.  Raises ValueError for a word that is not in ACTS.
    """
    if word not in ACTIONS:
        raise ValueError(f"{word!r} is no act")
    actor = get_actor()
    more = {name: about.pop(name, None) for name in _COLUMNS}
    data = {
        "interface": actor.interface,
        "origin": actor.origin,
        "reason": reason and storable_text(reason, _LONGEST),
        **about,
    }
    row = {
        "job_id": job_id,
        "type": f"{ACTION_PREFIX}{word}",
        "at_ms": clock.now_ms() if now_ms is None else now_ms,
        "attempt": 0,
        "data": encode_data({name: value for name, value in data.items() if value is not None}),
        **more,
        "priority": None,
        "actor": storable_text(actor.name, _LONGEST),
    }
    return AuditEntry(row)
