import asyncio

import pytest

from app.auth import api_keys as module
from app.auth.api_keys import KeyCache, Owner, OwnerKind
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.tenants import Tenant, hash_key

KNOWN = {"sk_a": Tenant("alice", False), "sk_o": Tenant("operator", True)}
HERE = "10.0.0.1"
ANONYMOUS_OWNER = Owner(HERE, OwnerKind.ANONYMOUS)


class Database:
    def __init__(self):
        self.keys, self.is_unavailable, self.reads = dict(KNOWN), False, 0

    def list_by_hash(self):
        self.reads += 1
        if self.is_unavailable:
            raise DatabaseUnavailable("away")
        return {hash_key(key): tenant for key, tenant in self.keys.items()}


class Sessions:
    """Sessions of the page: the cookie "mine" is the operator's."""

    def __call__(self, header):
        return hash_key("sk_o") if header == "mine" else ""

    def read(self):
        pass


@pytest.fixture
def database(monkeypatch):
    monkeypatch.setattr(module, "_MIN_PAUSE_S", 0.0)
    return Database()


def owner(key_cache, **shown):
    return asyncio.run(key_cache.owner_of({"REMOTE_ADDR": HERE} | shown))


def with_key(key_cache, key):
    return owner(key_cache, HTTP_AUTHORIZATION=f"Bearer {key}")


def test_without_keys_every_client_is_local():
    assert owner(KeyCache(None, Sessions())) == Owner("", OwnerKind.LOCAL)


@pytest.mark.parametrize("shown", ["", "Basic abc", "Bearer", "Bearer "])
def test_a_request_without_a_key_is_anonymous_and_reads_nothing(database, shown):
    assert owner(KeyCache(database, Sessions()), HTTP_AUTHORIZATION=shown) == ANONYMOUS_OWNER
    assert database.reads == 0


@pytest.mark.parametrize(
    "address, name",
    [("10.0.0.1", "10.0.0.1"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("fe80::1%eth0", "fe80::/64"), ("", "")],
)
def test_all_anonymous_addresses_of_an_ipv6_network_are_one_owner(database, address, name):
    assert owner(KeyCache(database, Sessions()), REMOTE_ADDR=address) == Owner(name, OwnerKind.ANONYMOUS)


@pytest.mark.parametrize(
    "key, expected",
    [
        ("sk_a", Owner("alice", OwnerKind.TENANT)),
        ("sk_o", Owner("operator", OwnerKind.OPERATOR)),
        ("sk_x", ANONYMOUS_OWNER),
    ],
)
def test_the_owner_of_a_key_is_read_from_the_database(database, key, expected):
    assert with_key(KeyCache(database, Sessions()), key) == expected


def test_the_metrics_key_is_accepted_without_reading_tenants(database):
    key_cache = KeyCache(database, Sessions(), "scraper")
    assert with_key(key_cache, "scraper") == Owner("metrics key", OwnerKind.OPERATOR)
    assert database.reads == 0
    assert with_key(key_cache, "sk_a").name == "alice" and with_key(key_cache, "scraper").kind is OwnerKind.OPERATOR
    assert with_key(KeyCache(database, Sessions()), "") == ANONYMOUS_OWNER


def test_only_an_unknown_key_is_looked_up(database):
    key_cache = KeyCache(database, Sessions())
    for _ in range(9):
        with_key(key_cache, "sk_a")
    assert database.reads == 1
    database.keys["sk_n"] = Tenant("new", False)
    assert with_key(key_cache, "sk_n") == Owner("new", OwnerKind.TENANT)


def test_concurrent_lookups_share_a_read(database):
    key_cache = KeyCache(database, Sessions())

    async def ask():
        environs = [{"REMOTE_ADDR": HERE, "HTTP_AUTHORIZATION": f"Bearer sk_{n}"} for n in range(50)]
        await asyncio.gather(*(key_cache.owner_of(environ) for environ in environs))

    asyncio.run(ask())
    assert database.reads <= 2


def test_while_the_database_is_unavailable_cached_keys_are_valid(database):
    key_cache = KeyCache(database, Sessions())
    asyncio.run(key_cache.refresh())
    database.is_unavailable = True
    asyncio.run(key_cache.refresh())
    assert with_key(key_cache, "sk_a") == Owner("alice", OwnerKind.TENANT)
    assert with_key(key_cache, "sk_x") == ANONYMOUS_OWNER


def test_a_removed_key_becomes_invalid(database):
    key_cache = KeyCache(database, Sessions())
    asyncio.run(key_cache.refresh())
    del database.keys["sk_o"]
    asyncio.run(key_cache.refresh())
    assert with_key(key_cache, "sk_o") == ANONYMOUS_OWNER


def test_a_session_of_the_page_identifies_its_owner(database):
    key_cache = KeyCache(database, Sessions())
    assert owner(key_cache, HTTP_COOKIE="mine") == Owner("operator", OwnerKind.OPERATOR)
    assert owner(key_cache, HTTP_COOKIE="another's") == ANONYMOUS_OWNER
