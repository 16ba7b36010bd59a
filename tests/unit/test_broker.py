"""The Redis broker as workers use it, on a real Valkey."""

from kombu import Connection
from redis import Redis

from tasks.broker import Transport
from tests.lua.room import client, valkey
from tests.support.valkey import Valkey

__all__ = ["client", "valkey"]


def _with_one_message_unanswered(valkey: Valkey) -> Connection:
    connection = Connection(valkey.url, transport=Transport)
    queue = connection.SimpleQueue("work")
    queue.put("a job")
    assert queue.get(timeout=5).payload == "a job"
    return connection


def test_a_channel_that_is_closed_after_its_connection_ends_nobody(valkey: Valkey, client: Redis) -> None:
    connection = _with_one_message_unanswered(valkey)
    channel = connection.default_channel
    connection._do_close_transport()
    channel.close()
    assert client.hlen("unacked") == 1, "the broker has it still"


def test_a_channel_that_is_closed_in_order_gives_its_messages_back(valkey: Valkey, client: Redis) -> None:
    with _with_one_message_unanswered(valkey):
        assert client.llen("work") == 0
    assert client.llen("work") == 1 and client.hlen("unacked") == 0
