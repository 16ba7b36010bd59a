"""The limits of a tenant: its own values, and those of the installation for the others.

A new limit is a field here, and a row of routing/admission/submit_limits.py: LIMITS.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slotkeeper.errors import InvalidRequest
from slotkeeper.jobs.batch_ids import MAX_LINES
from slotkeeper.jobs.values import PRIORITY_LEAST_URGENT, PRIORITY_MOST_URGENT, PRODUCTION
from slotkeeper.registry.values import VALUE_PATTERN

_ONLY_PRODUCTION = (PRODUCTION,)
MAX_PER_S = 1_000_000


class RateLimit(BaseModel):
    """Submits per second, and at once; burst null: as many as in a second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rate_per_s: float | None = Field(
        None, gt=0, le=MAX_PER_S, description="Jobs that may be submitted per second; null: no limit."
    )
    burst: int | None = Field(
        None, ge=1, le=MAX_PER_S, description="Jobs that may be submitted at once; it goes with a rate."
    )

    @model_validator(mode="after")
    def _check_burst(self) -> "RateLimit":
        if self.burst is not None and self.rate_per_s is None:
            raise ValueError("a burst goes with a rate; set rate_per_s, too")
        return self

    def encode(self) -> str:
        return orjson.dumps(self.model_dump(exclude_defaults=True), option=orjson.OPT_SORT_KEYS).decode()

    @property
    def at_once(self) -> int:
        """Return how many jobs may be submitted at once.  For a limit with a rate."""
        return self.burst or max(int(self.rate_per_s or 0), 1)


NO_RATE = RateLimit()


class TenantLimits(RateLimit):
    """The limits of a tenant, or of the installation.  null: no limit, or that of the installation."""

    model_rates: dict[str, RateLimit] = Field(
        {}, max_length=1000, description="Further rates, each of the tenant's jobs of one model."
    )
    models: list[str] | None = Field(None, max_length=1000, description="Models whose jobs it may submit; null: all.")
    most_urgent: int | None = Field(
        None,
        ge=PRIORITY_MOST_URGENT,
        le=PRIORITY_LEAST_URGENT,
        description="The most urgent priority that it may use; 1 is the most urgent of all.",
    )
    max_waiting: int | None = Field(None, ge=1, description="Jobs that may wait, of all models together.")
    environments: list[Annotated[str, Field(pattern=f"^{VALUE_PATTERN}$")]] | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="Environments that its jobs may name; the first is that of jobs that name none.  null: production.",
    )
    max_slots: int | None = Field(
        None, ge=1, le=1_000_000, description="Slots that its jobs may hold at once, of models that share servers."
    )
    slot_s_per_day: float | None = Field(
        None,
        gt=0,
        description="Seconds of slots, of all its runs that end on one day (UTC); then no jobs are accepted.",
    )
    slot_s_per_month: float | None = Field(None, gt=0, description="The same of a month (UTC).")
    max_open_batches: int | None = Field(None, ge=1, le=100_000, description="Batches that have not ended; null: 100.")
    max_batch_lines: int | None = Field(None, ge=1, le=MAX_LINES, description="Lines of a batch; null: 100,000.")
    max_payload_bytes: int | None = Field(None, ge=1, description="Largest payload of a job, as JSON.")
    max_result_bytes: int | None = Field(
        None, ge=1, description="Largest result of a job, as JSON; a larger one fails the job."
    )

    @property
    def allowed_environments(self) -> Sequence[str]:
        """Return the environments that its jobs may name."""
        return self.environments or _ONLY_PRODUCTION


NO_LIMITS = TenantLimits()
INSTALLATION = ""
"""In place of a tenant's name: the limits of the installation."""


def decode_limits(text: str) -> TenantLimits:
    """Return stored limits.  Those of a later release are left out."""
    stored: Mapping[str, Any] = orjson.loads(text)
    return TenantLimits(**{name: value for name, value in stored.items() if name in TenantLimits.model_fields})


def decode_rate(text: str) -> RateLimit:
    """Return the stored rate of a key."""
    return NO_RATE if text == "{}" else RateLimit(**orjson.loads(text))


def parse_rate(rate_per_s: float | None, burst: int | None) -> RateLimit:
    """Return a rate.  Raises InvalidRequest: a burst without a rate."""
    if burst is not None and rate_per_s is None:
        raise InvalidRequest("burst", "burst: a burst goes with a rate; set rate_per_s, too")
    return RateLimit(rate_per_s=rate_per_s, burst=burst)


def change_limits(limits: TenantLimits, changes: Mapping[str, Any]) -> TenantLimits:
    """Return limits with changed fields; None: the field has no value any more.  Raises InvalidRequest.

    Without a rate there is no burst.
    """
    if changes.get("rate_per_s", 0) is None:
        changes = {"burst": None, **changes}
    values = limits.model_dump(exclude_defaults=True) | dict(changes)
    try:
        return TenantLimits(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "burst"
        raise InvalidRequest(field, f"{field}: {first['msg'].removeprefix('Value error, ')}") from None


def resolve_limits(own: TenantLimits, installation: TenantLimits) -> TenantLimits:
    """Return the limits that apply to a tenant."""
    given = own.model_dump(exclude_defaults=True).keys()
    inherited = {name: value for name, value in installation if name not in given}
    if "rate_per_s" in given:
        inherited.pop("burst", None)
    return own.model_copy(update=inherited)
