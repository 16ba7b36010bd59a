from app.auth.access import _MOST_CACHED, Keys
from slotkeeper.registry.tenants import Tenant, hash_key

ACME = Tenant("acme", admin=False)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeTenants:
    def __init__(self, **keys: Tenant) -> None:
        self.keys = keys
        self.asked: list[str] = []

    def find_by_hash(self, hashed: str) -> Tenant | None:
        known = {hash_key(key): key for key in ("k1", "k2")}
        key = known.get(hashed, hashed)
        self.asked.append(key)
        return self.keys.get(key)


def test_a_key_is_looked_up_once_in_a_while():
    clock, tenants = Clock(), FakeTenants(k1=ACME)
    keys = Keys(tenants, 5.0, clock)
    assert [keys.tenant("k1"), keys.tenant("k1"), keys.tenant("k2"), keys.tenant("k2")] == [ACME, ACME, None, None]
    assert tenants.asked == ["k1", "k2"]
    clock.now = 5.0
    keys.tenant("k1")
    assert tenants.asked == ["k1", "k2", "k1"]


def test_a_removed_key_works_for_a_moment_at_most():
    clock, tenants = Clock(), FakeTenants(k1=ACME)
    keys = Keys(tenants, 5.0, clock)
    keys.tenant("k1")
    tenants.keys.clear()
    clock.now = 5.0
    assert keys.tenant("k1") is None


def test_guesses_do_not_fill_the_memory_and_no_key_is_kept_in_it():
    keys = Keys(FakeTenants(), 5.0, Clock())
    for guess in range(_MOST_CACHED + 10):
        keys.tenant(f"sk_{guess}")
    assert len(keys._cache) <= _MOST_CACHED
    assert not any("sk_" in name for name in keys._cache)
