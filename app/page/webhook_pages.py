"""The pages of webhooks: states, latest deliveries and given-up messages."""

from typing import Any

from flask import redirect, request

from app.api import webhook_views as webhooks_api
from app.page.layout import form
from app.page.login import page_view
from app.page.rendering import render_page, segment
from app.schemas.webhook_schemas import (
    CallbacksQuery,
    CallbacksReplayBody,
    DeliveriesQuery,
    DisableBody,
    GivenUpQuery,
    ReplayBody,
    WebhookPath,
    WebhookQuery,
)
from slotkeeper.registry.identity import Scope

_LATEST = 50


@page_view("/page/webhooks")
def webhooks() -> Any:
    listed = webhooks_api.list_webhooks(WebhookQuery(limit=100, cursor=request.args.get("cursor") or None))
    given_up = webhooks_api.list_given_up(GivenUpQuery(limit=_LATEST))
    callbacks = webhooks_api.list_given_up_callbacks(CallbacksQuery(limit=_LATEST))
    return render_page(
        "webhooks.html",
        webhooks=listed["webhooks"],
        next=listed["next_cursor"],
        given_up=given_up["messages"],
        callbacks=callbacks["callbacks"],
    )


@page_view("/page/webhooks/callbacks/replay", Scope.MANAGE, method="POST")
def replay_callbacks() -> Any:
    webhooks_api.replay_callbacks(CallbacksReplayBody.model_validate(_replay_choice()))
    return redirect("/page/webhooks?done=replayed", 303)


@page_view("/page/webhooks/<webhook>")
def webhook(webhook: str) -> Any:
    path = WebhookPath(webhook=webhook)
    return render_page(
        "webhook.html",
        webhook=webhooks_api.get_webhook(path),
        deliveries=webhooks_api.list_deliveries(path, DeliveriesQuery(limit=_LATEST))["deliveries"],
        given_up=webhooks_api.list_given_up(GivenUpQuery(webhook=webhook, limit=_LATEST))["messages"],
    )


@page_view("/page/webhooks/<webhook>/test", Scope.MANAGE, method="POST")
def test_webhook(webhook: str) -> Any:
    webhooks_api.test_webhook(WebhookPath(webhook=webhook))
    return _redirect_to_webhook(webhook, "tested")


@page_view("/page/webhooks/<webhook>/enable", Scope.MANAGE, method="POST")
def enable_webhook(webhook: str) -> Any:
    webhooks_api.enable_webhook(WebhookPath(webhook=webhook))
    return _redirect_to_webhook(webhook, "enabled")


@page_view("/page/webhooks/<webhook>/disable", Scope.MANAGE, method="POST")
def disable_webhook(webhook: str) -> Any:
    body = DisableBody.model_validate({"reason": form().get("reason") or None})
    webhooks_api.disable_webhook(WebhookPath(webhook=webhook), body)
    return _redirect_to_webhook(webhook, "disabled")


@page_view("/page/webhooks/<webhook>/replay", Scope.MANAGE, method="POST")
def replay_webhook(webhook: str) -> Any:
    webhooks_api.replay_webhook(WebhookPath(webhook=webhook), ReplayBody.model_validate(_replay_choice()))
    return _redirect_to_webhook(webhook, "replayed")


def _replay_choice() -> dict[str, Any]:
    """Return the body of a replay: one message, or all given-up messages."""
    message = form().get("message")
    return {"message": message} if message else {"given_up": True}


def _redirect_to_webhook(webhook: str, message: str) -> Any:
    return redirect(f"/page/webhooks/{segment(webhook)}?done={message}", 303)
