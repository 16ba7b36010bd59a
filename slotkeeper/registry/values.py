"""Frozen values of the registry: what has been registered, and whether an operator lets it take part."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeAlias
from urllib.parse import urlsplit


class AdminState(StrEnum):
    """Whether a server, a model or a tenant takes part; all but the first let nothing new start."""

    ONLINE = "online"
    PAUSED = "paused"
    DRAINING = "draining"
    FROZEN = "frozen"


STOPPED_STATES = frozenset({AdminState.PAUSED, AdminState.FROZEN})
"""Of a model or tenant: nothing of it is started."""
CLOSED_STATES = frozenset({AdminState.DRAINING, AdminState.FROZEN})
"""Of a model or tenant: no new jobs are accepted."""


@dataclass(frozen=True, slots=True)
class Server:
    """An inference process: its slots, its state, and the endpoint of each model that it serves."""

    name: str
    fleet: str
    slots: int
    state: str  # a AdminState
    endpoints: dict[str, str]  # model -> URL
    created_ms: int
    attributes: Mapping[str, str | float] = field(default_factory=dict)  # what it declares: {"gpu": "A100"}
    weight: float = 1.0  # above 0, to 1000: how gladly it is chosen
    reason: str | None = None
    changed_by: str | None = None
    changed_ms: int | None = None
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # model -> how it is spoken to for that
    leaving_ms: int | None = None  # since when it takes no new runs, because it is being removed
    leaving_by: str | None = None

    @property
    def takes_jobs(self) -> bool:
        """Whether anything new is started there."""
        return self.state == AdminState.ONLINE and self.leaving_ms is None

    def declared(self, model: str, name: str) -> str | float | None:
        """An attribute as it stands for a model: what it declares for that one alone comes first."""
        return self.attributes.get(f"{model}:{name}", self.attributes.get(name))


Location: TypeAlias = tuple[str, str, int | None, str]


@lru_cache(maxsize=4096)
def parse_location(url: str) -> Location:
    """What of an address says where a server is: no user, no password, no query."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port, parts.path


@dataclass(frozen=True, slots=True)
class TenantState:
    """A tenant that does not stand online: since when, by whom and why."""

    name: str
    state: str  # a AdminState
    reason: str | None = None
    changed_by: str | None = None
    changed_ms: int | None = None


def format_attribute(value: str | float) -> str:
    """An attribute as the scripts compare it: whole numbers without a point."""
    return value if isinstance(value, str) else format_number(value)


def format_number(value: int | float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
