"""Delivery to tenants' webhooks: receivers that are dead, refuse or raise errors, and tenants with many of them."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import insert, select

from slotkeeper.clock import now_ms
from slotkeeper.db import Database, Transaction
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import events
from slotkeeper.jobs.tables import messages as rows
from slotkeeper.jobs.values import NewJob
from slotkeeper.outbox.redelivery import Redelivery
from slotkeeper.outbox.subscriptions import FAILURES_TO_OPEN, Subscription, Subscriptions, new_id
from slotkeeper.outbox.tables import receivers as table
from slotkeeper.outbox.webhook_messages import Message
from slotkeeper.trace_context import make_span_id
from tasks.webhooks import delivery_loop, message_delivery
from tasks.webhooks.delivery_loop import DeliveryLoop
from tasks.webhooks.delivery_queue import MAX_IN_GROUP, LimitGroup
from tasks.webhooks.message_delivery import MessageDelivery
from tasks.webhooks.sender import SendResult
from tests.support.clock import set_clock
from tools.cluster.stack import eventually

_CLAIM_MS = 20_000
_KEEP_S = 3 * 86_400.0
_DEAD_COUNT = 1000
_MOST_UNPROVEN = MAX_IN_GROUP[LimitGroup.UNPROVEN] // 2  # concurrent deliveries of one tenant to unproven receivers


class FakeReceivers:
    """Sends to receivers whose URLs determine how they respond.

    "silent…" does not respond until `released` is set, "refusing…" responds 500, "broken…" raises an error, and any
    other receiver accepts the message.
    """

    def __init__(self) -> None:
        self.requested: list[str] = []  # names of receivers
        self.delivered: list[tuple[str, str, float]] = []  # name of the receiver, job id, monotonic time
        self.traces: list[str | None] = []  # of `delivered`
        self.released = threading.Event()

    def send(self, receiver: Subscription, message: Message, body: bytes, trace: str | None) -> SendResult:
        name = receiver.url.partition("//")[2]
        self.requested.append(name)
        if name.startswith("broken"):
            raise ZeroDivisionError("this test's sender")
        if name.startswith("refusing"):
            return SendResult(False, 500, "500", permanent=False)
        if name.startswith("silent"):
            self.released.wait(60)
            return SendResult(False, None, "no answer", permanent=False)
        self.delivered.append((name, message.job_id, time.monotonic()))
        self.traces.append(trace)
        return SendResult(True, 200, "", permanent=False)


@pytest.fixture
def receivers() -> Iterator[FakeReceivers]:
    receivers = FakeReceivers()
    yield receivers
    receivers.released.set()


@pytest.fixture
def deliveries(database: Database, receivers: FakeReceivers, monkeypatch) -> Iterator[DeliveryLoop]:
    monkeypatch.setattr(delivery_loop, "_FIND_PERIOD_S", 0.0)
    loop = _make_loop(database, receivers)
    yield loop
    receivers.released.set()
    eventually(lambda: not loop.running, "every delivery ends")


def _make_loop(database: Database, receivers: FakeReceivers) -> DeliveryLoop:
    return DeliveryLoop(database, MessageDelivery(database, receivers.send, _CLAIM_MS, _KEEP_S))


def _add(database: Database, name: str, tenant: str = "default", max_per_s: float | None = None) -> Subscription:
    """Add a webhook for canceled jobs, whose URL is https://name."""
    types = frozenset({"job.canceled"})
    new = Subscription(new_id(), tenant, f"https://{name}", types, "sealed", now_ms(), max_per_s=max_per_s)
    return Subscriptions(database).add(new, 100_000)


def _end(store: JobStore, name: str, tenant: str = "default") -> str:
    """Submit a job with this id and cancel it.  Returns the id."""
    now = now_ms() - 1000
    store.submit([NewJob(id=name, model="zimg", payload="{}", tenant=tenant)], now)
    store.cancel_waiting(name, now)
    return name


def _run_until(deliveries: DeliveryLoop, condition: Any, what: str) -> None:
    def run_and_check() -> bool:
        deliveries.run_once()
        return bool(condition())

    eventually(run_and_check, what)


def _add_dead_webhooks(database: Database, store: JobStore, tenant: str) -> None:
    """Add webhooks that never respond, each with one due message.

    Their ids sort before those of other webhooks, and they are subscribed to no further events.
    """
    job = _end(store, "dead", tenant)
    end_event = select(events.c.id).where(events.c.job_id == job, events.c.type == "job.canceled")
    with database.read() as connection:
        event, now = connection.execute(end_event).scalar(), now_ms()
    ids = [f"we_{n:032x}" for n in range(_DEAD_COUNT)]
    webhook = {"tenant": tenant, "url": "https://silent", "types": "[]", "sealed": "sealed", "created_ms": now}
    message = {"event": event, "job_id": job, "type": "job.canceled", "at_ms": now, "next_ms": now, "owed_ms": now}

    def unit(tx: Transaction) -> None:
        tx.connection.execute(insert(table), [{"id": id_, **webhook, "after_event": event} for id_ in ids])
        tx.connection.execute(insert(rows), [{"receiver": id_, **message} for id_ in ids])

    database.write(unit)


def test_a_tenant_with_a_thousand_dead_webhooks_delays_no_other_tenant(
    database, store, receivers, deliveries, monkeypatch
) -> None:
    monkeypatch.setattr(delivery_loop, "_MAX_PAUSE_S", 0.0)  # Each turn polls.
    _add(database, "good", "modest")
    _add_dead_webhooks(database, store, "greedy")
    for n in range(5):
        _end(store, f"job{n}", "modest")
        deliveries.run_once()
        eventually(lambda n=n: len(receivers.delivered) == n + 1, "one turn delivers to the working receiver")
    _run_until(deliveries, lambda: deliveries.running >= _MOST_UNPROVEN, "the deliveries to dead receivers run")


def test_a_thousand_dead_webhooks_do_not_delay_a_working_one_of_the_same_tenant(
    database, store, receivers, deliveries, monkeypatch
) -> None:
    monkeypatch.setattr(delivery_loop, "_MAX_PAUSE_S", 0.0)
    _add(database, "good", "greedy")
    _end(store, "first", "greedy")
    _run_until(deliveries, lambda: receivers.delivered and not deliveries.running, "the working receiver has a success")
    _add_dead_webhooks(database, store, "greedy")
    _run_until(deliveries, lambda: deliveries.running >= _MOST_UNPROVEN, "the limit of unproven receivers is reached")
    _end(store, "second", "greedy")
    _run_until(deliveries, lambda: len(receivers.delivered) == 3, "the working receiver has all three messages")


def test_a_slow_fan_out_of_events_delays_no_pending_message(database, receivers, deliveries, monkeypatch) -> None:
    receiver = _add(database, "good")
    started, may_end = threading.Event(), threading.Event()

    def step(*_: object) -> int:
        started.set()
        may_end.wait(60)
        return 0

    monkeypatch.setattr(message_delivery.EventFanOut, "step", step)
    thread = threading.Thread(target=deliveries.run)
    thread.start()
    try:
        assert started.wait(60)
        Redelivery(database).send_test(receiver, now_ms())
        eventually(lambda: receivers.delivered, "the message is delivered during the fan-out")
    finally:
        may_end.set()
        deliveries.stop()
        thread.join()


def test_a_dead_webhook_does_not_delay_another_of_the_same_tenant(database, store, receivers, deliveries) -> None:
    for name in ("silent", "good", "refusing"):
        _add(database, name)
    for n in range(20):
        _end(store, f"job{n}")
    _run_until(deliveries, lambda: len(receivers.delivered) == 20, "the working receiver has all messages")
    assert receivers.requested.count("silent") == 1, "an unproven receiver has one delivery at a time"


def test_an_open_breaker_stops_requests_to_a_webhook_that_refuses(database, store, receivers, deliveries) -> None:
    receiver = _add(database, "refusing")
    for n in range(50):
        _end(store, f"job{n}")
    _run_until(deliveries, lambda: Subscriptions(database).get(receiver.id).breaker_is_open, "the breaker opens")
    for _ in range(20):
        deliveries.run_once()
    eventually(lambda: not deliveries.running, "the deliveries end")
    assert len(receivers.requested) <= FAILURES_TO_OPEN + 1


def test_a_message_whose_delivery_raises_an_error_is_logged_and_retried(database, store, receivers, deliveries) -> None:
    broken, _ = _add(database, "broken"), _add(database, "good")
    job = _end(store, "job")
    _run_until(deliveries, lambda: receivers.delivered, "the other receiver has its message")
    eventually(lambda: Redelivery(database).list_attempts(broken.id), "the attempt is logged")
    (attempt,) = Redelivery(database).list_attempts(broken.id)
    assert (attempt.outcome, attempt.error) == ("failed", "It could not be sent: ZeroDivisionError.")
    with database.read() as connection:
        (row,) = connection.execute(select(rows).where(rows.c.receiver == broken.id)).all()
    assert (row.job_id, row.state, row.tries) == (job, "pending", 1) and row.next_ms > now_ms()


def test_two_processes_send_each_message_once_to_each_webhook(database, store, receivers, deliveries) -> None:
    other = _make_loop(database, receivers)
    for n in range(3):
        _add(database, f"good{n}")
    jobs = [_end(store, f"job{n}") for n in range(20)]

    def all_delivered() -> bool:
        threads = [threading.Thread(target=loop.run_once) for loop in (deliveries, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(receivers.delivered) >= 60 and not other.running

    eventually(all_delivered, "all messages are delivered")
    delivered = [(name, job) for name, job, _ in receivers.delivered]
    assert sorted(delivered) == sorted((f"good{n}", job) for n in range(3) for job in jobs)


def test_a_message_is_not_sent_before_its_send_time(database, store, receivers, monkeypatch) -> None:
    now, sleeps = now_ms(), list[tuple[float, int]]()  # seconds, and how many messages were delivered before
    set_clock(monkeypatch, lambda: now)
    monkeypatch.setattr(message_delivery.time, "sleep", lambda s: sleeps.append((s, len(receivers.delivered))))
    _add(database, "good", max_per_s=2)
    for n in range(3):
        _end(store, f"job{n}")
    delivery = MessageDelivery(database, receivers.send, _CLAIM_MS, _KEEP_S)
    assert delivery.write_messages()
    for message in delivery.claim([due.id for due in delivery.find_due(lambda *_: True)]).values():
        delivery.deliver(message)
    assert sleeps == [(0.5, 1)] and len(receivers.delivered) == 2


def test_two_processes_share_the_rate_limit_of_a_webhook_and_delay_no_other_webhook(
    database, store, receivers, deliveries
) -> None:
    other = _make_loop(database, receivers)
    for name, max_per_s in (("slow", 10), ("good", None)):
        _add(database, name, max_per_s=max_per_s)
    began_s = time.monotonic()
    for n in range(12):
        _end(store, f"job{n}")

    def all_delivered() -> bool:
        other.run_once()
        return len(receivers.delivered) == 24 and not other.running

    _run_until(deliveries, all_delivered, "all messages are delivered")
    times_s: dict[str, list[float]] = {"slow": [], "good": []}
    for name, _, at_s in receivers.delivered:
        times_s[name].append(at_s - began_s)
    assert all(at_s >= 0.1 * n - 0.01 for n, at_s in enumerate(sorted(times_s["slow"]))), "10 messages a second at most"
    assert max(times_s["good"]) < max(times_s["slow"])


def test_an_error_of_the_fan_out_delays_no_pending_message(database, store, receivers, deliveries, monkeypatch) -> None:
    receiver = _add(database, "good")
    Redelivery(database).send_test(receiver, now_ms())
    monkeypatch.setattr(message_delivery.EventFanOut, "step", lambda *_: 1 / 0)
    _run_until(deliveries, lambda: receivers.delivered, "the pending message is delivered")


def test_a_webhook_removed_during_a_delivery_receives_nothing_more(database, store, receivers, deliveries) -> None:
    receiver = _add(database, "silent")
    _end(store, "job")
    _run_until(deliveries, lambda: receivers.requested, "the delivery has started")
    Subscriptions(database).remove(receiver.id, None)
    receivers.released.set()
    eventually(lambda: not deliveries.running, "the delivery ends")
    assert deliveries.run_once() == 0 and Redelivery(database).list_attempts(receiver.id) == []


def test_a_webhook_receives_the_trace_of_the_messages_job(database, store, receivers, deliveries) -> None:
    given = f"00-{'a' * 32}-{'b' * 16}-01"
    _add(database, "good")
    for name, traceparent in (("traced", given), ("untraced", None)):
        store.submit([NewJob(id=name, model="zimg", payload="{}", traceparent=traceparent)], now_ms())
        store.cancel_waiting(name, now_ms())
    _run_until(deliveries, lambda: len(receivers.delivered) == 2, "both messages are delivered")
    traces = {job: trace for (_, job, _), trace in zip(receivers.delivered, receivers.traces, strict=True)}
    assert traces == {"traced": f"00-{'a' * 32}-{make_span_id('traced', 'job')}-01", "untraced": None}
