import pytest

from app.web.owners import Kind, Owner, Owners
from foundation.errors import RecordUnavailable
from registry.tenants import Tenant, hash_key

KNOWN = {"sk_a": Tenant("alice", False), "sk_o": Tenant("operator", True)}
HERE = "10.0.0.1"


class Record:
    def __init__(self):
        self.keys, self.away = dict(KNOWN), False

    def by_key(self, key):
        self._ask()
        return self.keys.get(key)

    def by_hash(self):
        self._ask()
        return {hash_key(key): tenant for key, tenant in self.keys.items()}

    def _ask(self):
        if self.away:
            raise RecordUnavailable("away")


class World:
    now = 0.0


def owners(world=World):
    return Owners(Record(), lambda: world.now)


def test_without_keys_everybody_is_local():
    assert Owners(None).known("", HERE) == Owner("", Kind.LOCAL)


@pytest.mark.parametrize("shown", ["", "Basic abc", "Bearer", "Bearer "])
def test_who_shows_no_key_is_a_stranger_at_once(shown):
    assert owners().known(shown, HERE) == Owner(HERE, Kind.STRANGER)


@pytest.mark.parametrize(
    "key, owner",
    [
        ("sk_a", Owner("alice", Kind.TENANT)),
        ("sk_o", Owner("operator", Kind.OPERATOR)),
        ("sk_x", Owner(HERE, Kind.STRANGER)),
    ],
)
def test_the_record_says_whose_key_it_is(key, owner):
    asked = owners()
    assert asked.known(f"Bearer {key}", HERE) is None
    assert asked.look_up(f"bearer {key}", HERE) == owner


def test_a_key_that_was_good_is_remembered_for_minutes_and_one_that_was_not_never():
    world = World()
    asked = owners(world)
    for key in ("Bearer sk_a", "Bearer sk_x"):
        asked.remember(key, asked.look_up(key, HERE))
    assert asked.known("Bearer sk_a", HERE) == Owner("alice", Kind.TENANT)
    assert asked.known("Bearer sk_x", HERE) is None
    world.now = 301
    assert asked.known("Bearer sk_a", HERE) is None


def test_only_so_many_keys_are_remembered():
    asked = owners()
    for n in range(5000):
        asked.remember(f"Bearer sk_{n}", Owner("alice", Kind.TENANT))
    assert len(asked._known) == 4096


def test_while_the_record_is_away_new_keys_are_strangers_and_those_that_were_read_are_known():
    record = Record()
    asked = Owners(record)
    asked.refresh()
    record.away = True
    asked.refresh()
    assert asked.look_up("Bearer sk_a", HERE) == Owner(HERE, Kind.STRANGER)
    assert asked.known("Bearer sk_a", HERE) == Owner("alice", Kind.TENANT)


def test_keys_are_known_before_they_come_and_no_more_when_they_are_gone():
    record = Record()
    asked = Owners(record)
    asked.refresh()
    assert asked.known("Bearer sk_o", HERE) == Owner("operator", Kind.OPERATOR)
    del record.keys["sk_o"]
    asked.refresh()
    assert asked.known("Bearer sk_o", HERE) is None


def test_who_has_logged_in_to_the_page_is_known_by_the_visit():
    asked = Owners(Record(), visits=lambda cookie: hash_key("sk_o") if cookie == "mine" else "")
    assert asked.known("", HERE, "mine") == Owner(HERE, Kind.STRANGER), "until all keys have been read"
    asked.refresh()
    assert asked.known("", HERE, "mine") == Owner("operator", Kind.OPERATOR)
    assert asked.known("", HERE, "another's") == Owner(HERE, Kind.STRANGER)
