"""Request and response bodies for webhooks and for deliveries to the `callback_url` of jobs."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from app.schemas.base import PROVIDED, BodySchema, From, ResponseSchema, Schema, Time, iso_time
from app.schemas.cursors import bounded_int, match_cursor
from app.schemas.event_schemas import WebhookEventType
from slotkeeper import json_text
from slotkeeper.errors import InvalidRequest
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


_URL: Any = Field(max_length=MAX_URL_LENGTH, examples=["https://hooks.example.com/slotkeeper"])
_EVENTS: Any = Field(
    None, min_length=1, max_length=50, description="Types of the events that it receives; if omitted, the ends of jobs."
)
_TEMPLATE: Any = Field(
    None,
    description=f"The body for receivers that expect another format: JSON of at most {MAX_TEMPLATE_BYTES} bytes.  In "
    f"its strings {{{{name}}}} is replaced by a value, at most {MAX_TEMPLATE_NAMES} times.  Names: "
    f"{', '.join(TEMPLATE_FIELDS)}, and result.part.  null: the standard body.",
    examples=[{"text": "{{model}}: job {{job_id}} is {{status}} {{error.message|slack}}"}],
)
_DESCRIPTION: Any = Field(None, max_length=200, description="A note for people.")
_MAX_PER_S: Any = Field(
    None, ge=LEAST_PER_S, le=MOST_PER_S, description="Messages that are sent per second at most; null: no limit."
)
_SHOWN_URL: Any = Field(description="Without user, password and the values of the query, which may be keys.")


class WebhookBody(BodySchema):
    """A webhook of a tenant."""

    url: str = _URL
    events: list[WebhookEventType] | None = _EVENTS
    template: dict[str, Any] | None = _TEMPLATE
    description: str | None = _DESCRIPTION
    max_per_s: float | None = _MAX_PER_S
    tenant: str | None = Field(
        None,
        description="The tenant whose events it receives; only operators may name another tenant.",
        json_schema_extra={"maxLength": MAX_NAME_LENGTH, "pattern": f"^{PRINTABLE_PATTERN}$"},
    )


class WebhookChange(BodySchema):
    """Changes to a webhook; omitted fields are not changed."""

    url: str | None = Field(None, max_length=MAX_URL_LENGTH)
    events: list[WebhookEventType] | None = Field(None, min_length=1, max_length=50)
    template: dict[str, Any] | None = _TEMPLATE
    description: str | None = _DESCRIPTION
    max_per_s: float | None = _MAX_PER_S

    @model_validator(mode="after")
    def _refuse_null(self) -> "WebhookChange":
        for name in ("url", "events"):
            if name in self.model_fields_set and getattr(self, name) is None:
                raise ValueError(f"{name} cannot be null; leave it out to keep it")
        return self


class DisableBody(BodySchema):
    """Why a webhook is disabled."""

    reason: str | None = Field(None, max_length=500)


class ReplayBody(BodySchema):
    """The messages to send again: exactly one of these."""

    message: str | None = Field(None, max_length=50, description="One message, by its webhook-id.")
    since: str | None = Field(
        None, max_length=40, description="All messages for events since this time; ISO 8601 with a time zone."
    )
    given_up: Literal[True] | None = Field(None, description="All messages that were given up.")

    @model_validator(mode="after")
    def _check_exactly_one(self) -> "ReplayBody":
        if sum(value is not None for value in (self.message, self.since, self.given_up)) != 1:
            raise ValueError("body must name one of message, since and given_up")
        return self


class CallbacksQuery(Schema):
    tenant: str | None = Field(
        None, max_length=MAX_NAME_LENGTH, description="Only those of this tenant; for operators."
    )
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=441, json_schema_extra={"pattern": f"^{_CALLBACK_CURSOR.pattern}$"})


class CallbacksReplayBody(ReplayBody):
    """The callbacks to send again: exactly one of `message`, `since` and `given_up`."""

    message: str | None = Field(
        None,
        description="One callback, by its webhook-id, even if it was delivered.",
        json_schema_extra={"maxLength": 400, "pattern": f"^{PRINTABLE_PATTERN}$"},
    )
    since: str | None = Field(
        None,
        max_length=40,
        description="All callbacks that were given up, of jobs that ended since this time; ISO 8601 with a time zone.",
    )
    tenant: str | None = Field(
        None,
        description="With `since` or `given_up`: only callbacks of this tenant's jobs; for operators.",
        json_schema_extra={"maxLength": MAX_NAME_LENGTH, "pattern": f"^{PRINTABLE_PATTERN}$"},
    )


class CallbackDeliveriesQuery(Schema):
    job_id: str = Field(max_length=400, description="The job whose callbacks are listed.")
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=60, json_schema_extra={"pattern": f"^{_LOG_CURSOR.pattern}$"})


class WebhookPath(Schema):
    webhook: str = Field(json_schema_extra=_ID)


class WebhookQuery(Schema):
    tenant: str | None = Field(
        None, max_length=MAX_NAME_LENGTH, description="Only those of this tenant; for operators."
    )
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
    """A message that the receiver of a webhook refused."""

    job_id: str
    event: Annotated[str, From("type")]
    tries: int
    status: Annotated[int | None, From("last_status")] = Field(description="HTTP status; null: there was no response.")
    error: Annotated[str | None, From("last_error")]


class WebhookView(ResponseSchema, source=Subscription):
    """A webhook of a tenant."""

    webhook: Annotated[str, From("id")]
    tenant: str
    url: Annotated[str, From(lambda webhook: mask_url(webhook.url))] = _SHOWN_URL
    events: Annotated[list[str], From(lambda webhook: sorted(webhook.types))]
    template: Annotated[
        dict[str, Any] | None, From(lambda webhook: webhook.template and json_text.loads(webhook.template))
    ]
    description: str
    max_per_s: float | None = Field(description="Messages that are sent per second at most; null: no limit.")
    state: Literal["enabled", "disabled"]
    reason: str | None = Field(description="Why it is disabled.")
    changed_by: str | None = Field(
        description="The tenant that enabled or disabled it; null: Slotkeeper disabled it, or its state never changed."
    )
    changed_at: Time | None
    created_at: Time
    failures: int = Field(description="Consecutive failures.")
    failing_since: Time | None
    next_try_at: Annotated[Time | None, PROVIDED] = Field(
        description="No message is sent before this time; null: there is no pause."
    )
    waiting: Annotated[int, PROVIDED] = Field(
        description="Messages that wait to be sent.  Of the events without a message yet, at most 1,000 are counted."
    )
    refused: Annotated[RefusedMessageView | None, PROVIDED] = Field(
        description="The oldest refused message that will be tried again; other messages do not wait for it."
    )
    catching_up: Annotated[bool, From(lambda webhook: webhook.behind is not None)] = Field(
        description="Some events have no message for this webhook yet."
    )
    former_until: Annotated[Time | None, PROVIDED] = Field(
        description="Until when messages are also signed with the previous secret; null: they are not."
    )


class NewWebhookView(WebhookView):
    secret: Annotated[str, PROVIDED] = Field(
        description="The secret that signs its messages; it is not returned again."
    )


class WebhookList(ResponseSchema):
    webhooks: list[WebhookView]
    next_cursor: str | None


class NewSecretView(ResponseSchema):
    webhook: str
    secret: str = Field(description="The new secret; it is not returned again.")
    former_until: Time | None = Field(
        description="Until when messages are also signed with the previous secret; null: they are not."
    )


class WebhookTestResult(ResponseSchema):
    webhook: str
    message: str = Field(description="The webhook-id of the test message; the list of deliveries shows its outcome.")


class ReplayResult(ResponseSchema):
    webhook: str
    message: str | None
    since: Time | None
    given_up: int | None = Field(description="Number of messages that will be tried again.")


class DeliveryView(ResponseSchema, source=DeliveryAttempt):
    """One attempt to deliver a message."""

    message: str = Field(description="Its webhook-id.")
    job_id: Annotated[str | None, From(lambda attempt: attempt.job_id or None)] = Field(
        description="null: a test message."
    )
    event: Annotated[str, From("type")]
    at: Time
    number: int = Field(description="Number of the attempt, from 1.")
    outcome: Literal["delivered", "failed", "given_up"]
    status: int | None = Field(description="HTTP status; null: there was no response.")
    latency_ms: int
    error: str | None
    answer: Annotated[str | None, PROVIDED] = Field(
        description="The beginning of the response.  If it came from the operator's network, only operators see it."
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
    at: Time = Field(description="When the event happened.")
    given_up_at: Annotated[Time | None, From("ended_ms")]
    tries: int
    status: Annotated[int | None, From("last_status")]
    error: Annotated[str | None, From("last_error")]


class GivenUpList(ResponseSchema):
    messages: list[GivenUpView]
    next_cursor: str | None


class CallbackView(ResponseSchema, source=GivenUpCallback):
    """A message to the `callback_url` of a job or a batch that was given up."""

    message: Annotated[str, From("message.id")] = Field(description="Its webhook-id.")
    job_id: Annotated[str, From("message.job_id")] = Field(description="Its job, or its batch.")
    model: str | None = Field(description="null: it is of a batch.")
    tenant: str
    url: Annotated[str, From(lambda callback: mask_url(callback.url))] = _SHOWN_URL
    status: Annotated[str, From("status")] = Field(description="The final state of the job; `ended`: of the batch.")
    ended_at: Annotated[Time, From("message.at_ms")]
    given_up_at: Annotated[Time | None, From("message.ended_ms")]
    tries: Annotated[int, From("message.tries")]
    last_status: Annotated[int | None, From("message.last_status")] = Field(
        description="HTTP status; null: there was no response."
    )
    error: Annotated[str | None, From("message.last_error")]


class CallbackList(ResponseSchema):
    callbacks: list[CallbackView]
    next_cursor: str | None


class CallbacksReplayView(ResponseSchema):
    message: str | None
    since: Time | None
    sent: int = Field(description="Number of callbacks that will be sent again.")


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
    """Return the number of the event of a message.  Raises InvalidRequest if `message` is not a webhook-id."""
    match = _MESSAGE.fullmatch(message)
    if match is None:
        raise InvalidRequest("message", "message must be the webhook-id of a message, such as the deliveries list")
    return bounded_int(match[1])


def encode_delivery_cursor(page: Sequence[DeliveryAttempt], limit: int) -> str | None:
    return f"t{page[-1].id}" if len(page) == limit else None


def decode_delivery_cursor(cursor: str | None) -> int | None:
    """Return the id in a cursor.  This and the following functions raise InvalidRequest for an invalid cursor."""
    match = match_cursor(_LOG_CURSOR, cursor)
    return match and bounded_int(match[1])


def encode_message_cursor(page: Sequence[Message], limit: int) -> str | None:
    return f"{page[-1].receiver}.{page[-1].event}" if len(page) == limit else None


def decode_message_cursor(cursor: str | None) -> tuple[str, int] | None:
    match = match_cursor(_GIVEN_UP_CURSOR, cursor)
    return match and (match[1], bounded_int(match[2]))


def encode_callback_cursor(page: Sequence[GivenUpCallback], limit: int) -> str | None:
    if len(page) < limit:
        return None
    last = page[-1].message
    return f"c{last.at_ms}.{last.event}.{last.job_id}"


def decode_callback_cursor(cursor: str | None) -> tuple[int, str, int] | None:
    match = match_cursor(_CALLBACK_CURSOR, cursor)
    return match and (bounded_int(match[1]), match[3], bounded_int(match[2]))
