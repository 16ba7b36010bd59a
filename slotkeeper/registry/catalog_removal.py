"""Remove models and servers, with what depends on them, each in one transaction.

Waiting or running jobs prevent a removal: it is refused, or the model or server takes nothing new until they have ended
and maintenance completes the removal.  Redis follows the database (routing/maintenance/decommission.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson
from sqlalchemy import Connection, delete, func, select, update

from slotkeeper.audit import commit_audited, make_entry
from slotkeeper.db import Database, Transaction
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.jobs import closed_models
from slotkeeper.jobs.closed_models import ClosedModel, ClosingReason
from slotkeeper.jobs.statements import unindexed
from slotkeeper.jobs.states import ACTIVE_STATES, State
from slotkeeper.jobs.tables import jobs
from slotkeeper.registry.catalog_changes import Change, Part, note_changes, raise_version
from slotkeeper.registry.server_descriptions import remove_model_from_scopes
from slotkeeper.registry.slot_use import find_slot_use
from slotkeeper.registry.tables import endpoints, models, servers

Row: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Removal:
    """How far a removal has come.

    fleet: whose copy in Redis has to follow.  is_over: the model or server is removed.
    remaining: jobs that have not ended, by state.  quarantined: slots.  lost: runs of a server that was removed by
    force.  idle: servers that serve no model any more.
    """

    name: str
    fleet: str
    is_over: bool
    remaining: Mapping[str, int] = field(default_factory=dict)
    quarantined: int = 0
    lost: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()


# -- models ------------------------------------------------------------------------------------------------------


def remove_model(database: Database, model: str, now_ms: int, by: str, *, drain: bool = False) -> Removal:
    """Remove a model all of whose jobs have ended.  drain: close it, and let maintenance remove it later.

    Raises NotFound; Conflict if it has jobs that have not ended, and `drain` is not set.
    """

    def unit(tx: Transaction) -> Removal:
        closed_models.lock_jobs(tx)
        raise_version(tx, Change(Part.MODEL, model))
        fleet, active = _get_fleet_of_model(tx, model), _count_active(tx.connection, model)
        if not active:
            return _delete_model(tx, model, fleet, now_ms, by)
        if not drain:
            raise Conflict(_explain_active(model, active), model=model, **active)
        closed = closed_models.find(tx, model)
        if closed is None or closed.because is not ClosingReason.REMOVING:
            closed_models.close(tx, ClosedModel(model, ClosingReason.REMOVING, now_ms, by))
        return Removal(model, fleet, False, active)

    return commit_audited(database, make_entry("model.remove", now_ms=now_ms, model=model, drain=drain), unit)


def finish_model_removal(database: Database, model: str, now_ms: int) -> Removal | None:
    """Remove a model that drains, if its last job has ended.  Returns None if not, or if the removal was canceled."""
    with database.read() as connection:  # without the lock that a write takes
        if _count_active(connection, model):
            return None

    def unit(tx: Transaction) -> Removal | None:
        closed_models.lock_jobs(tx)
        closed = closed_models.find(tx, model)
        if closed is None or closed.because is not ClosingReason.REMOVING or _count_active(tx.connection, model):
            return None
        raise_version(tx, Change(Part.MODEL, model))
        return _delete_model(tx, model, _get_fleet_of_model(tx, model), now_ms, closed.changed_by or "")

    return commit_audited(database, make_entry("model.remove", now_ms=now_ms, model=model), unit)


def count_active_jobs(database: Database, model: str) -> dict[str, int]:
    """Return how many jobs of a model have not ended, by state."""
    with database.read() as connection:
        return _count_active(connection, model)


def cancel_model_removal(database: Database, model: str) -> None:
    """Cancel a removal.  Raises NotFound if the model is not being removed."""

    def unit(tx: Transaction) -> bool:
        raise_version(tx, Change(Part.MODEL, model))
        return closed_models.reopen(tx, model, ClosingReason.REMOVING)

    if not commit_audited(database, make_entry("model.keep", model=model), unit):
        raise NotFound(f"Model {model!r} is not being removed.", model=model)


def _get_fleet_of_model(tx: Transaction, model: str) -> str:
    fleet = tx.connection.execute(select(models.c.fleet).where(models.c.name == model)).scalar()
    if fleet is None:
        raise NotFound("There is no such model; GET /admin/models lists them.", model=model)
    return str(fleet)


def _count_active(connection: Connection, model: str) -> dict[str, int]:
    """Return how many jobs of the model have not ended, by state, without states that have none.

    Uses the index of states: a model may have millions of ended jobs.
    """
    query = select(jobs.c.state, func.count()).where(
        jobs.c.state.in_(sorted(state.value for state in ACTIVE_STATES)), unindexed(jobs.c.model) == model
    )
    return {row[0]: row[1] for row in connection.execute(query.group_by(jobs.c.state))}


def _explain_active(model: str, active: Mapping[str, int]) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in sorted(active.items()))
    return (
        f"Model {model!r} has jobs that have not ended: {counts}.  Cancel them or let them end, or remove it with "
        "?drain=true: it takes no new ones, and goes when the last has ended."
    )


def _delete_model(tx: Transaction, model: str, fleet: str, now_ms: int, by: str) -> Removal:
    """Delete a model, none of whose jobs is active, with what depends on it."""
    served = [row.server for row in tx.connection.execute(select(endpoints).where(endpoints.c.model == model))]
    note_changes(tx, Change(Part.SECRETS), *(Change(Part.SERVER, server) for server in served))
    tx.connection.execute(delete(endpoints).where(endpoints.c.model == model))
    _delete_attributes_of_model(tx, served, model)
    remove_model_from_scopes(tx, model)
    tx.connection.execute(delete(models).where(models.c.name == model))
    closed_models.close(tx, ClosedModel(model, ClosingReason.REMOVED, now_ms, by))
    serving = set(tx.connection.execute(select(endpoints.c.server)).scalars())
    return Removal(model, fleet, True, idle=tuple(sorted(set(served) - serving)))


def _delete_attributes_of_model(tx: Transaction, served: list[str], model: str) -> None:
    """Delete the attributes that these servers have for this model alone."""
    for row in tx.connection.execute(select(servers.c.name, servers.c.attributes).where(servers.c.name.in_(served))):
        before: dict[str, Any] = orjson.loads(row.attributes)
        kept = {name: value for name, value in before.items() if not name.startswith(f"{model}:")}
        if kept != before:
            text = orjson.dumps(kept, option=orjson.OPT_SORT_KEYS).decode()
            tx.connection.execute(update(servers).where(servers.c.name == row.name).values(attributes=text))


# -- servers -----------------------------------------------------------------------------------------------------


def remove_server(
    database: Database, server: str, now_ms: int, by: str, *, drain: bool = False, force: bool = False
) -> Removal:
    """Remove a server on which nothing runs.  Its models stay, and their jobs wait for another server.

    drain: give it nothing new, and let maintenance remove it when its runs have ended.  force: remove it at once; the
    runs that are lost by that are returned.  Raises NotFound; Conflict if something runs there and neither is set.
    """

    def unit(tx: Transaction) -> Removal:
        closed_models.lock_jobs(tx)
        raise_version(tx, Change(Part.SERVER, server))
        fleet = _get_fleet_of_server(tx, server)
        use = find_slot_use(tx, server)
        if force or not use:
            _delete_server(tx, server)
            return Removal(server, fleet, True, quarantined=use.quarantined, lost=use.running)
        if not drain:
            raise Conflict(
                f"Server {server!r} runs {len(use.running)} jobs, and {use.quarantined} of its slots are quarantined.  "
                "Remove it with ?drain=true: it gets nothing new, and goes when they have ended; or with ?force=true: "
                "they are taken for lost, and run again elsewhere.",
                server=server,
                running=len(use.running),
                quarantined=use.quarantined,
            )
        leaving = {"leaving_ms": now_ms, "leaving_by": by or None}
        tx.connection.execute(update(servers).where(servers.c.name == server).values(**leaving))
        return Removal(server, fleet, False, {State.RUNNING.value: len(use.running)}, use.quarantined)

    entry = make_entry("server.remove", now_ms=now_ms, server=server, drain=drain, force=force)
    return commit_audited(database, entry, unit)


def finish_server_removal(database: Database, server: str) -> Removal | None:
    """Remove a server that takes nothing new, if nothing runs there.  Returns None if not, or if it was canceled.

    The caller has checked that no slot of it is leased or offered in Redis.
    """

    def unit(tx: Transaction) -> Removal | None:
        closed_models.lock_jobs(tx)
        row = tx.connection.execute(select(servers).where(servers.c.name == server)).first()
        if row is None or row.leaving_ms is None or find_slot_use(tx, server):
            return None
        raise_version(tx, Change(Part.SERVER, server))
        _delete_server(tx, server)
        return Removal(server, str(row.fleet), True)

    return database.write(unit)


def cancel_server_removal(database: Database, server: str) -> None:
    """Cancel a removal.  Raises NotFound if the server is not being removed."""
    leaving = (servers.c.name == server) & servers.c.leaving_ms.is_not(None)
    statement = update(servers).where(leaving).values(leaving_ms=None, leaving_by=None)

    def unit(tx: Transaction) -> bool:
        raise_version(tx, Change(Part.SERVER, server))
        return tx.connection.execute(statement).rowcount == 1

    if not commit_audited(database, make_entry("server.keep", server=server), unit):
        raise NotFound(f"Server {server!r} is not being removed.", server=server)


def _get_fleet_of_server(tx: Transaction, server: str) -> str:
    fleet = tx.connection.execute(select(servers.c.fleet).where(servers.c.name == server)).scalar()
    if fleet is None:
        raise NotFound("There is no such server; GET /admin/servers lists them.", server=server)
    return str(fleet)


def _delete_server(tx: Transaction, server: str) -> None:
    tx.connection.execute(delete(endpoints).where(endpoints.c.server == server))
    tx.connection.execute(delete(servers).where(servers.c.name == server))
