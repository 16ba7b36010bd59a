"""The Redis broker as workers use it, on a real Valkey."""

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


def _with_one_message_unanswered(valkey: Valkey) -> Connection:
    connection = Connection(valkey.url, transport=Transport)
    queue = connection.SimpleQueue("work")
    queue.put("a job")
    assert queue.get(timeout=5).payload == "a job"
    return connection


def test_a_wake_up_is_in_its_queue_also_where_the_broker_has_forgotten_that(
    valkey: Valkey, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer_messages, "celery", Celery(broker=valkey.url))
    for _ in range(2):
        client.flushall()
        offer_messages.publish_offer(Offer("zimg", "j1", "l1", "gpu-slot0", "gpu", "zimg", 1), 1, failures=0)
        assert client.llen("gpu.zimg") == 1


def test_a_producer_by_which_nothing_could_be_sent_goes_back_and_is_looked_at_anew(
    valkey: Valkey, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, offer = Celery(broker=valkey.url), Offer("zimg", "j1", "l1", "gpu-slot0", "gpu", "zimg", 1)
    monkeypatch.setattr(offer_messages, "celery", app)
    offer_messages.publish_offer(offer, 1, failures=0)
    (kept,) = (producer for of, producer in offer_messages._kept_producers.items() if of is app)
    with monkeypatch.context() as broken:
        broken.setattr(offer_messages, "build_message", lambda *_: None)
        with pytest.raises(TypeError):
            offer_messages.publish_offer(offer, 1, failures=0)
    assert app not in offer_messages._kept_producers and kept._channel is None, "it was put back"
    offer_messages.publish_offer(offer, 1, failures=0)
    assert client.llen("gpu.zimg") == 2


def _raw(**properties: object) -> str:
    """A wake-up as it stands in a list of the broker; `properties`: others than it should have."""
    usual = {"delivery_tag": "1", "delivery_info": {"exchange": "", "routing_key": "gpu.zimg"}}
    return json.dumps(
        {"body": "{}", "content-type": "application/json", "headers": {OFFER_HEADER: {}}}
        | {"properties": usual | properties}
    )


def test_a_message_from_which_something_is_missing_is_dropped(valkey: Valkey, client: Redis) -> None:
    _expect_the_second_alone(valkey, client, '{"body": "{}"}')


def _expect_the_second_alone(valkey: Valkey, client: Redis, first: str) -> None:
    """Of two messages a worker gets the one that is whole, and gives it back when it stops."""
    came: list[str] = []
    client.lpush("gpu.zimg", first, _raw())
    with Connection(valkey.url, transport=Transport) as connection:
        with connection.Consumer([Queue("gpu.zimg")], on_message=lambda it: came.append(it.delivery_tag)):
            for _ in range(2):
                connection.drain_events(timeout=5)
        assert came == ["1"]
    assert client.llen("gpu.zimg") == 1


def test_a_channel_that_is_closed_after_its_connection_ends_nobody(valkey: Valkey, client: Redis) -> None:
    connection = _with_one_message_unanswered(valkey)
    channel = connection.default_channel
    connection._do_close_transport()
    channel.close()  # type: ignore[attr-defined]
    assert client.hlen("unacked") == 1, "the broker has it still"


def test_a_channel_that_is_closed_in_order_gives_its_messages_back(valkey: Valkey, client: Redis) -> None:
    with _with_one_message_unanswered(valkey):
        assert client.llen("work") == 0
    assert client.llen("work") == 1 and client.hlen("unacked") == 0
