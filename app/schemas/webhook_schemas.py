"""What is read and written about webhooks and the deliveries of jobs' `callback_url`; see app.schemas.job_schemas."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from app.api.openapi import Schema
from app.schemas.base import PROVIDED, From, ResponseSchema, Time, iso_time
from app.schemas.cursors import bounded_int, match_cursor
from app.schemas.job_schemas import BodySchema
from slotkeeper import json_text
from slotkeeper.errors import InvalidRequest
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.outbox.redelivery import DeliveryAttempt, GivenUpCallback
from slotkeeper.outbox.subscriptions import RefusedMessage, Subscription
from slotkeeper.outbox.webhook_messages import Message
from slotkeeper.registry.tenants import MAX_NAME_LENGTH, PRINTABLE_PATTERN
from slotkeeper.urls import mask_url
from tasks.security.url_guard import MAX_URL_LENGTH
from tasks.webhooks.bodies import MAX_TEMPLATE_BYTES, MAX_TEMPLATE_NAMES, TEMPLATE_FIELDS

LEAST_PER_S, MOST_PER_S = 0.1, 1000
_ID: Any = {"pattern": "^we_[0-9a-f]{32}$"}
_MESSAGE = re.compile(r"msg_([1-9][0-9]{0,18})_[0-9]{1,19}")
_LOG_CURSOR = re.compile(r"t([1-9][0-9]{0,18})")
_CALLBACK_CURSOR = re.compile(r"c([0-9]{1,19})\.([0-9]{1,19})\.([!-~]{1,400})")
_GIVEN_UP_CURSOR = re.compile(r"(we_[0-9a-f]{32})\.([0-9]{1,19})")

if TYPE_CHECKING:
    EventType = str
else:
    EventType = Literal[tuple(sorted(EVENT_TYPES.values()))]

_URL: Any = Field(max_length=MAX_URL_LENGTH, examples=["https://hooks.example.com/slotkeeper"])
_EVENTS: Any = Field(
    None, min_length=1, max_length=50, description="Types of the events that it receives; if omitted, the ends of jobs."
)
_TEMPLATE: Any = Field(
    None,
    description=f"The body for receivers with another format: JSON of at most {MAX_TEMPLATE_BYTES} bytes, in "
    f"whose texts {{{{name}}}} stands for a value, {MAX_TEMPLATE_NAMES} times at most.  Names: "
    f"{', '.join(TEMPLATE_FIELDS)}, and result.part.  null: our own form.",
    examples=[{"text": "{{model}}: job {{job_id}} is {{status}} {{error.message|slack}}"}],
)
_DESCRIPTION: Any = Field(None, max_length=200, description="For people.")
_MAX_PER_S: Any = Field(
    None, ge=LEAST_PER_S, le=MOST_PER_S, description="Messages that it is sent in a second; null: as many as there are."
)
_SHOWN_URL: Any = Field(description="Without a user, a password and the values of its query, which may be keys.")


class WebhookBody(BodySchema):
    """A webhook of a tenant."""

    url: str = _URL
    events: list[EventType] | None = _EVENTS
    template: dict[str, Any] | None = _TEMPLATE
    description: str | None = _DESCRIPTION
    max_per_s: float | None = _MAX_PER_S
    tenant: str | None = Field(
        None,
        description="The tenant whose events it receives; only administrators may name another tenant.",
        json_schema_extra={"maxLength": MAX_NAME_LENGTH, "pattern": f"^{PRINTABLE_PATTERN}$"},
    )


class WebhookChange(BodySchema):
    """What shall be otherwise; what is left out stays."""

    url: str | None = Field(None, max_length=MAX_URL_LENGTH)
    events: list[EventType] | None = Field(None, min_length=1, max_length=50)
    template: dict[str, Any] | None = _TEMPLATE
    description: str | None = _DESCRIPTION
    max_per_s: float | None = _MAX_PER_S

    @model_validator(mode="after")
    def _says_something(self) -> "WebhookChange":
        for name in ("url", "events"):
            if name in self.model_fields_set and getattr(self, name) is None:
                raise ValueError(f"{name} cannot be null; leave it out to keep it")
        return self


class DisableBody(BodySchema):
    """Why a webhook is disabled."""

    reason: str | None = Field(None, max_length=500)


class ReplayBody(BodySchema):
    """What shall be told once more: one of these."""

    message: str | None = Field(None, max_length=50, description="One message, by its webhook-id.")
    since: str | None = Field(
        None, max_length=40, description="All that it wants and that has happened since; ISO 8601 with its zone."
    )
    given_up: Literal[True] | None = Field(None, description="All that was given up.")

    @model_validator(mode="after")
    def _is_one(self) -> "ReplayBody":
        if sum(it is not None for it in (self.message, self.since, self.given_up)) != 1:
            raise ValueError("body must name one of message, since and given_up")
        return self


class CallbacksQuery(Schema):
    tenant: str | None = Field(None, max_length=MAX_NAME_LENGTH, description="Only this tenant's; for administrators.")
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=441, json_schema_extra={"pattern": f"^{_CALLBACK_CURSOR.pattern}$"})


class CallbacksReplayBody(ReplayBody):
    """Which callbacks shall be sent once more: one of `message`, `since` and `given_up`."""

    message: str | None = Field(
        None,
        description="One callback, by its webhook-id; also one that was delivered.",
        json_schema_extra={"maxLength": 400, "pattern": f"^{PRINTABLE_PATTERN}$"},
    )
    since: str | None = Field(
        None, max_length=40, description="All given up of jobs that ended since then; ISO 8601 with its zone."
    )
    tenant: str | None = Field(
        None,
        description="Of several, those of this tenant's jobs; for administrators.",
        json_schema_extra={"maxLength": MAX_NAME_LENGTH, "pattern": f"^{PRINTABLE_PATTERN}$"},
    )


class CallbackDeliveriesQuery(Schema):
    job_id: str = Field(max_length=400, description="Whose.")
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=60, json_schema_extra={"pattern": f"^{_LOG_CURSOR.pattern}$"})


class WebhookPath(Schema):
    webhook: str = Field(json_schema_extra=_ID)


class WebhookQuery(Schema):
    tenant: str | None = Field(None, max_length=MAX_NAME_LENGTH, description="Only this tenant's; for administrators.")
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=60, json_schema_extra=_ID)


class DeliveriesQuery(Schema):
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=60, json_schema_extra={"pattern": f"^{_LOG_CURSOR.pattern}$"})


class GivenUpQuery(Schema):
    webhook: str | None = Field(None, max_length=60, json_schema_extra=_ID)
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=60, json_schema_extra={"pattern": f"^{_GIVEN_UP_CURSOR.pattern}$"})


class RefusedMessageView(ResponseSchema, source=RefusedMessage):
    """A message that a webhook has refused."""

    job_id: str
    event: Annotated[str, From("type")]
    tries: int
    status: Annotated[int | None, From("last_status")] = Field(description="HTTP status; null: there was no response.")
    error: Annotated[str | None, From("last_error")]


class WebhookView(ResponseSchema, source=Subscription):
    """A webhook of a tenant."""

    webhook: Annotated[str, From("id")]
    tenant: str
    url: Annotated[str, From(lambda it: mask_url(it.url))] = _SHOWN_URL
    events: Annotated[list[str], From(lambda it: sorted(it.types))]
    template: Annotated[dict[str, Any] | None, From(lambda it: it.template and json_text.loads(it.template))]
    description: str
    max_per_s: float | None = Field(description="Messages that it is sent in a second; null: as many as there are.")
    state: Literal["enabled", "disabled"]
    reason: str | None = Field(description="Why it is disabled.")
    changed_by: str | None = Field(description="The tenant that enabled or disabled it; null: it came about by itself.")
    changed_at: Time | None
    created_at: Time
    failures: int = Field(description="In a row.")
    failing_since: Time | None
    next_try_at: Annotated[Time | None, PROVIDED] = Field(description="It is left alone until then.")
    waiting: Annotated[int, PROVIDED] = Field(description="Messages that wait for it, up to 1,000 more than written.")
    refused: Annotated[RefusedMessageView | None, PROVIDED] = Field(
        description="The oldest message that it has refused and that is tried again; others do not wait for it."
    )
    behind: Annotated[bool, From(lambda it: it.behind is not None)] = Field(
        description="Some of its messages are not written yet."
    )
    former_until: Annotated[Time | None, PROVIDED] = Field(
        description="Until then messages are also signed with the secret before."
    )


class NewWebhookView(WebhookView):
    secret: Annotated[str, PROVIDED] = Field(description="With which its messages are signed; it is never shown again.")


class WebhookList(ResponseSchema):
    webhooks: list[WebhookView]
    next_cursor: str | None


class NewSecretView(ResponseSchema):
    webhook: str
    secret: str = Field(description="It is never shown again.")
    former_until: Time | None = Field(description="Until then messages are also signed with the secret before.")


class WebhookTestResult(ResponseSchema):
    webhook: str
    message: str = Field(description="The webhook-id under which it is sent; the deliveries say what came of it.")


class ReplayResult(ResponseSchema):
    webhook: str
    message: str | None
    since: Time | None
    given_up: int | None = Field(description="How many messages are tried once more.")


class DeliveryView(ResponseSchema, source=DeliveryAttempt):
    """One try of a message."""

    message: str = Field(description="Its webhook-id.")
    job_id: Annotated[str | None, From(lambda it: it.job_id or None)] = Field(description="null: a test.")
    event: Annotated[str, From("type")]
    at: Time
    number: int = Field(description="1: the first try.")
    outcome: Literal["delivered", "failed", "given_up"]
    status: int | None = Field(description="HTTP; null: there was no answer.")
    latency_ms: int
    error: str | None
    answer: Annotated[str | None, PROVIDED] = Field(
        description="What it begins with.  From a network inside only administrators see it."
    )


class DeliveryList(ResponseSchema):
    deliveries: list[DeliveryView]
    next_cursor: str | None


class GivenUpView(ResponseSchema, source=Message):
    """A message that was given up."""

    webhook: Annotated[str, From("receiver")]
    message: Annotated[str, From("id")]
    job_id: str
    event: Annotated[str, From("type")]
    at: Time = Field(description="When it happened.")
    given_up_at: Annotated[Time | None, From("ended_ms")]
    tries: int
    status: Annotated[int | None, From("last_status")]
    error: Annotated[str | None, From("last_error")]


class GivenUpList(ResponseSchema):
    messages: list[GivenUpView]
    next_cursor: str | None


class CallbackView(ResponseSchema, source=GivenUpCallback):
    """A message to a job's `callback_url` that was given up."""

    message: Annotated[str, From("message.id")] = Field(description="Its webhook-id.")
    job_id: Annotated[str, From("message.job_id")]
    model: str
    tenant: str
    url: Annotated[str, From(lambda it: mask_url(it.url))] = _SHOWN_URL
    status: Annotated[str, From("status")] = Field(description="How its job had ended.")
    ended_at: Annotated[Time, From("message.at_ms")]
    given_up_at: Annotated[Time | None, From("message.ended_ms")]
    tries: Annotated[int, From("message.tries")]
    last_status: Annotated[int | None, From("message.last_status")] = Field(
        description="HTTP; null: there was no answer."
    )
    error: Annotated[str | None, From("message.last_error")]


class CallbackList(ResponseSchema):
    callbacks: list[CallbackView]
    next_cursor: str | None


class CallbacksReplayView(ResponseSchema):
    message: str | None
    since: Time | None
    sent: int = Field(description="How many are sent once more.")


def webhook_status(
    subscription: Subscription, waiting: int, now_ms: int, refused: RefusedMessage | None = None
) -> dict[str, Any]:
    """Return the current state of a webhook, as WebhookView shows it."""
    overlaps = len(subscription.list_sealed_secrets(now_ms)) > 1
    return {
        "waiting": waiting,
        "refused": refused and RefusedMessageView.build(refused),
        "next_try_at": iso_time(subscription.open_until_ms) if subscription.open_until_ms > now_ms else None,
        "former_until": iso_time(subscription.former_until_ms) if overlaps else None,
    }


def delivery_view(delivery: DeliveryAttempt, *, shows_inside: bool) -> dict[str, Any]:
    """Return a delivery attempt as DeliveryView; a response from the operator's network only if `shows_inside`."""
    answer = delivery.answer if shows_inside or not delivery.inside else None
    return DeliveryView.build(delivery, answer=answer)


def event_id_of(message: str) -> int:
    """The event that a message tells of.  Raises InvalidRequest for what is no id of one."""
    found = _MESSAGE.fullmatch(message)
    if found is None:
        raise InvalidRequest("message", "message must be the webhook-id of a message, such as the deliveries list")
    return bounded_int(found[1])


def encode_delivery_cursor(page: Sequence[DeliveryAttempt], limit: int) -> str | None:
    return f"t{page[-1].id}" if len(page) == limit else None


def decode_delivery_cursor(cursor: str | None) -> int | None:
    """Raises InvalidRequest for what is no cursor of ours, as those below."""
    found = match_cursor(_LOG_CURSOR, cursor)
    return found and bounded_int(found[1])


def encode_message_cursor(page: Sequence[Message], limit: int) -> str | None:
    return f"{page[-1].receiver}.{page[-1].event}" if len(page) == limit else None


def decode_message_cursor(cursor: str | None) -> tuple[str, int] | None:
    found = match_cursor(_GIVEN_UP_CURSOR, cursor)
    return found and (found[1], bounded_int(found[2]))


def encode_callback_cursor(page: Sequence[GivenUpCallback], limit: int) -> str | None:
    if len(page) < limit:
        return None
    last = page[-1].message
    return f"c{last.at_ms}.{last.event}.{last.job_id}"


def decode_callback_cursor(cursor: str | None) -> tuple[int, str, int] | None:
    found = match_cursor(_CALLBACK_CURSOR, cursor)
    return found and (bounded_int(found[1]), found[3], bounded_int(found[2]))
