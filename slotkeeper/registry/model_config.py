"""What is configured for each model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slotkeeper.registry import policies

MOST_PAYLOAD_BYTES = 64 << 20
"""To which a model's bound on payloads may be raised."""


if TYPE_CHECKING:
    Policy = str
else:
    Policy = Literal[tuple(policies.POLICIES)]
_Tenant = Annotated[str, Field(min_length=1, max_length=200)]
_POLLED: Any = {"pattern": "^/.*\\{id\\}"}
_Share = Annotated[float, Field(strict=True, ge=0.001, le=1000, allow_inf_nan=False)]
_Slots = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
_MOST_WAITING = 1_000_000_000
_MOST_TENANTS = 10_000


class ModelConfig(BaseModel):
    """How jobs of one model are treated.

    An override of any field is stored in the record and takes effect everywhere within two seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    kind: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """The kind of models whose defaults it takes; null: those of the installation alone."""
    model_type: Literal["sync", "async"] = "sync"
    """sync: the server answers at once; async: with an id to be polled."""
    poll_endpoint_template: Annotated[str, Field(max_length=500, json_schema_extra=_POLLED)] | None = None
    """Path of the status request, with `{id}`; null: `/status/{id}`."""
    id_field: Annotated[str, Field(max_length=100)] | None = None
    """Where an async answer carries its id; null: `job_id`."""
    preset: Annotated[str, Field(max_length=100)] | None = None
    """The kind of inference server, by name; null: one that speaks the slot protocol."""
    description: dict[str, Any] | None = None
    """How its servers are spoken to, as docs/reference/descriptions.md says; with `preset`: what differs from that."""
    poll_interval: float = Field(2.0, gt=0, le=3600)
    """Seconds between two polls."""
    max_poll_time: float = Field(600.0, gt=0, le=7 * 86_400)
    """Seconds that one run may take in all, sync or async."""
    max_retries: int = Field(50, ge=0, le=10_000)
    """Wrong answers of a server before the job is set aside as dead."""
    max_crashes: int = Field(3, ge=1, le=100)
    """Deaths of a worker or server under the job before it is quarantined as dead."""
    retry_backoff: float = Field(1.0, gt=0, le=3600)
    """Seconds before the first retry; doubled each time."""
    retry_backoff_max: float = Field(30.0, gt=0, le=86_400)
    """Seconds that no single wait exceeds, before jitter of ±10 %."""
    max_payload_bytes: int = Field(1 << 20, gt=0, le=MOST_PAYLOAD_BYTES)
    """Largest payload, as compact JSON."""
    max_waiting: int | None = Field(None, ge=0, le=_MOST_WAITING)
    """Queued jobs beyond which a submit is answered 429; null: no bound."""
    capacity: int | None = Field(None, strict=True, ge=0, le=_MOST_WAITING)
    """Waiting jobs allowed for each slot.  The bound is the larger set one of `capacity` and `capacity_per_slot`,
    times the model's slots, and never above `max_waiting`; under `fair` it holds for each tenant."""
    capacity_per_slot: int | None = Field(None, strict=True, ge=0, le=_MOST_WAITING)
    """Waiting jobs allowed for each slot; see `capacity`."""
    default_ttl: float | None = Field(None, gt=0, le=366 * 86_400)
    """Seconds after which a job without its own `ttl` expires; null: never."""
    policy: Policy = Field(policies.DEFAULT_POLICY, description=policies.describe_all())
    """Whose turn it is, see `slotkeeper/registry/policies.py`."""
    tier_head_start: float = Field(60.0, strict=True, gt=0, le=7 * 86_400)
    """Seconds that one step of priority is worth under `aging`."""
    weights: dict[_Tenant, _Share] = Field({}, max_length=_MOST_TENANTS)
    """Tenant -> its share under `fair`; the share of all others is 1.  Kept, without effect, under other policies."""
    tenant_slots: _Slots | None = None
    """Slots that one tenant may hold at once; null: no bound."""
    tenant_slot_limits: dict[_Tenant, _Slots] = Field({}, max_length=_MOST_TENANTS)
    """Tenant -> the slots that it may hold at once, instead of `tenant_slots`."""
    affinity: float = Field(30.0, strict=True, ge=0, le=3600)
    """Seconds for which a server may go on with the model it has loaded although another model's job comes first."""
    unmatched: Literal["accept", "refuse"] = "accept"
    """What a submit is answered whose constraints no known server meets."""
    breaker_failures: int = Field(20, strict=True, ge=1, le=10_000)
    """Failures in a row, of different jobs, after which the model's breaker opens."""

    @model_validator(mode="after")
    def _relations(self) -> "ModelConfig":
        template = self.poll_endpoint_template
        if template is not None and (not template.startswith("/") or "{id}" not in template):
            raise ValueError("poll_endpoint_template must be a path that starts with / and contains {id}")
        if self.poll_interval > self.max_poll_time:
            raise ValueError("poll_interval must not exceed max_poll_time")
        if self.retry_backoff > self.retry_backoff_max:
            raise ValueError("retry_backoff must not exceed retry_backoff_max")
        return self


def parse_overrides(overrides: Mapping[str, Any]) -> tuple[ModelConfig, set[str]]:
    """The configuration that stored overrides make, and the names of those that say nothing to this release.

    A newer release may have stored them while this one still runs: they count as not set, instead of stopping it.
    """
    known = {name: value for name, value in overrides.items() if name in ModelConfig.model_fields}
    try:
        return ModelConfig(**known), set(overrides.keys() - known.keys())
    except ValidationError as error:
        wrong = {str(fault["loc"][0]) for fault in error.errors() if fault["loc"]} or set(known)
    config, _ = parse_overrides({name: value for name, value in known.items() if name not in wrong})
    return config, set(overrides.keys() - known.keys()) | wrong
