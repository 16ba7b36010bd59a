"""The delivery loop: silent receivers, an unavailable database, and messages that cannot be sent."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slotkeeper.clock import now_ms
from slotkeeper.db import Database
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import messages as rows
from slotkeeper.jobs.values import NewJob
from slotkeeper.outbox.redelivery import Redelivery
from slotkeeper.outbox.subscriptions import Subscription
from slotkeeper.outbox.webhook_messages import Message, MessageQueue
from tasks.webhooks import delivery_loop, message_delivery
from tasks.webhooks.delivery_loop import DeliveryLoop
from tasks.webhooks.delivery_queue import host_of_url
from tasks.webhooks.message_delivery import MessageDelivery
from tasks.webhooks.sender import SendResult
from tools.cluster.stack import eventually

_CLAIM_MS, _KEEP_S = 20_000, 86_400.0


class FakeReceivers:
    """Sends to receivers whose host names determine how they respond.

    "silent…" does not respond until `released` is set, "refusing…" responds 404, "broken…" raises an error, and any
    other host accepts the message.
    """

    def __init__(self) -> None:
        self.requested: list[str] = []  # hosts
        self.delivered: list[tuple[str, str]] = []  # hosts and job ids
        self.released = threading.Event()

    def send(self, receiver: Subscription, message: Message, body: bytes, trace: str | None) -> SendResult:
        host = host_of_url(receiver.url)
        self.requested.append(host)
        if host.startswith("broken"):
            raise ZeroDivisionError("this test's sender")
        if host.startswith("silent"):
            self.released.wait(60)
            return SendResult(False, None, "no answer", permanent=False)
        if host.startswith("refusing"):
            return SendResult(False, 404, "404", permanent=False)
        self.delivered.append((host, message.job_id))
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


def _add_message(store: JobStore, host: str, name: str, tenant: str = "default") -> str:
    """Add a due message: the end of a job, for a `callback_url` on this host.  Returns the job's id."""
    now = now_ms() - 1000
    store.submit([NewJob(id=name, model="zimg", payload="{}", tenant=tenant, callback_url=f"https://{host}/hook")], now)
    store.cancel_waiting(name, now)
    return name


def _run_until_idle(deliveries: DeliveryLoop) -> None:
    def is_idle() -> bool:
        return not deliveries.run_once() and not deliveries.running

    eventually(is_idle, "no message is due or being sent")


def test_silent_receivers_do_not_delay_those_that_answer(deliveries, store, receivers) -> None:
    for n in range(100):
        _add_message(store, f"silent{n}", f"s{n}")
    deliveries.run_once()
    assert deliveries.running == 100
    for n in range(20):
        _add_message(store, "good", f"g{n}")

    def all_delivered() -> bool:
        deliveries.run_once()
        return len(receivers.delivered) == 20

    eventually(all_delivered, "the receiver that responds has all of its messages")
    assert deliveries.running >= 100, "the deliveries to the silent ones have not ended"


def test_a_backlog_of_one_receiver_does_not_delay_messages_to_another(
    deliveries, store, receivers, monkeypatch
) -> None:
    monkeypatch.setattr(message_delivery, "_PAGE", 10)
    monkeypatch.setattr(delivery_loop, "_MAX_FIND_SHARE", 1e9)
    monkeypatch.setattr(message_delivery, "_NEWEST", 5)
    for n in range(50):
        _add_message(store, "silent", f"s{n}")
        if n == 30:
            _add_message(store, "good", "inside")

    def is_delivered() -> bool:
        deliveries.run_once()
        return receivers.delivered == [("good", "inside")]

    eventually(is_delivered, "the message within the backlog is delivered")
    eventually(lambda: deliveries.running == 1, "one message of the backlog is being sent")


def test_a_new_message_does_not_wait_until_a_backlog_has_been_read(deliveries, store, receivers, monkeypatch) -> None:
    monkeypatch.setattr(message_delivery, "_PAGE", 10)
    monkeypatch.setattr(delivery_loop, "_FIND_PERIOD_S", 60.0)
    monkeypatch.setattr(delivery_loop, "_MAX_FIND_SHARE", 1e-9)
    for n in range(50):
        _add_message(store, "silent", f"s{n}")
    _add_message(store, "good", "last")
    deliveries.run_once()
    eventually(lambda: receivers.delivered == [("good", "last")], "the first poll has found the new message")


def test_a_silent_receiver_has_one_delivery_at_a_time_for_all_tenants(deliveries, store) -> None:
    for n in range(5):
        _add_message(store, "silent", f"s{n}", tenant=f"t{n}")
    for _ in range(3):
        deliveries.run_once()
    assert deliveries.running == 1


def test_a_host_that_refuses_one_callback_receives_the_others_concurrently(deliveries, store, receivers) -> None:
    _add_message(store, "refusing", "first")
    _run_until_idle(deliveries)
    for n in range(3):
        _add_message(store, "refusing", f"r{n}")
    deliveries.run_once()
    eventually(lambda: len(receivers.requested) == 4, "one turn has sent all three")


def test_receivers_take_turns(deliveries, store, receivers) -> None:
    for n in range(3):
        _add_message(store, "silent-a", f"a{n}")
    for host in ("silent-b", "silent-c"):
        _add_message(store, host, f"{host}0")
    deliveries.run_once()
    eventually(lambda: sorted(receivers.requested) == ["silent-a", "silent-b", "silent-c"], "each has one request")


def test_a_message_whose_delivery_raises_an_error_is_retried_and_delays_no_other(
    database, deliveries, store, receivers
) -> None:
    _add_message(store, "broken", "bad")
    _add_message(store, "good", "well")
    _run_until_idle(deliveries)
    assert receivers.delivered == [("good", "well")]
    with database.read() as connection:
        (row,) = connection.execute(rows.select()).all()
    error = "It could not be sent: ZeroDivisionError."
    assert (row.job_id, row.state, row.tries, row.last_error) == ("bad", "pending", 1, error)
    assert [attempt.outcome for attempt in Redelivery(database).list_attempts("well")] == ["delivered"]


def test_two_processes_send_each_message_once(database, store, receivers, deliveries) -> None:
    other = _make_loop(database, receivers)
    names = [_add_message(store, f"good{n % 3}", f"g{n}") for n in range(30)]

    def all_delivered() -> bool:
        threads = [threading.Thread(target=loop.run_once) for loop in (deliveries, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(receivers.delivered) >= 30 and not other.running

    eventually(all_delivered, "all messages are delivered")
    assert sorted(job for _, job in receivers.delivered) == sorted(names)


def test_a_failed_claim_releases_its_permits(deliveries, store, receivers, monkeypatch) -> None:
    _add_message(store, "good", "g")

    def refuse(*_: Any) -> list[Message]:
        raise DatabaseUnavailable("this test's database")

    with monkeypatch.context() as patch:
        patch.setattr(MessageQueue, "claim", refuse)
        with pytest.raises(DatabaseUnavailable):
            deliveries.run_once()
        assert deliveries.running == 0
    _run_until_idle(deliveries)
    assert receivers.delivered == [("good", "g")]


def test_the_loop_survives_errors_of_the_database_and_ends_on_stop(deliveries, store, receivers, monkeypatch) -> None:
    monkeypatch.setattr(delivery_loop, "_RETRY_S", 0.01)
    errors = iter([DatabaseUnavailable("this test's database"), ZeroDivisionError("a bug")])
    list_due_callbacks = MessageQueue.list_due_callbacks

    def fail_twice(self: MessageQueue, *args: Any) -> Any:
        if (error := next(errors, None)) is not None:
            raise error
        return list_due_callbacks(self, *args)

    monkeypatch.setattr(MessageQueue, "list_due_callbacks", fail_twice)
    _add_message(store, "good", "g")
    thread = threading.Thread(target=deliveries.run)
    thread.start()
    eventually(lambda: receivers.delivered, "the loop continues after the errors")
    deliveries.stop()
    thread.join(10)
    assert not thread.is_alive()


@contextmanager
def _idle_loop(deliveries: DeliveryLoop, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the loop in a thread; in the block, no message is pending, and the next poll is an hour away."""
    monkeypatch.setattr(delivery_loop, "_IDLE_FIND_PERIOD_S", 3600.0)
    thread = threading.Thread(target=deliveries.run)
    thread.start()
    try:
        eventually(lambda: deliveries._find_at > time.monotonic() + 60, "the loop is idle")
        yield
    finally:
        deliveries.stop()
        thread.join(10)
        assert not thread.is_alive()


def test_an_idle_loop_sends_a_new_message(deliveries, store, receivers, monkeypatch) -> None:
    with _idle_loop(deliveries, monkeypatch):
        _add_message(store, "good", "g")
        eventually(lambda: receivers.delivered, "the message is delivered")


def test_an_idle_loop_retries_a_message_although_nothing_is_committed(
    deliveries, store, receivers, monkeypatch
) -> None:
    monkeypatch.setattr(message_delivery, "_FIRST_RETRY_MS", 500)
    with _idle_loop(deliveries, monkeypatch):
        _add_message(store, "broken", "b")
        eventually(lambda: len(receivers.requested) == 2, "the message is sent a second time")
