"""Which models, configurations and servers there are: the part of the record that operators change.

Every change raises a version in its own transaction; processes compare it to know that theirs is old.
"""

import math
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from itertools import count as count_from
from typing import Any, TypeAlias

import orjson
import structlog
from sqlalchemy import Table, Text, Update, bindparam, delete, func, insert, or_, select, update

from slotkeeper.audit.acts import AuditEntry, make_entry
from slotkeeper.clock import clock
from slotkeeper.db import Database, Transaction
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.schema import add_to_counter, counters, storable_text
from slotkeeper.db.shared_clock import ClockSynchronizer
from slotkeeper.errors import Conflict, DatabaseUnavailable, NotFound
from slotkeeper.jobs import closed_models
from slotkeeper.jobs.closed_models import ClosedModel
from slotkeeper.jobs.states import ACTIVE_STATES, State
from slotkeeper.jobs.tables import jobs
from slotkeeper.registry import defaults, server_descriptions
from slotkeeper.registry.defaults import ConfigSource, Defaults
from slotkeeper.registry.model_config import ModelConfig, parse_overrides
from slotkeeper.registry.secrets import Secret, put_secret, remove_secret, replace_seal
from slotkeeper.registry.secrets import list_secrets as secrets_of
from slotkeeper.registry.tables import endpoints, models, servers, tenant_states
from slotkeeper.registry.values import AdminState, Server, TenantState
from slotkeeper.urls import mask_url

log = structlog.get_logger(__name__)

Row: TypeAlias = Any  # SQLAlchemy's Row is generic in its columns; ours are named at the statements

_MAX_REASON = 500
_WORDS = {
    AdminState.ONLINE: "resume",
    AdminState.PAUSED: "pause",
    AdminState.DRAINING: "drain",
    AdminState.FROZEN: "freeze",
}
_MIN_WEIGHT = 0.001
_MAX_WEIGHT = 1000
_VERSION = "catalog_version"
_IDENTITY = "record_identity"
_SELECT_IDENTITY = select(counters.c.value).where(counters.c.name == _IDENTITY)
_SELECT_VERSION = select(counters.c.value).where(counters.c.name == _VERSION)
# Every process asks for these once a second.
_VERSION_AND_AHEAD = CompiledStatement(
    select(counters.c.name, counters.c.value).where(
        or_(counters.c.name == _VERSION, counters.c.name == bindparam("p_ahead", type_=Text))
    )
)
_VERSION_AND_TIME = CompiledStatement(
    select(
        _SELECT_VERSION.scalar_subquery().label("version"),
        (func.extract("epoch", func.clock_timestamp()) * 1000).label("at_ms"),
    )
)


@dataclass(frozen=True, slots=True)
class Model:
    """A named queue, and how its jobs are treated.  `overrides`: what differs from the defaults."""

    name: str
    fleet: str
    overrides: Mapping[str, Any]
    config: ModelConfig
    state: str = AdminState.ONLINE
    reason: str | None = None
    changed_by: str | None = None
    changed_ms: int | None = None
    described_by: str | None = None
    """The version by which its servers are spoken to; None: by the slot protocol, with what `config` says."""
    sources: Mapping[str, ConfigSource] = field(default_factory=dict)
    """Where each field of `config` comes from that is not built in."""


@dataclass(frozen=True)
class CatalogSnapshot:
    """All of the catalog at one version.  `tenants`: only those that do not stand online.

    `record`: the identity of the record that it was read from, which tells it from any other, and from one that was
    made anew.
    """

    version: int
    models: Mapping[str, Model]
    servers: Mapping[str, Server]
    tenants: Mapping[str, TenantState] = field(default_factory=dict)
    database_id: str = ""
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    closed: Mapping[str, ClosedModel] = field(default_factory=dict)
    """Names under which no jobs are accepted: see slotkeeper/jobs/closed_models.py."""
    defaults: Mapping[str, Defaults] = field(default_factory=dict)
    """What holds where a model says nothing: by kind, and of the installation."""

    def fleets(self) -> list[str]:
        return sorted({m.fleet for m in self.models.values()} | {s.fleet for s in self.servers.values()})

    def models_of(self, fleet: str) -> list[str]:
        return self._models_by_fleet.get(fleet, [])

    def servers_of(self, fleet: str) -> list[Server]:
        return self._servers_by_fleet.get(fleet, [])

    @cached_property
    def _models_by_fleet(self) -> Mapping[str, list[str]]:
        found = defaultdict[str, list[str]](list)
        for name in sorted(self.models):
            found[self.models[name].fleet].append(name)
        return found

    @cached_property
    def _servers_by_fleet(self) -> Mapping[str, list[Server]]:
        found = defaultdict[str, list[Server]](list)
        for name in sorted(self.servers):
            found[self.servers[name].fleet].append(self.servers[name])
        return found

    def has_pair(self, server: str, model: str) -> bool:
        return server in self.servers and model in self.models

    def model(self, name: str) -> Model | None:
        return self.models.get(name)

    def is_being_removed(self, model: str) -> bool:
        """Whether it is being removed."""
        return model in self.models and model in self.closed

    def find_description(self, server: str, model: str) -> str | None:
        """The version by which this server is spoken to for this model; None: by the slot protocol."""
        if server in self.servers and (own := self.servers[server].overrides.get(model)):
            return server_descriptions.find_version(own)
        return self.models[model].described_by if model in self.models else None

    def endpoint(self, server: str, model: str) -> str | None:
        """The server's address for this model; None: it serves no such model."""
        found = self.servers.get(server)
        return None if found is None else found.endpoints.get(model)

    def count_slots(self, model: str) -> int:
        """Slots, of servers that stand online, on which this model can run."""
        return sum(s.slots for s in self.servers.values() if model in s.endpoints and s.takes_jobs)


class Catalog:
    """Reads and changes models, configurations, servers, and who of them and of the tenants takes part."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._time = None if database.engine.dialect.name == "postgresql" else ClockSynchronizer(database)
        self._warned: set[tuple[str, ...]] = set()

    def get_version(self) -> int:
        """Raised by each change.  With it the common time is heard."""
        with self.database.read() as connection:
            asked = time.monotonic()
            if self._time is None:
                found = _VERSION_AND_TIME.fetch_all(connection, {})[0]
                clock.adjust(float(found.at_ms), asked, time.monotonic())
                return found.version or 0
            rows = _VERSION_AND_AHEAD.fetch_all(connection, {"p_ahead": self._time.name})
        found = {row.name: row.value for row in rows}
        self._time.synchronize(found.get(self._time.name))
        return found.get(_VERSION, 0)

    def get_database_id(self) -> str:
        """What tells this record from all others: a number by chance, made when it is asked for first.

        "": it has none yet, and nothing can be written.
        """
        with self.database.read() as connection:
            found = connection.execute(_SELECT_IDENTITY).scalar()
        try:
            return f"{found if found is not None else self.database.write(_made_identity):x}"
        except DatabaseUnavailable:
            return ""

    def read(self) -> CatalogSnapshot:
        """The catalog as it stands.  The version is read first: at worst a newer content is read again."""
        record = self.get_database_id()
        with self.database.read() as connection:
            version = connection.execute(_SELECT_VERSION).scalar() or 0
            model_rows = connection.execute(select(models)).all()
            server_rows = connection.execute(select(servers)).all()
            tenant_rows = connection.execute(select(tenant_states)).all()
            named, closed = secrets_of(connection), closed_models.list_closed(connection)
            known = defaults.list_defaults(connection)
            served = defaultdict[str, list[Row]](list)
            for row in connection.execute(select(endpoints)):
                served[row.server].append(row)
        return CatalogSnapshot(
            version,
            {row.name: self._model(row, known) for row in model_rows},
            {row.name: _server(row, served[row.name]) for row in server_rows},
            {row.name: TenantState(**row._mapping) for row in tenant_rows},
            record,
            named,
            closed,
            known,
        )

    def register(
        self,
        model: str,
        server: str,
        url: str,
        slots: int,
        now_ms: int,
        attributes: Mapping[str, str | float] | None = None,
        weight: float | None = None,
        of_model: Mapping[str, str | float] | None = None,
        overrides: Mapping[str, Any] | None = None,
        description: str | None = None,
    ) -> Server:
        """Add or change a server that serves `model` at `url`; the model is created if it is new.

        `attributes`, `weight`: what it declares, and how gladly it is chosen; None keeps what was.  `of_model`: what
        it declares for this model alone, kept as `<model>:<name>`; what is not named stays.  `overrides`: what was
        given of how it is spoken to for this model, and `description` what that makes, as JSON; None keeps what was.
        Raises Conflict if server and model belong to different fleets and cannot be brought together; ValueError
        for an attribute that is neither text nor a finite number, or a weight that is not above 0 and to 1000.
        """
        declared = _declared(slots, attributes, weight)
        special = {f"{model}:{name}": value for name, value in (of_model or {}).items()}
        registering = make_entry(
            "server.register", now_ms=now_ms, model=model, server=server, url=mask_url(url), slots=slots
        )

        def unit(tx: Transaction) -> Server:
            add_to_counter(tx.connection, _VERSION)  # First: on PostgreSQL its lock lets one change in at a time.
            fleet = _find_common_fleet(tx, model, server)
            if special or attributes is not None:
                declared["attributes"] = _together(tx, server, attributes, special)
            known = tx.connection.execute(select(models.c.fleet).where(models.c.name == model)).scalar()
            if known is None:
                closed_models.reopen(tx, model)
                tx.connection.execute(insert(models), {"name": model, "fleet": fleet, "created_ms": now_ms})
            elif known != fleet:
                tx.connection.execute(update(models).where(models.c.name == model).values(fleet=fleet))
            statement = update(servers).where(servers.c.name == server).values(**declared).returning(servers)
            row = tx.connection.execute(statement).first()
            if row is None:
                new = insert(servers).values(name=server, fleet=fleet, created_ms=now_ms, **declared).returning(servers)
                row = tx.connection.execute(new).one()
            serves = (endpoints.c.server == server) & (endpoints.c.model == model)
            there = {"url": url}
            if overrides is not None:
                there["overrides"] = _described(tx, overrides, description, now_ms)
            if tx.connection.execute(update(endpoints).where(serves).values(**there)).rowcount == 0:
                tx.connection.execute(insert(endpoints), {"server": server, "model": model, **there})
            served = tx.connection.execute(select(endpoints).where(endpoints.c.server == server)).all()
            registering.write(tx)
            return _server(row, served)

        return self.database.write(unit)

    def set_server_state(
        self, server: str, state: str, *, reason: str = "", by: str = "", now_ms: int | None = None
    ) -> None:
        """Have a server stand as `state` says.  Raises NotFound; ValueError for a word that is no AdminState."""
        entry = _change_of("server", server, state, reason, now_ms)
        self._change("server", server, entry, _stand(servers, server, state, reason, by, now_ms))

    def set_model_state(
        self, model: str, state: str, *, reason: str = "", by: str = "", now_ms: int | None = None
    ) -> None:
        """The same for a model, on all of its servers."""
        entry = _change_of("model", model, state, reason, now_ms)
        self._change("model", model, entry, _stand(models, model, state, reason, by, now_ms))

    def set_tenant_state(
        self, tenant: str, state: str, *, reason: str = "", by: str = "", now_ms: int | None = None
    ) -> None:
        """The same for a tenant, which need not have a key: nothing is NotFound here."""
        values = _standing(state, reason, by, now_ms)
        change = _change_of("tenant", tenant, state, reason, now_ms)

        def unit(tx: Transaction) -> None:
            add_to_counter(tx.connection, _VERSION)  # First: on PostgreSQL its lock lets one change in at a time.
            tx.connection.execute(delete(tenant_states).where(tenant_states.c.name == tenant))
            if values["state"] != AdminState.ONLINE:
                tx.connection.execute(insert(tenant_states), {"name": tenant, **values})
            change.write(tx)

        self.database.write(unit)

    def _change(self, kind: str, name: str, entry: AuditEntry, *statements: Any) -> None:
        """Run the statements; the last one has to find what is called `name`, or nothing is done."""

        def unit(tx: Transaction) -> int:
            add_to_counter(tx.connection, _VERSION)
            found: int = [tx.connection.execute(statement).rowcount for statement in statements][-1]
            if found:
                entry.write(tx)
            return found

        if self.database.write(unit) == 0:
            raise NotFound(f"There is no {kind} {name!r}; GET /admin/{kind}s lists them.", **{kind: name})

    def configure(self, model: str, overrides: Mapping[str, Any], now_ms: int, description: str | None = None) -> Model:
        """Replace the model's overrides; an empty mapping goes back to the defaults.

        `description`: what they say of how its servers are spoken to, whole and checked, as JSON; None: nothing.
        Raises pydantic.ValidationError, and then nothing has changed.  The model is created if it is new.
        """
        ModelConfig(**overrides)
        configuring = make_entry("model.configure", now_ms=now_ms, model=model, **_told(overrides))

        def unit(tx: Transaction) -> tuple[Row, defaults.AllDefaults]:
            add_to_counter(tx.connection, _VERSION)
            known = defaults.list_defaults(tx.connection)
            defaults.check_config(model, overrides, known)
            text = _described(tx, overrides, description, now_ms)
            statement = update(models).where(models.c.name == model).values(overrides=text).returning(models)
            row = tx.connection.execute(statement).first()
            if row is None:
                closed_models.reopen(tx, model)
                fleet = _new_fleet(tx, model)
                new = (
                    insert(models).values(name=model, fleet=fleet, overrides=text, created_ms=now_ms).returning(models)
                )
                row = tx.connection.execute(new).one()
            configuring.write(tx)
            return row, known

        return self._model(*self.database.write(unit))

    def set_defaults(
        self, kind: str, overrides: Mapping[str, Any], now_ms: int, by: str, description: str | None = None
    ) -> Defaults:
        """Replace what holds for models of a kind, or (INSTALLATION) for all, where they say nothing themselves.

        `description`: as of `configure`.  Raises InvalidJob: some model could not be configured so; then nothing has
        changed.
        """
        setting = make_entry("defaults.set", now_ms=now_ms, kind=kind, **_told(overrides))

        def unit(tx: Transaction) -> Defaults:
            add_to_counter(tx.connection, _VERSION)
            version = None if description is None else server_descriptions.store_description(tx, description, now_ms)
            found = Defaults(kind, dict(overrides), now_ms, by or None, version)
            defaults.put_defaults(tx, found)
            setting.write(tx)
            return found

        return self.database.write(unit)

    def remove_kind(self, kind: str) -> None:
        """Raises NotFound; Conflict: models are of this kind."""
        removing = make_entry("defaults.remove", kind=kind)

        def unit(tx: Transaction) -> None:
            add_to_counter(tx.connection, _VERSION)
            defaults.remove_kind(tx, kind)
            removing.write(tx)

        self.database.write(unit)

    def set_secret(self, secret: Secret) -> None:
        """Add or replace a secret that descriptions name."""
        setting = make_entry("secret.set", now_ms=secret.set_ms, secret=secret.name)

        def unit(tx: Transaction) -> None:
            add_to_counter(tx.connection, _VERSION)  # First: on PostgreSQL its lock lets one change in at a time.
            put_secret(tx, secret)
            setting.write(tx)

        self.database.write(unit)

    def reseal_secret(self, secret: Secret, sealed: str) -> bool:
        """Keep the same secret under another seal.  False: it has been set or removed meanwhile."""

        def unit(tx: Transaction) -> bool:
            add_to_counter(tx.connection, _VERSION)
            return replace_seal(tx, secret, sealed)

        return self.database.write(unit)

    def remove_secret(self, name: str) -> None:
        """Raises NotFound."""
        removing = make_entry("secret.remove", secret=name)

        def unit(tx: Transaction) -> bool:
            add_to_counter(tx.connection, _VERSION)
            if not remove_secret(tx, name):
                return False
            removing.write(tx)
            return True

        if not self.database.write(unit):
            raise NotFound("There is no such secret; GET /admin/secrets lists them.", secret=name)

    def _model(self, row: Row, known: defaults.AllDefaults) -> Model:
        overrides = orjson.loads(row.overrides)
        version = server_descriptions.find_version(overrides)
        overrides.pop(server_descriptions.VERSION_FIELD, None)
        found = defaults.resolve_config(overrides, version, known)
        config, strange = parse_overrides(found.values)
        seen = (row.name, *sorted(strange))
        if strange and seen not in self._warned:
            self._warned.add(seen)
            log.warning("catalog_overrides_unknown", model=row.name, fields=sorted(strange))
        return Model(
            row.name,
            row.fleet,
            overrides,
            config,
            row.state,
            row.reason,
            row.changed_by,
            row.changed_ms,
            found.described_by,
            found.sources,
        )


def raise_version(tx: Transaction) -> None:
    """Raise the version.  First in its transaction: on PostgreSQL its lock lets one change in at a time."""
    add_to_counter(tx.connection, _VERSION)


def _made_identity(tx: Transaction) -> int:
    add_to_counter(tx.connection, _VERSION, 0)  # First: on PostgreSQL its lock lets one change in at a time.
    found = tx.connection.execute(_SELECT_IDENTITY).scalar()
    if found is None:
        found = secrets.randbits(62)
        tx.connection.execute(insert(counters), {"name": _IDENTITY, "value": found})
    return int(found)


def _find_common_fleet(tx: Transaction, model: str, server: str) -> str:
    """The fleet in which this server and this model can stand together: all slots of a server are in one."""
    servers_fleet = tx.connection.execute(select(servers.c.fleet).where(servers.c.name == server)).scalar()
    models_fleet = tx.connection.execute(select(models.c.fleet).where(models.c.name == model)).scalar()
    if servers_fleet is None:
        founded = models_fleet or _new_fleet(tx, model)
        _check_that_nothing_runs_elsewhere(tx, server, founded)
        return founded
    if models_fleet in (None, servers_fleet):
        return str(servers_fleet)
    served = select(endpoints.c.server).where(endpoints.c.model == model).limit(1)
    waiting = (
        select(jobs.c.id).where(jobs.c.model == model, jobs.c.state.in_([s.value for s in ACTIVE_STATES])).limit(1)
    )
    if tx.connection.execute(served).first() or tx.connection.execute(waiting).first():
        raise Conflict(
            f"Server {server!r} belongs to fleet {servers_fleet!r} and model {model!r} to {models_fleet!r}, which has "
            "servers or unfinished jobs; register the server under another name, or empty the model first.",
            server=server,
            model=model,
        )
    return servers_fleet


def _new_fleet(tx: Transaction, model: str) -> str:
    """Return a name for a new model's fleet.  A removed model of this name may have left its fleet to others."""
    taken = set(tx.connection.execute(select(models.c.fleet)).scalars())
    return next(name for name in chain([model], (f"{model}.{n}" for n in count_from(2))) if name not in taken)


def _check_that_nothing_runs_elsewhere(tx: Transaction, server: str, fleet: str) -> None:
    """A server that was removed while it ran jobs of another fleet has slots that this one would not know as taken."""
    others = select(jobs.c.id).join(models, models.c.name == jobs.c.model)
    runs = others.where(jobs.c.state == State.RUNNING.value, jobs.c.server == server, models.c.fleet != fleet)
    if tx.connection.execute(runs.limit(1)).first():
        raise Conflict(
            f"A server {server!r} was removed and still runs jobs of another fleet; wait until they have ended, or "
            "register this one under another name.",
            server=server,
        )


def _stand(table: Table, name: str, state: str, reason: str, by: str, now_ms: int | None) -> Update:
    return update(table).where(table.c.name == name).values(**_standing(state, reason, by, now_ms))


def _change_of(kind: str, name: str, state: str, reason: str, now_ms: int | None) -> AuditEntry:
    """That a server, model or tenant is to stand so.  Raises ValueError for a word that is no AdminState."""
    return make_entry(f"{kind}.{_WORDS[AdminState(state)]}", now_ms=now_ms, reason=reason or None, **{kind: name})


def _standing(state: str, reason: str, by: str, now_ms: int | None) -> dict[str, Any]:
    """Columns that say how something stands, and since when, by whom and why."""
    return {
        "state": AdminState(state).value,
        "reason": storable_text(reason, _MAX_REASON) or None,
        "changed_by": storable_text(by, _MAX_REASON) or None,
        "changed_ms": now_ms,
    }


def _declared(slots: int, attributes: Mapping[str, str | float] | None, weight: float | None) -> dict[str, Any]:
    """Columns that a registration sets; what it leaves out is not among them."""
    values: dict[str, Any] = {"slots": slots}
    if attributes is not None:
        values["attributes"] = _attributes_text(attributes)
    if weight is not None:
        if not (_is_number(weight) and _MIN_WEIGHT <= weight <= _MAX_WEIGHT):
            raise ValueError(f"weight is {weight!r}; give a number from {_MIN_WEIGHT} to {_MAX_WEIGHT}")
        values["weight"] = weight
    return values


def _attributes_text(attributes: Mapping[str, str | float]) -> str:
    for name, value in attributes.items():
        if not isinstance(value, str) and not _is_number(value):
            raise ValueError(f"attribute {name!r} is {value!r}; give a text or a finite number")
    try:
        return orjson.dumps(dict(attributes), option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONEncodeError as error:
        raise ValueError(f"the attributes cannot be stored ({error}); give a plain name and value each") from error


def _together(
    tx: Transaction, server: str, own: Mapping[str, str | float] | None, of_model: Mapping[str, str | float]
) -> str:
    """A server's attributes: `own`, or those it has, and those of its models, of which `of_model` are new."""
    text = tx.connection.execute(select(servers.c.attributes).where(servers.c.name == server)).scalar()
    before: dict[str, str | float] = orjson.loads(text or "{}")
    kept = {name: value for name, value in before.items() if own is None or ":" in name}
    return _attributes_text({**kept, **(own or {}), **of_model})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _told(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What an act tells of a configuration.  A description may be long, and hold what was better kept in a secret."""
    told = {name: value for name, value in overrides.items() if name != "description"}
    return {"overrides": told, "described": "description" in overrides}


def _described(tx: Transaction, given: Mapping[str, Any], description: str | None, now_ms: int) -> str:
    """What was given, as stored: with the version that it makes, which is stored, too."""
    stored = dict(given)
    if description is not None:
        stored[server_descriptions.VERSION_FIELD] = server_descriptions.store_description(tx, description, now_ms)
    return orjson.dumps(stored).decode()


def _server(row: Row, served: Sequence[Row]) -> Server:
    return Server(
        row.name,
        row.fleet,
        row.slots,
        row.state,
        {it.model: it.url for it in served},
        row.created_ms,
        orjson.loads(row.attributes),
        row.weight,
        row.reason,
        row.changed_by,
        row.changed_ms,
        {it.model: orjson.loads(it.overrides) for it in served if it.overrides != "{}"},
        row.leaving_ms,
        row.leaving_by,
    )
