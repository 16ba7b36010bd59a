"""Webhooks: a process of its own that tells clients how their jobs ended, after the slot is free (HOOK-1).

    python -m tasks.webhooks

It asks the record for what is owed, claims what it can send at once, and sends each message in a thread of its own.
So nothing else waits for a receiver, and receivers wait for each other only within the bounds of tasks/berths.py.
Any number of these processes may run: a message is claimed before it is sent.
"""

import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import structlog

from jobs.catalog import Catalog
from jobs.config import RecordSettings
from jobs.crash import crash_at
from jobs.db import Database
from jobs.errors import RecordUnavailable
from jobs.record import Job, Webhook, now_ms
from jobs.rotations import Rotations
from jobs.store import Store
from jobs.webhooks import Due, Webhooks
from routing import exact
from tasks import startup
from tasks.berths import Berth, Berths
from tasks.config import TaskSettings
from tasks.keyring import webhook_secrets
from tasks.lines import Lines
from tasks.outbound import Sender, Sent, parse_allow

log = structlog.get_logger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 6 * 3600.0
_LOOK_EVERY_S = 0.25
_LOOKING_SHARE = 0.2  # of the time, however much is owed
_PAGE = 1000
_NEWEST = 200  # that each look reads beside its page
_HEAR_EVERY_S = 5.0
_AT_ONCE = 64  # messages that one transaction claims
_AWAY_S = 1.0
_LAST_TRIES_S = 3.0  # what those under way get when the process is told to stop

Send = Callable[[Webhook, Job, bytes], Sent]


class Deliveries:
    """Looks for what is due, and has it sent."""

    def __init__(self, webhooks: Webhooks, store: Store, send: Send, timeout_s: float, max_tries: int) -> None:
        self._webhooks, self._store, self._send = webhooks, store, send
        self._timeout_s, self._max_tries = timeout_s, max_tries
        self._berths, self._lines = Berths(), Lines()
        self._lock = threading.Lock()  # over the berths
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._last: Due | None = None  # up to where this look has come
        self._look_at = self._hear_at = 0.0
        self._catalog = Catalog(webhooks.database)

    def run(self) -> None:
        """Send what is owed until `stop`, then give the tries under way a moment to end."""
        while not self._ended.is_set():
            try:
                self.turn()
            except Exception as error:
                level = log.warning if isinstance(error, RecordUnavailable) else log.exception
                level("webhooks_postponed", error=str(error))
                self._ended.wait(_AWAY_S)
            self._woken.wait(max(self._look_at - time.monotonic(), 0))
            self._woken.clear()
        until = time.monotonic() + _LAST_TRIES_S
        while self.under_way and time.monotonic() < until:
            self._woken.wait(0.1)
            self._woken.clear()

    def stop(self) -> None:
        self._ended.set()
        self._woken.set()

    @property
    def under_way(self) -> int:
        with self._lock:
            return self._berths.taken

    def turn(self) -> int:
        """Look for what is due, if it is time to, and begin what may begin; answers how many tries."""
        if time.monotonic() >= self._look_at:
            self._look()
        begun = 0
        while (now_begun := self._begin()) > 0:
            begun += now_begun
        return begun

    def _look(self) -> None:
        """Read one page of what is due, from where the last look stopped, so that nobody's pile hides another's; and
        what has become due just now, so that it does not wait until the pile has been read."""
        began = time.monotonic()
        if began >= self._hear_at:
            self._catalog.version()  # With it the common time is heard.
            self._hear_at = began + _HEAR_EVERY_S
        now = now_ms()
        page = self._webhooks.due(now, _PAGE, self._last)
        newest = self._webhooks.newest_due(now, _NEWEST) if len(page) == _PAGE else []
        for due in (*newest, *page):
            self._lines.add(due)
        self._last = page[-1] if len(page) == _PAGE else None
        took_s = time.monotonic() - began
        rest_s = took_s / _LOOKING_SHARE if self._last else _LOOK_EVERY_S
        self._look_at = began + rest_s

    def _begin(self) -> int:
        """Claim and begin some tries; answers how many were chosen."""
        with self._lock:
            chosen = self._lines.take(self._berths, _AT_ONCE)
        if not chosen:
            return 0
        now = now_ms()
        berths = dict(chosen)
        try:
            claimed = self._webhooks.claim_all(list(berths), now, now + round(self._timeout_s * 2000))
            crash_at("webhook_claimed")
            for webhook in claimed:
                task = (webhook, berths[webhook.id])
                threading.Thread(target=self._try, args=task, name="webhook", daemon=True).start()
                del berths[webhook.id]
        finally:
            for berth in berths.values():  # Somebody else was quicker, or the database is away.
                self._leave(berth, None)
        return len(chosen)

    def _leave(self, berth: Berth, answered: bool | None) -> None:
        with self._lock:
            self._berths.leave(berth, answered)
        self._woken.set()

    def _try(self, webhook: Webhook, berth: Berth) -> None:
        """Send one message, and note what came of it."""
        answered = None
        try:
            answered = self._deliver(webhook)
        except RecordUnavailable as error:  # It is sent again, under the same id, when its claim is over.
            log.warning("webhook_not_noted", webhook_id=webhook.id, error=str(error))
        except Exception as error:
            log.exception("webhook_failed", webhook_id=webhook.id)
            self._give_back(webhook, f"It could not be sent: {type(error).__name__}.")
        finally:
            self._leave(berth, answered)

    def _deliver(self, webhook: Webhook) -> bool | None:
        """Whether the receiver took it; None: it was not asked."""
        job = self._store.get(webhook.job_id)
        if job is None:
            self._webhooks.failed(webhook, None, None, "the job was removed from the record")
            return None
        sent = self._send(webhook, job, exact.dumps(body(webhook, job)))
        crash_at("webhook_sent")
        if sent.ok:
            self._webhooks.delivered(webhook, now_ms(), sent.status or 0)
        else:
            next_ms = None if sent.permanent else _next_try(webhook.tries, self._max_tries)
            self._webhooks.failed(webhook, next_ms, sent.status, sent.error)
        return sent.status is not None

    def _give_back(self, webhook: Webhook, why: str) -> None:
        try:
            self._webhooks.failed(webhook, _next_try(webhook.tries, self._max_tries), None, why)
        except RecordUnavailable as error:
            log.warning("webhook_not_noted", webhook_id=webhook.id, error=str(error))


def body(webhook: Webhook, job: Job) -> dict[str, Any]:
    """What the client is told: how the job ended, at the time when the message was owed."""
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


def deliveries(database: Database) -> Deliveries:
    """As the settings say."""
    settings = TaskSettings()
    sender = Sender(parse_allow(settings.webhook_allow), settings.webhook_timeout_s)
    rotations = Rotations(database)

    def send(webhook: Webhook, job: Job, content: bytes) -> Sent:
        secrets = webhook_secrets(job.tenant, rotations.of(job.tenant), now_ms())
        return sender.send(webhook.url, webhook.id, content, datetime.now(UTC), secrets)

    return Deliveries(Webhooks(database), Store(database), send, settings.webhook_timeout_s, settings.webhook_max_tries)


def main() -> None:
    startup.begin()
    found = deliveries(Database(RecordSettings().record_url))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: found.stop())
    found.run()


if __name__ == "__main__":
    main()
