"""What subscriptions are told, as the process of webhooks sends it.

A message that its receiver refuses is tried until it is too old.  A webhook that takes nothing is left alone, longer
each time, and what it is owed waits; see slotkeeper/outbox/subscriptions.py.  One that answers 410 is disabled.  Where
the receiver is a job's `callback_url`, its message is given up instead: nobody could enable it again.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import structlog

from routing.queries.trace_spans import JOB, webhook_span_kind
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.db import Database
from slotkeeper.errors import NotFound
from slotkeeper.jobs.store import JobStore
from slotkeeper.outbox import event_reader, retention
from slotkeeper.outbox.fan_out import EventFanOut
from slotkeeper.outbox.subscriptions import (
    END_EVENT_TYPES,
    REASON_GONE,
    Subscription,
    Subscriptions,
    subscription_of_job,
)
from slotkeeper.outbox.webhook_messages import DeliveryResult, DueCallback, Message, MessageKey, MessageQueue
from slotkeeper.registry.tenants import SecretRotations
from tasks import tracing
from tasks.security import vault
from tasks.security.keyring import webhook_secrets
from tasks.webhooks.bodies import event_data, job_end_data, message_body, template_of, test_data
from tasks.webhooks.delivery_queue import CanSend, DueMessage, host_of_url
from tasks.webhooks.sender import SendResult, WebhookSender

log = structlog.get_logger(__name__)

_FIRST_RETRY_MS, _LONGEST_RETRY_MS = 5_000, 900_000
_MAX_RECEIVERS = 100  # whose messages one look reads
_MAX_READY = 5_000  # among which it chooses them
_PAGE = 1000  # messages of jobs' `callback_url` that one look reads,
_NEWEST = 200  # beside those that became due last
_TRIM_PERIOD_S = 30.0
_TRIM_AFTER_TRIES = 200  # tries of one receiver after which its log is trimmed
_TRIM_BATCH = 20  # receivers, between two steps of what is new
_SECRET_UNREADABLE = "Its signing secret cannot be opened with this installation's secret; rotate it."

Send = Callable[[Subscription, Message, bytes, str | None], SendResult]
"""The last: the traceparent that it is told of."""
Content = tuple[Subscription, bytes, str | None]
"""Whom, what, and the traceparent."""


class MessageDelivery:
    """Finds what is due and sends it; tasks/webhooks/delivery_loop.py says when."""

    def __init__(self, database: Database, send: Send, claim_ms: int, keep_s: float) -> None:
        self._database, self._send = database, send
        self._store, self._subscriptions, self._messages = (
            JobStore(database),
            Subscriptions(database),
            MessageQueue(database),
        )
        self._fan_out = EventFanOut(database)
        self._claim_ms, self._keep_ms = claim_ms, round(keep_s * 1000)
        self._last_callback: DueCallback | None = None  # of the jobs' messages, up to where the last look has come
        self.has_more = False
        """Whether the last look has not come to the end of what is due."""
        self.has_pending = True
        """Whether anything was owed at the last look, due or not.  If not, nothing will be until somebody writes."""
        self._grown_logs: dict[str, int] = {}  # receivers whose log has grown, and by how much
        self._logs_to_trim: list[str] = []  # those of them whose log is being trimmed
        self._trim_at = 0.0

    @staticmethod
    def sender(sender: WebhookSender, rotations: SecretRotations) -> Send:
        """Signs with a webhook's own secrets; to a job's `callback_url` with those of its tenant."""

        def send(receiver: Subscription, message: Message, content: bytes, trace: str | None) -> SendResult:
            now = now_ms()
            if message.of_job:
                secrets = webhook_secrets(receiver.tenant, rotations.get(receiver.tenant), now)
            else:
                opened = [vault.signing_secret(receiver.id, sealed) for sealed in receiver.list_sealed_secrets(now)]
                secrets = [secret for secret in opened if secret is not None]
            if not secrets:
                return SendResult(False, None, _SECRET_UNREADABLE, permanent=False)
            return sender.send(receiver.url, message.id, content, datetime.now(UTC), secrets, trace)

        return send

    @property
    def has_pending_events(self) -> bool:
        """Whether time alone may bring more to write down, as for a receiver that is left alone for a while."""
        return self._fan_out.must_poll or bool(self._logs_to_trim)

    def write_messages(self) -> bool:
        """Make messages of some of what is new; keep the logs short.  Returns whether there may be more of it."""
        now = now_ms()
        try:
            made = self._fan_out.step(now)
            crash_at("events_fanned_out")
            return made > 0 or self._fan_out.has_more
        finally:
            self._trim_logs(now)

    def find_due(self, may_send: CanSend) -> Iterator[DueMessage]:
        """Some of what is due; webhooks that `may_send` says no to are not read, as nothing can be sent to them now."""
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
        """One page of jobs' messages, from where the last look stopped, so that nobody's pile hides another's; and
        what has become due just now, so that it does not wait until the pile has been read."""
        page = self._messages.list_due_callbacks(now_ms, _PAGE, self._last_callback)
        self._last_callback = page[-1] if len(page) == _PAGE else None
        return (
            page if self._last_callback is None else [*self._messages.list_newest_due_callbacks(now_ms, _NEWEST), *page]
        )

    def _trim_logs(self, now_ms: int) -> None:
        """A few receivers at a time: what is new does not wait until all logs are trimmed."""
        is_full = any(count >= _TRIM_AFTER_TRIES for count in list(self._grown_logs.values()))
        if self._logs_to_trim or is_full or time.monotonic() >= self._trim_at:
            if not self._logs_to_trim:
                touched, self._grown_logs = self._grown_logs, {}
                self._logs_to_trim = list(touched)
                self._trim_at = time.monotonic() + _TRIM_PERIOD_S
            batch, self._logs_to_trim = self._logs_to_trim[:_TRIM_BATCH], self._logs_to_trim[_TRIM_BATCH:]
            retention.trim(self._database, batch, now_ms, self._keep_ms)

    def claim(self, ids: Sequence[MessageKey]) -> dict[MessageKey, Message]:
        """Begin a try of each of these that is due and that nobody else is at."""
        now = now_ms()
        claimed = self._messages.claim(ids, now, now + self._claim_ms)
        crash_at("message_claimed")
        return {message.key: message for message in claimed}

    def deliver(self, message: Message) -> bool | None:
        """Send a message and note what came of it.  Whether its receiver answered; None: it was not asked."""
        if (early_ms := message.send_ms - now_ms()) > 0:  # by a second at most
            time.sleep(early_ms / 1000)
        content = self._content_of_job(message) if message.of_job else self._content_of(message)
        if content is None:
            self._messages.drop(message)
            return None
        began = time.monotonic()
        sent = self._send(content[0], message, *content[1:])
        crash_at("message_sent")
        self._store_result(message, content[0], _delivery_result(sent, round((time.monotonic() - began) * 1000)))
        # Of one host there may be many jobs' addresses, and others are not to wait for one that is wrong.
        return sent.status is not None if message.of_job else sent.ok

    def return_message(self, message: Message, why: str) -> None:
        """Note that it could not be sent."""
        receiver = self._subscription_of(message)
        if receiver is not None:
            self._store_result(message, receiver, DeliveryResult(False, None, 0, why))

    def _subscription_of(self, message: Message) -> Subscription | None:
        """None: it has been removed meanwhile."""
        if message.of_job:
            job = self._store.get(message.job_id)
            return None if job is None else subscription_of_job(job)
        try:
            return self._subscriptions.get(message.receiver)
        except NotFound:
            return None

    def _content_of(self, message: Message) -> Content | None:
        """None: the webhook, or what the message tells of, is no longer in the record."""
        if (receiver := self._subscription_of(message)) is None:
            return None
        if message.is_test:
            return receiver, message_body(message, test_data(receiver.tenant), template_of(receiver)), None
        found = event_reader.read_page(self._database, message.event - 1, 1, message.job_id).events
        if not found or found[0].event.id != message.event:
            return None
        job = self._store.get(message.job_id) if message.type in END_EVENT_TYPES else None
        trace = tracing.outgoing_traceparent(message.job_id, found[0].traceparent, JOB)
        return receiver, message_body(message, event_data(found[0], job), template_of(receiver)), trace

    def _content_of_job(self, message: Message) -> Content | None:
        """None: the job is no longer in the record."""
        if (job := self._store.get(message.job_id)) is None:
            return None
        receiver = subscription_of_job(job)
        trace = tracing.outgoing_traceparent(job.id, job.traceparent, webhook_span_kind(message.id))
        return receiver, message_body(message, job_end_data(message, job), template_of(receiver)), trace

    def _store_result(self, message: Message, receiver: Subscription, result: DeliveryResult) -> None:
        now = now_ms()
        if not message.of_job:
            self._grown_logs[receiver.id] = self._grown_logs.get(receiver.id, 0) + 1
        if result.ok:
            self._messages.note_delivered(message, receiver, result, now)
            return
        self._messages.note_failed(message, receiver, result, now, self._next_try_ms(message, result, now))
        if result.status == 410 and receiver.enabled and not message.is_test and not message.of_job:
            if not self._subscriptions.disable_if_url(receiver.url, receiver.id, REASON_GONE, now):
                return
            log.warning("webhook_disabled", webhook=receiver.id, tenant=receiver.tenant, reason=REASON_GONE)

    def _next_try_ms(self, message: Message, result: DeliveryResult, now_ms: int) -> int | None:
        """When to try again; None: that was the last time."""
        if message.is_test or now_ms - message.owed_ms >= self._keep_ms or (message.of_job and result.permanent):
            return None
        wait_ms = min(_FIRST_RETRY_MS * 2.5 ** min(message.tries - 1, 20), _LONGEST_RETRY_MS)
        return now_ms + max(round(wait_ms * random.uniform(0.9, 1.1)), result.cooldown_ms)


def _delivery_result(sent: SendResult, latency_ms: int) -> DeliveryResult:
    cooldown_ms = round(sent.retry_after_s * 1000)
    return DeliveryResult(
        sent.ok, sent.status, latency_ms, sent.error, sent.answer, sent.inside, cooldown_ms, sent.permanent
    )
