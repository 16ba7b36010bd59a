"""Presets: descriptions of common servers by name.  Each is a TOML file in this folder:

    title, servers, checked   the kind of server, the servers and releases that it fits, and how this was checked
    notes                     what an operator should know before relying on it
    endpoint, slots, payload  an example of a registration and of a job
    model                     where such a server names its models
    signs                     responses that identify such a server (tasks.servers.probe)
    description, without      the input of Description.model_validate; `without`: JSON pointers to its null values

To add a preset, add a file NAME.toml here, and its recorded exchanges in tests/tasks/servers/conversations.
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
    """A response to GET `path` that indicates the preset.  The matching sign with the largest weight decides."""

    path: Annotated[str, Field(pattern=r"^/")]
    when: Condition = Field(alias="if")
    weight: Annotated[int, Field(ge=1, le=10)] = 5  # 1: many servers respond so; 10: no other server does


class ModelNameSource(_PresetData):
    """The place where a server names its first model: a text, or an object whose first key is the name.

    items: the pointer starts at the first item of this list that has true at `flag`, and not at the whole response.
    """

    path: Annotated[str, Field(pattern=r"^/")]
    pointer: PointerText
    items: PointerText | None = None
    flag: PointerText = "/"


class PresetInfo(_PresetData):
    """The facts about a preset's servers.  `endpoint`: an example, with MODEL in place of the model's name."""

    title: str
    servers: str
    evidence: Literal["live", "recorded", "documented"]
    """live: run with this description; recorded: responses of a real server; documented: from documentation or code."""
    checked: str
    notes: tuple[str, ...] = ()
    endpoint: str
    slots: int = 1
    payload: dict[str, Any]
    model: ModelNameSource | None = None
    signs: tuple[Sign, ...] = ()


@cache
def names() -> tuple[str, ...]:
    """Return the names of all presets, in alphabetical order."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.toml")))


def get(name: str) -> dict[str, Any]:
    """Return a preset's description, for Description.model_validate.  Raises KeyError."""
    preset = _read(name)
    description = deepcopy(preset["description"])
    for pointer in preset.get("without", ()):
        _clear(description, pointer)
    return description


def info(name: str) -> PresetInfo:
    """Return the facts about a preset's servers.  Raises KeyError."""
    return _info(name)


@cache
def _info(name: str) -> PresetInfo:
    preset = _read(name)
    return PresetInfo.model_validate(
        {key: value for key, value in preset.items() if key not in ("description", "without")}
    )


@cache
def _read(name: str) -> dict[str, Any]:
    if name not in names():
        raise KeyError(name)
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))


def _clear(description: dict[str, Any], pointer: str) -> None:
    """Set the value at the pointer to None, because TOML has no null."""
    *parents, last = pointer.removeprefix("/").split("/")
    for step in parents:
        description = description.setdefault(step, {})
    description[last] = None
