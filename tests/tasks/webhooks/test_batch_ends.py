"""The end of a batch: one message for its `callback_url`, and one for each webhook that subscribes to it."""

import json
from typing import Any

import pytest

from slotkeeper.clock import now_ms
from slotkeeper.db import Database
from slotkeeper.jobs.batch_ids import new_batch_id
from slotkeeper.jobs.batches import ENDED_TYPE, Batch, Batches, BatchState
from slotkeeper.outbox.redelivery import Redelivery
from slotkeeper.outbox.subscriptions import Subscription, Subscriptions, new_id
from slotkeeper.outbox.webhook_messages import Message
from tasks.webhooks.message_delivery import MessageDelivery
from tasks.webhooks.sender import SendResult

HOOK, CALLBACK = "https://hooks.example.com/all", "https://callbacks.example.com/one"


class Sent:
    """What was sent: (URL, webhook-id, body).  refuses: the receivers answer 410."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, Any]] = []
        self.refuses = False

    def send(self, receiver: Subscription, message: Message, body: bytes, trace: str | None) -> SendResult:
        self.messages.append((receiver.url, message.id, json.loads(body)))
        return SendResult(not self.refuses, 410 if self.refuses else 200, "", permanent=self.refuses)


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def delivery(database: Database, sent: Sent) -> MessageDelivery:
    return MessageDelivery(database, sent.send, 20_000, 86_400.0)


def an_ended_batch(database: Database, **fields: Any) -> Batch:
    batches, now = Batches(database), now_ms()
    batch, _ = batches.create(Batch("acme", new_batch_id(), BatchState.OPEN, now, now, **fields), None, "")
    batches.close(batch, now)
    assert batches.end(batch, now)
    assert not batches.end(batch, now), "it ends once"
    return batch


def deliver(delivery: MessageDelivery) -> None:
    while delivery.write_messages():
        pass
    keys = [due.id for due in delivery.find_due(lambda receiver, tenant: True)]
    for message in delivery.claim(keys).values():
        delivery.deliver(message)


def subscribe(database: Database, *types: str, tenant: str = "acme") -> None:
    subscription = Subscription(new_id(), tenant, HOOK, frozenset(types), "sealed", now_ms())
    Subscriptions(database).add(subscription, 10)


def test_the_end_of_a_batch_is_one_message_for_its_callback(
    database: Database, delivery: MessageDelivery, sent: Sent
) -> None:
    batch = an_ended_batch(database, callback_url=CALLBACK, name="night")
    for _ in range(2):
        deliver(delivery)
    about = {"batch": batch.id, "name": "night", "status": "ended", "by_state": {}, "lines": 0, "refused": 0}
    assert sent.messages == [(CALLBACK, f"msg_{batch.id}_0_completed", about | {"canceled": False})]


def test_a_webhook_for_ended_batches_gets_only_the_batches_of_its_tenant(
    database: Database, delivery: MessageDelivery, sent: Sent
) -> None:
    subscribe(database, ENDED_TYPE)
    subscribe(database, "job.completed")
    subscribe(database, ENDED_TYPE, tenant="other")
    batch = an_ended_batch(database, name="night")
    deliver(delivery)
    ((url, _, body),) = sent.messages
    assert (url, body["type"], body["data"]["batch"], body["data"]["name"]) == (HOOK, ENDED_TYPE, batch.id, "night")


def test_a_given_up_callback_of_a_batch_is_listed_and_sent_again(
    database: Database, delivery: MessageDelivery, sent: Sent
) -> None:
    batch = an_ended_batch(database, callback_url=CALLBACK)
    sent.refuses = True
    deliver(delivery)
    (given_up,) = Redelivery(database).list_given_up_callbacks("acme")
    assert (given_up.status, given_up.model, given_up.url, given_up.tenant) == ("ended", None, CALLBACK, "acme")
    assert Redelivery(database).list_given_up_callbacks("other") == []
    assert not Redelivery(database).retry_callback(given_up.message.id, "other", now_ms())
    sent.refuses = False
    assert Redelivery(database).retry_callback(given_up.message.id, "acme", now_ms())
    deliver(delivery)
    assert [webhook for _, webhook, _ in sent.messages] == [f"msg_{batch.id}_0_completed"] * 2


def test_a_batch_stays_until_its_message_is_sent(database: Database, delivery: MessageDelivery) -> None:
    batch, batches = an_ended_batch(database, callback_url=CALLBACK), Batches(database)
    later = now_ms() + 1000
    assert batches.delete_old(later) == 0
    deliver(delivery)
    assert batches.delete_old(later) == 1
    assert batches.get("acme", batch.id) is None
