"""Webhooks: URLs that receive the events of jobs.  A tenant sees its own webhooks; an operator sees all."""

from collections.abc import Sequence
from typing import Any

from app.api.job_views import visible_job
from app.api.openapi import blueprint, no_store, problem_responses
from app.auth.access import current_identity, current_tenant, scope, visible_tenant
from app.request_json import parse_time
from app.schemas import webhook_schemas
from app.schemas.webhook_schemas import (
    CallbackDeliveriesQuery,
    CallbackList,
    CallbacksQuery,
    CallbacksReplayBody,
    CallbacksReplayView,
    CallbackView,
    DeliveriesQuery,
    DeliveryList,
    DisableBody,
    GivenUpList,
    GivenUpQuery,
    GivenUpView,
    NewSecretView,
    NewWebhookView,
    ReplayBody,
    ReplayResult,
    WebhookBody,
    WebhookChange,
    WebhookList,
    WebhookPath,
    WebhookQuery,
    WebhookTestResult,
    WebhookView,
)
from slotkeeper.clock import now_ms
from slotkeeper.errors import Conflict, InvalidRequest, NotFound
from slotkeeper.outbox.fan_out import count_unwritten
from slotkeeper.outbox.redelivery import Redelivery
from slotkeeper.outbox.subscriptions import END_EVENT_TYPES, Subscription, Subscriptions, new_id
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.tenants import check_tenant_name
from tasks.config import TaskSettings
from tasks.security import vault
from tasks.security.url_guard import check_url, parse_networks
from tasks.services import database
from tasks.webhooks import bodies

api = no_store(blueprint("webhooks", "Webhooks", "/webhooks", scope=Scope.READ))


@api.get("", responses={200: WebhookList, **problem_responses(422)})
def list_webhooks(query: WebhookQuery) -> dict[str, Any]:
    """List webhooks, the oldest first."""
    tenant = query.tenant if current_identity().operates else current_tenant().name
    webhooks = _subscriptions().list_of_tenant(tenant, query.cursor or "", query.limit)
    cursor = webhooks[-1].id if len(webhooks) == query.limit else None
    return WebhookList.build(webhooks=_views(webhooks), next_cursor=cursor)


@api.post("", responses={201: NewWebhookView, **problem_responses(400, 409, 413, 415, 422)})
@scope(Scope.MANAGE)
def add_webhook(body: WebhookBody) -> tuple[dict[str, Any], int]:
    """Add a webhook: a URL that receives the events of a tenant's jobs from now on.

    Messages are signed as Standard Webhooks defines, with a secret that only this response shows.  Messages about one
    job arrive in order, each at least once and always with the same webhook-id.
    """
    caller = current_tenant()
    tenant = caller.name if body.tenant is None else check_tenant_name(body.tenant)
    if tenant != caller.name and not current_identity().operates:
        raise InvalidRequest("tenant", "tenant must be left out: the webhooks of others are for operators")
    id_ = new_id()
    secret, sealed = vault.new_signing_secret(id_)
    new = Subscription(
        id=id_,
        tenant=tenant,
        url=_validate_url(body.url),
        types=frozenset(body.events or END_EVENT_TYPES),
        sealed=sealed,
        created_ms=now_ms(),
        template=None if body.template is None else bodies.validate_template(body.template),
        description=_validate_description(body.description),
        max_per_s=body.max_per_s,
    )
    added = _subscriptions().add(new, TaskSettings().webhook_most_receivers)
    status = webhook_schemas.webhook_status(added, waiting=0, now_ms=now_ms())
    return NewWebhookView.build(added, **status, secret=secret), 201


@api.get("/given-up", responses={200: GivenUpList, **problem_responses(404, 422)})
def list_given_up(query: GivenUpQuery) -> dict[str, Any]:
    """List messages of webhooks that were given up, the newest first.  The last thousand of each webhook are stored."""
    if query.webhook is not None:
        _visible_webhook(query.webhook)
    messages = Redelivery(database()).list_given_up_webhooks(
        visible_tenant(), query.webhook, webhook_schemas.decode_message_cursor(query.cursor), query.limit
    )
    cursor = webhook_schemas.encode_message_cursor(messages, query.limit)
    return GivenUpList.build(messages=[GivenUpView.build(message) for message in messages], next_cursor=cursor)


@api.get("/callbacks/given-up", responses={200: CallbackList, **problem_responses(422)})
def list_given_up_callbacks(query: CallbacksQuery) -> dict[str, Any]:
    """List messages to jobs' `callback_url` that were given up.  The message of the job that ended last comes first."""
    tenant = query.tenant if current_identity().operates else current_tenant().name
    callbacks = Redelivery(database()).list_given_up_callbacks(
        tenant, webhook_schemas.decode_callback_cursor(query.cursor), query.limit
    )
    cursor = webhook_schemas.encode_callback_cursor(callbacks, query.limit)
    return CallbackList.build(callbacks=[CallbackView.build(callback) for callback in callbacks], next_cursor=cursor)


@api.post("/callbacks/replay", responses={202: CallbacksReplayView, **problem_responses(400, 404, 413, 415, 422)})
@scope(Scope.MANAGE)
def replay_callbacks(body: CallbacksReplayBody) -> tuple[dict[str, Any], int]:
    """Send messages to jobs' `callback_url` again with the same webhook-ids: one message, or all that were given up."""
    redelivery = Redelivery(database())
    tenant = None if body.tenant is None else check_tenant_name(body.tenant)
    tenant = tenant if current_identity().operates else current_tenant().name
    if body.message is None:
        since_ms = 0 if body.since is None else parse_time("since", body.since)
        sent = redelivery.retry_callbacks(tenant, since_ms, now_ms())
        return CallbacksReplayView.build(message=None, since=body.since, sent=sent), 202
    if not body.message.isprintable() or not redelivery.retry_callback(body.message, tenant, now_ms()):
        raise NotFound("There is no such callback, or its job has been removed.", message=body.message)
    return CallbacksReplayView.build(message=body.message, since=body.since, sent=1), 202


@api.get("/callbacks/deliveries", responses={200: DeliveryList, **problem_responses(404, 409, 422)})
def list_callback_deliveries(query: CallbackDeliveriesQuery) -> dict[str, Any]:
    """List the delivery attempts to a job's `callback_url`, the newest first.

    The last twenty are stored, for as long as the job is.
    """
    return _delivery_list(visible_job(query.job_id).id, query.cursor, query.limit)


@api.get("/<webhook>", responses={200: WebhookView, **problem_responses(404)})
def get_webhook(path: WebhookPath) -> dict[str, Any]:
    """Show a webhook and its status."""
    return _view(_visible_webhook(path.webhook))


@api.patch("/<webhook>", responses={200: WebhookView, **problem_responses(400, 404, 413, 415, 422)})
@scope(Scope.MANAGE)
def change_webhook(path: WebhookPath, body: WebhookChange) -> dict[str, Any]:
    """Change a webhook's URL, events, template, description or rate, also for its pending messages."""
    fields = body.model_fields_set
    values: dict[str, Any] = {}
    if body.url is not None:
        values["url"] = _validate_url(body.url)
    if body.events is not None:
        values["types"] = frozenset(body.events)
    if "template" in fields:
        values["template"] = None if body.template is None else bodies.validate_template(body.template)
    if "description" in fields:
        values["description"] = _validate_description(body.description)
    if "max_per_s" in fields:
        values["max_per_s"] = body.max_per_s
    if not values:
        return _view(_visible_webhook(path.webhook))
    return _view(_subscriptions().change(path.webhook, visible_tenant(), **values))


@api.delete("/<webhook>", responses={204: None, **problem_responses(404, 415)})
@scope(Scope.MANAGE)
def remove_webhook(path: WebhookPath) -> tuple[str, int]:
    """Remove a webhook, its pending messages, and its deliveries."""
    _subscriptions().remove(path.webhook, visible_tenant())
    return "", 204


@api.post("/<webhook>/test", responses={202: WebhookTestResult, **problem_responses(404, 409, 415)})
@scope(Scope.MANAGE)
def test_webhook(path: WebhookPath) -> tuple[dict[str, Any], int]:
    """Send one test message, `webhook.test`, without retries; the webhook's deliveries show its outcome."""
    webhook = _visible_webhook(path.webhook)
    if not webhook.enabled:
        raise Conflict("This webhook is disabled; enable it first.", webhook=webhook.id)
    message = Redelivery(database()).send_test(webhook, now_ms())
    return WebhookTestResult.build(webhook=webhook.id, message=message), 202


@api.post("/<webhook>/rotate", responses={200: NewSecretView, **problem_responses(404, 415)})
@scope(Scope.MANAGE)
def rotate_webhook(path: WebhookPath) -> dict[str, Any]:
    """Give a webhook a new secret.

    For a day messages are also signed with the former secret, so that the receiver can be updated.  If the secret is
    rotated again within that day, the oldest secret is not used any more.
    """
    webhook = _visible_webhook(path.webhook)
    secret, sealed = vault.new_signing_secret(webhook.id)
    changed = _view(_subscriptions().rotate_secret(webhook.id, visible_tenant(), sealed, now_ms()))
    return NewSecretView.build(webhook=webhook.id, secret=secret, former_until=changed["former_until"])


@api.post("/<webhook>/enable", responses={200: WebhookView, **problem_responses(404, 415)})
@scope(Scope.MANAGE)
def enable_webhook(path: WebhookPath) -> dict[str, Any]:
    """Enable a webhook: it receives the events since it was disabled.  Its next delivery is not delayed."""
    return _view(_subscriptions().enable(path.webhook, visible_tenant(), current_tenant().name, now_ms()))


@api.post("/<webhook>/disable", responses={200: WebhookView, **problem_responses(400, 404, 413, 415, 422)})
@scope(Scope.MANAGE)
def disable_webhook(path: WebhookPath, body: DisableBody) -> dict[str, Any]:
    """Disable a webhook.  When it is enabled, it receives the events since then of jobs that are still stored."""
    return _view(_subscriptions().disable(path.webhook, visible_tenant(), current_tenant().name, body.reason, now_ms()))


@api.get("/<webhook>/deliveries", responses={200: DeliveryList, **problem_responses(404, 422)})
def list_deliveries(path: WebhookPath, query: DeliveriesQuery) -> dict[str, Any]:
    """List the delivery attempts of a webhook, the newest first: the last thousand of the last seven days."""
    return _delivery_list(_visible_webhook(path.webhook).id, query.cursor, query.limit)


@api.post("/<webhook>/replay", responses={202: ReplayResult, **problem_responses(400, 404, 413, 415, 422)})
@scope(Scope.MANAGE)
def replay_webhook(path: WebhookPath, body: ReplayBody) -> tuple[dict[str, Any], int]:
    """Send messages again with the same webhook-ids: one message, all since a time, or all that were given up.

    Only events of jobs that are still stored are sent.
    """
    webhook, now = _visible_webhook(path.webhook), now_ms()
    given_up: int | None = None
    if body.message is not None:
        if not Redelivery(database()).replay_one(webhook, webhook_schemas.event_id_of(body.message), now):
            raise NotFound("The event of this message is not stored, or has been removed.", message=body.message)
    elif body.since is not None:
        Redelivery(database()).replay(webhook, parse_time("since", body.since))
    else:
        given_up = Redelivery(database()).retry_webhook(webhook, now)
    return ReplayResult.build(webhook=webhook.id, message=body.message, since=body.since, given_up=given_up), 202


def _subscriptions() -> Subscriptions:
    return Subscriptions(database())


def _visible_webhook(webhook_id: str) -> Subscription:
    """Return a webhook that this request may see.  Raises NotFound, also for a webhook of another tenant."""
    return _subscriptions().get(webhook_id, visible_tenant())


def _view(webhook: Subscription) -> dict[str, Any]:
    return _views([webhook])[0]


def _views(webhooks: Sequence[Subscription]) -> list[dict[str, Any]]:
    ids, now = [webhook.id for webhook in webhooks], now_ms()
    pending, refused = _subscriptions().count_pending(ids), _subscriptions().find_refused(ids)
    unwritten = count_unwritten(database(), webhooks)
    waiting = {id_: pending.get(id_, 0) + unwritten.get(id_, 0) for id_ in ids}
    return [
        WebhookView.build(
            webhook,
            **webhook_schemas.webhook_status(webhook, waiting[webhook.id], now, refused.get(webhook.id)),
        )
        for webhook in webhooks
    ]


def _delivery_list(receiver_id: str, cursor: str | None, limit: int) -> dict[str, Any]:
    """Return a page of delivery attempts.  `receiver_id`: of a webhook, or the id of a job with a `callback_url`."""
    attempts = Redelivery(database()).list_attempts(receiver_id, webhook_schemas.decode_delivery_cursor(cursor), limit)
    views = [webhook_schemas.delivery_view(attempt, shows_inside=current_identity().operates) for attempt in attempts]
    next_cursor = webhook_schemas.encode_delivery_cursor(attempts, limit)
    return DeliveryList.build(deliveries=views, next_cursor=next_cursor)


def _validate_url(url: str) -> str:
    """Return the URL.  Raises InvalidRequest if no message may be sent to it."""
    problem = check_url(url, parse_networks(TaskSettings().webhook_allow))
    if problem is not None:
        raise InvalidRequest("url", f"url: {problem}")
    return url


def _validate_description(text: str | None) -> str:
    """Return the description, or "".  Raises InvalidRequest if it cannot be shown on one line."""
    if text and not text.isprintable():
        raise InvalidRequest("description", "description must be printable, and on one line")
    return text or ""
