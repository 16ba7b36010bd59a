"""What is read and written about webhooks and the deliveries of jobs' `callback_url`; see app.schemas."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from app.answers import GIVEN, Answer, Read, Time, time
from app.openapi import Model
from app.paging import cursor_of, number
from app.schemas import Asked
from slotkeeper import json_text
from slotkeeper.errors import InvalidRequest
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.outbox.redelivery import GivenUpCallback
from slotkeeper.outbox.subscriptions import Subscription
from slotkeeper.outbox.webhook_messages import DeliveryAttempt, Message
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
    None, min_length=1, max_length=50, description="Types of events that it is told; left out: the ends of jobs."
)
_TEMPLATE: Any = Field(
    None,
    description=f"The body, where the receiver has a form of its own: JSON of at most {MAX_TEMPLATE_BYTES} bytes, in "
    f"whose texts {{{{name}}}} stands for a value, {MAX_TEMPLATE_NAMES} times at most.  Names: {', '.join(TEMPLATE_FIELDS)}, and "
    "result.part.  null: our own form.",
    examples=[{"text": "{{model}}: job {{job_id}} is {{status}} {{error.message|slack}}"}],
)
_DESCRIPTION: Any = Field(None, max_length=200, description="For people.")
_MAX_PER_S: Any = Field(
    None, ge=LEAST_PER_S, le=MOST_PER_S, description="Messages that it is sent in a second; null: as many as there are."
)
_SHOWN_URL: Any = Field(description="Without a user, a password and the values of its query, which may be keys.")


class ReceiverBody(Asked):
    """A webhook of a tenant."""

    url: str = _URL
    events: list[EventType] | None = _EVENTS
    template: dict[str, Any] | None = _TEMPLATE
    description: str | None = _DESCRIPTION
    max_per_s: float | None = _MAX_PER_S
    tenant: str | None = Field(
        None,
        description="Whose events it is told; of others than oneself for administrators.",
        json_schema_extra={"maxLength": MAX_NAME_LENGTH, "pattern": f"^{PRINTABLE_PATTERN}$"},
    )


class ReceiverChange(Asked):
    """What shall be otherwise; what is left out stays."""

    url: str | None = Field(None, max_length=MAX_URL_LENGTH)
    events: list[EventType] | None = Field(None, min_length=1, max_length=50)
    template: dict[str, Any] | None = _TEMPLATE
    description: str | None = _DESCRIPTION
    max_per_s: float | None = _MAX_PER_S

    @model_validator(mode="after")
    def _says_something(self) -> "ReceiverChange":
        for name in ("url", "events"):
            if name in self.model_fields_set and getattr(self, name) is None:
                raise ValueError(f"{name} cannot be null; leave it out to keep it")
        return self


class ReasonBody(Asked):
    """Why a webhook is disabled."""

    reason: str | None = Field(None, max_length=500)


class ReplayBody(Asked):
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


class CallbacksQuery(Model):
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


class CallbackTriesQuery(Model):
    job_id: str = Field(max_length=400, description="Whose.")
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=60, json_schema_extra={"pattern": f"^{_LOG_CURSOR.pattern}$"})


class ReceiverPath(Model):
    webhook: str = Field(json_schema_extra=_ID)


class ReceiverQuery(Model):
    tenant: str | None = Field(None, max_length=MAX_NAME_LENGTH, description="Only this tenant's; for administrators.")
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=60, json_schema_extra=_ID)


class TriesQuery(Model):
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=60, json_schema_extra={"pattern": f"^{_LOG_CURSOR.pattern}$"})


class GivenUpQuery(Model):
    webhook: str | None = Field(None, max_length=60, json_schema_extra=_ID)
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=60, json_schema_extra={"pattern": f"^{_GIVEN_UP_CURSOR.pattern}$"})


class ReceiverView(Answer, shows=Subscription):
    """A webhook of a tenant."""

    webhook: Annotated[str, Read("id")]
    tenant: str
    url: Annotated[str, Read(lambda it: mask_url(it.url))] = _SHOWN_URL
    events: Annotated[list[str], Read(lambda it: sorted(it.types))]
    template: Annotated[dict[str, Any] | None, Read(lambda it: it.template and json_text.loads(it.template))]
    description: str
    max_per_s: float | None = Field(description="Messages that it is sent in a second; null: as many as there are.")
    state: Literal["enabled", "disabled"]
    reason: str | None = Field(description="Why it is disabled.")
    changed_by: str | None = Field(description="The tenant that enabled or disabled it; null: it came about by itself.")
    changed_at: Time | None
    created_at: Time
    failures: int = Field(description="In a row.")
    failing_since: Time | None
    next_try_at: Annotated[Time | None, GIVEN] = Field(description="It is left alone until then.")
    waiting: Annotated[int, GIVEN] = Field(description="Messages that wait for it.")
    behind: Annotated[bool, Read(lambda it: it.behind is not None)] = Field(
        description="There is more to tell than these."
    )
    former_until: Annotated[Time | None, GIVEN] = Field(
        description="Until then messages are also signed with the secret before."
    )


class NewReceiverView(ReceiverView):
    secret: Annotated[str, GIVEN] = Field(description="With which its messages are signed; it is never shown again.")


class ReceiverList(Answer):
    webhooks: list[ReceiverView]
    next_cursor: str | None


class NewSecretView(Answer):
    webhook: str
    secret: str = Field(description="It is never shown again.")
    former_until: Time | None = Field(description="Until then messages are also signed with the secret before.")


class TestView(Answer):
    webhook: str
    message: str = Field(description="The webhook-id under which it is sent; the deliveries say what came of it.")


class ReplayView(Answer):
    webhook: str
    message: str | None
    since: Time | None
    given_up: int | None = Field(description="How many messages are tried once more.")


class TryView(Answer, shows=DeliveryAttempt):
    """One try of a message."""

    message: str = Field(description="Its webhook-id.")
    job_id: Annotated[str | None, Read(lambda it: it.job_id or None)] = Field(description="null: a test.")
    event: Annotated[str, Read("type")]
    at: Time
    number: int = Field(description="1: the first try.")
    outcome: Literal["delivered", "failed", "given_up"]
    status: int | None = Field(description="HTTP; null: there was no answer.")
    latency_ms: int
    error: str | None
    answer: Annotated[str | None, GIVEN] = Field(
        description="What it begins with.  From a network inside only administrators see it."
    )


class TryList(Answer):
    deliveries: list[TryView]
    next_cursor: str | None


class GivenUpView(Answer, shows=Message):
    """A message that was given up."""

    webhook: Annotated[str, Read("receiver")]
    message: Annotated[str, Read("id")]
    job_id: str
    event: Annotated[str, Read("type")]
    at: Time = Field(description="When it happened.")
    given_up_at: Annotated[Time | None, Read("ended_ms")]
    tries: int
    status: Annotated[int | None, Read("last_status")]
    error: Annotated[str | None, Read("last_error")]


class GivenUpList(Answer):
    messages: list[GivenUpView]
    next_cursor: str | None


class CallbackView(Answer, shows=GivenUpCallback):
    """A message to a job's `callback_url` that was given up."""

    message: Annotated[str, Read("message.id")] = Field(description="Its webhook-id.")
    job_id: Annotated[str, Read("message.job_id")]
    model: str
    tenant: str
    url: Annotated[str, Read(lambda it: mask_url(it.url))] = _SHOWN_URL
    status: Annotated[str, Read("status")] = Field(description="How its job had ended.")
    ended_at: Annotated[Time, Read("message.at_ms")]
    given_up_at: Annotated[Time | None, Read("message.ended_ms")]
    tries: Annotated[int, Read("message.tries")]
    last_status: Annotated[int | None, Read("message.last_status")] = Field(
        description="HTTP; null: there was no answer."
    )
    error: Annotated[str | None, Read("message.last_error")]


class CallbackList(Answer):
    callbacks: list[CallbackView]
    next_cursor: str | None


class CallbacksReplayView(Answer):
    message: str | None
    since: Time | None
    sent: int = Field(description="How many are sent once more.")


def standing(it: Subscription, waiting: int, now_ms: int) -> dict[str, Any]:
    """How a receiver does at this moment: what ReceiverView is given."""
    return {
        "waiting": waiting,
        "next_try_at": time(it.open_until_ms) if it.open_until_ms > now_ms else None,
        "former_until": time(it.former_until_ms) if len(it.seals(now_ms)) > 1 else None,
    }


def tried(it: DeliveryAttempt, *, shows_inside: bool) -> dict[str, Any]:
    """TryView."""
    return TryView.of(it, answer=it.answer if shows_inside or not it.inside else None)


def event_of(message: str) -> int:
    """The event that a message tells of.  Raises InvalidRequest for what is no id of one."""
    found = _MESSAGE.fullmatch(message)
    if found is None:
        raise InvalidRequest("message", "message must be the webhook-id of a message, such as the deliveries list")
    return number(found[1])


def after_try(page: Sequence[DeliveryAttempt], limit: int) -> str | None:
    return f"t{page[-1].id}" if len(page) == limit else None


def before_try(cursor: str | None) -> int | None:
    """Raises InvalidRequest for what is no cursor of ours, as those below."""
    found = cursor_of(_LOG_CURSOR, cursor)
    return found and number(found[1])


def after_message(page: Sequence[Message], limit: int) -> str | None:
    return f"{page[-1].receiver}.{page[-1].event}" if len(page) == limit else None


def before_message(cursor: str | None) -> tuple[str, int] | None:
    found = cursor_of(_GIVEN_UP_CURSOR, cursor)
    return found and (found[1], number(found[2]))


def after_callback(page: Sequence[GivenUpCallback], limit: int) -> str | None:
    if len(page) < limit:
        return None
    last = page[-1].message
    return f"c{last.at_ms}.{last.event}.{last.job_id}"


def before_callback(cursor: str | None) -> tuple[int, str, int] | None:
    found = cursor_of(_CALLBACK_CURSOR, cursor)
    return found and (number(found[1]), found[3], number(found[2]))
