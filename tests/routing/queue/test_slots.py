"""The slots of a fleet: which are offered or in cooldown, and what a change of the catalog does (SLOT-2, LEASE-1)."""

import pytest

from routing.config import RoutingSettings
from routing.queue.slots import Slots
from slotkeeper.redis.keys import FLEET_KEYS
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import Server as CatalogServer
from tests.support.room import OFFER_MS, START_MS, Offered, Server, a

ODD_NAMES = ["zimg-api4", "org/model-7b", "gpu.rack-2/a:8000", "a-slot3", "a-slot3-slot0", "x@y+z", "%d%w.-"]


# -- sync ----------------------------------------------------------------------------------------------


def test_every_slot_of_an_online_server_is_free(room):
    assert room.sync(Server("gpu-a", 2), Server("gpu-b", 1)) == "synced"
    assert sorted(room.members("free")) == ["gpu-a-slot0", "gpu-a-slot1", "gpu-b-slot0"]


def test_syncing_the_same_catalog_again_changes_nothing(room):
    servers = (Server("gpu-a", 3), Server("gpu-b", 2, "paused"))
    room.with_servers(*servers)
    room.enqueue(a("j1", 1))
    room.cool_down("gpu-a", 1000)
    before = room.dump()
    room.later(10)
    assert room.sync(*servers, version=room.version) == "synced"
    assert room.dump() == before


def test_an_older_catalog_changes_nothing(room):
    room.sync(Server("new", 2), version=7)
    before = room.dump()
    assert room.sync(Server("old", 9), version=6) == "stale"
    assert room.dump() == before


def test_new_slots_can_be_offered_at_once(room):
    room.with_slots(1)
    room.enqueue(a("j1", 1), a("j2", 2))
    room.sync(Server("gpu", 2))
    assert [(offer.job, offer.slot) for offer in room.offer()] == [("j2", "gpu-slot1")]


def test_slots_that_are_gone_are_offered_no_more(room):
    room.with_slots(3)
    room.sync(Server("gpu", 1))
    assert room.members("free") == ["gpu-slot0"]


@pytest.mark.parametrize("back", [True, False])
def test_a_slot_that_is_taken_away_under_a_lease_is_kept_until_its_release_and_not_offered_then(room, back):
    room.with_slots(2)
    _, held = room.enqueue(a("j1", 1), a("j2", 2))
    room.sync(Server("gpu", 1))
    assert room.taken()[held.slot] == "j2"
    room.claim(held)
    assert room.renew("w1", held) == ["renewed"]
    assert room.release(held, return_to_lane=back) == ("released", [])
    assert room.members("free") == room.members("cooling") == []


def test_a_slot_that_came_back_while_it_was_leased_is_not_free_twice(room):
    room.with_slots(2)
    _, held = room.enqueue(a("j1", 1), a("j2", 2))
    room.sync(Server("gpu", 1))
    room.sync(Server("gpu", 2))
    room.enqueue(a("j3", 3))
    assert room.members("free") == []
    room.release(held, "", limit=0)
    assert room.members("free") == ["gpu-slot1"]


@pytest.mark.parametrize("state", ["paused", "draining"])
def test_a_server_that_is_not_online_gets_nothing(room, state):
    room.with_servers(Server("gpu", 2, state))
    assert room.enqueue(a("j", 1)) == [] and room.members("free") == []


@pytest.mark.parametrize("state", ["paused", "draining"])
@pytest.mark.parametrize("cooldown_ms", [0, 500])
def test_a_slot_freed_on_a_server_that_is_not_online_is_offered_when_it_is_again(room, state, cooldown_ms):
    room.with_slots(1)
    (held,) = room.enqueue(a("j1", 1), a("j2", 2))
    room.sync(Server("gpu", 1, state))
    assert room.release(held, "", cooldown_ms=cooldown_ms) == ("released", [])
    room.later(1000)
    assert room.offer() == []
    room.sync(Server("gpu", 1))
    assert [offer.job for offer in room.offer()] == ["j2"]


def test_free_and_cooling_slots_of_a_server_that_is_paused_are_taken_out(room):
    room.with_servers(Server("gpu-a", 2), Server("gpu-b", 2))
    room.cool_down("gpu-b", 1000)
    room.sync(Server("gpu-a", 2, "paused"), Server("gpu-b", 2, "paused"))
    assert room.members("free") == room.members("cooling") == []
    room.later(5000)
    room.offer()
    assert room.members("free") == []


def test_a_removed_server_keeps_only_its_leases(room):
    room.with_slots(2)
    (held,) = room.enqueue(a("j", 1))
    room.sync()
    assert room.members("free") == [] and room.taken() == {held.slot: "j"}
    assert room.release(held, "") == ("released", [])
    assert room.taken() == {} and room.members("free") == []


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD_NAMES)
def test_the_name_of_a_server_may_look_like_the_name_of_a_slot(room, name):
    room.with_servers(Server(name, 2), Server(name + "0", 1))
    one, two, three = room.enqueue(a("j1", 1), a("j2", 2), a("j3", 3))
    assert {one.server, two.server, three.server} == {name, name + "0"}
    assert {offer.slot for offer in (one, two, three)} == {f"{name}-slot0", f"{name}-slot1", f"{name}0-slot0"}
    for offer in (one, two, three):
        assert offer.slot.startswith(f"{offer.server}-slot")
        assert room.release(offer, "", limit=0)[0] == "released"
    assert room.cool_down(name, 1000)[1] == 2
    assert room.members("free") == [f"{name}0-slot0"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_models_name_may_look_like_anything(room, name):
    room.with_servers(Server("gpu", 1, models=(name,)))
    room.enqueue(a("foreign", 1, model=name + "x"), a("foreign too", 2, model="x" + name))
    (offer,) = room.enqueue(a("j", 3, model=name))
    assert (offer.job, offer.model) == ("j", name)
    assert room.position(a("foreign", 1, model=name + "x")) == ["waiting", 0]


@pytest.mark.parametrize("served", [("zimg-large",), ("my-zimg", "zimg2"), ("xonline", "x5")])
def test_a_server_does_not_serve_a_model_whose_name_is_part_of_another(room, served):
    room.with_servers(Server("gpu", 3, models=served))
    for n, model in enumerate(("zim", "img", "large", "online", "5", "3", "online 3", "gpu"), 1):
        assert room.enqueue(a(f"j{n}", n, model=model)) == []
    assert room.offer() == []


# -- several models on a server --------------------------------------------------------------------------------


def test_a_server_takes_the_first_job_of_any_model_that_it_serves(room):
    room.with_servers(Server("both", 1, models=("flux", "zimg")))
    jobs = [a("z1", 1), a("f2", 2, model="flux"), a("urgent", 9, 1, "flux"), a("foreign", 0, 1, "trellis"), a("z3", 3)]
    room.enqueue(*jobs, limit=0)
    assert room.drain() == ["urgent", "z1", "f2", "z3"]
    assert room.waiting() == ["foreign"]


def test_a_job_at_the_head_that_no_free_slot_serves_blocks_no_other_job(room):
    room.with_servers(Server("a", 1, models=("flux",)), Server("b", 1, models=("flux", "zimg")))
    offers = room.enqueue(a("z1", 1), a("z2", 2), a("f3", 3, model="flux"))
    assert sorted((offer.job, offer.slot) for offer in offers) == [("f3", "a-slot0"), ("z1", "b-slot0")]


def test_the_slot_that_has_been_free_for_longest_is_offered_first(room):
    room.with_slots(3)
    first, second, third = room.enqueue(*[a(f"j{n}", n) for n in range(1, 4)])
    for offer in (second, third, first):
        room.later(1)
        room.release(offer, "")
    assert [offer.slot for offer in room.enqueue(*[a(f"k{n}", n) for n in range(4, 7)])] == [
        second.slot,
        third.slot,
        first.slot,
    ]


def test_slot_2_a_free_slot_is_found_however_many_others_serve_nothing_that_waits(room):
    room.with_servers(Server("idle", 300, models=("flux",)))
    room.later(1)
    room.sync(Server("idle", 300, models=("flux",)), Server("gpu", 1))
    assert [offer.slot for offer in room.enqueue(a("j", 1))] == ["gpu-slot0"]


@pytest.mark.parametrize("between", [63, 64, 300])
def test_slot_2_all_slots_of_a_server_are_found_however_many_others_became_free_between_them(room, between):
    large = Server("large", 2, attributes={"memory": 80})
    room.with_servers(large, *[Server(f"small{n}") for n in range(between)])
    room.client.zadd(room.key("free"), {"large-slot0": START_MS - 1, "large-slot1": START_MS + 1})
    offers = room.enqueue(a("any", 1), a("choosy", 2, constraints="memory>=80"))
    assert [offer.slot for offer in offers] == ["large-slot0", "large-slot1"]


@pytest.mark.parametrize(
    "act", [lambda room: room.enqueue(a("j", 1)), lambda room: room.cool_down("gpu7", 1000)], ids=["offer", "cooldown"]
)
def test_what_concerns_one_server_looks_at_few_of_a_thousand(room, act):
    room.with_servers(*[Server(f"gpu{n}") for n in range(1000)])
    room.client.config_resetstat()
    act(room)
    assert sum(row["calls"] for row in room.client.info("commandstats").values()) < 150


def test_slot_2_a_job_is_found_however_many_lanes_before_it_have_no_slot(room):
    room.enqueue(*[a(f"no{priority}-{n}", n, priority, f"m{n}") for n in range(40) for priority in range(1, 9)])
    room.with_slots(1)
    assert [offer.job for offer in room.enqueue(a("j", 1000, 9))] == ["j"]


# -- cooldowns and their ends ----------------------------------------------------------------------------------------


def test_each_rest_in_a_row_is_twice_as_long_up_to_the_longest(room):
    room.with_slots(1)
    assert [room.cool_down("gpu", 1000, 30_000)[0] for _ in range(8)] == [
        1000,
        2000,
        4000,
        8000,
        16000,
        30000,
        30000,
        30000,
    ]
    room.cool_down("gpu", 0)
    assert room.cool_down("gpu", 1000)[0] == 1000


def test_a_thousand_cooldowns_in_a_row_do_not_overflow(room):
    room.with_slots(1)
    room.client.hset(room.key("meta"), "failures:gpu", 5000)
    assert room.cool_down("gpu", 1000)[0] == 30_000


def test_a_slot_in_cooldown_is_not_offered_before_the_cooldown_ends(room):
    room.with_servers(Server("gpu", 2), Server("other", 1))
    assert room.cool_down("gpu", 1000) == [1000, 2]
    assert [offer.slot for offer in room.enqueue(a("j1", 1), a("j2", 2))] == ["other-slot0"]
    room.later(999)
    assert room.offer() == []
    room.later(1)
    assert [offer.job for offer in room.offer()] == ["j2"]
    assert room.members("cooling") == [] and len(room.members("free")) == 1


def test_a_woken_server_is_offered_at_once(room):
    room.with_slots(2)
    room.cool_down("gpu", 1000)
    room.enqueue(a("j", 1))
    assert room.cool_down("gpu", 0, 0) == [0, 2]
    assert [offer.job for offer in room.offer()] == ["j"]


def test_a_cooldown_leaves_leased_slots_and_other_servers_alone(room):
    room.with_servers(Server("gpu", 1), Server("gpu2", 1))
    (held,) = room.enqueue(a("j", 1), limit=1)
    taken = room.taken()
    assert room.cool_down(held.server, 1000)[1] == 0
    assert room.taken() == taken and len(room.members("free")) == 1


def test_a_cooldown_that_ends_on_a_server_that_is_not_online_frees_nothing(room):
    room.with_slots(1)
    room.cool_down("gpu", 1000)
    room.client.hset(room.key("servers"), "gpu", "paused 1\nzimg\n")
    room.later(1000)
    room.offer()
    assert room.members("free") == room.members("cooling") == []


def test_more_slots_than_one_look_takes_wake_in_the_next(room):
    room.with_slots(150)
    room.cool_down("gpu", 1000)
    room.later(1000)
    room.offer()
    room.offer()
    assert len(room.members("free")) == 150


# -- work of others (SLOT-1) -----------------------------------------------------------------------------------


def test_slot_1_the_slots_of_a_server_that_other_clients_use_are_not_offered_for_a_while(room):
    room.with_servers(Server("gpu", 4), Server("gpu2", 2))
    assert room.run("occupy_slots", "gpu", 3, 500) == 3
    assert sorted(slot for slot in room.members("free") if slot.startswith("gpu-")) == ["gpu-slot3"]
    assert len(room.members("free")) == 3
    room.later(500)
    room.offer()
    assert len(room.members("free")) == 6 and room.members("cooling") == []


def test_slot_1_slots_that_are_leased_or_in_cooldown_count_as_used_by_other_clients_once(room):
    room.with_slots(3)
    room.enqueue(a("j", 1))
    assert room.run("occupy_slots", "gpu", 1, 500) == 1
    assert room.run("occupy_slots", "gpu", 1, 500) == 1
    assert len(room.members("cooling")) == 1 and len(room.members("free")) == 1
    assert room.run("occupy_slots", "gpu", 9, 500) == 2
    assert room.taken() and room.members("free") == []


def test_occupying_no_slot_leaves_no_trace(room):
    room.with_slots(2)
    before = room.dump()
    assert room.run("occupy_slots", "gpu", 0, 500) == 0
    assert room.run("occupy_slots", "stranger", 5, 500) == 0
    assert room.dump() == before


def test_occupying_does_not_shorten_a_cooldown(room):
    room.with_slots(1)
    room.cool_down("gpu", 30_000)
    room.run("occupy_slots", "gpu", 1, 500)
    room.later(29_999)
    room.offer()
    assert room.members("free") == []


# -- time ------------------------------------------------------------------------------------------------------


def test_an_offer_is_open_for_the_time_it_was_given(room):
    room.with_slots(1)
    room.enqueue(a("j", 1))
    assert room.expiry_of("j") == START_MS + OFFER_MS


# -- busy servers ------------------------------------------------------------------------------------------------


def test_a_slot_whose_server_is_busy_is_tried_less_and_less_often(room):
    room.with_slots(2)
    room.enqueue(a("j1", 1), limit=1)
    (held,) = room.held()
    offer = Offered(held[0], held[1], held[3], "gpu", "zimg", 0, "")
    for cooldown_ms in (500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000):
        room.release(offer, "", return_to_lane=True, cooldown_ms=500, signal="busy", limit=0)
        room.set_free("gpu-slot1" if offer.slot == "gpu-slot0" else "gpu-slot0", None)
        room.later(cooldown_ms - 1)
        assert room.offer() == []
        room.later(1)
        (offer,) = room.offer()
    room.release(offer, "", return_to_lane=True, signal="ok", limit=0)
    (offer,) = room.offer()
    room.release(offer, "", return_to_lane=True, cooldown_ms=500, signal="busy", limit=0)
    room.later(500)
    assert len(room.offer()) == 1, "after a run that went well it begins anew"


# -- changes under way -----------------------------------------------------------------------------------------


def test_slot_1_leases_on_numbers_that_a_server_has_lost_count_against_those_it_has(room):
    room.with_slots(4)
    held = room.enqueue(*[a(f"j{n}", n) for n in range(1, 5)])
    for done in held[:2]:
        room.release(done, "", limit=0)
    room.sync(Server("gpu", 2))
    assert room.enqueue(a("j5", 5), a("j6", 6)) == []
    _, offers = room.release(held[2], "")
    assert [(offer.job, offer.slot) for offer in offers] == [("j5", held[1].slot)] or offers[0].slot == held[0].slot
    _, offers = room.release(held[3], "")
    assert len(offers) == 1 and len(room.taken()) == 2


def test_slots_that_are_given_back_are_offered_again_beside_the_leases_that_outlived_them(room):
    room.with_slots(4)
    held = room.enqueue(*[a(f"j{n}", n) for n in range(1, 5)])
    room.release(held[0], "", limit=0)
    room.sync(Server("gpu", 1))
    assert room.enqueue(a("j5", 5), a("j6", 6)) == []
    room.sync(Server("gpu", 4))
    assert [offer.slot for offer in room.offer()] == [held[0].slot]


def test_a_server_that_comes_again_under_its_name_begins_anew(room):
    room.with_slots(1)
    for n in range(3):
        (offer,) = room.enqueue(a(f"f{n}", n))
        room.release(offer, "", signal="failed", limit=0)
    room.cool_down("gpu", 1000)
    assert room.enqueue(a("j1", 9)) == []
    room.sync()
    room.sync(Server("gpu"))
    assert [offer.job for offer in room.offer()] == ["j1"]
    assert room.run("server_status")[0][6] == "closed"


def test_a_sync_writes_the_index_of_a_kind_again_if_it_lacks_slots(room):
    room.with_slots(2)
    (index,) = room.client.scan_iter(f"{room.key('free')}:*")
    complete = room.client.zrange(index, 0, -1)
    room.client.delete(index)
    room.sync(Server("gpu", 2), repairs=True)
    assert room.client.zrange(index, 0, -1) == complete


def test_of_servers_that_come_and_go_nothing_is_left(room):
    room.with_slots(1)
    room.enqueue(a("first", 1))
    before = room.dump()
    for n in range(20):
        room.sync(Server("gpu"), Server(f"spot{n}"))
        (held,) = room.enqueue(a(f"j{n}", 10 + n))
        room.cool_down(f"spot{n}", 1000)
        room.sync(Server("gpu"))
        room.release(held, "", signal="failed", limit=0)
        room.cool_down(f"spot{n}", 1000)
    after = room.dump()
    assert after.keys() <= before.keys()
    assert after[room.key("meta")].keys() == before[room.key("meta")].keys()
    assert after[room.key("stats:server:gpu")] == before[room.key("stats:server:gpu")]


def test_a_count_of_leases_that_is_wrong_is_mended_by_a_repair(room):
    room.with_slots(2)
    room.enqueue(a("j1", 1))
    room.client.hset(room.key("stats:server:gpu"), "taken", 7)
    room.sync(Server("gpu", 2), repairs=True)
    assert room.run("server_status")[0][4] == 1


# -- changes of the catalog ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 2])  # Every second version is brought as its changes.
def test_a_server_that_comes_back_smaller_under_its_leases_gets_no_more_runs_than_it_has_slots(room, first):
    room.version = first
    room.with_slots(3)
    *ended, held = room.enqueue(a("j1", 1), a("j2", 2), a("j3", 3))
    room.sync()
    for one in ended:
        room.release(one, "")
    room.sync()
    room.sync(Server("gpu", 1))
    assert room.enqueue(a("j4", 4)) == []
    assert [offer.job for offer in room.release(held, "")[1]] == ["j4"]


def _catalog(version: int, *servers: CatalogServer) -> CatalogSnapshot:
    return CatalogSnapshot(version, {}, {server.name: server for server in servers})


def _a_server(name: str, slots: int = 1) -> CatalogServer:
    return CatalogServer(name, "zimg", slots, "online", {"zimg": ""}, 0)


@pytest.fixture
def slots(room):
    return Slots(room.scripts, RoutingSettings())


def test_only_what_has_changed_is_sent(room, slots):
    gpu0, gpu1 = _a_server("gpu0"), _a_server("gpu1")
    slots.sync_all(["zimg"], _catalog(1, gpu0, gpu1))
    room.client.hdel(room.key("servers"), "gpu0")  # It does not come back, as it has not changed.
    slots.sync_all(["zimg"], _catalog(2, gpu0, _a_server("gpu1", 2), _a_server("gpu2")))
    assert sorted(room.client.hkeys(room.key("servers"))) == [b"gpu1", b"gpu2"]
    slots.sync_all(["zimg"], _catalog(3, gpu0, _a_server("gpu2")))
    assert room.client.hkeys(room.key("servers")) == [b"gpu2"] and "gpu1-slot0" not in room.members("free")


def test_a_fleet_that_lacks_earlier_changes_gets_the_whole_catalog(room, slots):
    gpu0, gpu1 = _a_server("gpu0"), _a_server("gpu1")
    slots.sync_all(["zimg"], _catalog(1, gpu0))
    slots.sync_all(["zimg"], _catalog(2, gpu0, gpu1))
    room.client.delete(*(room.key(name) for name in FLEET_KEYS))
    assert slots.sync_all(["zimg"], _catalog(3, gpu0, gpu1))["zimg"].answer == "synced"
    assert sorted(room.members("free")) == ["gpu0-slot0", "gpu1-slot0"]


def test_a_fleet_that_has_later_changes_of_another_process_keeps_them(room, slots):
    other, gpu0 = Slots(room.scripts, RoutingSettings()), _a_server("gpu0")
    slots.sync_all(["zimg"], _catalog(1, gpu0))
    other.sync_all(["zimg"], _catalog(2, gpu0, _a_server("gpu1")))
    slots.sync_all(["zimg"], _catalog(3, gpu0, _a_server("gpu1"), _a_server("gpu2")))
    assert sorted(room.members("free")) == ["gpu0-slot0", "gpu1-slot0", "gpu2-slot0"]
