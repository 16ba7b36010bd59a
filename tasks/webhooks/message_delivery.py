"""Find due messages, send them, and store the results.

A message that its receiver refuses is sent again until it is too old.  After several failures in a row, the breaker of
a webhook opens, and its messages wait (slotkeeper/outbox/subscriptions.py).  A webhook that responds 410 is disabled.
A message for a job's `callback_url` is given up after a 410, because nothing could enable that URL again.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence

import structlog

from routing.queries.trace_spans import JOB, webhook_span_kind
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.db import Database
from slotkeeper.errors import NotFound
from slotkeeper.jobs.batches import ENDED_TYPE, Batch, Batches
from slotkeeper.jobs.store import JobStore
from slotkeeper.outbox import event_reader, retention
from slotkeeper.outbox.fan_out import EventFanOut
from slotkeeper.outbox.subscriptions import (
    END_EVENT_TYPES,
    REASON_GONE,
    Subscription,
    Subscriptions,
    subscription_of_batch,
    subscription_of_job,
)
from slotkeeper.outbox.webhook_messages import DeliveryResult, DueCallback, Message, MessageKey, MessageQueue
from tasks import tracing
from tasks.webhooks.bodies import batch_end_data, event_data, job_end_data, message_body, template_of, test_data
from tasks.webhooks.delivery_queue import CanSend, DueMessage, host_of_url
from tasks.webhooks.sender import SendResult

log = structlog.get_logger(__name__)

_FIRST_RETRY_MS, _LONGEST_RETRY_MS = 5_000, 900_000
_MAX_RECEIVERS = 100  # webhooks whose messages one poll reads
_MAX_READY = 5_000  # webhooks with due messages from which a poll chooses them
_PAGE = 1000  # messages for jobs' `callback_url` that one poll reads, the oldest first
_NEWEST = 200  # messages that a poll reads in addition, the newest first, while there are further pages
_TRIM_PERIOD_S = 30.0
_TRIM_AFTER_ATTEMPTS = 200  # attempts of one webhook after which its log is trimmed
_TRIM_BATCH = 20  # webhooks whose logs are trimmed in one step

Send = Callable[[Subscription, Message, bytes, str | None], SendResult]
"""Sends a message to a subscription: the arguments are both, the body, and the traceparent to send."""
Content = tuple[Subscription, bytes, str | None]
"""The subscription, the body, and the traceparent."""


class MessageDelivery:
    """Finds due messages and sends them, when tasks/webhooks/delivery_loop.py calls it."""

    def __init__(self, database: Database, send: Send, claim_ms: int, keep_s: float) -> None:
        """Create a delivery.  `claim_ms`: how long a message is claimed.  `keep_s`: the age at which it is given up."""
        self._database, self._send = database, send
        self._store, self._subscriptions, self._messages = (
            JobStore(database),
            Subscriptions(database),
            MessageQueue(database),
        )
        self._batches = Batches(database)
        self._fan_out = EventFanOut(database)
        self._claim_ms, self._keep_ms = claim_ms, round(keep_s * 1000)
        self._last_callback: DueCallback | None = None  # cursor of the next page of messages for callback URLs
        self.has_more = False
        """Whether the last poll left out messages that are due."""
        self.has_pending = True
        """Whether any message was pending at the last poll, due or not.  If not, only a commit can add one."""
        self._grown_logs: dict[str, int] = {}  # webhook -> attempts that were logged since its log was last trimmed
        self._logs_to_trim: list[str] = []  # webhooks whose logs the next steps trim
        self._trim_at = 0.0

    @property
    def has_pending_events(self) -> bool:
        """Whether `write_messages` may have work without a new commit: a webhook catches up, or logs are trimmed."""
        return self._fan_out.must_poll or bool(self._logs_to_trim)

    def write_messages(self) -> bool:
        """Turn some new events into messages and trim some logs; return whether there may be more new events."""
        now = now_ms()
        try:
            made = self._fan_out.step(now)
            crash_at("events_fanned_out")
            return made > 0 or self._fan_out.has_more
        finally:
            self._trim_logs(now)

    def find_due(self, may_send: CanSend) -> Iterator[DueMessage]:
        """Yield some of the due messages; those of webhooks that `may_send` rejects are not read."""
        now = now_ms()
        callbacks = self._find_due_callbacks(now)
        ready = self._messages.list_ready(now, _MAX_READY)
        self.has_pending = bool(callbacks or ready) or self._messages.has_pending()
        admitted = [waiting for waiting in ready if may_send(waiting.receiver, waiting.tenant)]
        self.has_more = self._last_callback is not None or len(admitted) > _MAX_RECEIVERS or len(ready) == _MAX_READY
        for due in callbacks:
            yield DueMessage(MessageKey(due.job_id, due.event, of_job=True), host_of_url(due.url), due.tenant)
        for waiting in admitted[:_MAX_RECEIVERS]:
            for event in self._messages.list_due(waiting.receiver, now, waiting.most, is_trial=waiting.is_trial):
                yield DueMessage(MessageKey(waiting.receiver, event), waiting.receiver, waiting.tenant)

    def _find_due_callbacks(self, now_ms: int) -> list[DueCallback]:
        """Return the next page of due messages for callback URLs, and the newest ones if it is not the last page.

        Each poll reads on where the last one stopped, so the backlog of one receiver does not hide the messages of
        others.  The newest are added, so that they do not wait until the whole backlog has been read.
        """
        page = self._messages.list_due_callbacks(now_ms, _PAGE, self._last_callback)
        self._last_callback = page[-1] if len(page) == _PAGE else None
        return (
            page if self._last_callback is None else [*self._messages.list_newest_due_callbacks(now_ms, _NEWEST), *page]
        )

    def _trim_logs(self, now_ms: int) -> None:
        """Trim the logs of a few webhooks, so that new events do not wait until all logs are trimmed."""
        has_long_log = any(count >= _TRIM_AFTER_ATTEMPTS for count in list(self._grown_logs.values()))
        if self._logs_to_trim or has_long_log or time.monotonic() >= self._trim_at:
            if not self._logs_to_trim:
                grown, self._grown_logs = self._grown_logs, {}
                self._logs_to_trim = list(grown)
                self._trim_at = time.monotonic() + _TRIM_PERIOD_S
            batch, self._logs_to_trim = self._logs_to_trim[:_TRIM_BATCH], self._logs_to_trim[_TRIM_BATCH:]
            retention.trim(self._database, batch, now_ms, self._keep_ms)

    def claim(self, ids: Sequence[MessageKey]) -> dict[MessageKey, Message]:
        """Claim messages for one attempt each, and return those that are due and not claimed by another process."""
        now = now_ms()
        claimed = self._messages.claim(ids, now, now + self._claim_ms)
        crash_at("message_claimed")
        return {message.key: message for message in claimed}

    def deliver(self, message: Message) -> bool | None:
        """Send a claimed message and store the result.

        Returns whether the delivery succeeded; for a `callback_url`, whether its host responded with any status.
        Returns None if nothing was sent, because the subscription, the job or the event is not in the database.
        """
        if (early_ms := message.send_ms - now_ms()) > 0:  # at most CLAIM_AHEAD_MS
            time.sleep(early_ms / 1000)
        content = self._content_of_job(message) if message.of_job else self._content_of(message)
        if content is None:
            self._messages.drop(message)
            return None
        began = time.monotonic()
        sent = self._send(content[0], message, *content[1:])
        crash_at("message_sent")
        self._store_result(message, content[0], _delivery_result(sent, round((time.monotonic() - began) * 1000)))
        # One host may serve the callback URLs of many jobs, and a URL that it refuses must not delay the others.
        return sent.status is not None if message.of_job else sent.ok

    def return_message(self, message: Message, why: str) -> None:
        """Store a failed attempt for a claimed message that could not be sent.  `why`: the error, as a sentence."""
        receiver = self._subscription_of(message)
        if receiver is not None:
            self._store_result(message, receiver, DeliveryResult(False, None, 0, why))

    def _subscription_of(self, message: Message) -> Subscription | None:
        """Return the subscription of a message; None: it was removed after the claim."""
        if message.of_job:
            job = self._store.get(message.job_id)
            if job is not None:
                return subscription_of_job(job)
            batch = self._batches.find(message.job_id, None)
            return None if batch is None else subscription_of_batch(batch)
        try:
            return self._subscriptions.get(message.receiver)
        except NotFound:
            return None

    def _content_of(self, message: Message) -> Content | None:
        """Return the content of a webhook's message; None: the webhook or the event is not in the database."""
        if (receiver := self._subscription_of(message)) is None:
            return None
        if message.is_test:
            return receiver, message_body(message, test_data(receiver.tenant), template_of(receiver)), None
        if message.type == ENDED_TYPE:
            batch = self._batches.get(receiver.tenant, message.job_id)
            return None if batch is None else self._content_about(batch, message, receiver)
        found = event_reader.read_page(self._database, message.event - 1, 1, message.job_id).events
        if not found or found[0].event.id != message.event:
            return None
        job = self._store.get(message.job_id) if message.type in END_EVENT_TYPES else None
        trace = tracing.outgoing_traceparent(message.job_id, found[0].traceparent, JOB)
        return receiver, message_body(message, event_data(found[0], job), template_of(receiver)), trace

    def _content_of_job(self, message: Message) -> Content | None:
        """Return the content of a message for a `callback_url`; None: its job or batch is not in the database."""
        if (job := self._store.get(message.job_id)) is None:
            return self._content_of_batch(message)
        receiver = subscription_of_job(job)
        trace = tracing.outgoing_traceparent(job.id, job.traceparent, webhook_span_kind(message.id))
        return receiver, message_body(message, job_end_data(message, job), template_of(receiver)), trace

    def _content_of_batch(self, message: Message) -> Content | None:
        if (batch := self._batches.find(message.job_id, None)) is None:
            return None
        return self._content_about(batch, message, subscription_of_batch(batch))

    def _content_about(self, batch: Batch, message: Message, receiver: Subscription) -> Content:
        data = batch_end_data(self._batches.read_progress(batch))
        return receiver, message_body(message, data, template_of(receiver)), None

    def _store_result(self, message: Message, receiver: Subscription, result: DeliveryResult) -> None:
        now = now_ms()
        if not message.of_job:
            self._grown_logs[receiver.id] = self._grown_logs.get(receiver.id, 0) + 1
        if result.ok:
            self._messages.note_delivered(message, receiver, result, now)
            return
        self._messages.note_failed(message, receiver, result, now, self._next_attempt_ms(message, result, now))
        if result.status == 410 and receiver.enabled and not message.is_test and not message.of_job:
            if not self._subscriptions.disable_if_url(receiver.url, receiver.id, REASON_GONE, now):
                return
            log.warning("webhook_disabled", webhook=receiver.id, tenant=receiver.tenant, reason=REASON_GONE)

    def _next_attempt_ms(self, message: Message, result: DeliveryResult, now_ms: int) -> int | None:
        """Return the time of the next attempt; None: the message is given up."""
        if message.is_test or now_ms - message.owed_ms >= self._keep_ms or (message.of_job and result.permanent):
            return None
        wait_ms = min(_FIRST_RETRY_MS * 2.5 ** min(message.tries - 1, 20), _LONGEST_RETRY_MS)
        return now_ms + max(round(wait_ms * random.uniform(0.9, 1.1)), result.cooldown_ms)


def _delivery_result(sent: SendResult, latency_ms: int) -> DeliveryResult:
    cooldown_ms = round(sent.retry_after_s * 1000)
    return DeliveryResult(
        sent.ok, sent.status, latency_ms, sent.error, sent.answer, sent.inside, cooldown_ms, sent.permanent
    )
