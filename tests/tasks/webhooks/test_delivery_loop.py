"""Webhooks under way: receivers that never answer, a database that is away, rows that nobody can send."""

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
from tasks.webhooks import delivery_loop
from tasks.webhooks import message_delivery as source
from tasks.webhooks.delivery_loop import DeliveryLoop
from tasks.webhooks.delivery_queue import host_of_url
from tasks.webhooks.message_delivery import MessageDelivery
from tasks.webhooks.sender import SendResult
from tools.cluster.stack import eventually

_CLAIM_MS, _KEEP_S = 20_000, 86_400.0


class Receivers:
    """The outside: hosts whose name begins with "silent" answer only when the test lets them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.let_go = threading.Event()

    def send(self, receiver: Subscription, message: Message, body: bytes, trace: str | None) -> SendResult:
        host = host_of_url(receiver.url)
        self.asked.append(host)
        if host.startswith("broken"):
            raise ZeroDivisionError("this test's sender")
        if host.startswith("silent"):
            self.let_go.wait(60)
            return SendResult(False, None, "no answer", permanent=False)
        if host.startswith("refusing"):
            return SendResult(False, 404, "it answered 404", permanent=False)
        self.told.append((host, message.job_id))
        return SendResult(True, 200, "", permanent=False)


@pytest.fixture
def receivers() -> Iterator[Receivers]:
    found = Receivers()
    yield found
    found.let_go.set()


@pytest.fixture
def deliveries(database: Database, receivers: Receivers, monkeypatch) -> Iterator[DeliveryLoop]:
    monkeypatch.setattr(delivery_loop, "_FIND_PERIOD_S", 0.0)
    found = _deliveries(database, receivers)
    yield found
    receivers.let_go.set()
    eventually(lambda: not found.running, "every try ends")


def _deliveries(database: Database, receivers: Receivers) -> DeliveryLoop:
    return DeliveryLoop(database, MessageDelivery(database, receivers.send, _CLAIM_MS, _KEEP_S))


def _owe(store: JobStore, host: str, name: str, tenant: str = "default") -> str:
    now = now_ms() - 1000
    store.submit([NewJob(id=name, model="zimg", payload="{}", tenant=tenant, callback_url=f"https://{host}/hook")], now)
    store.cancel_waiting(name, now)
    return name


def _until_quiet(deliveries: DeliveryLoop) -> None:
    def is_quiet() -> bool:
        return not deliveries.run_once() and not deliveries.running

    eventually(is_quiet, "nothing is under way")


def test_silent_receivers_do_not_delay_those_that_answer(deliveries, store, receivers) -> None:
    for n in range(100):
        _owe(store, f"silent{n}", f"s{n}")
    deliveries.run_once()
    assert deliveries.running == 100
    for n in range(20):
        _owe(store, "good", f"g{n}")

    def all_told() -> bool:
        deliveries.run_once()
        return len(receivers.told) == 20

    eventually(all_told, "the one that answers has all of its messages")
    assert deliveries.running >= 100, "the silent ones are still being waited for"


def test_one_receivers_pile_does_not_hide_what_is_owed_to_another(deliveries, store, receivers, monkeypatch) -> None:
    monkeypatch.setattr(source, "_PAGE", 10)
    monkeypatch.setattr(delivery_loop, "_MAX_FIND_SHARE", 1e9)
    monkeypatch.setattr(source, "_NEWEST", 5)
    for n in range(50):
        _owe(store, "silent", f"s{n}")
        if n == 30:
            _owe(store, "good", "inside")

    def is_told() -> bool:
        deliveries.run_once()
        return receivers.told == [("good", "inside")]

    eventually(is_told, "it is found inside the pile")
    eventually(lambda: deliveries.running == 1, "of the pile one is being tried")


def test_what_has_become_due_just_now_does_not_wait_until_a_pile_has_been_read(
    deliveries, store, receivers, monkeypatch
) -> None:
    monkeypatch.setattr(source, "_PAGE", 10)
    monkeypatch.setattr(delivery_loop, "_FIND_PERIOD_S", 60.0)
    monkeypatch.setattr(delivery_loop, "_MAX_FIND_SHARE", 1e-9)
    for n in range(50):
        _owe(store, "silent", f"s{n}")
    _owe(store, "good", "last")
    deliveries.run_once()
    eventually(lambda: receivers.told == [("good", "last")], "the first look has found it")


def test_a_silent_receiver_of_one_tenant_is_tried_once_at_a_time(deliveries, store) -> None:
    for n in range(5):
        _owe(store, "silent", f"s{n}", tenant=f"t{n}")
    for _ in range(3):
        deliveries.run_once()
    assert deliveries.running == 1


def test_a_host_that_refuses_one_job_is_sent_the_others_beside_each_other(deliveries, store, receivers) -> None:
    _owe(store, "refusing", "first")
    _until_quiet(deliveries)
    for n in range(3):
        _owe(store, "refusing", f"r{n}")
    deliveries.run_once()
    eventually(lambda: len(receivers.asked) == 4, "all are asked in one turn")


def test_receivers_take_turns(deliveries, store, receivers) -> None:
    for n in range(3):
        _owe(store, "silent-a", f"a{n}")
    for host in ("silent-b", "silent-c"):
        _owe(store, host, f"{host}0")
    deliveries.run_once()
    eventually(lambda: sorted(receivers.asked) == ["silent-a", "silent-b", "silent-c"], "each is asked once")


def test_a_message_that_cannot_be_sent_ends_nothing_and_is_tried_again(database, deliveries, store, receivers) -> None:
    _owe(store, "broken", "bad")
    _owe(store, "good", "well")
    _until_quiet(deliveries)
    assert receivers.told == [("good", "well")]
    with database.read() as connection:
        (left,) = connection.execute(rows.select()).all()
    said = "It could not be sent: ZeroDivisionError."
    assert (left.job_id, left.state, left.tries, left.last_error) == ("bad", "pending", 1, said)
    assert [it.outcome for it in Redelivery(database).list_attempts("well")] == ["delivered"]


def test_two_processes_tell_each_client_once(database, store, receivers, deliveries) -> None:
    other = _deliveries(database, receivers)
    names = [_owe(store, f"good{n % 3}", f"g{n}") for n in range(30)]

    def all_told() -> bool:
        threads = [threading.Thread(target=one.run_once) for one in (deliveries, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(receivers.told) >= 30 and not other.running

    eventually(all_told, "all are told")
    assert sorted(job for _, job in receivers.told) == sorted(names)


def test_a_claim_that_fails_gives_its_berths_back(deliveries, store, receivers, monkeypatch) -> None:
    _owe(store, "good", "g")

    def refuse(*_: Any) -> list[Message]:
        raise DatabaseUnavailable("the database is away")

    with monkeypatch.context() as away:
        away.setattr(MessageQueue, "claim", refuse)
        with pytest.raises(DatabaseUnavailable):
            deliveries.run_once()
        assert deliveries.running == 0
    _until_quiet(deliveries)
    assert receivers.told == [("good", "g")]


def test_the_process_ends_when_told_to_and_survives_a_database_that_is_away(
    deliveries, store, receivers, monkeypatch
) -> None:
    monkeypatch.setattr(delivery_loop, "_RETRY_S", 0.01)
    looks = iter([DatabaseUnavailable("away"), ZeroDivisionError("a bug")])
    look = MessageQueue.list_due_callbacks

    def shaky(self: MessageQueue, *args: Any) -> Any:
        if (error := next(looks, None)) is not None:
            raise error
        return look(self, *args)

    monkeypatch.setattr(MessageQueue, "list_due_callbacks", shaky)
    _owe(store, "good", "g")
    thread = threading.Thread(target=deliveries.run)
    thread.start()
    eventually(lambda: receivers.told, "it goes on")
    deliveries.stop()
    thread.join(10)
    assert not thread.is_alive()


@contextmanager
def _resting(deliveries: DeliveryLoop, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While it runs, nothing is owed, and it would look again in an hour."""
    monkeypatch.setattr(delivery_loop, "_IDLE_FIND_PERIOD_S", 3600.0)
    thread = threading.Thread(target=deliveries.run)
    thread.start()
    try:
        eventually(lambda: deliveries._find_at > time.monotonic() + 60, "it rests")
        yield
    finally:
        deliveries.stop()
        thread.join(10)
        assert not thread.is_alive()


def test_what_comes_to_be_owed_while_nothing_was_is_sent(deliveries, store, receivers, monkeypatch) -> None:
    with _resting(deliveries, monkeypatch):
        _owe(store, "good", "g")
        eventually(lambda: receivers.told, "it is sent")


def test_what_is_due_later_is_sent_though_nobody_writes_to_the_record(
    deliveries, store, receivers, monkeypatch
) -> None:
    monkeypatch.setattr(source, "_FIRST_RETRY_MS", 500)
    with _resting(deliveries, monkeypatch):
        _owe(store, "broken", "b")
        eventually(lambda: len(receivers.asked) == 2, "it is tried once more")
