"""The life of a few jobs in one process: submit, offer, start, call, settle, retry, webhook, and all maintenance.

    python -m tests.system.faults.life story      # dies where SLOTKEEPER_CRASH_AT says
    python -m tests.system.faults.life recover    # starts nothing new, brings to an end what is there
    python -m tests.system.faults.life nursery    # forks a life for each line, and imports once

Runs live in a worker's loop, from messages that went through the broker, or handed on.  One thread does all work, so
every life passes the crash points in nearly the same order.  The story includes a silent worker, an emptied Redis, and
a client that repeats a request after no response.

A life leaves files for others: `asked` and `told`, one line for each job before and after its submit; `emptied`, the
last event before Redis was emptied; and after a normal end, `report-<name>.json`.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.request import Request, urlopen

# Imported before the fork, like everything that takes a while.
import celery.backends.redis
import celery.beat
import celery.events
import celery.loaders.app  # noqa: F401
import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
import kombu.pidbox
import kombu.transport.redis  # noqa: F401

from routing.dispatch import batch_control, batch_lines
from routing.dispatch.outcome import Outcome
from routing.maintenance import quarantined_slots, rebuild, server_report
from routing.queries import job_list
from routing.queue.leases import Lease, new_lease_owner
from slotkeeper import crash_points
from slotkeeper.clock import now_ms
from slotkeeper.errors import Conflict, DatabaseUnavailable
from slotkeeper.jobs import batch_ids, credits, ledger, notifications, quarantine
from slotkeeper.jobs.batches import Batch, BatchState
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import ACTIVE_STATES, State
from slotkeeper.jobs.values import NewJob
from slotkeeper.outbox.subscriptions import Subscription, Subscriptions, new_id
from slotkeeper.registry.credit_accounts import Act
from slotkeeper.registry.identity import LOCAL_IDENTITY
from slotkeeper.registry.prices import Price, set_prices
from tasks import maintenance, offer_messages, results, server_push, services
from tasks.celery_app import celery as app
from tasks.config import EventSettings
from tasks.inference import infer
from tasks.offer_messages import publish_queue
from tasks.relay import relay
from tasks.security import vault
from tasks.webhooks import delivery_loop as hooks
from tasks.webhooks import message_delivery, sender
from tasks.worker import run_health, server_call
from tasks.worker.heartbeat import LeaseWatch
from tasks.worker.worker import this_worker
from tests.support import passes
from tests.support.builders import a_submission
from tests.support.unread_events import count_unread_events
from tools.cluster.direct_starts import begin_run

SERVER, SLOTS, SYNC, ASYNC = "gpu", 2, "zimg", "flux"
SETTINGS = {
    "SLOTKEEPER_LEASE_MS": "600",
    "SLOTKEEPER_RENEW_EVERY_MS": "100",
    "SLOTKEEPER_OFFER_MS": "300",
    "SLOTKEEPER_BUSY_COOLDOWN_MS": "30",
    "SLOTKEEPER_CATALOG_REFRESH_S": "0",
    "SLOTKEEPER_RETENTION_S": "3600",
    "SLOTKEEPER_BATCH_OPEN_S": "0.5",
    "SLOTKEEPER_WEBHOOK_TIMEOUT_S": "2",
    "SLOTKEEPER_WEBHOOK_ALLOW": "127.0.0.0/8",
    "SLOTKEEPER_SECRET": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
}
_CONFIG = {"retry_backoff": 0.05, "retry_backoff_max": 0.1, "poll_interval": 0.02, "max_retries": 1, "max_crashes": 20}
_QUEUES = (offer_messages.queue_name(SYNC), offer_messages.queue_name(ASYNC))
_QUIET_WITHIN_S = 80.0
_TICK_S = 0.02
GRANTED = 10**12
credits.MOST_PARTS = 3  # Or none would be folded in a life.
_SILENT_S = 0.25  # longer than two renewals
_LONG_AGO_MS = 10 * 3600 * 1000
_COUNTS_ONLY = -1  # A crash point that counts down from here never reaches zero.


class Hands:
    """What a worker process does, one message after another."""

    def __init__(self) -> None:
        self._channel = app.connection_for_read().default_channel
        this_worker().consumer = self

    def work(self) -> None:
        """Do whatever there is to be done."""
        while (found := self.next()) is not None:
            self.do(*found)
        self.rest()

    def next(self) -> tuple[dict[str, Any], Any] | None:
        publish_queue().flush(_QUIET_WITHIN_S)
        for queue in _QUEUES:
            message = self._channel.basic_get(queue, no_ack=True)  # type: ignore[attr-defined]
            if message is not None:
                return message.headers, message.payload
        return None

    def do(self, headers: dict[str, Any], body: Any) -> None:
        """Carry out the run that a wake-up asks for, and those that are handed on after it."""
        offer = offer_messages.read_offer(headers["id"], body[0], headers)
        assert offer is not None
        this_worker().executor.run_open_offer(offer)
        self.rest()

    def rest(self) -> None:
        """Until no run is under way."""
        assert this_worker().worker_loop.wait_until_idle(_QUIET_WITHIN_S)


class Life:
    """The life of one process.  `name` makes the ids of its jobs unique."""

    def __init__(self, name: str, home: Path, url: str) -> None:
        self.name, self.home, self.url = name, home, url
        self.dispatcher = services.dispatcher()
        self.deliveries = hooks.make_delivery_loop(services.database())
        # All lives share one holder: else each would wait until the lease of the former expires.
        self.relays = relay.make_relays(services.database(), EventSettings(), holder="life")
        self._prepare()
        self.hands = Hands()
        self._say_room()

    # -- acts ------------------------------------------------------------------------------------------------

    def submit(self, what: str, payload: dict[str, Any], model: str = SYNC, **more: Any) -> str:
        """Submit a job, as a client that logs its request and the response."""
        wish = {"id": f"{self.name}-{what}", "model": model, "payload": payload, **more}
        self._note("asked", wish)
        self._say_room()  # Or, if the last report has run out, no wake-up is sent, and the next end hands the job over.
        self._ask(wish)
        return str(wish["id"])

    def ask_again(self) -> None:
        """Repeat each request that got no response, under the same id."""
        accepted = read_lines(self.home / "told")
        answered, received = {line["id"] for line in accepted}, Counter(line.get("batch") for line in accepted)
        for wish in read_lines(self.home / "asked"):
            if "batch" in wish and received[wish["batch"]] < wish["first"] + wish["count"]:
                self._send_lines(wish)
            elif "batch" not in wish and wish["id"] not in answered:
                self._ask(wish)

    def batch(self) -> None:
        """Send the lines of a batch in two requests, pause the batch before they run, and resume it."""
        for first, lines in ((0, 2), (2, 1)):
            self._note("asked", wish := {"batch": f"{self.name}-batch", "first": first, "count": lines})
            self._say_room()
            self._send_lines(wish)
        batch = self._batch_of(f"{self.name}-batch")
        batch_control.close(self.dispatcher, services.batches(), batch, 3, 10)
        batch_control.set_paused(self.dispatcher, services.batches(), batch, True, 10)
        self._resume_batches()

    def _send_lines(self, wish: dict[str, Any]) -> None:
        batch, count = self._batch_of(wish["batch"]), wish["count"]
        lines = [{"model": SYNC, "payload": {"do": "ok"}}] * count
        with suppress(Conflict):  # It is closed, and has the lines.
            batch_lines.add_lines(self.dispatcher, services.batches(), batch, wish["first"], lines, LOCAL_IDENTITY)
        for line in range(wish["first"], wish["first"] + count):
            self._note("told", {"id": batch_ids.line_job_id(batch.id, line), "batch": wish["batch"]})

    def _batch_of(self, key: str) -> Batch:
        now = now_ms()
        new = Batch("default", batch_ids.new_batch_id(), BatchState.OPEN, now, now)
        return services.batches().create(new, key, "")[0]

    def _resume_batches(self) -> None:
        """Resume all batches: the life that paused one may have died."""
        for batch in services.batches().list_unfinished():
            if batch.is_paused:
                batch_control.set_paused(self.dispatcher, services.batches(), batch, False, 10)

    def abandon(self, job_id: str) -> None:
        """Let another worker begin the job and then fall silent."""
        headers, (args, *_) = self._come_to(job_id)
        offer = offer_messages.read_offer(job_id, args, headers)
        assert offer is not None
        begin_run(self.dispatcher, offer, new_lease_owner("silent"))

    def hand_back(self, job_id: str) -> None:
        """Stop this worker just after it has begun the job."""
        found, heartbeat = self._come_to(job_id), this_worker().heartbeat
        add = heartbeat.add

        def stopped(held: Lease, **more: bool) -> LeaseWatch:
            hold = add(held, **more)
            hold.end("stop")
            return hold

        with mock.patch.object(heartbeat, "add", stopped):
            self.hands.do(*found)

    def linger(self, hook: str) -> None:
        """Cancel a job while its server runs it, so that the server goes on, even on a busy machine."""
        for n in count():
            job_id = self.submit(f"lingering{n}", {"do": "ok", "seconds": 0.6}, ASYNC, callback_url=hook)
            self._cancel_at_server(job_id)
            if quarantine.find(self.dispatcher.store.database, job_id, 1) is not None:
                return
            self.recover()

    def _cancel_at_server(self, job_id: str) -> None:
        found, poll = self._come_to(job_id), server_call.ServerCall._poll

        async def unwanted(call: server_call.ServerCall, remote_id: str) -> Outcome:
            self._cancel(job_id)
            call._watch.request_cancel()
            return await poll(call, remote_id)

        with (
            mock.patch.object(server_call.ServerCall, "_poll", unwanted),
            mock.patch.object(server_call, "_CANCEL_WAIT_S", 0.02),
        ):
            self.hands.do(*found)

    def push(self, job_id: str) -> None:
        """Let the job's worker fall silent and its server run the job and push the end."""
        self.abandon(job_id)
        request = Request(f"{self.url}/{SYNC}", b'{"do": "ok"}', {"X-Job-Id": job_id})
        with urlopen(request, timeout=10) as answer:
            body = answer.read()
        job = self.dispatcher.store.get(job_id)
        assert job is not None
        outcome = server_push.read_push(job, body)
        assert outcome is not None
        server_push.apply_push(job, outcome)

    def forget(self, hook: str) -> None:
        """Let a worker fall silent and check its server before the lease expires, even on a busy machine."""
        for n in count():
            self.abandon(job_id := self.submit(f"forgotten{n}", {"do": "ok"}, callback_url=hook))
            _pause(_SILENT_S)
            maintenance.check_servers()
            job = self.dispatcher.store.get(job_id)
            if job is not None and job.error_code == "server_lost":
                return
            self.recover()

    def _come_to(self, job_id: str) -> tuple[dict[str, Any], Any]:
        """Process all messages before the job's wake-up, and return the wake-up.  Raises TimeoutError."""
        end = time.monotonic() + _QUIET_WITHIN_S
        while (found := self.hands.next()) is None or found[0]["id"] != job_id:
            if time.monotonic() > end:
                job = self.dispatcher.store.get(job_id)
                raise TimeoutError(f"no wake-up came for {job_id}, which is {job and job.state}")
            if found is not None:
                self.hands.do(*found)
            else:
                self._say_room()
                maintenance.sweep()
                _pause()
        return found

    def _say_room(self) -> None:
        services.workers().report(this_worker().owner, this_worker().concurrency.free_places)

    def recover(self) -> None:
        """Work, and keep everything in order, until nothing is left to do."""
        end = time.monotonic() + _QUIET_WITHIN_S
        self.ask_again()
        self._resume_batches()
        while True:
            this_worker().poller.poll_once()
            self.hands.work()
            for task in (maintenance.drive_batches, maintenance.keep_time):
                task()
            maintenance.keep_credits()
            for task in (maintenance.reap_dead_workers, maintenance.reap):
                task()
            maintenance.reconcile_all()
            maintenance.sweep()
            quarantined_slots.sync_leases(self.dispatcher)
            if quarantined_slots.servers_to_ask(self.dispatcher):
                maintenance.check_urgent_servers()
            self._send_webhooks()
            self._relay_events()
            services.result_notifier().notify_overdue()
            self.hands.work()
            self._revive()
            if self._is_quiet():
                return
            if time.monotonic() > end:
                raise TimeoutError("it never became quiet")
            _pause()

    # -- the story -------------------------------------------------------------------------------------------

    def story(self) -> None:
        hook = f"{self.url}/hook"
        self.submit("first", {"do": "ok"}, callback_url=hook)
        self.submit("second", {"do": "ok"})
        self.submit("overdue", {"do": "ok"}, ttl_s=0.02, callback_url=hook)
        _pause(0.03)
        maintenance.keep_time()
        self.submit("wrong", {"do": "error", "times": 1}, callback_url=hook)
        self.submit("busy", {"do": "busy", "times": 1})
        self.submit("bad", {"do": "invalid"}, callback_url=hook)
        self.submit("polled", {"do": "ok"}, ASYNC, callback_url=hook)
        self.submit("later", {"do": "ok"}, delay_s=0.05)
        self.submit("task", {"do": "ok"}, by_task=True, next=f"{self.name}-next")
        self.submit("stubborn", {"do": "error", "times": 2}, callback_url=hook)
        self._cancel(self.submit("unwanted", {"do": "ok"}, callback_url=hook))
        self.recover()
        self.hand_back(self.submit("handed", {"do": "ok"}, ASYNC, callback_url=hook))
        self.push(self.submit("pushed", {"do": "ok"}, callback_url=hook))
        self.linger(hook)
        self.batch()
        self.submit("beside", {"do": "ok"}, ASYNC)
        self.submit("behind", {"do": "ok"}, ASYNC)
        self.recover()
        self.abandon(unwanted := self.submit("regretted", {"do": "ok"}, callback_url=hook))
        self._cancel(unwanted)
        self.forget(hook)
        self.recover()
        self.abandon(self.submit("orphan", {"do": "ok"}, callback_url=hook))
        self.submit("offered", {"do": "ok"})
        self.submit("waiting", {"do": "ok"})
        self._lose_from_room(self.submit("lost", {"do": "ok"}, priority=9))
        maintenance.reconcile_all()
        self._empty_redis()
        maintenance.sweep()
        self._leave_something_old()
        maintenance.scan_dlq()
        self.recover()

    def _send_webhooks(self) -> None:
        end = time.monotonic() + _QUIET_WITHIN_S
        self.deliveries.run_once()
        while self.deliveries.running:
            if time.monotonic() > end:
                raise TimeoutError("webhooks were still being sent")
            _pause()

    def _relay_events(self) -> None:
        for one in self.relays:
            one.relay_batch()

    def _cancel(self, job_id: str) -> None:
        with suppress(Conflict):
            self.dispatcher.cancel(job_id)

    def _lose_from_room(self, job_id: str) -> None:
        waiting = [job for job in self.dispatcher.store.list_queued([SYNC]) if job.id == job_id]
        self.dispatcher.queues.withdraw(SYNC, waiting)

    def _empty_redis(self) -> None:
        with self.dispatcher.store.database.read() as connection:
            last_event = connection.exec_driver_sql("SELECT max(id) FROM events").scalar()
        self._note("emptied", {"last_event": last_event})
        services.scripts().redis.flushdb()

    def _leave_something_old(self) -> None:
        """Store a job that ended before the retention time began."""
        store, then = self.dispatcher.store, now_ms() - _LONG_AGO_MS
        store.submit([NewJob(id=f"{self.name}-old", model=SYNC, payload="{}")], then)
        store.cancel_waiting(f"{self.name}-old", then)

    # -- the rest --------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Register the server and its models, and open the queue, in the first life."""
        while not (self.home / "asked").exists():
            with suppress(DatabaseUnavailable):  # Many lives begin at once: there may be no time left to connect.
                self._register_all()
                return

    def _register_all(self) -> None:
        if not self.dispatcher.catalog.get().servers:
            for model in (SYNC, ASYNC):
                services.catalog().register(model, SERVER, f"{self.url}/{model}", SLOTS, now_ms())
            services.catalog().configure(SYNC, _CONFIG, now_ms())
            services.catalog().configure(ASYNC, _CONFIG | {"model_type": "async"}, now_ms())
        self._open_account()
        self._add_receiver()
        rebuild.refresh_fleet(self.dispatcher, SYNC)

    def _open_account(self) -> None:
        """Set a price for all jobs; the grant pays for all of them."""
        tenant, accounts = LOCAL_IDENTITY.tenant.name, services.credit_accounts()
        set_prices(services.database(), [Price(None, "", 1_000_000, 10)], now_ms())
        accounts.open(tenant, 0, None, now_ms())
        accounts.act(tenant, Act("grant", GRANTED, "for all lives", "first"), now_ms())

    def _add_receiver(self) -> None:
        """Add a webhook of the tenant that receives all events."""
        all_of_them = Subscriptions(services.database())
        if not all_of_them.list_of_tenant():
            id_ = new_id()
            types, (_, sealed) = frozenset(EVENT_TYPES.values()), vault.new_signing_secret(id_)
            all_of_them.add(Subscription(id_, "default", f"{self.url}/events", types, sealed, now_ms()), 1)

    def _ask(self, wish: dict[str, Any]) -> None:
        if wish.get("by_task"):
            following = infer.si(wish["model"], wish["payload"]).set(task_id=wish["next"])
            infer.apply_async((wish["model"], wish["payload"]), task_id=wish["id"], chain=[following])
        else:
            self.dispatcher.submit([a_submission(**wish)], LOCAL_IDENTITY)
        self._note("told", {"id": wish["id"]})

    def _note(self, file: str, line: dict[str, Any]) -> None:
        with (self.home / file).open("a") as out:
            out.write(json.dumps(line) + "\n")

    def _revive(self) -> None:
        for job in job_list.find_jobs(self.dispatcher.store.database, state=State.DEAD):
            self.dispatcher.revive(job.id)

    def _is_quiet(self) -> bool:
        by_state = ledger.read(self.dispatcher.store.database).by_state
        queue = self.dispatcher.fleets.counts([SYNC])[SYNC]
        if (
            any(by_state[state] for state in ACTIVE_STATES)
            or services.batches().list_unfinished()
            or queue.taken
            or queue.waiting
            or self.dispatcher.leases.list_all([SYNC])[SYNC]
        ):
            return False
        with self.dispatcher.store.database.read() as connection:
            if connection.exec_driver_sql("SELECT count(*) FROM messages WHERE state = 'pending'").scalar():
                return False
            if count_unread_events(services.database()):
                return False
            return not connection.exec_driver_sql("SELECT count(*) FROM result_notifications").scalar()

    def report(self) -> None:
        queue = self.dispatcher.fleets.counts([SYNC])[SYNC]
        found = {
            "open": queue.is_open,
            "slots": queue.free + queue.cooling,
            "taken": queue.taken,
            "waiting": queue.waiting,
            "leases": len(self.dispatcher.leases.list_all([SYNC])[SYNC]),
            "findings": sorted(
                f"{violation.check} {violation.subject}" for violation in passes.find_violations(self.dispatcher, {})
            ),
            "passed": {point: _COUNTS_ONLY - left for point, left in crash_points._left.items() if left < _COUNTS_ONLY},
        }
        (self.home / f"report-{self.name}.json").write_text(json.dumps(found))


def live(step: str) -> None:
    """One life, by the settings of the environment.  `story`: first what others have left, then its own jobs."""
    crash_points._left.clear()
    home = Path(os.environ["SLOTKEEPER_HOME"])
    hooks._FIND_PERIOD_S = 0.0
    message_delivery._FIRST_RETRY_MS = 100
    notifications.NOTIFY_AFTER_MS = 50
    results.ResultNotifier.put = lambda self, notification: self.notify([notification])  # type: ignore[method-assign]  # one pair of hands
    server_report.MIN_AGE_MS = 0
    run_health._REPORT_DELAY_S = 0.0
    life = Life(os.environ["LIFE_NAME"], home, os.environ["LIFE_SERVER"])
    # From here on it may die, and every passing is counted.
    crash_points._left.update(dict.fromkeys(crash_points.POINTS, _COUNTS_ONLY))
    crash_points._left.update(crash_points._read(os.environ.get("SLOTKEEPER_CRASH_AT", "")))
    life.recover()
    if step == "story":
        life.story()
    life.report()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def nursery() -> None:
    """For each line `{"step", "env"}` fork a life, and say how it ended: 0, or the negative of a signal."""
    trusted = sender._tls()  # Nothing in a life speaks TLS, but each would read all authorities.
    sender._tls = lambda: trusted
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _be_born(order["step"], order["env"])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


def _be_born(step: str, env: dict[str, str]) -> None:
    code = 1
    try:
        os.environ.update(env)
        log = os.open(Path(env["SLOTKEEPER_HOME"]) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.alarm(200)
        live(step)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _pause(seconds: float = _TICK_S) -> None:
    """Leases, delays and deadlines are real time here."""
    threading.Event().wait(seconds)


if __name__ == "__main__":
    if sys.argv[1:] == ["nursery"]:
        nursery()
    else:
        live(sys.argv[1])
        os._exit(0)
