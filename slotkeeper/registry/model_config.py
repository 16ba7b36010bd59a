"""The configuration of a model: its fields, and where each value comes from (model, kind, installation, release)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slotkeeper.errors import InvalidJob
from slotkeeper.jobs.terms import MAX_JITTER
from slotkeeper.registry import policies
from slotkeeper.registry.values import VALUE_PATTERN

MAX_PAYLOAD_BYTES = 64 << 20
"""The largest value of `max_payload_bytes`."""
INSTALLATION = ""
"""The name of the defaults of all models."""
KIND = "kind"
"""The field by which a model names its kind."""
PROTOCOL_FIELDS = frozenset({"preset", "description", "model_type", "poll_endpoint_template", "id_field"})
"""The fields that together say how servers are called."""


if TYPE_CHECKING:
    Policy = str
else:
    Policy = Literal[tuple(policies.POLICIES)]
_Tenant = Annotated[str, Field(min_length=1, max_length=200)]
_POINTER: Any = {"pattern": "^(/.*)?$"}
_POLLED: Any = {"pattern": "^/.*\\{id\\}"}
_Share = Annotated[float, Field(strict=True, ge=0.001, le=1000, allow_inf_nan=False)]
_Slots = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
_MOST_WAITING = 1_000_000_000
_MOST_TENANTS = 10_000


class ModelConfig(BaseModel):
    """How jobs of one model are treated.

    An override of any field is stored in the database and takes effect everywhere within two seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    kind: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """The kind of models whose defaults it inherits; null: only those of the installation."""
    model_type: Literal["sync", "async"] = "sync"
    """sync: the response holds the result; async: it holds an id, which is polled."""
    poll_endpoint_template: Annotated[str, Field(max_length=500, json_schema_extra=_POLLED)] | None = None
    """Path of the status request, with `{id}`; null: `/status/{id}`."""
    id_field: Annotated[str, Field(max_length=100)] | None = None
    """The field of an async response that holds the id; null: `job_id`."""
    preset: Annotated[str, Field(max_length=100)] | None = None
    """The preset of the inference server; null: it implements the slot protocol."""
    description: dict[str, Any] | None = None
    """How its servers are called, see docs/reference/descriptions.md; with `preset`: what differs from the preset."""
    poll_interval: float = Field(2.0, gt=0, le=3600)
    """Seconds between two polls."""
    max_poll_time: float = Field(600.0, gt=0, le=7 * 86_400)
    """Seconds that one run may take, sync or async."""
    max_retries: int = Field(50, ge=0, le=10_000)
    """Error responses of servers before the job is dead-lettered."""
    max_crashes: int = Field(3, ge=1, le=100)
    """Crashes of a worker or server under the job before it is dead-lettered."""
    retry_backoff: float = Field(1.0, gt=0, le=3600)
    """Seconds before the first retry; doubled each time."""
    retry_backoff_max: float = Field(30.0, gt=0, le=86_400)
    """Longest wait before a retry in seconds, before its jitter."""
    retry_jitter: float = Field(0.1, strict=True, ge=0, le=MAX_JITTER)
    """Share of a wait by which it varies at random, up or down; 0: it does not."""
    max_payload_bytes: int = Field(1 << 20, gt=0, le=MAX_PAYLOAD_BYTES)
    """Largest payload, as compact JSON."""
    max_waiting: int | None = Field(None, ge=0, le=_MOST_WAITING)
    """Number of queued jobs above which a submit gets 429; null: no limit."""
    capacity: int | None = Field(None, strict=True, ge=0, le=_MOST_WAITING)
    """Waiting jobs allowed for each slot.  The limit is the larger one of `capacity` and `capacity_per_slot`, times
    the model's slots, and never above `max_waiting`; under `fair` it holds for each tenant."""
    capacity_per_slot: int | None = Field(None, strict=True, ge=0, le=_MOST_WAITING)
    """Waiting jobs allowed for each slot; see `capacity`."""
    default_ttl: float | None = Field(None, gt=0, le=366 * 86_400)
    """Seconds after which a job without `ttl` expires; null: never."""
    policy: Policy = Field(policies.DEFAULT_POLICY, description=policies.describe_all())
    """The order of waiting jobs, see `slotkeeper/registry/policies.py`."""
    tier_head_start: float = Field(60.0, strict=True, gt=0, le=7 * 86_400)
    """Seconds that one step of priority is worth under `aging`."""
    weights: dict[_Tenant, _Share] = Field({}, max_length=_MOST_TENANTS)
    """Tenant -> its share under `fair`; the share of all others is 1.  No effect under other policies."""
    tenant_slots: _Slots | None = None
    """Slots that one tenant may hold at once; null: no limit."""
    tenant_slot_limits: dict[_Tenant, _Slots] = Field({}, max_length=_MOST_TENANTS)
    """Tenant -> slots that it may hold at once, instead of `tenant_slots`."""
    affinity: float = Field(30.0, strict=True, ge=0, le=3600)
    """Seconds for which a server may continue with the loaded model although another model's job comes first."""
    redact: list[Annotated[str, Field(max_length=500, json_schema_extra=_POINTER)]] = Field([], max_length=20)
    """JSON pointers into payloads, such as `/user/email`: what is there is shown to the job's tenant alone."""
    unmatched: Literal["accept", "refuse"] = "accept"
    """Whether a job is accepted whose constraints no known server meets."""
    breaker_failures: int = Field(20, strict=True, ge=1, le=10_000)
    """Consecutive failures, of different jobs, after which the model's circuit breaker opens."""

    node_pools: list[Annotated[str, Field(pattern=f"^{VALUE_PATTERN}$")]] = Field([], max_length=50)
    """Pools of nodes that may serve the model, and see its payloads; empty: none."""
    node_patience: float = Field(120.0, strict=True, ge=0, le=86_400)
    """Seconds for which a run waits for a node that has lost its connection, before it is taken for lost."""

    @model_validator(mode="after")
    def _relations(self) -> "ModelConfig":
        template = self.poll_endpoint_template
        if template is not None and (not template.startswith("/") or "{id}" not in template):
            raise ValueError("poll_endpoint_template must be a path that starts with / and contains {id}")
        if any(place and not place.startswith("/") for place in self.redact):
            raise ValueError("redact must list JSON pointers, which begin with /")
        if self.poll_interval > self.max_poll_time:
            raise ValueError("poll_interval must not exceed max_poll_time")
        if self.retry_backoff > self.retry_backoff_max:
            raise ValueError("retry_backoff must not exceed retry_backoff_max")
        return self


def parse_overrides(overrides: Mapping[str, Any]) -> tuple[ModelConfig, set[str]]:
    """Return the configuration that stored overrides make, and the names of those that this release does not know.

    A newer release may have stored them while this one still runs: they count as not set, instead of stopping it.
    """
    known = {name: value for name, value in overrides.items() if name in ModelConfig.model_fields}
    try:
        return ModelConfig(**known), set(overrides.keys() - known.keys())
    except ValidationError as error:
        wrong = {str(fault["loc"][0]) for fault in error.errors() if fault["loc"]} or set(known)
    config, _ = parse_overrides({name: value for name, value in known.items() if name not in wrong})
    return config, set(overrides.keys() - known.keys()) | wrong


# -- defaults ----------------------------------------------------------------------------------------------------


class ConfigSource(StrEnum):
    """Where the value of a field comes from; the first of these that sets it counts."""

    MODEL = "model"
    KIND = "kind"
    INSTALLATION = "installation"
    RELEASE = "built-in"


@dataclass(frozen=True, slots=True)
class Defaults:
    """The defaults of a kind of models, or (INSTALLATION) of all.  described_by: as of a model."""

    name: str
    overrides: Mapping[str, Any]
    changed_ms: int
    changed_by: str | None = None
    described_by: str | None = None


AllDefaults: TypeAlias = Mapping[str, Defaults]


class _Level(NamedTuple):
    """The fields that one source sets, and the version of the description that they make."""

    source: ConfigSource
    overrides: Mapping[str, Any]
    described_by: str | None

    @property
    def sets_protocol(self) -> bool:
        return self.described_by is not None or any(self.overrides.get(name) is not None for name in PROTOCOL_FIELDS)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration of a model: each field that is set, and its source."""

    values: Mapping[str, Any]
    sources: Mapping[str, ConfigSource]
    described_by: str | None


def resolve_config(own: Mapping[str, Any], described_by: str | None, known: AllDefaults) -> Resolved:
    """Resolve the configuration of a model that sets `own`.

    How servers are called is one thing set by several fields (PROTOCOL_FIELDS): all of them come from the first source
    that sets any.
    """
    levels = [_Level(ConfigSource.MODEL, own, described_by), *_inherited_levels(own, known)]
    protocol = next((level for level in levels if level.sets_protocol), None)
    values, sources = dict[str, Any](), dict[str, ConfigSource]()
    for level in levels:
        for name, value in level.overrides.items():
            if name not in values and (name not in PROTOCOL_FIELDS or protocol is None or level is protocol):
                values[name], sources[name] = value, level.source
    return Resolved(values, sources, protocol and protocol.described_by)


def resolve_inherited(own: Mapping[str, Any], known: AllDefaults) -> Resolved:
    """Resolve the configuration that the model would have if it set only its kind."""
    return resolve_config({KIND: own[KIND]} if own.get(KIND) else {}, None, known)


def _inherited_levels(own: Mapping[str, Any], known: AllDefaults) -> Sequence[_Level]:
    """Return the levels below the model.  A kind that does not exist (it was removed just now) sets nothing."""
    levels = []
    if own.get(KIND) and (kind := known.get(own[KIND])) is not None:
        levels.append(_Level(ConfigSource.KIND, kind.overrides, kind.described_by))
    if (installation := known.get(INSTALLATION)) is not None:
        levels.append(_Level(ConfigSource.INSTALLATION, installation.overrides, installation.described_by))
    return levels


def check_config(model: str, own: Mapping[str, Any], known: AllDefaults) -> None:
    """Raise InvalidJob, which names model and field, if the fields do not fit together, or the kind does not exist."""
    if own.get(KIND) and own[KIND] not in known:
        raise InvalidJob(KIND, f"kind: there is no kind {own[KIND]!r}; add it first: PUT /admin/kinds/{own[KIND]}")
    values = resolve_config(own, None, known).values
    _, unknown = parse_overrides(own)
    try:
        ModelConfig(**{name: value for name, value in values.items() if name not in unknown})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else "body"
        message = str(first["msg"]).removeprefix("Value error, ")
        raise InvalidJob(field, f"{message}: so model {model!r} would be configured") from None
