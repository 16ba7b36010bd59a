"""Nodes: machines of other owners whose agents connect to a gateway, and what they may serve.

A node is a server whose endpoints follow from its declaration, its grant and the configuration of the models
(`served_models`).  `Nodes.apply` makes the catalog so.  Whether a node is connected stands in Redis alone
(routing/queue/presence.py).
"""

import hashlib
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple, TypeAlias

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import Connection, delete, insert, select, update

from slotkeeper import signatures
from slotkeeper.audit import commit_audited, make_entry
from slotkeeper.db import Transaction
from slotkeeper.errors import Conflict, InvalidRequest, NotFound
from slotkeeper.jobs.values import ENVIRONMENT, PRODUCTION
from slotkeeper.registry import node_keys
from slotkeeper.registry.catalog import Catalog, encode_attributes, find_common_fleet, put_endpoint, put_overrides
from slotkeeper.registry.catalog_changes import Change, Part, lock_version, raise_version
from slotkeeper.registry.server_descriptions import VERSION_FIELD, hash_body
from slotkeeper.registry.slot_use import find_slot_use
from slotkeeper.registry.snapshot import Model
from slotkeeper.registry.tables import endpoints, enrolment_tokens, nodes, servers
from slotkeeper.registry.tables import node_keys as keys
from slotkeeper.registry.values import VALUE_PATTERN

Row: TypeAlias = Any

MAX_DECLARATION_BYTES = 32 << 10
MAX_SLOTS = 1_000
NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""The name of a node, which its server has, too."""
POOL = "pool"
"""The attribute of a node's server that names its pool."""
_PATHS = ("enroll", "tokens")  # of the API, where a name could stand
_LABELS = ("region", "gpu", "memory", "runtime", "driver")  # Each further set of values makes a kind of servers.
_MODEL_FIELDS = ("model_version", "runtime")
_TOKEN_PREFIX, _ID_PREFIX = "nt_", "n_"
_DIGEST_DIGITS = 16
_HOUR_MS = 3_600_000
_WRONG_TOKEN = "token: it is wrong, was used, or has expired; an operator makes another with `slotkeeper nodes token`."

_Value = Annotated[str, Field(pattern=f"^{VALUE_PATTERN}$")]


class Grant(BaseModel):
    """What a node may do, as the token says with which it enrolled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    owner: Annotated[str, Field(min_length=1, max_length=200)]
    """The tenant to which the node belongs."""
    pool: _Value
    """A model is served by the node only if its configuration names this pool."""
    environments: list[_Value] = Field([PRODUCTION], min_length=1, max_length=20)
    """It may be of one of these; of the first, if it names none."""
    models: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(["*"], min_length=1, max_length=50)
    """Names or patterns (`flux-*`) of the models that it may serve."""
    max_slots: int = Field(8, ge=1, le=MAX_SLOTS)
    trusted: bool = False
    """It is a machine of the installation: its refusals of a request need no second node."""


class DeclaredModel(BaseModel):
    """A model that a node serves."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_version: _Value | None = None
    runtime: _Value | None = None


class Declaration(BaseModel):
    """What a node says of itself when it connects."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    models: dict[Annotated[str, Field(min_length=1, max_length=128)], DeclaredModel] = Field(
        min_length=1, max_length=50
    )
    slots: int = Field(ge=1, le=MAX_SLOTS)
    labels: dict[str, _Value | Annotated[float, Field(gt=-1e15, lt=1e15)]] = Field({}, max_length=len(_LABELS))
    environment: _Value | None = None


class InvalidDeclaration(Exception):
    """A node may not declare this; the text says why, as a clause."""


def parse_declaration(text: bytes, grant: Grant) -> Declaration:
    """Return what a node declares, if its grant allows it.  Raises InvalidDeclaration."""
    if len(text) > MAX_DECLARATION_BYTES:
        raise InvalidDeclaration(f"it has {len(text)} bytes; at most {MAX_DECLARATION_BYTES}")
    try:
        declared = Declaration.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise InvalidDeclaration(f"{'.'.join(map(str, fault['loc'])) or 'it'}: {fault['msg']}") from None
    for name in declared.labels:
        if name not in _LABELS:
            raise InvalidDeclaration(f"labels.{name}: a node may set these labels: {', '.join(_LABELS)}")
    if declared.environment is not None and declared.environment not in grant.environments:
        allowed = ", ".join(grant.environments)
        raise InvalidDeclaration(f"environment {declared.environment!r}: its grant has {allowed}")
    return declared


def digest_of(declaration: bytes) -> str:
    """Return the digest of a declaration, as it was sent."""
    return hashlib.sha256(declaration).hexdigest()[:_DIGEST_DIGITS]


@dataclass(frozen=True, slots=True)
class Node:
    """A node, as stored.  Times in ms.

    declaration: None: it has not connected yet.  fault: why it does not serve what it declares, or parts of it.
    """

    id: str
    name: str
    grant: Grant
    declaration: bytes | None
    digest: str | None
    fault: str | None
    created_ms: int
    seen_ms: int | None
    revoked_ms: int | None

    @property
    def endpoint(self) -> str:
        """Return the URL under which workers reach it, through a gateway."""
        return f"node://{self.id}/run"


class Signer(NamedTuple):
    """A key that has signed a result, valid or not, and the name and owner of its node."""

    public_key: bytes
    node: str
    owner: str


@dataclass(frozen=True, slots=True)
class EnrolmentToken:
    """A token as it is listed; its text cannot be read again."""

    id: str
    grant: Grant
    made_by: str | None
    created_ms: int
    expires_ms: int
    uses_left: int


def served_models(node: Node, models: Iterable[Model]) -> dict[str, DeclaredModel]:
    """Return the models that a node serves: it declares them, its grant has them, and they name its pool."""
    if node.declaration is None or node.revoked_ms is not None:
        return {}
    try:
        declared = parse_declaration(node.declaration, node.grant)
    except InvalidDeclaration:  # A release after it was stored knows less.
        return {}
    by_name = {model.name: model for model in models}
    return {
        name: terms
        for name, terms in sorted(declared.models.items())
        if name in by_name
        and node.grant.pool in by_name[name].config.node_pools
        and any(fnmatchcase(name, pattern) for pattern in node.grant.models)
    }


class Nodes:
    """Reads and changes nodes.  All methods raise DatabaseUnavailable; those that change something also CommitUnknown.

    description: how nodes are called, as JSON (tasks/servers/node_description.py).
    """

    def __init__(self, catalog: Catalog, description: str) -> None:
        self.database = catalog.database
        self._catalog, self._description = catalog, description

    # -- reading ---------------------------------------------------------------------------------------------

    def find(self, node_id: str) -> tuple[Node, Mapping[str, bytes]] | None:
        """Return the node with this id and its valid public keys by their ids; None: there is no such node."""
        with self.database.read() as connection:
            row = connection.execute(select(nodes).where(nodes.c.id == node_id)).first()
            return None if row is None else (_node(row), _valid_keys(connection, node_id))

    def get(self, name: str) -> Node:
        """Return the node of this name.  Raises NotFound."""
        with self.database.read() as connection:
            row = connection.execute(select(nodes).where(nodes.c.name == name)).first()
        if row is None:
            raise _no_such_node(name)
        return _node(row)

    def list_all(self) -> list[Node]:
        """Return all nodes, by name."""
        with self.database.read() as connection:
            return [_node(row) for row in connection.execute(select(nodes).order_by(nodes.c.name))]

    def list_ids(self) -> set[str]:
        """Return the ids of all nodes that are not revoked."""
        with self.database.read() as connection:
            return set(connection.execute(select(nodes.c.id).where(nodes.c.revoked_ms.is_(None))).scalars())

    def find_keys(self, node_id: str) -> Mapping[str, bytes]:
        """Return the valid public keys of a node by their ids; none if it was revoked, or there is no such node."""
        with self.database.read() as connection:
            return _valid_keys(connection, node_id)

    def find_signer(self, key_id: str) -> Signer | None:
        """Return whose key this is or was; None: its node was removed."""
        query = select(keys.c.public_key, nodes.c.name, nodes.c.owner).where(
            keys.c.id == key_id, keys.c.node == nodes.c.id
        )
        with self.database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else Signer(signatures.decode_bytes(row.public_key), row.name, row.owner)

    def list_tokens(self, now_ms: int) -> list[EnrolmentToken]:
        """Return the tokens that can be used, the newest first."""
        usable = (enrolment_tokens.c.expires_ms > now_ms) & (enrolment_tokens.c.uses_left > 0)
        with self.database.read() as connection:
            rows = connection.execute(
                select(enrolment_tokens).where(usable).order_by(enrolment_tokens.c.created_ms.desc())
            ).all()
        return [
            EnrolmentToken(row.id, _grant(row), row.made_by, row.created_ms, row.expires_ms, row.uses_left)
            for row in rows
        ]

    # -- enrolment -------------------------------------------------------------------------------------------

    def make_token(self, grant: Grant, by: str, now_ms: int, expires_ms: int, uses: int = 1) -> tuple[str, str]:
        """Make an enrolment token, and return its id and its text, which cannot be read again."""
        token_id, text = secrets.token_hex(4), _TOKEN_PREFIX + secrets.token_urlsafe(32)
        row = {
            "hash": _hash_token(text),
            "id": token_id,
            "granted": grant.model_dump_json(),
            "made_by": by or None,
            "created_ms": now_ms,
            "expires_ms": expires_ms,
            "uses_left": uses,
        }
        entry = make_entry(
            "node.token", now_ms=now_ms, tenant=grant.owner, token=token_id, pool=grant.pool, expires_ms=expires_ms
        )

        def unit(tx: Transaction) -> bool:
            tx.connection.execute(
                delete(enrolment_tokens).where(enrolment_tokens.c.expires_ms < now_ms - 24 * _HOUR_MS)
            )
            tx.connection.execute(insert(enrolment_tokens), row)
            return True

        commit_audited(self.database, entry, unit)
        return token_id, text

    def remove_token(self, token_id: str) -> None:
        """Remove a token, so that no node can enrol with it any more.  Raises NotFound."""
        statement = delete(enrolment_tokens).where(enrolment_tokens.c.id == token_id)
        entry = make_entry("node.remove_token", token=token_id)
        if not commit_audited(self.database, entry, lambda tx: tx.connection.execute(statement).rowcount):
            raise NotFound("There is no such enrolment token; GET /nodes/tokens lists them.", token=token_id)

    def enroll(self, token: str, name: str, public_key: bytes, proof: bytes, now_ms: int) -> Node:
        """Use a token up, and add a node.  The same token with the same key returns the same node again.

        proof: the signature of the key over signatures.enrolment_statement.
        Raises InvalidRequest, also if the token is wrong, used or expired; Conflict: the name is taken.
        """
        if not re.fullmatch(NAME_PATTERN, name) or name in _PATHS:
            raise InvalidRequest(
                "name", f"name: 1 to 64 letters, digits or . _ - that begin with a letter or digit, not {_PATHS}"
            )
        signed = signatures.enrolment_statement(token, public_key)
        if not signatures.is_signed(public_key, signatures.ENROLMENT_TYPE, signed, proof):
            raise InvalidRequest("proof", "proof: it is no signature of this key over the token and the key")
        token_hash, key_id = _hash_token(token), signatures.key_id(public_key)
        if not self._knows_token(token_hash):  # Without a lock: anyone may try.
            raise InvalidRequest("token", _WRONG_TOKEN)
        node_id = f"{_ID_PREFIX}{secrets.token_hex(8)}"
        entry = make_entry("node.enroll", now_ms=now_ms, server=name, node=node_id, key=key_id)

        def unit(tx: Transaction) -> Row:
            lock_version(tx)
            known = select(nodes).where(nodes.c.token == token_hash, nodes.c.name == name)
            if (row := tx.connection.execute(known).first()) is not None and key_id in node_keys.list_valid_keys(
                tx.connection, [row.id]
            ).get(row.id, {}):
                return row
            usable = (enrolment_tokens.c.hash == token_hash) & (enrolment_tokens.c.expires_ms > now_ms)
            statement = (
                update(enrolment_tokens)
                .where(usable, enrolment_tokens.c.uses_left > 0)
                .values(uses_left=enrolment_tokens.c.uses_left - 1)
                .returning(enrolment_tokens.c.granted)
            )
            granted = tx.connection.execute(statement).scalar()
            if granted is None:
                raise InvalidRequest("token", _WRONG_TOKEN)
            _check_free_name(tx, name)
            if node_keys.has_key(tx.connection, key_id):
                raise Conflict("This key belongs to a node already; let the agent make another.", key=key_id)
            grant = Grant.model_validate_json(granted)
            new = {
                "id": node_id,
                "name": name,
                "owner": grant.owner,
                "granted": granted,
                "token": token_hash,
                "created_ms": now_ms,
            }
            row = tx.connection.execute(insert(nodes).values(**new).returning(nodes)).one()
            node_keys.add_key(tx, node_id, public_key, now_ms)
            entry.write(tx, tenant=grant.owner)
            return row

        return _node(self.database.write(unit))

    def _knows_token(self, token_hash: str) -> bool:
        """Return whether this token exists, or a node has enrolled with it."""
        with self.database.read() as connection:
            tokens = select(enrolment_tokens.c.id).where(enrolment_tokens.c.hash == token_hash)
            enrolled = select(nodes.c.id).where(nodes.c.token == token_hash).limit(1)
            return any(connection.execute(query).first() is not None for query in (tokens, enrolled))

    # -- what a node declares --------------------------------------------------------------------------------

    def declare(self, declarations: Mapping[str, bytes], now_ms: int) -> list[str]:
        """Store what nodes (by id) declare, bring the catalog in line, and return the fleets that have changed."""

        def unit(tx: Transaction) -> list[str]:
            for node_id, text in declarations.items():
                values = {"declaration": text.decode(), "digest": digest_of(text), "seen_ms": now_ms}
                tx.connection.execute(update(nodes).where(nodes.c.id == node_id).values(**values))
            return self._apply(tx, declarations.keys(), now_ms)

        return self.database.write(unit)

    def note_seen(self, node: Node, now_ms: int) -> None:
        """Store that a node has connected, at most once an hour."""
        if node.seen_ms is None or node.seen_ms < now_ms - _HOUR_MS:
            statement = update(nodes).where(nodes.c.id == node.id).values(seen_ms=now_ms)
            self.database.write(lambda tx: tx.connection.execute(statement).rowcount)

    def apply(self, now_ms: int) -> list[str]:
        """Bring the endpoints of all nodes in line with the models, and return the fleets that have changed."""
        return self.database.write(lambda tx: self._apply(tx, None, now_ms))

    def _apply(self, tx: Transaction, ids: Collection[str] | None, now_ms: int) -> list[str]:
        if tx.connection.execute(select(nodes.c.id).limit(1)).first() is None:
            return []
        lock_version(tx)
        query = select(nodes) if ids is None else select(nodes).where(nodes.c.id.in_(ids))
        found = [_node(row) for row in tx.connection.execute(query)]
        models, version = self._catalog.list_models(tx.connection).values(), hash_body(self._description)
        wanted = [_wanted_server(tx, node, served_models(node, models)) for node in found]
        before = [_read_server(tx, node, version) for node in found]
        changed = [index for index, node in enumerate(found) if wanted[index] != before[index]]
        if changed:
            raise_version(tx, *(Change(Part.SERVER, found[index].name) for index in changed))
        fleets = set[str]()
        for index in changed:
            fleets |= self._write_server(tx, found[index], wanted[index], before[index], now_ms)
        return sorted(fleets)

    def _write_server(
        self, tx: Transaction, node: Node, wanted: "_NodeServer", before: "_NodeServer", now_ms: int
    ) -> set[str]:
        """Make the server of a node what it should be, and return the fleets that it was and is in."""
        fleet = select(servers.c.fleet).where(servers.c.name == node.name)
        fleets = {tx.connection.execute(fleet).scalar()}
        gone = endpoints.c.model.not_in(wanted.models)
        tx.connection.execute(delete(endpoints).where(endpoints.c.server == node.name, gone))
        attributes = dict(wanted.attributes)
        for model, of_model in wanted.models.items():
            with suppress(Conflict):  # The model before has put the server into another fleet; `fault` says so later.
                put_endpoint(tx, model, node.name, node.endpoint, {"slots": wanted.slots}, None, {}, now_ms)
                put_overrides(tx, model, node.name, {}, self._description, now_ms)
                attributes |= {f"{model}:{name}": value for name, value in of_model.items()}
        text = encode_attributes(attributes)
        tx.connection.execute(update(servers).where(servers.c.name == node.name).values(attributes=text))
        if not wanted.models and not find_slot_use(tx, node.name):
            tx.connection.execute(delete(servers).where(servers.c.name == node.name))
        tx.connection.execute(update(nodes).where(nodes.c.id == node.id).values(fault=wanted.fault))
        fleets.add(tx.connection.execute(fleet).scalar())
        return {one for one in fleets if one is not None}

    # -- keys ------------------------------------------------------------------------------------------------

    def rotate(self, node_id: str, public_key: bytes, now_ms: int) -> str:
        """Add a key to a node, whose former keys stay valid until it has connected with this one.

        The caller has checked that both keys have signed it.  Raises Conflict: the key belongs to a node.
        """
        key_id = signatures.key_id(public_key)
        entry = make_entry("node.rotate", now_ms=now_ms, node=node_id, key=key_id)

        def unit(tx: Transaction) -> bool:
            if key_id in node_keys.list_valid_keys(tx.connection, [node_id]).get(node_id, {}):
                return False
            if node_keys.has_key(tx.connection, key_id):
                raise Conflict("This key belongs to a node already.", key=key_id)
            node_keys.add_key(tx, node_id, public_key, now_ms)
            raise_version(tx, Change(Part.SERVER, _name_of(tx, node_id)))
            return True

        commit_audited(self.database, entry, unit)
        return key_id

    def retire_older_keys(self, node_id: str, key_id: str, now_ms: int) -> None:
        """Retire the keys that a node had before this one, with which it has connected."""
        if len(self.find_keys(node_id)) < 2:
            return

        def unit(tx: Transaction) -> bool:
            if not node_keys.retire_older_keys(tx, node_id, key_id, now_ms):
                return False
            raise_version(tx, Change(Part.SERVER, _name_of(tx, node_id)))
            return True

        self.database.write(unit)

    def revoke(self, name: str, now_ms: int, reason: str = "") -> list[str]:
        """Revoke a node and its keys: it opens no connection, and its results are refused.

        Returns the fleets that have changed.  Raises NotFound.
        """
        entry = make_entry("node.revoke", now_ms=now_ms, server=name, reason=reason or None)

        def unit(tx: Transaction) -> tuple[list[str]]:
            node_id = tx.connection.execute(select(nodes.c.id).where(nodes.c.name == name)).scalar()
            if node_id is None:
                raise _no_such_node(name)
            raise_version(tx, Change(Part.SERVER, name))
            tx.connection.execute(update(nodes).where(nodes.c.id == node_id).values(revoked_ms=now_ms))
            node_keys.revoke_keys(tx, node_id, now_ms)
            return (self._apply(tx, [node_id], now_ms),)

        return commit_audited(self.database, entry, unit)[0]

    def remove(self, name: str, now_ms: int) -> list[str]:
        """Remove a node that was revoked and on which nothing runs.  Returns the fleets that have changed.

        Raises NotFound; Conflict.
        """
        entry = make_entry("node.remove", now_ms=now_ms, server=name)

        def unit(tx: Transaction) -> tuple[list[str]]:
            row = tx.connection.execute(select(nodes).where(nodes.c.name == name)).first()
            if row is None:
                raise _no_such_node(name)
            if row.revoked_ms is None:
                raise Conflict(f"Revoke the node first: slotkeeper nodes revoke {name}", server=name)
            if find_slot_use(tx, name):
                raise Conflict(
                    f"Node {name!r} still runs jobs, or may run them; wait until they have ended.", server=name
                )
            raise_version(tx, Change(Part.SERVER, name))
            fleets = self._apply(tx, [row.id], now_ms)
            tx.connection.execute(delete(nodes).where(nodes.c.id == row.id))
            return (fleets,)

        return commit_audited(self.database, entry, unit)[0]


@dataclass(frozen=True, slots=True)
class _NodeServer:
    """The server of a node.  Without models and slots: there is none.

    models: attributes that the server has for each model that it serves.
    fault: why it does not serve further models.
    """

    slots: int
    attributes: Mapping[str, str | float]
    models: Mapping[str, Mapping[str, str | float]]
    fault: str | None = None


def _read_server(tx: Transaction, node: Node, version: str) -> _NodeServer:
    """Return the server of a node as it is; an endpoint with another description than `version` counts as missing."""
    row = tx.connection.execute(select(servers).where(servers.c.name == node.name)).first()
    if row is None:
        return _NodeServer(0, {}, {}, node.fault)
    attributes: dict[str, str | float] = orjson.loads(row.attributes)
    of_server = {name: value for name, value in attributes.items() if ":" not in name}
    models = {}
    for served in tx.connection.execute(select(endpoints).where(endpoints.c.server == node.name)):
        if orjson.loads(served.overrides).get(VERSION_FIELD) == version:
            own = {name: attributes.get(f"{served.model}:{name}") for name in _MODEL_FIELDS}
            models[served.model] = {name: value for name, value in own.items() if value is not None}
    return _NodeServer(row.slots if models else 0, of_server if models else {}, models, node.fault)


def _wanted_server(tx: Transaction, node: Node, served: Mapping[str, DeclaredModel]) -> _NodeServer:
    """Return the server of a node as it should be."""
    models, faults = {}, []
    for model, terms in served.items():
        try:
            find_common_fleet(tx, model, node.name)
        except Conflict as conflict:
            faults.append(conflict.detail)
            continue
        own = {name: getattr(terms, name) for name in _MODEL_FIELDS}
        models[model] = {name: value for name, value in own.items() if value is not None}
    fault = " ".join(faults) or None
    if not models or node.declaration is None:
        return _NodeServer(0, {}, {}, fault)
    declared = parse_declaration(node.declaration, node.grant)
    environment = declared.environment or node.grant.environments[0]
    attributes: dict[str, str | float] = {**declared.labels, POOL: node.grant.pool}
    if environment != PRODUCTION:
        attributes[ENVIRONMENT] = environment
    return _NodeServer(min(declared.slots, node.grant.max_slots), attributes, models, fault)


def _valid_keys(connection: Connection, node_id: str) -> Mapping[str, bytes]:
    return node_keys.list_valid_keys(connection, [node_id]).get(node_id, {})


def _hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _check_free_name(tx: Transaction, name: str) -> None:
    """Raise Conflict if a node or a server has this name."""
    for column in (nodes.c.name, servers.c.name):
        if tx.connection.execute(select(column).where(column == name)).first():
            raise Conflict(f"A server or node {name!r} exists already; give the agent another name.", server=name)


def _name_of(tx: Transaction, node_id: str) -> str:
    return str(tx.connection.execute(select(nodes.c.name).where(nodes.c.id == node_id)).scalar_one())


def _no_such_node(name: str) -> NotFound:
    return NotFound("There is no such node; GET /nodes lists them.", server=name)


def _grant(row: Row) -> Grant:
    return Grant.model_validate_json(row.granted)


def _node(row: Row) -> Node:
    declaration = None if row.declaration is None else row.declaration.encode()
    return Node(
        row.id,
        row.name,
        _grant(row),
        declaration,
        row.digest,
        row.fault,
        row.created_ms,
        row.seen_ms,
        row.revoked_ms,
    )
