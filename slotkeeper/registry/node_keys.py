"""The keys of nodes: which of them are valid, and what happens to them."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import orjson
from sqlalchemy import ColumnElement, Connection, insert, select, update

from slotkeeper import signatures
from slotkeeper.db import Transaction
from slotkeeper.registry.tables import node_keys, nodes
from slotkeeper.registry.values import NodeIdentity

Row: TypeAlias = Any

_IS_VALID = node_keys.c.retired_ms.is_(None) & node_keys.c.revoked_ms.is_(None)


def is_node(connection: Connection, name: str) -> bool:
    """Return whether a node has this name."""
    return connection.execute(select(nodes.c.id).where(nodes.c.name == name)).first() is not None


def list_identities(connection: Connection, names: Collection[str] | None = None) -> dict[str, NodeIdentity]:
    """Return the identities of the nodes with these names; None: of all."""
    query = select(nodes.c.id, nodes.c.name, nodes.c.owner, nodes.c.granted).where(nodes.c.revoked_ms.is_(None))
    if names is not None:
        query = query.where(nodes.c.name.in_(names))
    rows = connection.execute(query).all()
    # A result that was signed just before its key was replaced counts; no connection is opened with that key.
    keys = _list_keys(connection, [row.id for row in rows], node_keys.c.revoked_ms.is_(None)) if rows else {}
    return {
        row.name: NodeIdentity(row.id, keys.get(row.id, {}), bool(orjson.loads(row.granted)["trusted"]), row.owner)
        for row in rows
    }


def list_valid_keys(connection: Connection, ids: Collection[str]) -> Mapping[str, dict[str, bytes]]:
    """Return the valid public keys of these nodes: id of the node -> id of the key -> key."""
    return _list_keys(connection, ids, _IS_VALID)


def _list_keys(
    connection: Connection, ids: Collection[str], condition: ColumnElement[bool]
) -> Mapping[str, dict[str, bytes]]:
    found = defaultdict[str, dict[str, bytes]](dict)
    query = select(node_keys.c.id, node_keys.c.node, node_keys.c.public_key).where(condition)
    for row in connection.execute(query.where(node_keys.c.node.in_(ids))):
        found[row.node][row.id] = signatures.decode_bytes(row.public_key)
    return found


def add_key(tx: Transaction, node: str, public_key: bytes, now_ms: int) -> str:
    """Add a key to a node, and return its id."""
    key_id = signatures.key_id(public_key)
    row = {"id": key_id, "node": node, "public_key": signatures.encode_bytes(public_key), "from_ms": now_ms}
    tx.connection.execute(insert(node_keys), row)
    return key_id


def has_key(connection: Connection, key_id: str) -> bool:
    """Return whether any node has or had this key."""
    return connection.execute(select(node_keys.c.id).where(node_keys.c.id == key_id)).first() is not None


def retire_older_keys(tx: Transaction, node: str, key_id: str, now_ms: int) -> bool:
    """Retire the keys that a node had before this one, and return whether there were any."""
    from_ms = select(node_keys.c.from_ms).where(node_keys.c.id == key_id).scalar_subquery()
    older = (node_keys.c.node == node) & (node_keys.c.id != key_id) & (node_keys.c.from_ms <= from_ms) & _IS_VALID
    return tx.connection.execute(update(node_keys).where(older).values(retired_ms=now_ms)).rowcount > 0


def revoke_keys(tx: Transaction, node: str, now_ms: int) -> None:
    """Revoke all keys of a node."""
    of_node = (node_keys.c.node == node) & node_keys.c.revoked_ms.is_(None)
    tx.connection.execute(update(node_keys).where(of_node).values(revoked_ms=now_ms))
