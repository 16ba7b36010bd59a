"""Request and response bodies for tenants, their webhook secrets, and the secrets that descriptions name."""

from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from app.schemas.base import (
    _REASON,
    MODEL_NAME,
    PROVIDED,
    AdminStateName,
    BodySchema,
    From,
    ResponseSchema,
    Schema,
    StateView,
    Time,
    iso_time,
)
from slotkeeper.registry import values
from slotkeeper.registry.api_keys import ApiKey
from slotkeeper.registry.identity import Scope, format_scopes
from slotkeeper.registry.server_descriptions import Secret
from slotkeeper.registry.tenant_limits import MAX_PER_S, RateLimit, TenantLimits
from slotkeeper.registry.tenants import MAX_NAME_LENGTH, PRINTABLE_PATTERN
from slotkeeper.registry.values import AdminState, TenantState
from slotkeeper.registry.webhook_rotations import SecretRotation
from tasks.security.vault import MAX_LENGTH, MIN_LENGTH, NAME_PATTERN, VALUE_PATTERN

_SECRET: Any = {"pattern": f"^{NAME_PATTERN}$"}


_Named = Annotated[str, Field(max_length=128, json_schema_extra=MODEL_NAME)]


class SecretPath(Schema):
    name: str = Field(json_schema_extra=_SECRET)


class SecretBody(BodySchema):
    """A secret.  A server description refers to it as {{secret/NAME}}."""

    value: str = Field(
        description="The value.  It is stored encrypted, sent to servers, and never returned by the API.",
        json_schema_extra={
            "minLength": MIN_LENGTH,
            "maxLength": MAX_LENGTH,
            "pattern": f"^{VALUE_PATTERN}$",
            "writeOnly": True,
        },
    )
    models: list[_Named] | None = Field(
        description="Models whose descriptions may refer to it; null: all models.",
        min_length=1,
        max_length=100,
        examples=[["flux"]],
    )


class SecretView(ResponseSchema, source=Secret):
    secret: Annotated[str, From("name")]
    models: Annotated[
        list[str] | None, From(lambda secret: None if secret.models is None else sorted(secret.models))
    ] = Field(description="null: all models.")
    set_by: str | None = Field(description="The tenant that set it.")
    set_at: Time


class SecretList(ResponseSchema):
    secrets: list[SecretView]


_RATE: Any = Field(None, gt=0, le=MAX_PER_S, description="Jobs that may be submitted per second; null: no limit.")
_BURST: Any = Field(None, ge=1, le=MAX_PER_S, description="Jobs that may be submitted at once; it goes with a rate.")


_ENVIRONMENT: Any = {"pattern": f"^{values.VALUE_PATTERN}$"}


def _may_be_null(name: str) -> Any:
    """Return a limit as a field of a body."""
    limit = TenantLimits.model_fields[name]
    return limit.annotation, limit


_WITH_PATTERNS = frozenset({"model_rates", "models", "environments"})
_Numbers: Any = create_model(
    "_Numbers",
    __base__=BodySchema,
    **{name: _may_be_null(name) for name in TenantLimits.model_fields if name not in _WITH_PATTERNS},
)


class LimitsBody(_Numbers):
    """Limits of a tenant, or of the installation.

    Omitted fields are not changed; null: the field has no value any more.
    """

    model_rates: dict[_Named, RateLimit] | None = Field(
        None, max_length=1000, description="Further rates, each of the jobs of one model."
    )
    models: list[_Named] | None = Field(
        None, max_length=1000, description="Models whose jobs may be submitted; null: all."
    )
    environments: list[Annotated[str, Field(json_schema_extra=_ENVIRONMENT)]] | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="Environments that jobs may name; the first is that of jobs that name none.  null: production.",
    )

    @property
    def changes(self) -> dict[str, Any]:
        """The fields in the body, by name."""
        given: dict[str, Any] = self.model_dump(exclude_unset=True)
        return given


class TenantBody(BodySchema):
    """The new state of a tenant, and its limits.  Omitted fields are not changed."""

    state: AdminStateName | None = None
    reason: str | None = _REASON
    rate_per_s: float | None = _RATE
    burst: int | None = _BURST
    limits: LimitsBody | None = None

    @property
    def limit_changes(self) -> dict[str, Any]:
        """The limits in the body, by name; a rate and a burst may stand beside `limits`."""
        beside = self.model_dump(include={"rate_per_s", "burst"}, exclude_unset=True)
        return beside | ({} if self.limits is None else self.limits.changes)


class TenantPath(Schema):
    tenant: str = Field(json_schema_extra={"maxLength": MAX_NAME_LENGTH, "pattern": f"^{PRINTABLE_PATTERN}$"})


class TenantView(StateView, source=TenantState):
    tenant: Annotated[str, From("name")]
    keys: Annotated[int, PROVIDED] = Field(description="How many valid keys it has.")
    operates: Annotated[bool, PROVIDED] = Field(description="Whether one of them has the scope `operate`.")
    rate_per_s: Annotated[float | None, PROVIDED] = Field(
        description="Jobs that may be submitted per second; null: no limit."
    )
    burst: Annotated[int | None, PROVIDED]
    limits: Annotated[TenantLimits, PROVIDED] = Field(description="Its own limits.")


class OwnTenantView(ResponseSchema):
    """A tenant as its own keys see it."""

    tenant: str
    state: str = Field(description="`paused`, `draining` and `frozen`: an operator keeps its jobs back.")
    scopes: list[str] = Field(description="What the key of this request may be used for.")
    limits: TenantLimits = Field(description="The limits that apply, with those of the installation.")


class UsageQuery(Schema):
    first: date | None = Field(
        None, alias="from", description="The first day (UTC); by default the first of the month."
    )
    last: date | None = Field(None, alias="to", description="The last day; by default today.")
    by: Literal["day", "model"] = Field("day", description="`day`: by day and model; `model`: summed over the days.")


class UsageRow(ResponseSchema):
    """What a tenant has used of a model."""

    day: str | None = Field(description="null: all days.")
    model: str
    slot_s: float = Field(description="Seconds for which its runs held a slot; a run counts when it has ended.")
    runs: int = Field(description="Runs that a server has taken.")
    accepted: int
    completed: int
    ended: int = Field(description="Jobs that ended without completing.")


class UsageList(ResponseSchema):
    tenant: str
    usage: list[UsageRow]


class LimitsView(ResponseSchema):
    """The limits of the installation."""

    limits: TenantLimits


class KeyPath(TenantPath):
    key: str = Field(json_schema_extra={"maxLength": 100, "pattern": "^[0-9A-Za-z]+$"})


_SCOPES: Any = {"items": {"type": "string", "enum": [scope.value for scope in Scope]}}


class KeyBody(BodySchema):
    """A new key."""

    name: str = Field("", max_length=100, description="What it is for, or where it is used.")
    scopes: list[str] = Field(
        ["submit", "read", "manage"],
        min_length=1,
        max_length=len(Scope),
        description="What it may be used for; at most what the key of this request may.",
        json_schema_extra=_SCOPES,
    )
    expires_in_s: int | None = Field(
        None, ge=1, le=3650 * 86_400, description="After how many seconds it ends; null: when it is revoked."
    )
    rate_per_s: float | None = _RATE
    burst: int | None = _BURST


class KeyChangeBody(BodySchema):
    """What of a key is changed.  Omitted fields are not changed."""

    name: str | None = Field(None, max_length=100)
    scopes: list[str] | None = Field(None, min_length=1, max_length=len(Scope), json_schema_extra=_SCOPES)
    expires_in_s: int | None = Field(
        None, ge=1, le=3650 * 86_400, description="In how many seconds it ends; null: when it is revoked."
    )


class KeyRotateBody(BodySchema):
    """How long the key that is replaced stays valid."""

    overlap_s: int = Field(0, ge=0, le=30 * 86_400, description="Seconds; 0: it ends at once.")


class KeyView(ResponseSchema, source=ApiKey):
    key_id: Annotated[str, From("id")] = Field(description="It stands in the key after `sk_`.")
    tenant: str
    name: str
    scopes: Annotated[list[str], From(lambda key: format_scopes(key.scopes).split())]
    valid: Annotated[bool, PROVIDED]
    created_at: Time
    created_by: str | None = Field(description="The tenant whose key made it; null: the command line.")
    expires_at: Time | None
    revoked_at: Time | None
    last_used_at: Time | None = Field(description="A minute late at most; null: never.")
    rate_per_s: Annotated[float | None, From(lambda key: key.rate.rate_per_s)] = Field(
        description="Jobs that may be submitted per second with this key; null: no limit."
    )
    burst: Annotated[int | None, From(lambda key: key.rate.burst)]


class NewKeyView(KeyView):
    key: Annotated[str, PROVIDED] = Field(description="The key, which is not shown again.")


class CeleryTokenBody(BodySchema):
    """How long a token is valid."""

    ttl_s: int = Field(3600, ge=1, le=30 * 86_400, description="Seconds.")


class CeleryTokenView(ResponseSchema):
    """A token for Celery's messages, which nothing lists."""

    token: str = Field(description="`skt_…`, for the header `slotkeeper_token`.")
    expires_at: str


class KeyList(ResponseSchema):
    """The keys of a tenant, the newest first.  One that has ended is listed for 90 days."""

    keys: list[KeyView]


class TenantList(ResponseSchema):
    """The tenants that were added, and those whose state is not `online`."""

    tenants: list[TenantView]


class WebhookSecretView(ResponseSchema):
    """The secrets with which a tenant verifies its webhook messages (Standard Webhooks)."""

    tenant: str
    secrets: list[str] = Field(description="`whsec_…`, the newest first; each message is signed with all of them.")
    rotation: int = Field(description="How many times the secret was rotated.")
    former_until: str | None = Field(
        description="Until when messages are also signed with the previous secret; null: they are not."
    )


def tenant_view(name: str, state: TenantState | None, limits: TenantLimits, keys: Sequence[ApiKey]) -> dict[str, Any]:
    """Return TenantView.  `state` None: it is online.  `limits`: its own.  `keys`: those that are valid."""
    return TenantView.build(
        state or TenantState(name, AdminState.ONLINE),
        keys=len(keys),
        operates=any(Scope.OPERATE in key.scopes for key in keys),
        rate_per_s=limits.rate_per_s,
        burst=limits.burst,
        limits=limits.model_dump(),
    )


def webhook_secret_view(name: str, rotation: SecretRotation, secrets: list[str], now_ms: int) -> dict[str, Any]:
    """Return WebhookSecretView."""
    until = iso_time(rotation.former_until_ms) if len(rotation.list_valid(now_ms)) > 1 else None
    return WebhookSecretView.build(tenant=name, secrets=secrets, rotation=rotation.number, former_until=until)
