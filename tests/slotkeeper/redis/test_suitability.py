"""A Redis that could lose what is kept there is named at start, and by the readiness of a process."""

from collections.abc import Iterator

import pytest
from redis import Redis

from slotkeeper.redis.connections import explain_eviction, explain_no_persistence
from tests.support.api import Api


@pytest.fixture
def keeping(client: Redis) -> Iterator[Redis]:
    """Settings that a test changes are put back."""
    names = ("maxmemory-policy", "appendonly")
    before = {name: client.config_get(name)[name] for name in names}
    yield client
    for name, value in before.items():
        client.config_set(name, value)


def test_a_redis_that_evicts_keys_is_reported_and_one_that_rejects_new_keys_is_not(keeping: Redis) -> None:
    assert explain_eviction(keeping) is None
    keeping.config_set("maxmemory-policy", "allkeys-lru")
    assert "allkeys-lru" in (advice := explain_eviction(keeping) or "") and "noeviction" in advice


def test_a_redis_without_an_append_only_file_is_reported(keeping: Redis) -> None:
    keeping.config_set("appendonly", "no")
    assert "appendonly yes" in (explain_no_persistence(keeping) or "")
    keeping.config_set("appendonly", "yes")
    assert explain_no_persistence(keeping) is None


def test_a_process_whose_redis_may_throw_leases_away_is_degraded(api: Api) -> None:
    with api.valkey.client() as redis:
        redis.config_set("maxmemory-policy", "volatile-ttl")
        try:
            answer = api.client.get("/health/ready").json
        finally:
            redis.config_set("maxmemory-policy", "noeviction")
    assert answer["status"] == "degraded" and "noeviction" in answer["parts"]["redis"]["why"]
