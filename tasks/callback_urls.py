"""The ends that jobs with a callback URL are owed, as the process of webhooks sends them."""

import random
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from foundation import exact
from foundation.crash import crash_at
from insight import spans
from jobs.record import Job, Webhook, now_ms
from jobs.store import Store
from outbox.webhooks import Due, Webhooks
from registry.rotations import Rotations
from tasks import tracing
from tasks.bodies import told_of_end
from tasks.keyring import webhook_secrets
from tasks.lines import Admits, Owed, host_of
from tasks.outbound import Sender, Sent

_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 6 * 3600.0
_PAGE = 1000
_NEWEST = 200  # that each look reads beside its page

Send = Callable[[Webhook, Job, bytes], Sent]


class CallbackUrls:
    """A source of messages; see tasks/webhooks.py."""

    def __init__(self, webhooks: Webhooks, store: Store, send: Send, claim_ms: int, max_tries: int) -> None:
        self._webhooks, self._store, self._send = webhooks, store, send
        self._claim_ms, self._max_tries = claim_ms, max_tries
        self._last: Due | None = None  # up to where the last look has come
        self.owes = True
        self.gathers = False  # Each is written with its job's end.

    @staticmethod
    def sender(sender: Sender, rotations: Rotations) -> Send:
        """Signs with the secret of the job's tenant."""

        def send(webhook: Webhook, job: Job, content: bytes) -> Sent:
            trace = tracing.told(job.id, job.traceparent, spans.webhook(webhook.id))
            secrets = webhook_secrets(job.tenant, rotations.of(job.tenant), now_ms())
            return sender.send(webhook.url, webhook.id, content, datetime.now(UTC), secrets, trace)

        return send

    @property
    def has_more(self) -> bool:
        return self._last is not None

    def gather(self) -> bool:
        return False

    def look(self, _: Admits) -> Iterator[Owed]:
        """One page of what is due, from where the last look stopped, so that nobody's pile hides another's; and
        what has become due just now, so that it does not wait until the pile has been read."""
        now = now_ms()
        page = self._webhooks.due(now, _PAGE, self._last)
        self.owes = bool(page) or self._webhooks.owes()
        newest = self._webhooks.newest_due(now, _NEWEST) if len(page) == _PAGE else []
        self._last = page[-1] if len(page) == _PAGE else None
        return (Owed(due.id, host_of(due.url), due.tenant, self) for due in (*newest, *page))

    def claim(self, ids: Sequence[str]) -> dict[str, Webhook]:
        now = now_ms()
        claimed = self._webhooks.claim_all(ids, now, now + self._claim_ms)
        crash_at("webhook_claimed")
        return {webhook.id: webhook for webhook in claimed}

    def deliver(self, webhook: Webhook) -> bool | None:
        job = self._store.get(webhook.job_id)
        if job is None:
            self._webhooks.failed(webhook, now_ms(), None, None, "the job was removed from the record")
            return None
        sent = self._send(webhook, job, exact.dumps(told_of_end(webhook, job)))
        crash_at("webhook_sent")
        if sent.ok:
            self._webhooks.delivered(webhook, now_ms(), sent.status or 0)
        else:
            next_ms = None if sent.permanent else _next_try(webhook.tries, self._max_tries)
            self._webhooks.failed(webhook, now_ms(), next_ms, sent.status, sent.error)
        return sent.status is not None

    def give_back(self, webhook: Webhook, why: str) -> None:
        self._webhooks.failed(webhook, now_ms(), _next_try(webhook.tries, self._max_tries), None, why)


def _next_try(tries: int, most: int) -> int | None:
    """When to try again after `tries` of them, in ms since the epoch; None: that was the last."""
    if tries >= most:
        return None
    wait_s = min(_FIRST_RETRY_S * 2.5 ** (tries - 1), _LONGEST_RETRY_S) * random.uniform(0.9, 1.1)
    return now_ms() + round(wait_s * 1000)
