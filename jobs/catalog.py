"""Which models, configurations and servers there are: the part of the record that operators change.

Every change raises a version in its own transaction; processes compare it to know that theirs is old.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import delete, insert, select, update

from jobs.config import ModelConfig
from jobs.db import Database, Transaction
from jobs.errors import Conflict, NotFound
from jobs.models import counters, endpoints, jobs, models, servers
from jobs.record import Server
from jobs.states import ACTIVE
from jobs.store import count

_VERSION = "catalog_version"
_SELECT_VERSION = select(counters.c.value).where(counters.c.name == _VERSION)


@dataclass(frozen=True, slots=True)
class Model:
    """A named queue, and how its jobs are treated.  `overrides`: what differs from the defaults."""

    name: str
    fleet: str
    overrides: Mapping[str, Any]
    config: ModelConfig


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of the catalog at one version."""

    version: int
    models: Mapping[str, Model]
    servers: Mapping[str, Server]

    def fleets(self) -> list[str]:
        return sorted({m.fleet for m in self.models.values()} | {s.fleet for s in self.servers.values()})

    def models_of(self, fleet: str) -> list[str]:
        return sorted(m.name for m in self.models.values() if m.fleet == fleet)

    def servers_of(self, fleet: str) -> list[Server]:
        return sorted((s for s in self.servers.values() if s.fleet == fleet), key=lambda s: s.name)

    def slots_of(self, model: str) -> int:
        """Slots, of servers that are not draining or paused, on which this model can run."""
        return sum(s.slots for s in self.servers.values() if model in s.endpoints and s.state == "online")


class Catalog:
    """Reads and changes models, configurations and servers."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def version(self) -> int:
        with self.database.read() as connection:
            return connection.execute(_SELECT_VERSION).scalar() or 0

    def snapshot(self) -> Snapshot:
        """The catalog as it stands.  The version is read first: at worst a newer content is read again."""
        with self.database.read() as connection:
            version = connection.execute(_SELECT_VERSION).scalar() or 0
            model_rows = connection.execute(select(models)).all()
            server_rows = connection.execute(select(servers)).all()
            urls: dict[str, dict[str, str]] = defaultdict(dict)
            for row in connection.execute(select(endpoints)):
                urls[row.server][row.model] = row.url
        return Snapshot(
            version,
            {row.name: _model(row.name, row.fleet, orjson.loads(row.overrides)) for row in model_rows},
            {
                row.name: Server(row.name, row.fleet, row.slots, row.state, dict(urls[row.name]), row.created_ms)
                for row in server_rows
            },
        )

    def register(self, model: str, server: str, url: str, slots: int, now: int) -> Server:
        """Add or change a server that serves `model` at `url`; the model is created if it is new.

        Raises Conflict if server and model belong to different fleets and cannot be brought together.
        """

        def unit(tx: Transaction) -> Server:
            fleet = _meeting_fleet(tx, model, server)
            known = tx.connection.execute(select(models.c.fleet).where(models.c.name == model)).scalar()
            if known is None:
                tx.connection.execute(insert(models), {"name": model, "fleet": fleet, "created_ms": now})
            elif known != fleet:
                tx.connection.execute(update(models).where(models.c.name == model).values(fleet=fleet))
            row = tx.connection.execute(select(servers).where(servers.c.name == server)).first()
            if row is None:
                new = {"name": server, "fleet": fleet, "slots": slots, "state": "online", "created_ms": now}
                tx.connection.execute(insert(servers), new)
            else:
                tx.connection.execute(update(servers).where(servers.c.name == server).values(slots=slots))
            serves = (endpoints.c.server == server) & (endpoints.c.model == model)
            if tx.connection.execute(update(endpoints).where(serves).values(url=url)).rowcount == 0:
                tx.connection.execute(insert(endpoints), {"server": server, "model": model, "url": url})
            count(tx, _VERSION)
            served = tx.connection.execute(select(endpoints).where(endpoints.c.server == server)).all()
            return Server(
                server,
                fleet,
                slots,
                "online" if row is None else row.state,
                {e.model: e.url for e in served},
                now if row is None else row.created_ms,
            )

        return self.database.write(unit)

    def set_server_state(self, server: str, state: str) -> None:
        """online, draining (finish what runs, take nothing new) or paused.  Raises NotFound."""
        self._change_server(server, update(servers).where(servers.c.name == server).values(state=state))

    def remove_server(self, server: str) -> None:
        """Forget a server; its models stay, and their jobs wait.  Raises NotFound."""
        self._change_server(
            server,
            delete(endpoints).where(endpoints.c.server == server),
            delete(servers).where(servers.c.name == server),
        )

    def _change_server(self, server: str, *statements: Any) -> None:
        def unit(tx: Transaction) -> int:
            count(tx, _VERSION)
            return [tx.connection.execute(statement).rowcount for statement in statements][-1]

        if self.database.write(unit) == 0:
            raise NotFound(f"There is no server {server!r}; GET /admin/servers lists them.", server=server)

    def configure(self, model: str, overrides: Mapping[str, Any], now: int) -> Model:
        """Replace the model's overrides; an empty mapping goes back to the defaults.

        Raises pydantic.ValidationError, and then nothing has changed.  The model is created if it is new.
        """
        ModelConfig(**overrides)
        text = orjson.dumps(dict(overrides)).decode()

        def unit(tx: Transaction) -> str:
            count(tx, _VERSION)
            changed = update(models).where(models.c.name == model).values(overrides=text).returning(models.c.fleet)
            fleet = tx.connection.execute(changed).scalar()
            if fleet is None:
                new = {"name": model, "fleet": model, "overrides": text, "created_ms": now}
                tx.connection.execute(insert(models), new)
            return fleet or model

        return _model(model, self.database.write(unit), overrides)


def _meeting_fleet(tx: Transaction, model: str, server: str) -> str:
    """The fleet in which this server and this model can stand together: all slots of a server are in one."""
    servers_fleet = tx.connection.execute(select(servers.c.fleet).where(servers.c.name == server)).scalar()
    models_fleet = tx.connection.execute(select(models.c.fleet).where(models.c.name == model)).scalar()
    if servers_fleet is None or models_fleet in (None, servers_fleet):
        return servers_fleet or models_fleet or model
    served = select(endpoints.c.server).where(endpoints.c.model == model).limit(1)
    waiting = select(jobs.c.id).where(jobs.c.model == model, jobs.c.state.in_([s.value for s in ACTIVE])).limit(1)
    if tx.connection.execute(served).first() or tx.connection.execute(waiting).first():
        raise Conflict(
            f"Server {server!r} belongs to fleet {servers_fleet!r} and model {model!r} to {models_fleet!r}, which has "
            "servers or unfinished jobs; register the server under another name, or empty the model first.",
            server=server,
            model=model,
        )
    return servers_fleet


def _model(name: str, fleet: str, overrides: Mapping[str, Any]) -> Model:
    return Model(name, fleet, overrides, ModelConfig(**overrides))
