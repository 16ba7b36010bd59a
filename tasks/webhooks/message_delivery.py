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
from tasks.security.url_guard import SendResult, WebhookSender
from tasks.webhooks.bodies import event_data, job_end_data, message_body, template_of, test_data
from tasks.webhooks.delivery_queue import CanSend, DueMessage, host_of_url

log = structlog.get_logger(__name__)

_FIRST_RETRY_MS, _LONGEST_RETRY_MS = 5_000, 900_000
_RECEIVERS = 100  # whose messages one look reads
_READY = 5_000  # among which it chooses them
_PAGE = 1000  # messages of jobs' `callback_url` that one look reads,
_NEWEST = 200  # beside those that became due last
_TIDY_EVERY_S = 30.0
_LOGGED_UNTIDIED = 200  # tries of one receiver after which its log is trimmed
_TIDIED = 20  # receivers, between two steps of what is new
_SECRET_UNREADABLE = "Its signing secret cannot be opened with this installation's secret; rotate it."

Send = Callable[[Subscription, Message, bytes, str | None], SendResult]
"""The last: the traceparent that it is told of."""
Content = tuple[Subscription, bytes, str | None]
"""Whom, what, and the traceparent."""


class MessageDelivery:
    """Finds what is due and sends it; tasks/webhooks/delivery_loop.py says when."""

    def __init__(self, database: Database, send: Send, claim_ms: int, keep_s: float) -> None:
        self._database, self._send = database, send
        self._store, self._receivers, self._messages = (
            JobStore(database),
            Subscriptions(database),
            MessageQueue(database),
        )
        self._fan_out = EventFanOut(database)
        self._claim_ms, self._keep_ms = claim_ms, round(keep_s * 1000)
        self._last: DueCallback | None = None  # of the jobs' messages, up to where the last look has come
        self.has_more = False
        """Whether the last look has not come to the end of what is due."""
        self.has_pending = True
        """Whether anything was owed at the last look, due or not.  If not, nothing will be until somebody writes."""
        self._touched: dict[str, int] = {}  # receivers whose log has grown, and by how much
        self._untidy: list[str] = []  # those of them whose log is being trimmed
        self._tidy_at = 0.0

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
        return self._fan_out.must_poll or bool(self._untidy)

    def write_messages(self) -> bool:
        """Make messages of some of what is new; keep the logs short.  Returns whether there may be more of it."""
        now = now_ms()
        try:
            made = self._fan_out.step(now)
            crash_at("events_fanned_out")
            return made > 0 or self._fan_out.has_more
        finally:
            self._tidy(now)

    def find_due(self, admits: CanSend) -> Iterator[DueMessage]:
        """Some of what is due; webhooks that `admits` says no to are not read, as nothing can be sent to them now."""
        now = now_ms()
        of_jobs = self._look_at_jobs(now)
        ready = self._messages.list_ready(now, _READY)
        self.has_pending = bool(of_jobs or ready) or self._messages.has_pending()
        admitted = [it for it in ready if admits(it.receiver, it.tenant)]
        self.has_more = self._last is not None or len(admitted) > _RECEIVERS or len(ready) == _READY
        for due in of_jobs:
            yield DueMessage(MessageKey(due.job_id, due.event, of_job=True), host_of_url(due.url), due.tenant)
        for it in admitted[:_RECEIVERS]:
            for event in self._messages.list_due(it.receiver, now, it.most):
                yield DueMessage(MessageKey(it.receiver, event), it.receiver, it.tenant)

    def _look_at_jobs(self, now_ms: int) -> list[DueCallback]:
        """One page of jobs' messages, from where the last look stopped, so that nobody's pile hides another's; and
        what has become due just now, so that it does not wait until the pile has been read."""
        page = self._messages.list_due_callbacks(now_ms, _PAGE, self._last)
        self._last = page[-1] if len(page) == _PAGE else None
        return page if self._last is None else [*self._messages.list_newest_due_callbacks(now_ms, _NEWEST), *page]

    def _tidy(self, now_ms: int) -> None:
        """A few receivers at a time: what is new does not wait until all logs are trimmed."""
        is_full = any(count >= _LOGGED_UNTIDIED for count in list(self._touched.values()))
        if self._untidy or is_full or time.monotonic() >= self._tidy_at:
            if not self._untidy:
                touched, self._touched = self._touched, {}
                self._untidy = list(touched)
                self._tidy_at = time.monotonic() + _TIDY_EVERY_S
            some, self._untidy = self._untidy[:_TIDIED], self._untidy[_TIDIED:]
            retention.trim(self._database, some, now_ms, self._keep_ms)

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
        told = self._content_of_job(message) if message.of_job else self._content_of(message)
        if told is None:
            self._messages.drop(message)
            return None
        began = time.monotonic()
        sent = self._send(told[0], message, *told[1:])
        crash_at("message_sent")
        self._note(message, told[0], _answered(sent, round((time.monotonic() - began) * 1000)))
        # Of one host there may be many jobs' addresses, and others are not to wait for one that is wrong.
        return sent.status is not None if message.of_job else sent.ok

    def return_message(self, message: Message, why: str) -> None:
        """Note that it could not be sent."""
        receiver = self._receiver_of(message)
        if receiver is not None:
            self._note(message, receiver, DeliveryResult(False, None, 0, why))

    def _receiver_of(self, message: Message) -> Subscription | None:
        """None: it has been removed meanwhile."""
        if message.of_job:
            job = self._store.get(message.job_id)
            return None if job is None else subscription_of_job(job)
        try:
            return self._receivers.get(message.receiver)
        except NotFound:
            return None

    def _content_of(self, message: Message) -> Content | None:
        """None: the webhook, or what the message tells of, is no longer in the record."""
        if (receiver := self._receiver_of(message)) is None:
            return None
        if message.is_test:
            return receiver, message_body(message, test_data(receiver.tenant), template_of(receiver)), None
        found = event_reader.read_page(self._database, message.event - 1, 1, message.job_id).events
        if not found or found[0].event.id != message.event:
            return None
        job = self._store.get(message.job_id) if message.type in END_EVENT_TYPES else None
        trace = tracing.told(message.job_id, found[0].traceparent, JOB)
        return receiver, message_body(message, event_data(found[0], job), template_of(receiver)), trace

    def _content_of_job(self, message: Message) -> Content | None:
        """None: the job is no longer in the record."""
        if (job := self._store.get(message.job_id)) is None:
            return None
        receiver = subscription_of_job(job)
        trace = tracing.told(job.id, job.traceparent, webhook_span_kind(message.id))
        return receiver, message_body(message, job_end_data(message, job), template_of(receiver)), trace

    def _note(self, message: Message, receiver: Subscription, answered: DeliveryResult) -> None:
        now = now_ms()
        if not message.of_job:
            self._touched[receiver.id] = self._touched.get(receiver.id, 0) + 1
        if answered.ok:
            self._messages.note_delivered(message, receiver, answered, now)
            return
        self._messages.note_failed(message, receiver, answered, now, self._next_ms(message, answered, now))
        if answered.status == 410 and receiver.enabled and not message.is_test and not message.of_job:
            if not self._receivers.disable_if_url(receiver.url, receiver.id, REASON_GONE, now):
                return
            log.warning("webhook_disabled", webhook=receiver.id, tenant=receiver.tenant, reason=REASON_GONE)

    def _next_ms(self, message: Message, answered: DeliveryResult, now_ms: int) -> int | None:
        """When to try again; None: that was the last time."""
        if message.is_test or now_ms - message.owed_ms >= self._keep_ms or (message.of_job and answered.permanent):
            return None
        wait_ms = min(_FIRST_RETRY_MS * 2.5 ** min(message.tries - 1, 20), _LONGEST_RETRY_MS)
        return now_ms + max(round(wait_ms * random.uniform(0.9, 1.1)), answered.cooldown_ms)


def _answered(sent: SendResult, latency_ms: int) -> DeliveryResult:
    cooldown_ms = round(sent.retry_after_s * 1000)
    return DeliveryResult(
        sent.ok, sent.status, latency_ms, sent.error, sent.answer, sent.inside, cooldown_ms, sent.permanent
    )
