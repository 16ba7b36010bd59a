"""Tenants' webhooks under way: receivers that are dead, refuse, or break; tenants with very many of them."""

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
from tasks.webhooks import delivery_loop
from tasks.webhooks import message_delivery as source
from tasks.webhooks.delivery_loop import DeliveryLoop
from tasks.webhooks.delivery_queue import MAX_IN_GROUP, LimitGroup
from tasks.webhooks.message_delivery import MessageDelivery
from tasks.webhooks.sender import SendResult
from tests.support.clock import set_clock
from tools.cluster.stack import eventually

_CLAIM_MS = 20_000
_KEEP_S = 3 * 86_400.0
_VERY_MANY = 1000
_MOST_OF_ONE = MAX_IN_GROUP[LimitGroup.UNPROVEN] // 2  # tries of one tenant's receivers that have not answered


class Outside:
    """Receivers at addresses that begin with "silent" answer only when the test lets them, "broken" never."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.told: list[tuple[str, str, float]] = []
        self.traces: list[str | None] = []
        self.let_go = threading.Event()

    def send(self, receiver: Subscription, message: Message, body: bytes, trace: str | None) -> SendResult:
        name = receiver.url.partition("//")[2]
        self.asked.append(name)
        if name.startswith("broken"):
            raise ZeroDivisionError("this test's sender")
        if name.startswith("refusing"):
            return SendResult(False, 500, "it answered 500", permanent=False)
        if name.startswith("silent"):
            self.let_go.wait(60)
            return SendResult(False, None, "no answer", permanent=False)
        self.told.append((name, message.job_id, time.monotonic()))
        self.traces.append(trace)
        return SendResult(True, 200, "", permanent=False)


@pytest.fixture
def outside() -> Iterator[Outside]:
    found = Outside()
    yield found
    found.let_go.set()


@pytest.fixture
def deliveries(database: Database, outside: Outside, monkeypatch) -> Iterator[DeliveryLoop]:
    monkeypatch.setattr(delivery_loop, "_FIND_PERIOD_S", 0.0)
    found = _deliveries(database, outside)
    yield found
    outside.let_go.set()
    eventually(lambda: not found.running, "every try ends")


def _deliveries(database: Database, outside: Outside) -> DeliveryLoop:
    return DeliveryLoop(database, MessageDelivery(database, outside.send, _CLAIM_MS, _KEEP_S))


def _add(database: Database, name: str, tenant: str = "default", max_per_s: float | None = None) -> Subscription:
    wanted = frozenset({"job.canceled"})
    new = Subscription(new_id(), tenant, f"https://{name}", wanted, "sealed", now_ms(), max_per_s=max_per_s)
    return Subscriptions(database).add(new, 100_000)


def _end(store: JobStore, name: str, tenant: str = "default") -> str:
    now = now_ms() - 1000
    store.submit([NewJob(id=name, model="zimg", payload="{}", tenant=tenant)], now)
    store.cancel_waiting(name, now)
    return name


def _until(deliveries: DeliveryLoop, condition: Any, what: str) -> None:
    def turned() -> bool:
        deliveries.run_once()
        return bool(condition())

    eventually(turned, what)


def _owe_very_many(database: Database, store: JobStore, tenant: str) -> None:
    """Messages to receivers that never answer, that are before all others, and want to hear of nothing else."""
    job = _end(store, "dead", tenant)
    its_end = select(events.c.id).where(events.c.job_id == job, events.c.type == "job.canceled")
    with database.read() as connection:
        event, now = connection.execute(its_end).scalar(), now_ms()
    ids = [f"we_{n:032x}" for n in range(_VERY_MANY)]
    same = {"tenant": tenant, "url": "https://silent", "types": "[]", "sealed": "sealed", "created_ms": now}
    owed = {"event": event, "job_id": job, "type": "job.canceled", "at_ms": now, "next_ms": now, "owed_ms": now}

    def unit(tx: Transaction) -> None:
        tx.connection.execute(insert(table), [{"id": id_, **same, "after_event": event} for id_ in ids])
        tx.connection.execute(insert(rows), [{"receiver": id_, **owed} for id_ in ids])

    database.write(unit)


def test_a_tenant_with_very_many_dead_webhooks_delays_no_other_tenants(
    database, store, outside, deliveries, monkeypatch
) -> None:
    monkeypatch.setattr(delivery_loop, "_MAX_PAUSE_S", 0.0)  # Each turn looks.
    _add(database, "good", "modest")
    _owe_very_many(database, store, "greedy")
    for n in range(5):
        _end(store, f"job{n}", "modest")
        deliveries.run_once()
        eventually(lambda n=n: len(outside.told) == n + 1, "the next turn has told the one that answers")
    _until(deliveries, lambda: deliveries.running >= _MOST_OF_ONE, "the dead ones are being tried")


def test_very_many_dead_webhooks_delay_no_other_of_their_tenant_that_has_answered(
    database, store, outside, deliveries, monkeypatch
) -> None:
    monkeypatch.setattr(delivery_loop, "_MAX_PAUSE_S", 0.0)
    _add(database, "good", "greedy")
    _end(store, "first", "greedy")
    _until(deliveries, lambda: outside.told and not deliveries.running, "it has answered")
    _owe_very_many(database, store, "greedy")
    _until(deliveries, lambda: deliveries.running >= _MOST_OF_ONE, "as many are being tried as may be")
    _end(store, "second", "greedy")
    _until(deliveries, lambda: len(outside.told) == 3, "it is told of what came before and after")


def test_what_takes_long_to_write_down_holds_up_nothing_that_is_owed(
    database, outside, deliveries, monkeypatch
) -> None:
    receiver = _add(database, "good")
    gathering, ended = threading.Event(), threading.Event()

    def step(*_: object) -> int:
        gathering.set()
        ended.wait(60)
        return 0

    monkeypatch.setattr(source.EventFanOut, "step", step)
    running = threading.Thread(target=deliveries.run)
    running.start()
    try:
        assert gathering.wait(60)
        Redelivery(database).send_test(receiver, now_ms())
        eventually(lambda: outside.told, "it is told meanwhile")
    finally:
        ended.set()
        deliveries.stop()
        running.join()


def test_one_dead_webhook_delays_no_other_of_its_tenant(database, store, outside, deliveries) -> None:
    for name in ("silent", "good", "refusing"):
        _add(database, name)
    for n in range(20):
        _end(store, f"job{n}")
    _until(deliveries, lambda: len(outside.told) == 20, "the one that answers has all of its messages")
    assert outside.asked.count("silent") == 1, "a receiver that has not answered is tried once at a time"


def test_a_webhook_that_refuses_is_asked_less_and_less(database, store, outside, deliveries) -> None:
    receiver = _add(database, "refusing")
    for n in range(50):
        _end(store, f"job{n}")
    _until(deliveries, lambda: Subscriptions(database).get(receiver.id).breaker_is_open, "its breaker opens")
    for _ in range(20):
        deliveries.run_once()
    eventually(lambda: not deliveries.running, "its tries end")
    assert len(outside.asked) <= FAILURES_TO_OPEN + 1


def test_a_message_that_cannot_be_sent_is_tried_again_and_ends_nothing(database, store, outside, deliveries) -> None:
    broken, _ = _add(database, "broken"), _add(database, "good")
    job = _end(store, "job")
    _until(deliveries, lambda: outside.told, "the other is told")
    eventually(lambda: Redelivery(database).list_attempts(broken.id), "it is noted")
    (entry,) = Redelivery(database).list_attempts(broken.id)
    assert (entry.outcome, entry.error) == ("failed", "It could not be sent: ZeroDivisionError.")
    with database.read() as connection:
        (row,) = connection.execute(select(rows).where(rows.c.receiver == broken.id)).all()
    assert (row.job_id, row.state, row.tries) == (job, "pending", 1) and row.next_ms > now_ms()


def test_two_processes_tell_each_message_once(database, store, outside, deliveries) -> None:
    other = _deliveries(database, outside)
    for n in range(3):
        _add(database, f"good{n}")
    jobs = [_end(store, f"job{n}") for n in range(20)]

    def all_told() -> bool:
        threads = [threading.Thread(target=one.run_once) for one in (deliveries, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(outside.told) >= 60 and not other.running

    eventually(all_told, "all are told")
    told = [(name, job) for name, job, _ in outside.told]
    assert sorted(told) == sorted((f"good{n}", job) for n in range(3) for job in jobs)


def test_a_message_is_sent_when_its_turn_comes(database, store, outside, monkeypatch) -> None:
    now, slept = now_ms(), list[tuple[float, int]]()
    set_clock(monkeypatch, lambda: now)
    monkeypatch.setattr(source.time, "sleep", lambda s: slept.append((s, len(outside.told))))
    _add(database, "good", max_per_s=2)
    for n in range(3):
        _end(store, f"job{n}")
    owed = MessageDelivery(database, outside.send, _CLAIM_MS, _KEEP_S)
    assert owed.write_messages()
    for message in owed.claim([it.id for it in owed.find_due(lambda *_: True)]).values():
        owed.deliver(message)
    assert slept == [(0.5, 1)] and len(outside.told) == 2


def test_two_processes_keep_to_a_receivers_pace_and_others_do_not_wait_for_it(
    database, store, outside, deliveries
) -> None:
    other = _deliveries(database, outside)
    for name, max_per_s in (("slow", 10), ("good", None)):
        _add(database, name, max_per_s=max_per_s)
    began = time.monotonic()
    for n in range(12):
        _end(store, f"job{n}")

    def all_told() -> bool:
        other.run_once()
        return len(outside.told) == 24 and not other.running

    _until(deliveries, all_told, "all are told")
    at_s = {name: [at - began for whose, _, at in outside.told if whose == name] for name in ("slow", "good")}
    assert all(at >= 0.1 * n - 0.01 for n, at in enumerate(sorted(at_s["slow"]))), "whenever it began"
    assert max(at_s["good"]) < max(at_s["slow"])


def test_events_that_cannot_be_read_keep_nothing_from_being_sent(
    database, store, outside, deliveries, monkeypatch
) -> None:
    receiver = _add(database, "good")
    Redelivery(database).send_test(receiver, now_ms())
    monkeypatch.setattr(source.EventFanOut, "step", lambda *_: 1 / 0)
    _until(deliveries, lambda: outside.told, "what is owed is sent")


def test_a_receiver_that_is_removed_while_it_is_told_is_told_no_more(database, store, outside, deliveries) -> None:
    receiver = _add(database, "silent")
    _end(store, "job")
    _until(deliveries, lambda: outside.asked, "it is being told")
    Subscriptions(database).remove(receiver.id, None)
    outside.let_go.set()
    eventually(lambda: not deliveries.running, "its try ends")
    assert deliveries.run_once() == 0 and Redelivery(database).list_attempts(receiver.id) == []


def test_a_receiver_is_told_of_the_trace_of_what_it_is_told_about(database, store, outside, deliveries) -> None:
    given = f"00-{'a' * 32}-{'b' * 16}-01"
    _add(database, "good")
    for name, traceparent in (("traced", given), ("untraced", None)):
        store.submit([NewJob(id=name, model="zimg", payload="{}", traceparent=traceparent)], now_ms())
        store.cancel_waiting(name, now_ms())
    _until(deliveries, lambda: len(outside.told) == 2, "both ends are told")
    traces = {job: trace for (_, job, _), trace in zip(outside.told, outside.traces, strict=True)}
    assert traces == {"traced": f"00-{'a' * 32}-{make_span_id('traced', 'job')}-01", "untraced": None}
