"""The cached keys: as recent as the database's, and available while the database is down."""

from typing import Any, cast

import pytest

from app.auth.api_keys import KeyCache
from slotkeeper.db import Database
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.api_keys import ApiKeys, hash_key, make_key
from slotkeeper.registry.identity import FIRST_SCOPES, Scope
from tests.support.clock import set_clock
from tests.support.keys import FakeKeys, add_key


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Sessions:
    def read(self) -> None:
        pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys() -> FakeKeys:
    return FakeKeys(acme=FIRST_SCOPES)


@pytest.fixture
def cache(keys: FakeKeys, clock: Clock) -> KeyCache:
    return KeyCache(cast(ApiKeys, keys), cast(Any, Sessions()), 1.0, clock=clock)


def test_keys_are_compared_once_a_second_and_read_when_they_have_changed(
    cache: KeyCache, keys: FakeKeys, clock: Clock
) -> None:
    for _ in range(3):
        identity = cache.find("sk_acme")
        assert identity is not None and identity.tenant.name == "acme" and identity.scopes == FIRST_SCOPES
    assert (keys.looks, keys.reads) == (1, 1)
    clock.now = 1.0
    cache.find("sk_acme")
    assert (keys.looks, keys.reads) == (2, 1)


def test_a_revoked_key_opens_nothing_after_a_second(cache: KeyCache, keys: FakeKeys, clock: Clock) -> None:
    cache.find("sk_acme")
    keys.change("acme", None)
    clock.now = 1.0
    assert cache.find("sk_acme") is None


def test_a_new_key_opens_at_once(cache: KeyCache, keys: FakeKeys) -> None:
    cache.find("sk_acme")
    keys.change("beta", FIRST_SCOPES)
    assert cache.find("sk_beta") is not None


def test_a_cached_key_is_refused_after_its_expiry(
    cache: KeyCache, keys: FakeKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.expires_ms["acme"] = 1_000
    set_clock(monkeypatch, lambda: 999)
    assert cache.find("sk_acme") is not None
    set_clock(monkeypatch, lambda: 1_000)
    assert cache.find("sk_acme") is None


def test_the_cached_keys_stay_valid_while_the_database_is_down(cache: KeyCache, keys: FakeKeys, clock: Clock) -> None:
    keys.is_away = True
    with pytest.raises(DatabaseUnavailable):
        cache.find("sk_acme")
    keys.is_away = False
    assert cache.find("sk_acme") is not None
    keys.is_away, clock.now = True, 5.0
    assert cache.find("sk_acme") is not None and cache.find("sk_other") is None


def test_a_mistyped_key_is_refused_without_a_look(cache: KeyCache, keys: FakeKeys) -> None:
    key = make_key().key
    assert cache.find(key[:-1] + ("a" if key[-1] != "a" else "b")) is None and keys.looks == 0
    assert cache.find(key) is None and keys.looks == 1


def test_keys_that_are_used_are_noted_once_a_minute(cache: KeyCache, keys: FakeKeys, clock: Clock) -> None:
    keys.change("beta", {Scope.OPERATE})
    cache.find("sk_acme")
    clock.now = 59.0
    cache.find("sk_beta")
    assert keys.used == []
    clock.now = 60.0
    cache.find("sk_acme")
    assert keys.used == ["acme", "beta"]


def test_the_cache_holds_no_key(cache: KeyCache) -> None:
    cache.find("sk_acme")
    assert list(cache._valid) == [hash_key("sk_acme")]


def test_the_last_use_of_a_key_is_stored(database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    key = add_key(database, "acme")
    cache = KeyCache(ApiKeys(database), cast(Any, Sessions()), 1.0, clock=clock)
    cache.find(key)
    clock.now = 60.0
    set_clock(monkeypatch, lambda: 5_000)
    cache.find(key)
    (stored,) = ApiKeys(database).list_of("acme")
    assert stored.last_used_ms == 5_000
