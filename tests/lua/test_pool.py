"""How connections to Redis are lent."""

import pytest
from redis import Redis

from scripting.pool import Pool
from tests.support.valkey import Valkey


@pytest.fixture
def pool(valkey: Valkey) -> Pool:
    return Pool.from_url(valkey.url)


@pytest.fixture
def redis(pool: Pool) -> Redis:
    return Redis.from_pool(pool)


def test_one_after_another_has_the_same_connection_and_two_at_once_have_two(pool):
    first = pool.get_connection()
    beside = pool.get_connection()
    assert beside is not first
    pool.release(beside)
    pool.release(first)
    assert pool.get_connection() is first


def test_a_connection_that_redis_has_closed_is_opened_anew(redis, valkey):
    assert redis.ping()
    with valkey.client() as other:
        other.client_kill_filter(_type="normal", skipme=True)
    assert redis.ping()


def test_an_answer_that_nobody_heard_is_not_taken_for_the_next(redis, pool):
    connection = pool.get_connection()
    connection.send_command("ECHO", "unheard")
    assert connection.can_read(1)
    pool.release(connection)
    assert redis.echo("heard") == b"heard"


def test_what_was_opened_before_the_process_was_forked_is_left_alone(redis, pool):
    assert redis.ping()
    before = pool.get_connection()
    pool.release(before)
    pool.pid = before.pid = 0  # as the new one sees them
    assert pool.get_connection() is not before
    assert before.is_connected


def test_one_connection_is_enough_for_one_after_another(valkey):
    narrow = Redis.from_pool(Pool.from_url(f"{valkey.url}?max_connections=1"))
    assert [narrow.ping() for _ in range(3)] == [True] * 3
