import asyncio

import pytest

from app.auth import api_keys as module
from app.auth.api_keys import KeyCache, Owner, OwnerKind
from slotkeeper.registry.api_keys import hash_key
from slotkeeper.registry.identity import FIRST_SCOPES, Scope
from tests.support.keys import FakeKeys

HERE = "10.0.0.1"
ANONYMOUS_OWNER = Owner(HERE, OwnerKind.ANONYMOUS)


class Sessions:
    """Sessions of the page: the cookie "mine" is the operator's."""

    def __call__(self, header):
        return hash_key("sk_operator") if header == "mine" else ""

    def read(self):
        pass


@pytest.fixture
def keys(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    return FakeKeys(alice=FIRST_SCOPES, operator={Scope.OPERATE})


@pytest.fixture
def key_cache(keys):
    return KeyCache(keys, Sessions(), 0.0)


def owner(key_cache, **shown):
    return asyncio.run(key_cache.owner_of({"REMOTE_ADDR": HERE} | shown))


def with_key(key_cache, key):
    return owner(key_cache, HTTP_AUTHORIZATION=f"Bearer {key}")


@pytest.mark.parametrize("shown", ["", "Basic abc", "Bearer", "Bearer "])
def test_a_request_without_a_key_is_anonymous_and_reads_nothing(keys, key_cache, shown):
    assert owner(key_cache, HTTP_AUTHORIZATION=shown) == ANONYMOUS_OWNER
    assert keys.looks == 0


@pytest.mark.parametrize(
    "address, name",
    [("10.0.0.1", "10.0.0.1"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("fe80::1%eth0", "fe80::/64"), ("", "")],
)
def test_all_anonymous_addresses_of_an_ipv6_network_are_one_owner(key_cache, address, name):
    assert owner(key_cache, REMOTE_ADDR=address) == Owner(name, OwnerKind.ANONYMOUS)


@pytest.mark.parametrize(
    "key, expected",
    [
        ("sk_alice", Owner("alice", OwnerKind.TENANT)),
        ("sk_operator", Owner("operator", OwnerKind.OPERATOR)),
        ("sk_x", ANONYMOUS_OWNER),
    ],
)
def test_the_owner_of_a_key_is_read_from_the_database(key_cache, key, expected):
    assert with_key(key_cache, key) == expected


def test_the_metrics_key_is_accepted_without_reading_tenants(keys, key_cache):
    key_cache = KeyCache(keys, Sessions(), 0.0, "scraper")
    assert with_key(key_cache, "scraper") == Owner("metrics key", OwnerKind.OPERATOR)
    assert keys.looks == 0
    assert with_key(key_cache, "sk_alice").name == "alice" and with_key(key_cache, "scraper").kind is OwnerKind.OPERATOR
    assert with_key(key_cache, "") == ANONYMOUS_OWNER


def test_only_an_unknown_key_causes_a_lookup(keys, key_cache):
    for _ in range(9):
        with_key(key_cache, "sk_alice")
    assert keys.looks == 1
    keys.change("n", FIRST_SCOPES)
    assert with_key(key_cache, "sk_n") == Owner("n", OwnerKind.TENANT)


def test_concurrent_lookups_share_a_read(keys, key_cache):

    async def ask():
        environs = [{"REMOTE_ADDR": HERE, "HTTP_AUTHORIZATION": f"Bearer sk_{n}"} for n in range(50)]
        await asyncio.gather(*(key_cache.owner_of(environ) for environ in environs))

    asyncio.run(ask())
    assert keys.looks <= 2


def test_while_the_database_is_unavailable_cached_keys_are_valid(keys, key_cache):
    asyncio.run(key_cache.refresh_in_thread())
    keys.is_away = True
    asyncio.run(key_cache.refresh_in_thread())
    assert with_key(key_cache, "sk_alice") == Owner("alice", OwnerKind.TENANT)
    assert with_key(key_cache, "sk_x") == ANONYMOUS_OWNER


def test_a_removed_key_becomes_invalid(keys, key_cache):
    asyncio.run(key_cache.refresh_in_thread())
    keys.change("operator", None)
    asyncio.run(key_cache.refresh_in_thread())
    assert with_key(key_cache, "sk_operator") == ANONYMOUS_OWNER


def test_a_session_of_the_page_identifies_its_owner(keys, key_cache):
    assert owner(key_cache, HTTP_COOKIE="mine") == Owner("operator", OwnerKind.OPERATOR)
    assert owner(key_cache, HTTP_COOKIE="another's") == ANONYMOUS_OWNER
