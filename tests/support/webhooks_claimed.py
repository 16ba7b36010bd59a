"""Claims of webhooks for tests, by the write with which the webhook process claims."""

from outbox.webhooks import Webhook, Webhooks


def claim_webhook(webhooks: Webhooks, webhook_id: str, now_ms: int, until: int) -> Webhook | None:
    """Begin a try that will be over by `until`; None: it is not due, or another is at it."""
    return next(iter(webhooks.claim_all([webhook_id], now_ms, until)), None)
