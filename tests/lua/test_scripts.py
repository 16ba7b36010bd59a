"""How scripts are put together and run."""

import pytest
from redis import Redis

from routing.keys import FORMAT, Keys
from routing.scripts import Scripts, assemble, names, source
from tests.lua.room import CLOCK, FRAGMENTS, Room


@pytest.mark.parametrize("name", names())
def test_a_fragment_is_replaced_by_its_name_and_nothing_else_is(name):
    ours = assemble(name, FRAGMENTS)
    assert (CLOCK in ours) == ("-- @include lib/now_ms" in source(name))
    assert ours.replace(CLOCK, source("lib/now_ms")) == assemble(name)
    assert "@include" not in ours


def test_a_script_is_sent_once_and_then_named_by_its_hash(client: Redis):
    scripts = Scripts(client, Keys("test"))
    client.config_resetstat()
    for _ in range(3):
        scripts.run("depths", "zimg")
    calls = client.info("commandstats")
    assert calls["cmdstat_eval"]["calls"] == 1
    assert calls["cmdstat_evalsha"]["calls"] == 2


def test_a_redis_that_forgot_the_scripts_is_told_them_again(client: Redis):
    room = Room(client)
    room.with_slots(1)
    client.script_flush()
    assert room.run("depths")[1] == 1
    assert room.offer() == []


@pytest.mark.parametrize("fleet", ["zimg", "stable-diffusion", "org/model.v2", "a-slot3"])
def test_keys_of_a_fleet_are_its_prefix_its_tag_and_a_name(fleet):
    keys = Keys("mine").fleet(fleet)
    assert keys[0] == f"mine:{FORMAT}:{{{fleet}}}:classes" and len(keys) == len(set(keys)) == 14
    assert Keys("mine").fleet(fleet) == keys
