"""Descriptions of servers that are known by name, as data: one file each, with what is known of its servers.

    title, servers, checked   what it is, which servers and releases it fits, and how that was found out
    notes                     what an operator should know before relying on it
    endpoint, slots, payload  an example of a registration and of a job
    model                     where such a server names its models
    signs                     answers by which such a server can be recognized (tasks.servers.probe)
    description, without      what Description.model_validate takes; `without`: JSON pointers to what is null there

To add one: a file NAME.toml here, and its conversation in tests/tasks/servers/conversations.
"""

import tomllib
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.servers.description import Condition, PointerText

_FOLDER = Path(__file__).parent


class _PresetData(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)


class Sign(_PresetData):
    """Such an answer to GET `path` speaks for the preset; the strongest sign that is met decides."""

    path: Annotated[str, Field(pattern=r"^/")]
    when: Condition = Field(alias="if")
    weight: Annotated[int, Field(ge=1, le=10)] = 5  # 1: many servers answer so; 10: no other does


class ModelNameSource(_PresetData):
    """Where a server names its first model."""

    path: Annotated[str, Field(pattern=r"^/")]
    pointer: PointerText


class PresetInfo(_PresetData):
    """What is known of a preset's servers.  `endpoint`: an example, in which MODEL stands for the model's name."""

    title: str
    servers: str
    evidence: Literal["live", "recorded", "documented"]
    """live: run with this description; recorded: answers of a real server; documented: from its documents or source."""
    checked: str
    notes: tuple[str, ...] = ()
    endpoint: str
    slots: int = 1
    payload: dict[str, Any]
    model: ModelNameSource | None = None
    signs: tuple[Sign, ...] = ()


@cache
def names() -> tuple[str, ...]:
    """All presets, in alphabetical order."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.toml")))


def get(name: str) -> dict[str, Any]:
    """What Description.model_validate takes.  Raises KeyError."""
    preset = _read(name)
    description = deepcopy(preset["description"])
    for pointer in preset.get("without", ()):
        _clear(description, pointer)
    return description


def info(name: str) -> PresetInfo:
    """What is known of it.  Raises KeyError."""
    return _info(name)


@cache
def _info(name: str) -> PresetInfo:
    known = _read(name)
    return PresetInfo.model_validate(
        {key: value for key, value in known.items() if key not in ("description", "without")}
    )


@cache
def _read(name: str) -> dict[str, Any]:
    if name not in names():
        raise KeyError(name)
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))


def _clear(description: dict[str, Any], pointer: str) -> None:
    """TOML has no null."""
    *parents, last = pointer.removeprefix("/").split("/")
    for step in parents:
        description = description.setdefault(step, {})
    description[last] = None
