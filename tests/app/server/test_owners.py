import asyncio

import pytest

from app.auth import api_keys as module
from app.auth.api_keys import KeyCache, Owner, OwnerKind
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.tenants import Tenant, hash_key

KNOWN = {"sk_a": Tenant("alice", False), "sk_o": Tenant("operator", True)}
HERE = "10.0.0.1"
STRANGER = Owner(HERE, OwnerKind.ANONYMOUS)


class Database:
    def __init__(self):
        self.keys, self.away, self.readings = dict(KNOWN), False, 0

    def list_by_hash(self):
        self.readings += 1
        if self.away:
            raise DatabaseUnavailable("away")
        return {hash_key(key): tenant for key, tenant in self.keys.items()}


class Visits:
    """To the page: the cookie "mine" is the operator's."""

    def __call__(self, header):
        return hash_key("sk_o") if header == "mine" else ""

    def read(self):
        pass


@pytest.fixture
def database(monkeypatch):
    monkeypatch.setattr(module, "_MIN_PAUSE_S", 0.0)
    return Database()


def owner(asked, **shown):
    return asyncio.run(asked.owner_of({"REMOTE_ADDR": HERE} | shown))


def with_key(asked, key):
    return owner(asked, HTTP_AUTHORIZATION=f"Bearer {key}")


def test_without_keys_everybody_is_local():
    assert owner(KeyCache(None, Visits())) == Owner("", OwnerKind.LOCAL)


@pytest.mark.parametrize("shown", ["", "Basic abc", "Bearer", "Bearer "])
def test_who_shows_no_key_is_a_stranger_and_nothing_is_read(database, shown):
    assert owner(KeyCache(database, Visits()), HTTP_AUTHORIZATION=shown) == STRANGER
    assert database.readings == 0


@pytest.mark.parametrize(
    "address, name",
    [("10.0.0.1", "10.0.0.1"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("fe80::1%eth0", "fe80::/64"), ("", "")],
)
def test_a_stranger_has_one_turn_for_all_addresses_of_a_network_of_ipv6(database, address, name):
    assert owner(KeyCache(database, Visits()), REMOTE_ADDR=address) == Owner(name, OwnerKind.ANONYMOUS)


@pytest.mark.parametrize(
    "key, expected",
    [("sk_a", Owner("alice", OwnerKind.TENANT)), ("sk_o", Owner("operator", OwnerKind.OPERATOR)), ("sk_x", STRANGER)],
)
def test_the_database_says_whose_key_it_is(database, key, expected):
    assert with_key(KeyCache(database, Visits()), key) == expected


def test_the_key_of_metrics_is_known_and_reads_no_tenants(database):
    asked = KeyCache(database, Visits(), "scraper")
    assert with_key(asked, "scraper") == Owner("metrics key", OwnerKind.OPERATOR)
    assert database.readings == 0
    assert with_key(asked, "sk_a").name == "alice" and with_key(asked, "scraper").kind is OwnerKind.OPERATOR
    assert with_key(KeyCache(database, Visits()), "") == STRANGER


def test_a_known_key_is_not_looked_up_and_a_new_one_is(database):
    asked = KeyCache(database, Visits())
    for _ in range(9):
        with_key(asked, "sk_a")
    assert database.readings == 1
    database.keys["sk_n"] = Tenant("new", False)
    assert with_key(asked, "sk_n") == Owner("new", OwnerKind.TENANT)


def test_those_who_ask_at_the_same_time_share_a_reading(database):
    asked = KeyCache(database, Visits())

    async def ask():
        shown = [{"REMOTE_ADDR": HERE, "HTTP_AUTHORIZATION": f"Bearer sk_{n}"} for n in range(50)]
        await asyncio.gather(*(asked.owner_of(it) for it in shown))

    asyncio.run(ask())
    assert database.readings <= 2


def test_while_the_database_is_away_those_that_were_read_are_known(database):
    asked = KeyCache(database, Visits())
    asyncio.run(asked.refresh())
    database.away = True
    asyncio.run(asked.refresh())
    assert with_key(asked, "sk_a") == Owner("alice", OwnerKind.TENANT)
    assert with_key(asked, "sk_x") == STRANGER


def test_a_key_that_is_gone_is_known_no_more(database):
    asked = KeyCache(database, Visits())
    asyncio.run(asked.refresh())
    del database.keys["sk_o"]
    asyncio.run(asked.refresh())
    assert with_key(asked, "sk_o") == STRANGER


def test_who_has_logged_in_to_the_page_is_known_by_the_visit(database):
    asked = KeyCache(database, Visits())
    assert owner(asked, HTTP_COOKIE="mine") == Owner("operator", OwnerKind.OPERATOR)
    assert owner(asked, HTTP_COOKIE="another's") == STRANGER
