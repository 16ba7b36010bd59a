"""What holds where a model's own configuration says nothing: that of its kind, then that of the installation.

A field is taken from the first of these that says it: the model, its kind, the installation, the release.  How servers
are spoken to is one thing said in several fields (SPOKEN): they are taken together, from the first that says any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import orjson
from pydantic import ValidationError
from sqlalchemy import Connection, delete, insert, select

from slotkeeper.db import Transaction
from slotkeeper.errors import Conflict, InvalidJob, NotFound
from slotkeeper.registry import server_descriptions
from slotkeeper.registry.model_config import ModelConfig, parse_overrides
from slotkeeper.registry.tables import defaults, models

INSTALLATION = ""
"""The name of what holds for all models."""
KIND = "kind"
"""The field by which a model says of what kind it is."""
PROTOCOL_FIELDS = frozenset({"preset", "description", "model_type", "poll_endpoint_template", "id_field"})


class ConfigSource(StrEnum):
    """Where a field of a configuration comes from, the nearest first."""

    MODEL = "model"
    KIND = "kind"
    INSTALLATION = "installation"
    RELEASE = "built-in"


@dataclass(frozen=True, slots=True)
class Defaults:
    """Of a kind of models, or of the installation.  `described_by`: as of a model."""

    name: str
    overrides: Mapping[str, Any]
    changed_ms: int
    changed_by: str | None = None
    described_by: str | None = None


AllDefaults: TypeAlias = Mapping[str, Defaults]
Level: TypeAlias = tuple[
    ConfigSource, Mapping[str, Any], str | None
]  # what is said there, and the version that this makes


@dataclass(frozen=True, slots=True)
class Resolved:
    """What holds for a model: each field that somebody says, and where it comes from."""

    values: Mapping[str, Any]
    sources: Mapping[str, ConfigSource]
    described_by: str | None


def resolve_config(own: Mapping[str, Any], described_by: str | None, known: AllDefaults) -> Resolved:
    """What holds for a model whose own configuration says `own`."""
    levels = [(ConfigSource.MODEL, own, described_by), *_behind(own, known)]
    speaks = next((it for it in levels if _says_how_to_speak(it)), None)
    values, sources = dict[str, Any](), dict[str, ConfigSource]()
    for level in levels:
        for name, value in level[1].items():
            if name not in values and (name not in PROTOCOL_FIELDS or speaks is None or level is speaks):
                values[name], sources[name] = value, level[0]
    return Resolved(values, sources, speaks and speaks[2])


def _says_how_to_speak(level: Level) -> bool:
    _, said, described_by = level
    return described_by is not None or any(said.get(name) is not None for name in PROTOCOL_FIELDS)


def resolve_inherited(own: Mapping[str, Any], known: AllDefaults) -> Resolved:
    """What would hold if the model said nothing but its kind."""
    return resolve_config({KIND: own[KIND]} if own.get(KIND) else {}, None, known)


def _behind(own: Mapping[str, Any], known: AllDefaults) -> Sequence[Level]:
    """A kind that is not there says nothing: it went just now, or another record had it."""
    kind, installation = known.get(own.get(KIND) or INSTALLATION), known.get(INSTALLATION)
    of_kind = [(ConfigSource.KIND, kind.overrides, kind.described_by)] if kind is not None and own.get(KIND) else []
    of_all = [(ConfigSource.INSTALLATION, installation.overrides, installation.described_by)] if installation else []
    return [*of_kind, *of_all]


def list_defaults(connection: Connection) -> dict[str, Defaults]:
    found = {}
    for row in connection.execute(select(defaults).order_by(defaults.c.name)):
        said = orjson.loads(row.overrides)
        version = server_descriptions.find_version(said)
        said.pop(server_descriptions.VERSION_FIELD, None)
        found[row.name] = Defaults(row.name, said, row.changed_ms, row.changed_by, version)
    return found


def put_defaults(tx: Transaction, it: Defaults) -> None:
    """Replace what is said under this name.  Raises InvalidJob: a model could not be configured so."""
    stored = dict(it.overrides) | ({server_descriptions.VERSION_FIELD: it.described_by} if it.described_by else {})
    tx.connection.execute(delete(defaults).where(defaults.c.name == it.name))
    text = orjson.dumps(stored).decode()
    row = {"name": it.name, "overrides": text, "changed_by": it.changed_by, "changed_ms": it.changed_ms}
    tx.connection.execute(insert(defaults), row)
    check_all(tx)


def remove_kind(tx: Transaction, kind: str) -> None:
    """Raises NotFound; Conflict: models are of this kind."""
    its = sorted(name for name, own in _own(tx) if own.get(KIND) == kind)
    if its:
        shown = ", ".join(its[:5])
        raise Conflict(f"{len(its)} models are of kind {kind!r} ({shown}); give them another first.", kind=kind)
    if tx.connection.execute(delete(defaults).where(defaults.c.name == kind)).rowcount == 0:
        raise NotFound("There is no such kind; GET /admin/kinds lists them.", kind=kind)


def check_all(tx: Transaction) -> None:
    """Hold every model's configuration against what is said now.  Raises InvalidJob, which names model and field."""
    known = list_defaults(tx.connection)
    for model, own in _own(tx):
        check_config(model, own, known)


def check_config(model: str, own: Mapping[str, Any], known: AllDefaults) -> None:
    """Raises InvalidJob: the fields do not go together, though each may be right where it is said."""
    if own.get(KIND) and own[KIND] not in known:
        raise InvalidJob(KIND, f"kind: there is no kind {own[KIND]!r}; add it first: PUT /admin/kinds/{own[KIND]}")
    said = resolve_config(own, None, known).values
    _, strange = parse_overrides(own)
    try:
        ModelConfig(**{name: value for name, value in said.items() if name not in strange})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else "body"
        message = str(first["msg"]).removeprefix("Value error, ")
        raise InvalidJob(field, f"{message}: so model {model!r} would be configured") from None


def _own(tx: Transaction) -> list[tuple[str, dict[str, Any]]]:
    """Each model, and what its own configuration says."""
    rows = tx.connection.execute(select(models.c.name, models.c.overrides).order_by(models.c.name))
    return [(row.name, _without_version(orjson.loads(row.overrides))) for row in rows]


def _without_version(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in stored.items() if name != server_descriptions.VERSION_FIELD}
