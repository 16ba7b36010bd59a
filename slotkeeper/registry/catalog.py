"""Read and change the catalog; each change raises its version.

The catalog is what operators change: models with their configuration, servers, states, secrets.  A process compares the
version to find out that its copy is old.
"""

import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from itertools import count as count_from
from typing import Any, TypeAlias, TypeVar

import orjson
import structlog
from sqlalchemy import Column, ColumnElement, Connection, Table, delete, insert, select, true, update

from slotkeeper.audit import AuditEntry, commit_audited, make_entry
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import counters, storable_text, upsert
from slotkeeper.db.shared_clock import ClockSynchronizer
from slotkeeper.errors import Conflict, DatabaseUnavailable, NotFound
from slotkeeper.jobs import closed_models
from slotkeeper.jobs.states import ACTIVE_STATES
from slotkeeper.jobs.tables import jobs
from slotkeeper.registry import defaults, model_config, node_keys, server_descriptions
from slotkeeper.registry.catalog_changes import (
    SELECT_VERSION,
    Change,
    Edition,
    Part,
    list_changes,
    lock_version,
    note_changes,
    raise_version,
    read_edition,
)
from slotkeeper.registry.credit_accounts import list_metered
from slotkeeper.registry.model_config import AllDefaults, Defaults, ModelConfig
from slotkeeper.registry.prices import list_prices
from slotkeeper.registry.server_descriptions import Secret
from slotkeeper.registry.slot_use import find_slot_use
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.tables import endpoints, models, servers, tenant_states, tenants
from slotkeeper.registry.tenant_limits import TenantLimits, decode_limits
from slotkeeper.registry.values import AdminState, NodeIdentity, Server, TenantState
from slotkeeper.urls import mask_url

T = TypeVar("T")

log = structlog.get_logger(__name__)

Row: TypeAlias = Any  # the columns that the statement names

_MAX_REASON = 500
_ACTIONS = {
    AdminState.ONLINE: "resume",
    AdminState.PAUSED: "pause",
    AdminState.DRAINING: "drain",
    AdminState.FROZEN: "freeze",
}
_MIN_WEIGHT = 0.001
_MAX_WEIGHT = 1000
_DATABASE_ID = "record_identity"
_SELECT_DATABASE_ID = select(counters.c.value).where(counters.c.name == _DATABASE_ID)


class Catalog:
    """Reads and changes models, configurations, servers, and the states of models, servers and tenants.

    All methods raise DatabaseUnavailable; those that change something also CommitUnknown.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._clock = ClockSynchronizer(database)
        self._warned: set[tuple[str, ...]] = set()

    # -- reading ---------------------------------------------------------------------------------------------

    def get_version(self) -> int:
        """Return the version, which each change raises.  The shared clock is measured on the same connection."""
        with self.database.read() as connection:
            self._clock.synchronize(connection)
            return connection.execute(SELECT_VERSION).scalar() or 0

    def get_database_id(self) -> str:
        """Return a random number that identifies this database, made when it is asked for first.

        Returns "" if there is none yet and nothing can be written.
        """
        with self.database.read() as connection:
            found = connection.execute(_SELECT_DATABASE_ID).scalar()
        try:
            return f"{found if found is not None else self.database.write(_make_database_id):x}"
        except DatabaseUnavailable:
            return ""

    def read(self) -> CatalogSnapshot:
        """Return the whole catalog.  The version is read first: at worst a newer content is read once more."""
        database_id = self.get_database_id()
        with self.database.read() as connection:
            edition, known = read_edition(connection), defaults.list_defaults(connection)
            return CatalogSnapshot(
                edition.version,
                self._read_models(connection, known),
                _read_servers(connection),
                _read_tenants(connection),
                database_id,
                server_descriptions.list_secrets(connection),
                closed_models.list_closed(connection),
                known,
                edition.mark,
                _read_limits(connection),
                list_prices(connection),
                list_metered(connection),
            )

    def read_after(self, former: CatalogSnapshot) -> CatalogSnapshot:
        """Return the present catalog; of the database, only what has changed since `former` is read where it can be."""
        with self.database.read() as connection:
            edition = read_edition(connection)
            changes = list_changes(connection, Edition(former.version, former.mark), edition.version)
            if changes is not None and former.database_id and Change(Part.DEFAULTS) not in changes:
                return self._read_changes(connection, former, edition, changes)
        return self.read()

    def _read_changes(
        self, connection: Connection, former: CatalogSnapshot, edition: Edition, changes: Collection[Change]
    ) -> CatalogSnapshot:
        names = {part: [change.name for change in changes if change.part is part] for part in Part}
        found: dict[str, Any] = {"version": edition.version, "mark": edition.mark}
        if of_models := names[Part.MODEL]:
            models_read = self._read_models(connection, former.defaults, of_models)
            found["models"] = _with_changes(former.models, of_models, models_read)
            found["closed"] = closed_models.list_closed(connection)
        if of_servers := names[Part.SERVER]:
            found["servers"] = _with_changes(former.servers, of_servers, _read_servers(connection, of_servers))
        if of_tenants := names[Part.TENANT]:
            found["tenants"] = _with_changes(former.tenants, of_tenants, _read_tenants(connection, of_tenants))
            found["limits"] = _with_changes(former.limits, of_tenants, _read_limits(connection, of_tenants))
            found["metered"] = list_metered(connection)
        if names[Part.SECRETS]:
            found["secrets"] = server_descriptions.list_secrets(connection)
        return replace(former, **found)

    def list_models(self, connection: Connection) -> dict[str, Model]:
        """Return all models, in a transaction that changes them or their servers."""
        return self._read_models(connection, defaults.list_defaults(connection))

    def _read_models(
        self, connection: Connection, known: AllDefaults, names: Collection[str] | None = None
    ) -> dict[str, Model]:
        rows = connection.execute(select(models).where(_is_one_of(models.c.name, names)))
        return {row.name: self._model(row, known) for row in rows}

    # -- servers and models ----------------------------------------------------------------------------------

    def register(
        self,
        model: str,
        server: str,
        url: str,
        slots: int | None,
        now_ms: int,
        attributes: Mapping[str, str | float] | None = None,
        weight: float | None = None,
        of_model: Mapping[str, str | float] | None = None,
        overrides: Mapping[str, Any] | None = None,
        description: str | None = None,
    ) -> Server:
        """Add or change a server that serves `model` at `url`.  The model is created if it is new.

        slots, attributes, weight: of the server; None keeps the present ones, and a new server has one slot.  of_model:
        attributes of the server for this model alone, stored as `<model>:<name>`; others are kept.  overrides: how the
        server is called for this model, as given; description: what that makes, as JSON; None keeps the present ones.

        Raises Conflict if server and model are in different fleets that cannot be merged; ValueError for an attribute
        that is neither text nor a finite number, or a weight that is not above 0 and at most 1000.
        """
        values = _server_values(slots, attributes, weight)
        entry = make_entry("server.register", now_ms=now_ms, model=model, server=server, url=mask_url(url), slots=slots)

        def unit(tx: Transaction) -> Server:
            if node_keys.is_node(tx.connection, server):
                raise Conflict(f"{server!r} is a node, which declares by itself what it serves.", server=server)
            put_endpoint(tx, model, server, url, values, attributes, of_model or {}, now_ms)
            if overrides is not None:
                put_overrides(tx, model, server, overrides, description, now_ms)
            row = tx.connection.execute(select(servers).where(servers.c.name == server)).one()
            return _server(row, tx.connection.execute(select(endpoints).where(endpoints.c.server == server)).all())

        return self._change(entry, Change(Part.SERVER, server), unit)

    def configure(self, model: str, overrides: Mapping[str, Any], now_ms: int, description: str | None = None) -> Model:
        """Replace the model's overrides; an empty mapping restores the defaults.  The model is created if it is new.

        description: how its servers are called, as the overrides say, whole and checked, as JSON; None: they do not
        say it.  Raises pydantic.ValidationError or InvalidJob, and then nothing has changed.
        """
        ModelConfig(**overrides)
        entry = make_entry("model.configure", now_ms=now_ms, model=model, **_audit_facts(overrides))

        def unit(tx: Transaction) -> tuple[Row, AllDefaults]:
            known = defaults.list_defaults(tx.connection)
            model_config.check_config(model, overrides, known)
            text = _overrides_text(tx, overrides, description, now_ms)
            _ensure_model(tx, model, None, now_ms)
            statement = update(models).where(models.c.name == model).values(overrides=text).returning(models)
            return tx.connection.execute(statement).one(), known

        return self._model(*self._change(entry, Change(Part.MODEL, model), unit))

    def set_server_state(
        self, server: str, state: str, *, reason: str = "", by: str = "", now_ms: int | None = None
    ) -> None:
        """Set the state of a server.  Raises NotFound; ValueError for a word that is no AdminState."""
        self._set_state(Part.SERVER, servers, server, state, reason, by, now_ms)

    def set_model_state(
        self, model: str, state: str, *, reason: str = "", by: str = "", now_ms: int | None = None
    ) -> None:
        """Set the state of a model, on all of its servers.  Raises as `set_server_state`."""
        self._set_state(Part.MODEL, models, model, state, reason, by, now_ms)

    def set_tenant_state(
        self, tenant: str, state: str, *, reason: str = "", by: str = "", now_ms: int | None = None
    ) -> None:
        """Set the state of a tenant, which need not have a key.  Raises ValueError as `set_server_state`."""
        values = _state_values(state, reason, by, now_ms)

        def unit(tx: Transaction) -> bool:
            if values["state"] == AdminState.ONLINE:
                tx.connection.execute(delete(tenant_states).where(tenant_states.c.name == tenant))
            else:
                upsert(tx.connection, tenant_states, {"name": tenant}, values)
            return True

        entry = _state_entry("tenant", tenant, state, reason, now_ms)
        self._change(entry, Change(Part.TENANT, tenant), unit)

    def _set_state(
        self, kind: Part, table: Table, name: str, state: str, reason: str, by: str, now_ms: int | None
    ) -> None:
        statement = update(table).where(table.c.name == name).values(**_state_values(state, reason, by, now_ms))
        entry = _state_entry(kind, name, state, reason, now_ms)
        if not self._change(entry, Change(kind, name), lambda tx: tx.connection.execute(statement).rowcount):
            raise NotFound(f"There is no {kind} {name!r}; GET /admin/{kind}s lists them.", **{kind: name})

    # -- defaults and secrets --------------------------------------------------------------------------------

    def set_defaults(
        self, kind: str, overrides: Mapping[str, Any], now_ms: int, by: str, description: str | None = None
    ) -> Defaults:
        """Replace the defaults of a kind of models, or (INSTALLATION) of all.

        description: as of `configure`.  Raises InvalidJob, and then nothing has changed: they do not fit a model.
        """
        entry = make_entry("defaults.set", now_ms=now_ms, kind=kind, **_audit_facts(overrides))

        def unit(tx: Transaction) -> Defaults:
            version = None if description is None else server_descriptions.store_description(tx, description, now_ms)
            given = Defaults(kind, dict(overrides), now_ms, by or None, version)
            defaults.put_defaults(tx, given)
            return given

        return self._change(entry, Change(Part.DEFAULTS), unit)

    def remove_kind(self, kind: str) -> None:
        """Remove a kind of models.  Raises NotFound; Conflict if models are of this kind."""

        def unit(tx: Transaction) -> bool:
            defaults.remove_kind(tx, kind)
            return True

        self._change(make_entry("defaults.remove", kind=kind), Change(Part.DEFAULTS), unit)

    def set_secret(self, secret: Secret) -> None:
        """Add or replace a secret that descriptions name."""

        def unit(tx: Transaction) -> bool:
            server_descriptions.put_secret(tx, secret)
            return True

        self._change(make_entry("secret.set", now_ms=secret.set_ms, secret=secret.name), Change(Part.SECRETS), unit)

    def reseal_secret(self, secret: Secret, sealed: str) -> bool:
        """Store the same secret under another seal.  Returns False if it was set or removed in the meantime."""

        def unit(tx: Transaction) -> bool:
            raise_version(tx, Change(Part.SECRETS))
            return server_descriptions.replace_seal(tx, secret, sealed)

        return self.database.write(unit)

    def remove_secret(self, name: str) -> None:
        """Remove a secret.  Raises NotFound."""
        entry = make_entry("secret.remove", secret=name)
        if not self._change(entry, Change(Part.SECRETS), lambda tx: server_descriptions.remove_secret(tx, name)):
            raise NotFound("There is no such secret; GET /admin/secrets lists them.", secret=name)

    def _change(self, entry: AuditEntry, changed: Change, unit: Callable[[Transaction], T]) -> T:
        """Raise the version, run the unit, and write the entry if it changed something."""

        def change(tx: Transaction) -> T:
            raise_version(tx, changed)
            return unit(tx)

        return commit_audited(self.database, entry, change)

    def _model(self, row: Row, known: AllDefaults) -> Model:
        overrides = orjson.loads(row.overrides)
        version = server_descriptions.find_version(overrides)
        overrides.pop(server_descriptions.VERSION_FIELD, None)
        resolved = model_config.resolve_config(overrides, version, known)
        config, unknown = model_config.parse_overrides(resolved.values)
        warning = (row.name, *sorted(unknown))
        if unknown and warning not in self._warned:
            self._warned.add(warning)
            log.warning("catalog_overrides_unknown", model=row.name, fields=sorted(unknown))
        return Model(
            row.name,
            row.fleet,
            overrides,
            config,
            row.state,
            row.reason,
            row.changed_by,
            row.changed_ms,
            resolved.described_by,
            resolved.sources,
        )


def _make_database_id(tx: Transaction) -> int:
    lock_version(tx)
    found = tx.connection.execute(_SELECT_DATABASE_ID).scalar()
    if found is None:
        found = secrets.randbits(62)
        tx.connection.execute(insert(counters), {"name": _DATABASE_ID, "value": found})
    return int(found)


# -- fleets ------------------------------------------------------------------------------------------------------


def _ensure_model(tx: Transaction, model: str, fleet: str | None, now_ms: int) -> bool:
    """Create the model if it is new, and put it into the fleet.  Returns whether that changed something.

    fleet: None: its own, or a new one.
    """
    known = tx.connection.execute(select(models.c.fleet).where(models.c.name == model)).scalar()
    if known is None:
        closed_models.reopen(tx, model)
        row = {"name": model, "fleet": fleet or _name_new_fleet(tx, model), "created_ms": now_ms}
        tx.connection.execute(insert(models), row)
    elif fleet not in (None, known):
        tx.connection.execute(update(models).where(models.c.name == model).values(fleet=fleet))
    return known is None or fleet not in (None, known)


def find_common_fleet(tx: Transaction, model: str, server: str) -> str:
    """Return the fleet of this server and this model: all slots of a server are in one.  Raises Conflict."""
    server_fleet = tx.connection.execute(select(servers.c.fleet).where(servers.c.name == server)).scalar()
    model_fleet = tx.connection.execute(select(models.c.fleet).where(models.c.name == model)).scalar()
    if server_fleet is None:
        fleet = model_fleet or _name_new_fleet(tx, model)
        _check_no_use_by_other_fleets(tx, server, model, fleet)
        return fleet
    if model_fleet in (None, server_fleet):
        return str(server_fleet)
    served = select(endpoints.c.server).where(endpoints.c.model == model).limit(1)
    active = select(jobs.c.id).where(jobs.c.model == model, jobs.c.state.in_([s.value for s in ACTIVE_STATES])).limit(1)
    if tx.connection.execute(served).first() or tx.connection.execute(active).first():
        raise Conflict(
            f"Server {server!r} belongs to fleet {server_fleet!r} and model {model!r} to {model_fleet!r}, which has "
            "servers or unfinished jobs; register the server under another name, or empty the model first.",
            server=server,
            model=model,
        )
    return server_fleet


def _name_new_fleet(tx: Transaction, model: str) -> str:
    """Return a name for a new model's fleet.  A removed model of this name may have left its fleet to others."""
    taken = set(tx.connection.execute(select(models.c.fleet)).scalars())
    return next(name for name in chain([model], (f"{model}.{n}" for n in count_from(2))) if name not in taken)


def _check_no_use_by_other_fleets(tx: Transaction, server: str, model: str, fleet: str) -> None:
    """Raise Conflict if a server of this name was removed and its slots are still in use for another fleet.

    The new server's slots would be free in its fleet: the leases and quarantines are in the other fleet's queue.
    """
    of_fleet = tx.connection.execute(select(models.c.name).where(models.c.fleet == fleet)).scalars()
    use = find_slot_use(tx, server, except_models={model, *of_fleet})
    if use:
        raise Conflict(
            f"A server {server!r} was removed and may still run jobs of another fleet: {len(use.running)} run there, "
            f"and {use.quarantined} of its slots are quarantined.  Wait until both have ended, which they do by "
            "themselves, or register this one under another name.",
            server=server,
            running=len(use.running),
            quarantined=use.quarantined,
        )


# -- endpoints ---------------------------------------------------------------------------------------------------


def put_endpoint(
    tx: Transaction,
    model: str,
    server: str,
    url: str,
    values: Mapping[str, Any],
    attributes: Mapping[str, str | float] | None,
    of_model: Mapping[str, str | float],
    now_ms: int,
) -> None:
    """Add or change a server and its endpoint for a model, in a transaction that has raised the version.

    values: columns of the server.  attributes, of_model: as of `Catalog.register`.
    Raises Conflict if server and model are in different fleets that cannot be merged.
    """
    fleet = find_common_fleet(tx, model, server)
    model_attributes = {f"{model}:{name}": value for name, value in of_model.items()}
    if model_attributes or attributes is not None:
        values = {**values, "attributes": _merge_attributes(tx, server, attributes, model_attributes)}
    if _ensure_model(tx, model, fleet, now_ms):
        note_changes(tx, Change(Part.MODEL, model))
    if_new = {"fleet": fleet, "created_ms": now_ms} | ({} if "slots" in values else {"slots": 1})
    upsert(tx.connection, servers, {"name": server}, values, if_new)
    upsert(tx.connection, endpoints, {"server": server, "model": model}, {"url": url})


def put_overrides(
    tx: Transaction, model: str, server: str, overrides: Mapping[str, Any], description: str | None, now_ms: int
) -> None:
    """Set how a server is called for a model, in a transaction that has raised the version."""
    text = _overrides_text(tx, overrides, description, now_ms)
    this = (endpoints.c.server == server) & (endpoints.c.model == model)
    tx.connection.execute(update(endpoints).where(this).values(overrides=text))


# -- rows --------------------------------------------------------------------------------------------------------


def _state_entry(kind: str, name: str, state: str, reason: str, now_ms: int | None) -> AuditEntry:
    """Raises ValueError for a word that is no AdminState."""
    return make_entry(f"{kind}.{_ACTIONS[AdminState(state)]}", now_ms=now_ms, reason=reason or None, **{kind: name})


def _state_values(state: str, reason: str, by: str, now_ms: int | None) -> dict[str, Any]:
    return {
        "state": AdminState(state).value,
        "reason": storable_text(reason, _MAX_REASON) or None,
        "changed_by": storable_text(by, _MAX_REASON) or None,
        "changed_ms": now_ms,
    }


def _server_values(
    slots: int | None, attributes: Mapping[str, str | float] | None, weight: float | None
) -> dict[str, Any]:
    """Return the columns that a registration sets.  Raises ValueError."""
    values: dict[str, Any] = {} if slots is None else {"slots": slots}
    if attributes is not None:
        values["attributes"] = encode_attributes(attributes)
    if weight is not None:
        if not (_is_number(weight) and _MIN_WEIGHT <= weight <= _MAX_WEIGHT):
            raise ValueError(f"weight is {weight!r}; give a number from {_MIN_WEIGHT} to {_MAX_WEIGHT}")
        values["weight"] = weight
    return values


def _merge_attributes(
    tx: Transaction, server: str, own: Mapping[str, str | float] | None, of_model: Mapping[str, str | float]
) -> str:
    """Return all attributes of a server: `own` replaces those of the server, if given; `of_model` is added."""
    text = tx.connection.execute(select(servers.c.attributes).where(servers.c.name == server)).scalar()
    before: dict[str, str | float] = orjson.loads(text or "{}")
    kept = {name: value for name, value in before.items() if own is None or ":" in name}
    return encode_attributes({**kept, **(own or {}), **of_model})


def encode_attributes(attributes: Mapping[str, str | float]) -> str:
    """Return the attributes of a server as they are stored.  Raises ValueError."""
    for name, value in attributes.items():
        if not isinstance(value, str) and not _is_number(value):
            raise ValueError(f"attribute {name!r} is {value!r}; give a text or a finite number")
    try:
        return orjson.dumps(dict(attributes), option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONEncodeError as error:
        raise ValueError(f"the attributes cannot be stored ({error}); give a plain name and value each") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _audit_facts(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an audit entry says of a configuration.  A description may be long, and hold a password."""
    shown = {name: value for name, value in overrides.items() if name != "description"}
    return {"overrides": shown, "described": "description" in overrides}


def _overrides_text(tx: Transaction, given: Mapping[str, Any], description: str | None, now_ms: int) -> str:
    """Store the description, and return the overrides as stored, with its version."""
    stored = dict(given)
    if description is not None:
        stored[server_descriptions.VERSION_FIELD] = server_descriptions.store_description(tx, description, now_ms)
    return orjson.dumps(stored).decode()


def _with_changes(former: Mapping[str, T], names: Collection[str], read: Mapping[str, T]) -> dict[str, T]:
    """Return the former rows, those with these names as they were read now: the others are gone."""
    return {**{name: row for name, row in former.items() if name not in names}, **read}


def _is_one_of(column: Column[str], names: Collection[str] | None) -> ColumnElement[bool]:
    """Return the condition of the rows with these names; None: of all."""
    return true() if names is None else column.in_(names)


def _read_servers(connection: Connection, names: Collection[str] | None = None) -> dict[str, Server]:
    rows = connection.execute(select(servers).where(_is_one_of(servers.c.name, names))).all()
    served = defaultdict[str, list[Row]](list)
    for row in connection.execute(select(endpoints).where(_is_one_of(endpoints.c.server, names))):
        served[row.server].append(row)
    of_nodes = node_keys.list_identities(connection, names)
    return {row.name: _server(row, served[row.name], of_nodes.get(row.name)) for row in rows}


def _read_tenants(connection: Connection, names: Collection[str] | None = None) -> dict[str, TenantState]:
    rows = connection.execute(select(tenant_states).where(_is_one_of(tenant_states.c.name, names)))
    return {row.name: TenantState(**row._mapping) for row in rows}


def _read_limits(connection: Connection, names: Collection[str] | None = None) -> dict[str, TenantLimits]:
    of_names = _is_one_of(tenants.c.name, names)
    rows = connection.execute(select(tenants.c.name, tenants.c.limits).where(of_names, tenants.c.limits != "{}"))
    return {row.name: decode_limits(row.limits) for row in rows}


def _server(row: Row, served: Sequence[Row], node: NodeIdentity | None = None) -> Server:
    return Server(
        row.name,
        row.fleet,
        row.slots,
        row.state,
        {endpoint.model: endpoint.url for endpoint in served},
        row.created_ms,
        orjson.loads(row.attributes),
        row.weight,
        row.reason,
        row.changed_by,
        row.changed_ms,
        {endpoint.model: orjson.loads(endpoint.overrides) for endpoint in served if endpoint.overrides != "{}"},
        row.leaving_ms,
        row.leaving_by,
        node,
    )
