"""Settings of routing: the defaults satisfy the design, and relations are checked at the start."""

import os

import pytest

from routing.config import RoutingSettings
from routing.queue.leases import Lease, Renewal
from routing.queue.queues import new_lease_prefix
from slotkeeper.errors import InvalidSetting


def test_the_default_settings_satisfy_their_relations():
    settings = RoutingSettings()
    assert settings.renew_every_ms * 3 <= settings.lease_ms, "two renewals in a row may be lost"
    assert settings.unreachable_cooldown_ms <= settings.unreachable_cooldown_max_ms
    assert settings.busy_cooldown_ms <= settings.busy_cooldown_max_ms


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEASE_MS", "199"),
        ("LEASE_MS", "soon"),
        ("RENEW_EVERY_MS", "49"),
        ("OFFER_MS", "0"),
        ("REDIS_PORT", "0"),
        ("REDIS_PORT", "65536"),
        ("REDIS_TIMEOUT_S", "0"),
        ("REDIS_PREFIX", ""),
        ("REDIS_PREFIX", "a{b}"),
        ("REDIS_PREFIX", "a b"),
        ("REDIS_PREFIX", "x" * 65),
        ("BUSY_COOLDOWN_MS", "-1"),
        ("UNREACHABLE_COOLDOWN_MS", "0"),
        ("CATALOG_REFRESH_S", "-0.1"),
    ],
)
def test_a_setting_out_of_its_bounds_is_refused_with_its_name(monkeypatch, name, value):
    monkeypatch.setenv(f"SLOTKEEPER_{name}", value)
    with pytest.raises(InvalidSetting, match=f"(?i){name}"):
        RoutingSettings()


@pytest.mark.parametrize(("lease_ms", "renew_ms", "fits"), [(1000, 499, True), (1000, 500, False), (1000, 900, False)])
def test_the_renewal_interval_must_be_under_half_of_the_lease(monkeypatch, lease_ms, renew_ms, fits):
    monkeypatch.setenv("SLOTKEEPER_LEASE_MS", str(lease_ms))
    monkeypatch.setenv("SLOTKEEPER_RENEW_EVERY_MS", str(renew_ms))
    if fits:
        assert RoutingSettings().renew_every_ms == renew_ms
    else:
        with pytest.raises(InvalidSetting, match="under half of SLOTKEEPER_LEASE_MS"):
            RoutingSettings()


def test_a_prefix_cannot_break_the_hash_tag():
    """Redis Cluster takes the first pair of braces in a key for its tag."""
    for prefix in ("a{", "}", "{}"):
        with pytest.raises(InvalidSetting):
            RoutingSettings(redis_prefix=prefix)


def test_the_embedded_redis_is_used_unless_another_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path))  # That of the checkout may hold a password of `make run`.
    assert RoutingSettings().effective_redis_url == "redis://127.0.0.1:6399/0"
    monkeypatch.setenv("SLOTKEEPER_REDIS_PORT", "7000")
    assert RoutingSettings().effective_redis_url == "redis://127.0.0.1:7000/0"
    monkeypatch.setenv("SLOTKEEPER_REDIS_URL", "rediss://cache:6380/3")
    assert RoutingSettings().effective_redis_url == "rediss://cache:6380/3"


# -- values ----------------------------------------------------------------------------------------------------


def test_a_leases_tag_names_lease_and_owner_so_that_it_can_be_read_back():
    held = Lease("zimg", "j", "p1-7", "worker one/ab12", "gpu-slot0")
    assert held.stored_text.split(" ", 1) == ["p1-7", "worker one/ab12"]


@pytest.mark.parametrize("server", ["gpu", "a-slot3", "org/gpu.1-slot0"])
def test_the_server_name_of_a_slot_is_the_part_before_its_number(server):
    assert Lease("f", "j", "l", "o", f"{server}-slot12").server == server


def test_names_of_leases_are_unique_across_an_emptied_redis():
    assert len({new_lease_prefix() for _ in range(10_000)}) == 10_000


def test_names_of_leases_are_unique_across_a_fork():
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writes, new_lease_prefix().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reads, 100).decode() != new_lease_prefix()
    os.close(reads)
    os.close(writes)


def test_the_values_of_renewal_are_the_replies_of_the_script():
    assert {str(renewal) for renewal in Renewal} == {"renewed", "cancel", "lost", "unknown"}
