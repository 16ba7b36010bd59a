"""Webhooks: a process of its own that tells clients what became of their jobs, after the slot is free (HOOK-1).

    python -m tasks.webhooks.delivery_loop

It asks for what is owed, claims what it can send at once, and sends each message in a thread of its own.  So nothing
else waits for a receiver, and receivers wait for each other only within the bounds of tasks/berths.py.  Any number of
these processes may run: a message is claimed before it is sent.
"""

import signal
import sys
import threading
import time
from typing import Any

import structlog

from slotkeeper.config import StorageSettings
from slotkeeper.db import Database
from slotkeeper.db.change_listener import ChangeListener
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.outbox.webhook_messages import Message
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.tenants import SecretRotations
from tasks import liveness, startup
from tasks.berths import DeliveryLimits, Permit
from tasks.config import EventSettings, TaskSettings
from tasks.relay.relay import RelayThreads
from tasks.security.url_guard import WebhookSender, parse_networks
from tasks.services import processes
from tasks.webhooks.delivery_queue import FairQueue
from tasks.webhooks.message_delivery import MessageDelivery

log = structlog.get_logger(__name__)

_LOOK_EVERY_S = 0.25  # while anything is owed
_LOOK_AGAIN_S = 5.0  # though nothing was owed, and nobody has written since
_LOOKING_SHARE = 0.2  # of the time, however much is owed
_LONGEST_PAUSE_S = 1.0  # between two looks
_HEAR_EVERY_S = 5.0
_AT_ONCE = 64  # messages that one transaction claims
_AWAY_S = 1.0
_LAST_TRIES_S = 3.0  # what those under way get when the process is told to stop


class DeliveryLoop:
    """Looks for what is due, and has it sent; beside that, in a thread of its own, has written down what is owed.

    Both look rarely while nothing is owed and nobody writes to the record; `lookout` wakes them.
    """

    def __init__(self, database: Database, messages: MessageDelivery, lookout: ChangeListener | None = None) -> None:
        """`lookout`: one that others have, too; None: one of its own."""
        self._messages = messages
        self._lookout = lookout or ChangeListener(database)
        self._berths, self._lines = DeliveryLimits(), FairQueue()
        self._lock = threading.Lock()  # over the berths
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._news = threading.Event()  # Something was written since the last look,
        self._unread = threading.Event()  # or since it was last looked for what is to be written down.
        self._has_pending_events = True
        self._look_at = self._soonest = self._hear_at = 0.0
        self._catalog = Catalog(database)

    def run(self) -> None:
        """Send what is owed until `stop`, then give the tries under way a moment to end."""
        self._lookout.on_change(self._hear)
        self._lookout.start()
        gathering = threading.Thread(target=self._keep_gathering, name="gather", daemon=True)
        gathering.start()
        while not self._ended.is_set():
            try:
                self._send()
            except Exception as error:
                _postponed(error)
                self._ended.wait(_AWAY_S)
            self._woken.wait(max(self._next_look - time.monotonic(), 0))
            self._woken.clear()
        gathering.join(_LAST_TRIES_S)
        until = time.monotonic() + _LAST_TRIES_S
        while self.under_way and time.monotonic() < until:
            self._woken.wait(0.1)
            self._woken.clear()

    def stop(self) -> None:
        self._ended.set()
        self._lookout.stop()
        self._woken.set()
        self._unread.set()

    def _hear(self) -> None:
        """Something was written."""
        self._unread.set()
        self._news.set()
        self._woken.set()

    @property
    def under_way(self) -> int:
        with self._lock:
            return self._berths.taken

    def run_once(self) -> int:
        """A turn by hand: write down some of what is owed, look for what is due, if it is time to, and begin what may
        begin; answers how many tries."""
        self._write_messages()
        return self._send()

    def _keep_gathering(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            if self._write_messages():
                self._ended.wait(min(time.monotonic() - began, _LOOK_EVERY_S))
            else:
                self._unread.wait(_LOOK_EVERY_S if self._has_pending_events else _LOOK_AGAIN_S)
                self._unread.clear()

    def _write_messages(self) -> bool:
        """Whether anything was found.  Events that cannot be read keep nothing from being sent."""
        try:
            gathered, self._has_pending_events = self._messages.write_messages(), self._messages.has_pending_events
        except Exception as error:
            log.warning("events_not_fanned_out", error=str(error))
            gathered, self._has_pending_events = False, True
        if gathered:
            self._news.set()
            self._woken.set()
        return gathered

    @property
    def _next_look(self) -> float:
        """When to look again, as time.monotonic() has it."""
        return min(self._look_at, self._soonest) if self._news.is_set() else self._look_at

    def _send(self) -> int:
        """Look, if it is time to, and begin what may begin; answers how many tries."""
        if time.monotonic() >= self._next_look:
            self._news.clear()
            self._look()
        begun = 0
        while (now_begun := self._begin()) > 0:
            begun += now_begun
        return begun

    def _look(self) -> None:
        began = time.monotonic()
        if began >= self._hear_at:
            self._catalog.get_version()  # With it the common time is heard.
            self._hear_at = began + _HEAR_EVERY_S
        failed = False
        try:
            for owed in self._messages.find_due(self._admits):
                self._lines.add(owed)
        except Exception as error:
            _postponed(error)
            failed = True
        pause_s = _AWAY_S if failed else _LOOK_EVERY_S if self._messages.has_pending else _LOOK_AGAIN_S
        soonest_s = min((time.monotonic() - began) / _LOOKING_SHARE, _LONGEST_PAUSE_S)
        if self._messages.has_more:
            pause_s = soonest_s
        self._look_at, self._soonest = began + pause_s, began + soonest_s

    def _admits(self, receiver: str, tenant: str) -> bool:
        with self._lock:
            return self._berths.admits(receiver, tenant)

    def _begin(self) -> int:
        """Claim and begin some tries; answers how many were chosen."""
        with self._lock:
            chosen = self._lines.take(self._berths, _AT_ONCE)
        berths: dict[Any, Permit] = {owed.id: berth for owed, berth in chosen}
        try:
            for id_, message in (self._messages.claim(list(berths)) if berths else {}).items():
                threading.Thread(target=self._try, args=(message, berths[id_]), name="webhook", daemon=True).start()
                del berths[id_]
        finally:
            for berth in berths.values():  # Somebody else was quicker, or the database is away.
                self._leave(berth, None)
        return len(chosen)

    def _leave(self, berth: Permit, answered: bool | None) -> None:
        with self._lock:
            self._berths.release(berth, answered)
        self._woken.set()

    def _try(self, message: Message, berth: Permit) -> None:
        """Send one message, and note what came of it."""
        answered = None
        try:
            answered = self._messages.deliver(message)
        except DatabaseUnavailable as error:  # It is sent again, under the same id, when its claim is over.
            log.warning("delivery_not_recorded", webhook_id=message.id, error=str(error))
        except Exception as error:
            log.exception("webhook_failed", webhook_id=message.id)
            self._return_message(message, f"It could not be sent: {type(error).__name__}.")
        finally:
            self._leave(berth, answered)

    def _return_message(self, message: Message, why: str) -> None:
        try:
            self._messages.return_message(message, why)
        except DatabaseUnavailable as error:
            log.warning("delivery_not_recorded", webhook_id=message.id, error=str(error))


def _postponed(error: Exception) -> None:
    level = log.warning if isinstance(error, DatabaseUnavailable) else log.exception
    level("webhooks_postponed", error=str(error))


def deliveries(database: Database, lookout: ChangeListener | None = None) -> DeliveryLoop:
    """As the settings say."""
    settings = TaskSettings()
    sender = WebhookSender(parse_networks(settings.webhook_allow), settings.webhook_timeout_s)
    claim_ms = round(settings.webhook_timeout_s * 2000)
    send = MessageDelivery.sender(sender, SecretRotations(database))
    messages = MessageDelivery(database, send, claim_ms, settings.webhook_keep_s)
    return DeliveryLoop(database, messages, lookout)


def main() -> None:
    """With `--embedded-relay` this process is the relay, too, in threads: that spares memory where one is enough."""
    startup.prepare_or_exit()
    database = Database(StorageSettings().sqlalchemy_url)
    lookout = ChangeListener(database)
    relaying = RelayThreads(database, EventSettings(), lookout) if "--embedded-relay" in sys.argv[1:] else None
    found = deliveries(database, lookout)

    def stop(*_: object) -> None:
        found.stop()
        if relaying is not None:
            relaying.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    liveness.start_reporting("webhooks", processes())
    if relaying is not None:
        relaying.begin()
    found.run()
    if relaying is not None:
        relaying.end()


if __name__ == "__main__":
    main()
