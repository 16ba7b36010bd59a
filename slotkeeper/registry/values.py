"""Frozen values of the catalog: servers, and the states that operators set."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class AdminState(StrEnum):
    """The state of a server, a model or a tenant.

    A server starts new runs only if it is ONLINE.  For models and tenants, see STOPPED_STATES and CLOSED_STATES.
    """

    ONLINE = "online"
    PAUSED = "paused"
    DRAINING = "draining"
    FROZEN = "frozen"


VALUE_PATTERN = "[A-Za-z0-9-][A-Za-z0-9._:/+ -]{0,127}"
"""The text of a value of a server's attribute."""
STOPPED_STATES = frozenset({AdminState.PAUSED, AdminState.FROZEN})
"""Of a model or tenant: none of its jobs is started."""
CLOSED_STATES = frozenset({AdminState.DRAINING, AdminState.FROZEN})
"""Of a model or tenant: none of its jobs is accepted."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What makes a server a node: its id, and the public keys of the node that were not revoked, by their ids.

    owner: a tenant.  is_trusted: it belongs to the installation, so that its refusals are believed.
    """

    id: str
    keys: Mapping[str, bytes]
    is_trusted: bool
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Server:
    """An inference server: its slots, its state, and the endpoint of each model that it serves.

    attributes: what it declares, such as {"gpu": "A100"}.  weight: above 0, at most 1000; preference among servers.
    overrides: model -> how the server is called for that model.  leaving_ms: since when it is being removed, and takes
    no new runs.  node: it is a node, which takes jobs only while it is connected.
    """

    name: str
    fleet: str
    slots: int
    state: str  # an AdminState
    endpoints: dict[str, str]  # model -> URL
    created_ms: int
    attributes: Mapping[str, str | float] = field(default_factory=dict)
    weight: float = 1.0
    reason: str | None = None
    changed_by: str | None = None
    changed_ms: int | None = None
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    leaving_ms: int | None = None
    leaving_by: str | None = None
    node: NodeIdentity | None = None

    @property
    def takes_jobs(self) -> bool:
        """Return whether new runs start there."""
        return self.state == AdminState.ONLINE and self.leaving_ms is None

    def declared(self, model: str, name: str) -> str | float | None:
        """Return an attribute for a model: the one for this model alone comes first."""
        return self.attributes.get(f"{model}:{name}", self.attributes.get(name))


@dataclass(frozen=True, slots=True)
class TenantState:
    """The state of a tenant that is not online: since when, by whom and why."""

    name: str
    state: str  # an AdminState
    reason: str | None = None
    changed_by: str | None = None
    changed_ms: int | None = None


def format_attribute(value: str | float) -> str:
    """Return an attribute as the scripts compare it: whole numbers without a decimal point."""
    return value if isinstance(value, str) else format_number(value)


def format_number(value: int | float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
