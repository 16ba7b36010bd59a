"""The Redis transport of the workers, and the publishing of wake-ups, on a real Valkey."""

import json

import pytest
from celery import Celery
from kombu import Connection, Queue
from redis import Redis

from routing.queue.queues import Offer
from tasks import offer_messages
from tasks.extensions.transport import Transport
from tasks.offer_messages import OFFER_HEADER
from tools.cluster.valkey_process import Valkey


def _connect_with_unacknowledged_message(valkey: Valkey) -> Connection:
    connection = Connection(valkey.url, transport=Transport)
    queue = connection.SimpleQueue("work")
    queue.put("a job")
    assert queue.get(timeout=5).payload == "a job"
    return connection


def test_a_wake_up_reaches_its_queue_after_the_broker_has_lost_the_queue(
    valkey: Valkey, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer_messages, "celery", Celery(broker=valkey.url))
    for _ in range(2):
        client.flushall()
        offer_messages.publish_offer(Offer("zimg", "j1", "l1", "gpu-slot0", "gpu", "zimg", 1), 1, failures=0)
        assert client.llen("gpu.zimg") == 1


def test_a_producer_that_fails_returns_to_its_pool_and_the_next_message_is_sent(
    valkey: Valkey, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, offer = Celery(broker=valkey.url), Offer("zimg", "j1", "l1", "gpu-slot0", "gpu", "zimg", 1)
    monkeypatch.setattr(offer_messages, "celery", app)
    offer_messages.publish_offer(offer, 1, failures=0)
    (kept,) = (producer for owner, producer in offer_messages._kept_producers.items() if owner is app)
    with monkeypatch.context() as patched:
        patched.setattr(offer_messages, "build_message", lambda *_: None)
        with pytest.raises(TypeError):
            offer_messages.publish_offer(offer, 1, failures=0)
    assert app not in offer_messages._kept_producers and kept._channel is None, "the pool has it again"
    offer_messages.publish_offer(offer, 1, failures=0)
    assert client.llen("gpu.zimg") == 2


def _raw(**properties: object) -> str:
    """Return a wake-up as the broker stores it.  `properties`: replace or extend its usual ones."""
    usual = {"delivery_tag": "1", "delivery_info": {"exchange": "", "routing_key": "gpu.zimg"}}
    return json.dumps(
        {"body": "{}", "content-type": "application/json", "headers": {OFFER_HEADER: {}}}
        | {"properties": usual | properties}
    )


def test_a_message_without_headers_and_properties_is_dropped(valkey: Valkey, client: Redis) -> None:
    received: list[str] = []
    client.lpush("gpu.zimg", '{"body": "{}"}', _raw())
    with Connection(valkey.url, transport=Transport) as connection:
        with connection.Consumer([Queue("gpu.zimg")], on_message=lambda message: received.append(message.delivery_tag)):
            for _ in range(2):
                connection.drain_events(timeout=5)
        assert received == ["1"]
    assert client.llen("gpu.zimg") == 1, "the other message is not acknowledged, so it returns to its queue"


def test_a_channel_can_be_closed_after_its_connection(valkey: Valkey, client: Redis) -> None:
    connection = _connect_with_unacknowledged_message(valkey)
    channel = connection.default_channel
    connection._do_close_transport()
    channel.close()  # type: ignore[attr-defined]
    assert client.hlen("unacked") == 1, "the broker still has the message"


def test_a_channel_that_is_closed_first_returns_its_messages_to_the_queue(valkey: Valkey, client: Redis) -> None:
    with _connect_with_unacknowledged_message(valkey):
        assert client.llen("work") == 0
    assert client.llen("work") == 1 and client.hlen("unacked") == 0
