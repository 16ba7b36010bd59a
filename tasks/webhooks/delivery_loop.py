"""The loop of the process `webhooks`, which notifies clients of the ends of their jobs (HOOK-1).

    python -m tasks.webhooks

The loop finds due messages, claims those that it can send at once, and sends each in a separate thread.  So a slow
receiver delays other receivers only within the limits of tasks/webhooks/delivery_queue.py.  Any number of these
processes may run, because a message is claimed before it is sent.
"""

import threading
import time
from typing import Any

import structlog

from slotkeeper.db import Database
from slotkeeper.db.change_listener import ChangeListener
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.outbox.webhook_messages import Message
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.webhook_rotations import SecretRotations
from tasks.config import TaskSettings
from tasks.security.url_guard import parse_networks
from tasks.webhooks.delivery_queue import DeliveryLimits, FairQueue, Permit
from tasks.webhooks.message_delivery import MessageDelivery
from tasks.webhooks.sender import SigningSender, WebhookSender

log = structlog.get_logger(__name__)

_FIND_PERIOD_S = 0.25  # while messages are pending
_IDLE_FIND_PERIOD_S = 5.0  # while no message is pending and nothing is committed
_MAX_FIND_SHARE = 0.2  # of the time is spent in polls, however many messages are pending
_MAX_PAUSE_S = 1.0  # between two polls
_CLOCK_PERIOD_S = 5.0
_CLAIM_LIMIT = 64  # messages that one transaction claims
_RETRY_S = 1.0
_STOP_WAIT_S = 3.0  # how long deliveries in progress may take after `stop`


class DeliveryLoop:
    """Polls for due messages and sends them; a second thread turns new events into messages.

    Both threads poll rarely while no message is pending; the change listener wakes them after a commit.
    """

    def __init__(self, database: Database, messages: MessageDelivery, listener: ChangeListener | None = None) -> None:
        """Create a loop.  `listener`: shared with other parts of the process; None: the loop creates one."""
        self._messages = messages
        self._listener = listener or ChangeListener(database)
        self._limits, self._queue = DeliveryLimits(), FairQueue()
        self._lock = threading.Lock()  # protects _limits
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._has_changes = threading.Event()  # There was a commit since the last poll for due messages.
        self._has_unread_events = threading.Event()  # There was a commit since events were last turned into messages.
        self._has_pending_events = True
        self._find_at = self._earliest_find_at = self._read_clock_at = 0.0
        self._catalog = Catalog(database)

    def run(self) -> None:
        """Send messages until `stop`, then wait for deliveries in progress, for a few seconds at most."""
        self._listener.on_change(self._on_change)
        self._listener.start()
        writer = threading.Thread(target=self._write_messages_forever, name="webhook-writer", daemon=True)
        writer.start()
        while not self._ended.is_set():
            try:
                self._send()
            except Exception as error:
                _log_error(error)
                self._ended.wait(_RETRY_S)
            self._woken.wait(max(self._next_find_at - time.monotonic(), 0))
            self._woken.clear()
        writer.join(_STOP_WAIT_S)
        until = time.monotonic() + _STOP_WAIT_S
        while self.running and time.monotonic() < until:
            self._woken.wait(0.1)
            self._woken.clear()

    def stop(self) -> None:
        """Make `run` return.  May be called in a signal handler."""
        self._ended.set()
        self._listener.stop()
        self._woken.set()
        self._has_unread_events.set()

    def _on_change(self) -> None:
        self._has_unread_events.set()
        self._has_changes.set()
        self._woken.set()

    @property
    def running(self) -> int:
        """The number of deliveries in progress."""
        with self._lock:
            return self._limits.running

    def run_once(self) -> int:
        """Run one turn of both threads in the caller's thread, and return how many messages were taken to be sent.

        Deliveries that the turn starts go on in their threads.
        """
        self._write_messages()
        return self._send()

    def _write_messages_forever(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            if self._write_messages():
                self._ended.wait(min(time.monotonic() - began, _FIND_PERIOD_S))
            else:
                self._has_unread_events.wait(_FIND_PERIOD_S if self._has_pending_events else _IDLE_FIND_PERIOD_S)
                self._has_unread_events.clear()

    def _write_messages(self) -> bool:
        """Turn new events into messages, and return whether there may be more of them.

        An error is logged and not raised, because messages that exist already must be sent nevertheless.
        """
        try:
            may_have_more, self._has_pending_events = self._messages.write_messages(), self._messages.has_pending_events
        except Exception as error:
            log.warning("events_not_fanned_out", error=str(error))
            may_have_more, self._has_pending_events = False, True
        if may_have_more:
            self._has_changes.set()
            self._woken.set()
        return may_have_more

    @property
    def _next_find_at(self) -> float:
        """The time of the next poll, by time.monotonic()."""
        return min(self._find_at, self._earliest_find_at) if self._has_changes.is_set() else self._find_at

    def _send(self) -> int:
        """Poll if it is time to, start deliveries within the limits, and return how many messages were taken."""
        if time.monotonic() >= self._next_find_at:
            self._has_changes.clear()
            self._find_due()
        started = 0
        while (now_started := self._start_deliveries()) > 0:
            started += now_started
        return started

    def _find_due(self) -> None:
        began = time.monotonic()
        if began >= self._read_clock_at:
            self._catalog.get_version()  # This read also synchronizes the process's clock with the database.
            self._read_clock_at = began + _CLOCK_PERIOD_S
        failed = False
        try:
            for due in self._messages.find_due(self._may_send):
                self._queue.add(due)
        except Exception as error:
            _log_error(error)
            failed = True
        pause_s = _RETRY_S if failed else _FIND_PERIOD_S if self._messages.has_pending else _IDLE_FIND_PERIOD_S
        soonest_s = min((time.monotonic() - began) / _MAX_FIND_SHARE, _MAX_PAUSE_S)
        if self._messages.has_more:
            pause_s = soonest_s
        self._find_at, self._earliest_find_at = began + pause_s, began + soonest_s

    def _may_send(self, receiver: str, tenant: str) -> bool:
        with self._lock:
            return self._limits.may_send(receiver, tenant)

    def _start_deliveries(self) -> int:
        """Claim queued messages, start a thread for each, and return how many were taken from the queue."""
        with self._lock:
            chosen = self._queue.take(self._limits, _CLAIM_LIMIT)
        permits: dict[Any, Permit] = {due.id: permit for due, permit in chosen}
        try:
            for id_, message in (self._messages.claim(list(permits)) if permits else {}).items():
                threading.Thread(
                    target=self._deliver, args=(message, permits[id_]), name="webhook", daemon=True
                ).start()
                del permits[id_]
        finally:
            for permit in permits.values():  # Another process has claimed the message, or the claim failed.
                self._release(permit, None)
        return len(chosen)

    def _release(self, permit: Permit, succeeded: bool | None) -> None:
        with self._lock:
            self._limits.release(permit, succeeded)
        self._woken.set()

    def _deliver(self, message: Message, permit: Permit) -> None:
        """Send one message and store the result."""
        succeeded = None
        try:
            succeeded = self._messages.deliver(message)
        except DatabaseUnavailable as error:  # After its claim has expired, the message is sent again with the same id.
            log.warning("delivery_not_recorded", webhook_id=message.id, error=str(error))
        except Exception as error:
            log.exception("webhook_failed", webhook_id=message.id)
            self._return_message(message, f"It could not be sent: {type(error).__name__}.")
        finally:
            self._release(permit, succeeded)

    def _return_message(self, message: Message, why: str) -> None:
        try:
            self._messages.return_message(message, why)
        except DatabaseUnavailable as error:
            log.warning("delivery_not_recorded", webhook_id=message.id, error=str(error))


def _log_error(error: Exception) -> None:
    level = log.warning if isinstance(error, DatabaseUnavailable) else log.exception
    level("webhooks_postponed", error=str(error))


def make_delivery_loop(database: Database, listener: ChangeListener | None = None) -> DeliveryLoop:
    """Return a loop that is configured by the settings.  `listener`: see `DeliveryLoop`."""
    settings = TaskSettings()
    sender = WebhookSender(parse_networks(settings.webhook_allow), settings.webhook_timeout_s)
    claim_ms = round(settings.webhook_timeout_s * 2000)
    send = SigningSender(sender, SecretRotations(database))
    messages = MessageDelivery(database, send, claim_ms, settings.webhook_keep_s)
    return DeliveryLoop(database, messages, listener)
