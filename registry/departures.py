"""Models and servers that are removed or renamed, with what hangs on them in the record.

Each act is one transaction, so that there is never a model or server in part.  What waits or runs is in the way of a
removal; it is refused, or the one that leaves takes nothing new until that has ended and maintenance ends the act.
What Redis holds follows from the record: see upkeep/reconcile/departures.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson
from sqlalchemy import Connection, delete, func, insert, select, update

from audit.acts import act
from database.db import Database, Transaction
from foundation.errors import Conflict, NotFound
from jobs.models import jobs, withheld
from jobs.moves import compared
from jobs.names import Because, ClosedName
from jobs.states import ACTIVE, State
from registry import names, secrets
from registry.catalog import changed
from registry.tables import endpoints, models, servers

Row: TypeAlias = Any

MOST_RENAMED = 50_000
"""Unfinished jobs that a model may have when it is renamed: they are changed in one transaction.

On PostgreSQL all submits wait for it, about a second for so many, and it is given up after four (Limits).
"""


@dataclass(frozen=True, slots=True)
class Departure:
    """How far a removal or a renaming has come.

    `is_over`: it is done.  `left`: what has not ended, by state.  `fleet`: whose room has to follow.  `lost`: runs of a
    server that was removed under them.  `idle`: servers that serve no model any more.
    """

    name: str
    fleet: str
    is_over: bool
    left: Mapping[str, int] = field(default_factory=dict)
    withheld: int = 0
    lost: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()


# -- models ----------------------------------------------------------------------------------------------------


def remove_model(database: Database, model: str, now_ms: int, by: str, *, drain: bool = False) -> Departure:
    """Remove a model all of whose jobs have ended.  `drain`: or else close it, and let maintenance remove it then.

    Raises NotFound; Conflict: it has jobs that have not ended, and shall not drain.
    """

    removing = act("model.remove", now_ms=now_ms, model=model, drain=drain)

    def unit(tx: Transaction) -> Departure:
        names.hold_jobs(tx)
        changed(tx)
        removing.note(tx)
        fleet, left = _fleet_of(tx, model), _active(tx.connection, model)
        if not left:
            return _removed(tx, model, fleet, now_ms, by)
        if not drain:
            raise Conflict(_in_the_way(model, left), model=model, **left)
        closed = names.find(tx, model)
        if closed is None or closed.because is not Because.REMOVING:
            names.close(tx, ClosedName(model, Because.REMOVING, now_ms, by))
        return Departure(model, fleet, False, left)

    return database.write(unit)


def end_removal(database: Database, model: str, now_ms: int) -> Departure | None:
    """Remove a model that was closed for it, if its last job has ended; None: not yet, or it was called off."""
    with database.read() as connection:  # A look that keeps nobody from writing.
        if _active(connection, model):
            return None

    removing = act("model.remove", now_ms=now_ms, model=model)

    def unit(tx: Transaction) -> Departure | None:
        names.hold_jobs(tx)
        closed = names.find(tx, model)
        if closed is None or closed.because is not Because.REMOVING or _active(tx.connection, model):
            return None
        changed(tx)
        removing.note(tx)
        return _removed(tx, model, _fleet_of(tx, model), now_ms, closed.changed_by or "")

    return database.write(unit)


def left_of(database: Database, model: str) -> dict[str, int]:
    """How many jobs of a model have not ended, by state."""
    with database.read() as connection:
        return _active(connection, model)


def keep_model(database: Database, model: str) -> None:
    """Call a removal off.  Raises NotFound: it is not being removed."""

    keeping = act("model.keep", model=model)

    def unit(tx: Transaction) -> bool:
        changed(tx)
        is_kept = names.reopen(tx, model, Because.REMOVING)
        if is_kept:
            keeping.note(tx)
        return is_kept

    if not database.write(unit):
        raise NotFound(f"Model {model!r} is not being removed.", model=model)


def rename_model(
    database: Database, model: str, to: str, now_ms: int, by: str, *, former_until_ms: int | None = None
) -> Departure:
    """Give a model another name: its jobs that have not ended, its servers, secrets and former names follow.

    `former_until_ms`: until when submits under the old one are taken; None: for good.  What has ended stays under the
    name that it had.  Raises NotFound; Conflict: the name is taken, or too much waits.
    """

    renaming = act("model.rename", now_ms=now_ms, model=model, to=to)

    def unit(tx: Transaction) -> Departure:
        names.hold_jobs(tx)
        changed(tx)
        renaming.note(tx)
        row = _model(tx, model)
        _check_free(tx, models, "model", to)
        if (closed := names.find(tx, model)) is not None:
            raise Conflict(f"{closed.refusal()}  Call that off before you rename it.", model=model)
        names.take(tx, to, now_ms, owner=model)
        left = _active(tx.connection, model)
        if sum(left.values()) > MOST_RENAMED:
            raise Conflict(
                f"Model {model!r} has {sum(left.values())} jobs that have not ended; at most {MOST_RENAMED} can be "
                "taken along.  Drain it first, until fewer wait.",
                model=model,
                **left,
            )
        tx.connection.execute(insert(models), {**row._mapping, "name": to})
        _call_otherwise(tx, model, to)
        tx.connection.execute(delete(models).where(models.c.name == model))
        names.follow(tx, model, to)
        names.close(tx, ClosedName(model, Because.RENAMED, now_ms, by, to, former_until_ms))
        return Departure(to, row.fleet, True, left)

    return database.write(unit)


def end_former_name(database: Database, model: str, former: str, now_ms: int) -> None:
    """Submits under a former name are taken no more.  Raises NotFound."""

    ending = act("model.end_former_name", now_ms=now_ms, model=model, former=former)

    def unit(tx: Transaction) -> bool:
        names.hold_jobs(tx)
        changed(tx)
        closed = names.find(tx, former)
        if closed is None or closed.stands_for(now_ms) != model:
            return False
        ending.note(tx)
        names.close(tx, ClosedName(former, Because.RENAMED, closed.changed_ms, closed.changed_by, model, now_ms))
        return True

    if not database.write(unit):
        raise NotFound(f"{former!r} is no former name of {model!r} that is in use.", model=model, former=former)


def _model(tx: Transaction, model: str) -> Row:
    row = tx.connection.execute(select(models).where(models.c.name == model)).first()
    if row is None:
        raise NotFound("There is no such model; GET /admin/models lists them.", model=model)
    return row


def _fleet_of(tx: Transaction, model: str) -> str:
    return str(_model(tx, model).fleet)


def _active(connection: Connection, model: str) -> dict[str, int]:
    """How many jobs of it have not ended, by state; those without any are left out.

    By the index of states: a model may have millions of jobs that have ended.
    """
    query = select(jobs.c.state, func.count()).where(
        jobs.c.state.in_(sorted(state.value for state in ACTIVE)), compared(jobs.c.model) == model
    )
    return {row[0]: row[1] for row in connection.execute(query.group_by(jobs.c.state))}


def _in_the_way(model: str, left: Mapping[str, int]) -> str:
    said = ", ".join(f"{count} {state}" for state, count in sorted(left.items()))
    return (
        f"Model {model!r} has jobs that have not ended: {said}.  Cancel them or let them end, or remove it with "
        "?drain=true: it takes no new ones, and goes when the last has ended."
    )


def _removed(tx: Transaction, model: str, fleet: str, now_ms: int, by: str) -> Departure:
    """Take a model away with what hangs on it; the caller knows that none of its jobs is active."""
    served = [row.server for row in tx.connection.execute(select(endpoints).where(endpoints.c.model == model))]
    tx.connection.execute(delete(endpoints).where(endpoints.c.model == model))
    _declare_otherwise(tx, served, model, None)
    secrets.scope_otherwise(tx, model, None)
    tx.connection.execute(delete(models).where(models.c.name == model))
    names.follow(tx, model, None)
    names.close(tx, ClosedName(model, Because.REMOVED, now_ms, by))
    serving = set(tx.connection.execute(select(endpoints.c.server)).scalars())
    return Departure(model, fleet, True, idle=tuple(sorted(set(served) - serving)))


def _call_otherwise(tx: Transaction, model: str, to: str) -> None:
    """All that names a model and goes on names it by its new name.

    Acceptance numbers stay, and with them the order (ORDER-1).
    """
    active = jobs.c.state.in_(sorted(state.value for state in ACTIVE)) & (compared(jobs.c.model) == model)
    tx.connection.execute(update(jobs).where(active).values(model=to))
    tx.connection.execute(update(withheld).where(withheld.c.model == model).values(model=to))
    served = [row.server for row in tx.connection.execute(select(endpoints).where(endpoints.c.model == model))]
    tx.connection.execute(update(endpoints).where(endpoints.c.model == model).values(model=to))
    _declare_otherwise(tx, served, model, to)
    secrets.scope_otherwise(tx, model, to)


def _declare_otherwise(tx: Transaction, served: list[str], model: str, to: str | None) -> None:
    """What servers declare for this model alone they declare for `to`; None: no more."""
    mine = f"{model}:"
    for row in tx.connection.execute(select(servers.c.name, servers.c.attributes).where(servers.c.name.in_(served))):
        before: dict[str, Any] = orjson.loads(row.attributes)
        kept = {name: value for name, value in before.items() if not name.startswith(mine)}
        if to is not None:
            kept |= {
                f"{to}:{name.removeprefix(mine)}": value for name, value in before.items() if name.startswith(mine)
            }
        if kept != before:
            text = orjson.dumps(kept, option=orjson.OPT_SORT_KEYS).decode()
            tx.connection.execute(update(servers).where(servers.c.name == row.name).values(attributes=text))


# -- servers ---------------------------------------------------------------------------------------------------


def remove_server(
    database: Database, server: str, now_ms: int, by: str, *, drain: bool = False, force: bool = False
) -> Departure:
    """Forget a server on which nothing runs; its models stay, and their jobs wait for another.

    `drain`: or else give it nothing new, and let maintenance remove it when its runs have ended.  `force`: at once; the
    caller is told which runs are lost by it.  Raises NotFound; Conflict: something runs there, and neither is wanted.
    """

    removing = act("server.remove", now_ms=now_ms, server=server, drain=drain, force=force)

    def unit(tx: Transaction) -> Departure:
        names.hold_jobs(tx)
        changed(tx)
        removing.note(tx)
        fleet, runs, kept = str(_server(tx, server).fleet), _runs(tx, server), _withheld(tx, server)
        if force or not (runs or kept):
            _forget_server(tx, server)
            return Departure(server, fleet, True, withheld=kept, lost=tuple(runs))
        if not drain:
            raise Conflict(
                f"Server {server!r} runs {len(runs)} jobs, and {kept} of its slots are withheld.  Remove it with "
                "?drain=true: it gets nothing new, and goes when they have ended; or with ?force=true: they are taken "
                "for lost, and run again elsewhere.",
                server=server,
                running=len(runs),
                withheld=kept,
            )
        _let_leave(tx, server, now_ms, by, None)
        return Departure(server, fleet, False, {State.RUNNING.value: len(runs)}, kept)

    return database.write(unit)


def rename_server(database: Database, server: str, to: str, now_ms: int, by: str) -> Departure:
    """Give a server another name, at once if nothing runs there; else it gets nothing new until its runs have ended.

    A run names its slot, and its worker holds it by that name.  Raises NotFound; Conflict: the name is taken.
    """

    renaming = act("server.rename", now_ms=now_ms, server=server, to=to)

    def unit(tx: Transaction) -> Departure:
        names.hold_jobs(tx)
        changed(tx)
        renaming.note(tx)
        row = _server(tx, server)
        _check_free(tx, servers, "server", to)
        pending = select(servers.c.name).where(servers.c.becomes == to, servers.c.name != server)
        if (other := tx.connection.execute(pending).scalar()) is not None:
            raise Conflict(f"Server {other!r} is getting the name {to!r}; take another.", server=to)
        _let_leave(tx, server, now_ms, by, to)
        left = {State.RUNNING.value: len(_runs(tx, server))}
        return Departure(server, str(row.fleet), False, left, _withheld(tx, server))

    return database.write(unit)


def end_leaving(database: Database, server: str) -> Departure | None:
    """Remove or rename a server that takes nothing new, if nothing runs there; None: not yet, or it was called off.

    The caller knows that no slot of it is held or offered in Redis.
    """

    def unit(tx: Transaction) -> Departure | None:
        names.hold_jobs(tx)
        row = tx.connection.execute(select(servers).where(servers.c.name == server)).first()
        if row is None or row.leaving_ms is None or _runs(tx, server) or _withheld(tx, server):
            return None
        changed(tx)
        if row.becomes is None:
            _forget_server(tx, server)
        else:
            _rename_server(tx, row)
        return Departure(row.becomes or server, str(row.fleet), True)

    return database.write(unit)


def keep_server(database: Database, server: str) -> None:
    """Call a removal or renaming off.  Raises NotFound: it is not leaving."""
    leaving, keeping = (servers.c.name == server) & servers.c.leaving_ms.is_not(None), act("server.keep", server=server)

    def unit(tx: Transaction) -> bool:
        changed(tx)
        is_kept = tx.connection.execute(update(servers).where(leaving).values(**_STAYS)).rowcount == 1
        if is_kept:
            keeping.note(tx)
        return is_kept

    if not database.write(unit):
        raise NotFound(f"Server {server!r} is not being removed or renamed.", server=server)


_STAYS: dict[str, Any] = {"leaving_ms": None, "leaving_by": None, "becomes": None}


def _server(tx: Transaction, server: str) -> Row:
    row = tx.connection.execute(select(servers).where(servers.c.name == server)).first()
    if row is None:
        raise NotFound("There is no such server; GET /admin/servers lists them.", server=server)
    return row


def _let_leave(tx: Transaction, server: str, now_ms: int, by: str, becomes: str | None) -> None:
    values = {"leaving_ms": now_ms, "leaving_by": by or None, "becomes": becomes}
    tx.connection.execute(update(servers).where(servers.c.name == server).values(**values))


def _runs(tx: Transaction, server: str) -> list[str]:
    running = select(jobs.c.id).where(jobs.c.state == State.RUNNING.value, jobs.c.server == server)
    return list(tx.connection.execute(running.order_by(jobs.c.seq)).scalars())


def _withheld(tx: Transaction, server: str) -> int:
    query = select(func.count()).select_from(withheld).where(withheld.c.server == server)
    return int(tx.connection.execute(query).scalar_one())


def _forget_server(tx: Transaction, server: str) -> None:
    tx.connection.execute(delete(endpoints).where(endpoints.c.server == server))
    tx.connection.execute(delete(servers).where(servers.c.name == server))


def _rename_server(tx: Transaction, row: Row) -> None:
    """Its endpoints follow, and what is resumed there."""
    server, to = row.name, row.becomes
    tx.connection.execute(insert(servers), {**row._mapping, **_STAYS, "name": to, "formerly": server})
    tx.connection.execute(update(endpoints).where(endpoints.c.server == server).values(server=to))
    tx.connection.execute(delete(servers).where(servers.c.name == server))
    resumed = (jobs.c.state == State.QUEUED.value) & (jobs.c.server == server)
    tx.connection.execute(update(jobs).where(resumed).values(server=to))


def _check_free(tx: Transaction, table: Any, kind: str, name: str) -> None:
    if tx.connection.execute(select(table.c.name).where(table.c.name == name)).first() is not None:
        raise Conflict(f"There is a {kind} {name!r} already; take another name.", **{kind: name})
