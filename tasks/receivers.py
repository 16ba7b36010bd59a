"""What tenants' receivers are told, as the process of webhooks sends it.

A message that its receiver refuses is tried until it is too old.  A receiver that takes nothing is left alone, longer
each time, and what it is owed waits; see outbox/receivers.py.  One that answers 410 is disabled.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import structlog

from database.db import Database
from foundation.crash import crash_at
from foundation.errors import NotFound
from insight.spans import JOB
from jobs.events import TYPES
from jobs.record import now_ms
from jobs.states import FINAL
from jobs.store import Store
from outbox import tail
from outbox.messages import Answered, Message, Messages
from outbox.receivers import GONE, Receiver, Receivers
from outbox.spreading import Spreading
from tasks import tracing, vault
from tasks.bodies import body, told_of_event, told_of_test
from tasks.lines import Admits, Owed
from tasks.outbound import Sender, Sent

log = structlog.get_logger(__name__)

_FIRST_RETRY_MS, _LONGEST_RETRY_MS = 5_000, 900_000
_RECEIVERS = 100  # whose messages one look reads
_READY = 5_000  # among which it chooses them
_TIDY_EVERY_S = 30.0
_LOGGED_UNTIDIED = 200  # tries of one receiver after which its log is trimmed
_TIDIED = 20  # receivers, between two steps of what is new
_ENDS = frozenset(TYPES[state] for state in FINAL)
_SEALED = "Its signing secret cannot be opened with this installation's secret; rotate it."

Send = Callable[[Receiver, Message, bytes, str | None], Sent]
"""The last: the traceparent that it is told of."""
Key = tuple[str, int]


class ReceiverMessages:
    """A source of messages; see tasks/webhooks.py."""

    def __init__(self, database: Database, send: Send, claim_ms: int, keep_s: float) -> None:
        self._database, self._send = database, send
        self._store, self._receivers, self._messages = Store(database), Receivers(database), Messages(database)
        self._spreading = Spreading(database)
        self._claim_ms, self._keep_ms = claim_ms, round(keep_s * 1000)
        self._has_more = False
        self.owes = True
        self._touched: dict[str, int] = {}  # receivers whose log has grown, and by how much
        self._untidy: list[str] = []  # those of them whose log is being trimmed
        self._tidy_at = 0.0

    @staticmethod
    def sender(sender: Sender) -> Send:
        """Signs with the receiver's own secrets."""

        def send(receiver: Receiver, message: Message, content: bytes, trace: str | None) -> Sent:
            opened = [vault.signing_secret(receiver.id, sealed) for sealed in receiver.seals(now_ms())]
            secrets = [secret for secret in opened if secret is not None]
            if not secrets:
                return Sent(False, None, _SEALED, permanent=False)
            return sender.send(receiver.url, message.id, content, datetime.now(UTC), secrets, trace)

        return send

    @property
    def has_more(self) -> bool:
        return self._has_more

    @property
    def gathers(self) -> bool:
        return self._spreading.waits or bool(self._untidy)

    def gather(self) -> bool:
        """Make messages of some of what is new; keep the logs short."""
        now = now_ms()
        try:
            made = self._spreading.step(now)
            crash_at("events_spread")
            return made > 0 or self._spreading.has_more
        finally:
            self._tidy(now)

    def look(self, admits: Admits) -> Iterator[Owed]:
        """What is due to some receivers, their tenants in turn; those that cannot be sent any now are not read."""
        now = now_ms()
        ready = self._messages.ready(now, _READY)
        self.owes = bool(ready) or self._messages.owes()
        admitted = [it for it in ready if admits(it.receiver, it.tenant)]
        self._has_more = len(admitted) > _RECEIVERS or len(ready) == _READY
        for it in admitted[:_RECEIVERS]:
            for event in self._messages.due(it.receiver, now, it.most):
                yield Owed((it.receiver, event), it.receiver, it.tenant, self)

    def _tidy(self, now_ms: int) -> None:
        """A few receivers at a time: what is new does not wait until all logs are trimmed."""
        is_full = any(count >= _LOGGED_UNTIDIED for count in list(self._touched.values()))
        if self._untidy or is_full or time.monotonic() >= self._tidy_at:
            if not self._untidy:
                touched, self._touched = self._touched, {}
                self._untidy = list(touched)
                self._tidy_at = time.monotonic() + _TIDY_EVERY_S
            some, self._untidy = self._untidy[:_TIDIED], self._untidy[_TIDIED:]
            self._messages.tidy(some, now_ms, self._keep_ms)

    def claim(self, ids: Sequence[Key]) -> dict[Key, Message]:
        now = now_ms()
        claimed = self._messages.claim_all(ids, now, now + self._claim_ms)
        crash_at("message_claimed")
        return {(message.receiver, message.event): message for message in claimed}

    def deliver(self, message: Message) -> bool | None:
        if (early_ms := message.send_ms - now_ms()) > 0:  # by a second at most
            time.sleep(early_ms / 1000)
        try:
            receiver = self._receivers.get(message.receiver)
        except NotFound:
            return None
        told = self._told(message, receiver)
        if told is None:
            self._messages.dropped(message)
            return None
        began = time.monotonic()
        sent = self._send(receiver, message, *told)
        crash_at("message_sent")
        self._note(message, receiver, _answered(sent, round((time.monotonic() - began) * 1000)))
        return sent.ok

    def give_back(self, message: Message, why: str) -> None:
        self._note(message, self._receivers.get(message.receiver), Answered(False, None, 0, why))

    def _told(self, message: Message, receiver: Receiver) -> tuple[bytes, str | None] | None:
        """The body, and the traceparent of its job; None: what it tells of is no longer in the record."""
        if message.is_test:
            return body(message, told_of_test(receiver.tenant), receiver.template), None
        found = tail.page(self._database, message.event - 1, 1, message.job_id).entries
        if not found or found[0].event.id != message.event:
            return None
        job = self._store.get(message.job_id) if message.type in _ENDS else None
        trace = tracing.told(message.job_id, found[0].traceparent, JOB)
        return body(message, told_of_event(found[0], job), receiver.template), trace

    def _note(self, message: Message, receiver: Receiver, answered: Answered) -> None:
        now = now_ms()
        self._touched[receiver.id] = self._touched.get(receiver.id, 0) + 1
        if answered.ok:
            self._messages.delivered(message, receiver, answered, now)
            return
        is_gone = answered.status == 410
        self._messages.failed(message, receiver, answered, now, self._next_ms(message, now))
        if is_gone and receiver.enabled and not message.is_test:
            if not self._receivers.disable_at(receiver.url, receiver.id, GONE, now):
                return
            log.warning("webhook_disabled", webhook=receiver.id, tenant=receiver.tenant, reason=GONE)

    def _next_ms(self, message: Message, now_ms: int) -> int | None:
        """When to try again; None: that was the last time."""
        if message.is_test or now_ms - message.owed_ms >= self._keep_ms:
            return None
        wait_ms = min(_FIRST_RETRY_MS * 2.5 ** min(message.tries - 1, 20), _LONGEST_RETRY_MS)
        return now_ms + round(wait_ms * random.uniform(0.9, 1.1))


def _answered(sent: Sent, latency_ms: int) -> Answered:
    cooldown_ms = round(sent.retry_after_s * 1000)
    return Answered(sent.ok, sent.status, latency_ms, sent.error, sent.answer, sent.inside, cooldown_ms)
