"""Webhooks: tell clients how their jobs ended, after the slot is free, from a queue of their own (HOOK-1)."""

import random
from datetime import UTC, datetime
from typing import Any

from jobs.crash import crash_at
from jobs.once import once
from jobs.record import Job, Webhook, now_ms
from routing import exact
from tasks.celery_app import celery
from tasks.config import TaskSettings, signing_secret
from tasks.outbound import Sender, parse_allow
from tasks.wiring import dispatcher, webhooks

_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 6 * 3600.0


@once
def _sender() -> Sender:
    settings = TaskSettings()
    return Sender(signing_secret(), parse_allow(settings.webhook_allow), settings.webhook_timeout_s)


@celery.task(name="webhooks.send", ignore_result=True)
def send(webhook_id: str) -> None:
    """Try one message, if it is due.  A second delivery finds it claimed."""
    settings, now = TaskSettings(), now_ms()
    until = now + round(settings.webhook_timeout_s * 2000)
    webhook = webhooks().claim(webhook_id, now, until)
    if webhook is None:
        return
    crash_at("webhook_claimed")
    job = dispatcher().store.get(webhook.job_id)
    if job is None:
        webhooks().failed(webhook, None, None, "the job was removed from the record")
        return
    sent = _sender().send(webhook.url, webhook.id, exact.dumps(body(webhook, job)), datetime.now(UTC))
    crash_at("webhook_sent")
    if sent.ok:
        webhooks().delivered(webhook, now_ms(), sent.status or 0)
    else:
        next_ms = None if sent.permanent else _next_try(webhook.tries, settings.webhook_max_tries)
        webhooks().failed(webhook, next_ms, sent.status, sent.error)


@celery.task(name="webhooks.send_due", ignore_result=True, send_events=False)
def send_due() -> None:
    """Wake a task for each message whose time has come: first tries that were missed, and retries."""
    for webhook_id in webhooks().due(now_ms()):
        send.delay(webhook_id)


def body(webhook: Webhook, job: Job) -> dict[str, Any]:
    """What the client is told (R131): how the job ended, at the time when the message was owed."""
    told: dict[str, Any] = {"job_id": job.id, "model": job.model, "status": webhook.status}
    if job.state is webhook.status:
        told["attempts"] = job.attempts
        told["result"] = exact.loads(job.result) if job.result else None
        told["error"] = {"code": job.error_code, "message": job.error_message} if job.error_code else None
    return told


def _next_try(tries: int, most: int) -> int | None:
    """When to try again after `tries` of them, in ms since the epoch; None: that was the last."""
    if tries >= most:
        return None
    wait_s = min(_FIRST_RETRY_S * 2.5 ** (tries - 1), _LONGEST_RETRY_S) * random.uniform(0.9, 1.1)
    return now_ms() + round(wait_s * 1000)
