"""The slots of a fleet: which are offered or in cooldown, and the effect of a catalog change (SLOT-2, LEASE-1)."""

import pytest

from routing.config import RoutingSettings
from routing.queue.slots import Slots
from slotkeeper.redis.keys import FLEET_KEYS
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import Server as CatalogServer
from tests.support.fleet_queue import OFFER_MS, START_MS, Offered, Server, a

ODD_NAMES = ["zimg-api4", "org/model-7b", "gpu.rack-2/a:8000", "a-slot3", "a-slot3-slot0", "x@y+z", "%d%w.-"]


# -- sync ----------------------------------------------------------------------------------------------


def test_every_slot_of_an_online_server_is_free(queue):
    assert queue.sync(Server("gpu-a", 2), Server("gpu-b", 1)) == "synced"
    assert sorted(queue.members("free")) == ["gpu-a-slot0", "gpu-a-slot1", "gpu-b-slot0"]


def test_syncing_the_same_catalog_again_changes_nothing(queue):
    servers = (Server("gpu-a", 3), Server("gpu-b", 2, "paused"))
    queue.with_servers(*servers)
    queue.enqueue(a("j1", 1))
    queue.cool_down("gpu-a", 1000)
    before = queue.dump()
    queue.later(10)
    assert queue.sync(*servers, version=queue.version) == "synced"
    assert queue.dump() == before


def test_an_older_catalog_changes_nothing(queue):
    queue.sync(Server("new", 2), version=7)
    before = queue.dump()
    assert queue.sync(Server("old", 9), version=6) == "stale"
    assert queue.dump() == before


def test_new_slots_can_be_offered_at_once(queue):
    queue.with_slots(1)
    queue.enqueue(a("j1", 1), a("j2", 2))
    queue.sync(Server("gpu", 2))
    assert [(offer.job, offer.slot) for offer in queue.offer()] == [("j2", "gpu-slot1")]


def test_removed_slots_are_not_offered(queue):
    queue.with_slots(3)
    queue.sync(Server("gpu", 1))
    assert queue.members("free") == ["gpu-slot0"]


@pytest.mark.parametrize("back", [True, False])
def test_a_slot_that_is_taken_away_under_a_lease_is_kept_until_its_release_and_not_offered_then(queue, back):
    queue.with_slots(2)
    _, held = queue.enqueue(a("j1", 1), a("j2", 2))
    queue.sync(Server("gpu", 1))
    assert queue.taken()[held.slot] == "j2"
    queue.claim(held)
    assert queue.renew("w1", held) == ["renewed"]
    assert queue.release(held, return_to_lane=back) == ("released", [])
    assert queue.members("free") == queue.members("cooling") == []


def test_a_leased_slot_that_is_removed_and_added_again_is_free_only_after_its_release(queue):
    queue.with_slots(2)
    _, held = queue.enqueue(a("j1", 1), a("j2", 2))
    queue.sync(Server("gpu", 1))
    queue.sync(Server("gpu", 2))
    queue.enqueue(a("j3", 3))
    assert queue.members("free") == []
    queue.release(held, "", limit=0)
    assert queue.members("free") == ["gpu-slot1"]


@pytest.mark.parametrize("state", ["paused", "draining"])
def test_a_server_that_is_not_online_gets_nothing(queue, state):
    queue.with_servers(Server("gpu", 2, state))
    assert queue.enqueue(a("j", 1)) == [] and queue.members("free") == []


@pytest.mark.parametrize("state", ["paused", "draining"])
@pytest.mark.parametrize("cooldown_ms", [0, 500])
def test_a_slot_freed_on_a_server_that_is_not_online_is_offered_when_it_is_again(queue, state, cooldown_ms):
    queue.with_slots(1)
    (held,) = queue.enqueue(a("j1", 1), a("j2", 2))
    queue.sync(Server("gpu", 1, state))
    assert queue.release(held, "", cooldown_ms=cooldown_ms) == ("released", [])
    queue.later(1000)
    assert queue.offer() == []
    queue.sync(Server("gpu", 1))
    assert [offer.job for offer in queue.offer()] == ["j2"]


def test_free_and_cooling_slots_of_a_server_that_is_paused_are_taken_out(queue):
    queue.with_servers(Server("gpu-a", 2), Server("gpu-b", 2))
    queue.cool_down("gpu-b", 1000)
    queue.sync(Server("gpu-a", 2, "paused"), Server("gpu-b", 2, "paused"))
    assert queue.members("free") == queue.members("cooling") == []
    queue.later(5000)
    queue.offer()
    assert queue.members("free") == []


def test_a_removed_server_keeps_only_its_leases(queue):
    queue.with_slots(2)
    (held,) = queue.enqueue(a("j", 1))
    queue.sync()
    assert queue.members("free") == [] and queue.taken() == {held.slot: "j"}
    assert queue.release(held, "") == ("released", [])
    assert queue.taken() == {} and queue.members("free") == []


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_server_name_may_look_like_a_slot_name(queue, name):
    queue.with_servers(Server(name, 2), Server(name + "0", 1))
    one, two, three = queue.enqueue(a("j1", 1), a("j2", 2), a("j3", 3))
    assert {one.server, two.server, three.server} == {name, name + "0"}
    assert {offer.slot for offer in (one, two, three)} == {f"{name}-slot0", f"{name}-slot1", f"{name}0-slot0"}
    for offer in (one, two, three):
        assert offer.slot.startswith(f"{offer.server}-slot")
        assert queue.release(offer, "", limit=0)[0] == "released"
    assert queue.cool_down(name, 1000)[1] == 2
    assert queue.members("free") == [f"{name}0-slot0"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_model_name_may_look_like_a_server_or_slot_name(queue, name):
    queue.with_servers(Server("gpu", 1, models=(name,)))
    queue.enqueue(a("foreign", 1, model=name + "x"), a("foreign too", 2, model="x" + name))
    (offer,) = queue.enqueue(a("j", 3, model=name))
    assert (offer.job, offer.model) == ("j", name)
    assert queue.position(a("foreign", 1, model=name + "x")) == ["waiting", 0]


@pytest.mark.parametrize("served", [("zimg-large",), ("my-zimg", "zimg2"), ("xonline", "x5")])
def test_a_server_gets_no_job_of_a_model_whose_name_is_only_a_part_of_a_served_name(queue, served):
    queue.with_servers(Server("gpu", 3, models=served))
    for n, model in enumerate(("zim", "img", "large", "online", "5", "3", "online 3", "gpu"), 1):
        assert queue.enqueue(a(f"j{n}", n, model=model)) == []
    assert queue.offer() == []


# -- several models on a server --------------------------------------------------------------------------------


def test_a_server_takes_the_first_job_of_any_model_that_it_serves(queue):
    queue.with_servers(Server("both", 1, models=("flux", "zimg")))
    jobs = [a("z1", 1), a("f2", 2, model="flux"), a("urgent", 9, 1, "flux"), a("foreign", 0, 1, "trellis"), a("z3", 3)]
    queue.enqueue(*jobs, limit=0)
    assert queue.drain() == ["urgent", "z1", "f2", "z3"]
    assert queue.waiting() == ["foreign"]


def test_a_job_at_the_head_that_no_free_slot_serves_blocks_no_other_job(queue):
    queue.with_servers(Server("a", 1, models=("flux",)), Server("b", 1, models=("flux", "zimg")))
    offers = queue.enqueue(a("z1", 1), a("z2", 2), a("f3", 3, model="flux"))
    assert sorted((offer.job, offer.slot) for offer in offers) == [("f3", "a-slot0"), ("z1", "b-slot0")]


def test_the_slot_that_has_been_free_for_longest_is_offered_first(queue):
    queue.with_slots(3)
    first, second, third = queue.enqueue(*[a(f"j{n}", n) for n in range(1, 4)])
    for offer in (second, third, first):
        queue.later(1)
        queue.release(offer, "")
    assert [offer.slot for offer in queue.enqueue(*[a(f"k{n}", n) for n in range(4, 7)])] == [
        second.slot,
        third.slot,
        first.slot,
    ]


def test_slot_2_a_free_slot_is_found_among_any_number_of_slots_without_a_matching_job(queue):
    queue.with_servers(Server("idle", 300, models=("flux",)))
    queue.later(1)
    queue.sync(Server("idle", 300, models=("flux",)), Server("gpu", 1))
    assert [offer.slot for offer in queue.enqueue(a("j", 1))] == ["gpu-slot0"]


@pytest.mark.parametrize("between", [63, 64, 300])
def test_slot_2_every_slot_of_a_server_is_found_with_any_number_of_free_slots_between_them(queue, between):
    large = Server("large", 2, attributes={"memory": 80})
    queue.with_servers(large, *[Server(f"small{n}") for n in range(between)])
    queue.client.zadd(queue.key("free"), {"large-slot0": START_MS - 1, "large-slot1": START_MS + 1})
    offers = queue.enqueue(a("any", 1), a("choosy", 2, constraints="memory>=80"))
    assert [offer.slot for offer in offers] == ["large-slot0", "large-slot1"]


@pytest.mark.parametrize(
    "act",
    [lambda queue: queue.enqueue(a("j", 1)), lambda queue: queue.cool_down("gpu7", 1000)],
    ids=["offer", "cooldown"],
)
def test_an_operation_on_one_server_of_a_thousand_runs_few_redis_commands(queue, act):
    queue.with_servers(*[Server(f"gpu{n}") for n in range(1000)])
    queue.client.config_resetstat()
    act(queue)
    assert sum(row["calls"] for row in queue.client.info("commandstats").values()) < 150


def test_slot_2_a_job_is_found_behind_any_number_of_lanes_without_a_slot(queue):
    queue.enqueue(*[a(f"no{priority}-{n}", n, priority, f"m{n}") for n in range(40) for priority in range(1, 9)])
    queue.with_slots(1)
    assert [offer.job for offer in queue.enqueue(a("j", 1000, 9))] == ["j"]


# -- cooldowns and their ends ----------------------------------------------------------------------------------------


def test_each_consecutive_cooldown_is_twice_as_long_up_to_the_maximum(queue):
    queue.with_slots(1)
    assert [queue.cool_down("gpu", 1000, 30_000)[0] for _ in range(8)] == [
        1000,
        2000,
        4000,
        8000,
        16000,
        30000,
        30000,
        30000,
    ]
    queue.cool_down("gpu", 0)
    assert queue.cool_down("gpu", 1000)[0] == 1000


def test_a_thousand_cooldowns_in_a_row_do_not_overflow(queue):
    queue.with_slots(1)
    queue.client.hset(queue.key("meta"), "failures:gpu", 5000)
    assert queue.cool_down("gpu", 1000)[0] == 30_000


def test_a_slot_in_cooldown_is_not_offered_before_the_cooldown_ends(queue):
    queue.with_servers(Server("gpu", 2), Server("other", 1))
    assert queue.cool_down("gpu", 1000) == [1000, 2]
    assert [offer.slot for offer in queue.enqueue(a("j1", 1), a("j2", 2))] == ["other-slot0"]
    queue.later(999)
    assert queue.offer() == []
    queue.later(1)
    assert [offer.job for offer in queue.offer()] == ["j2"]
    assert queue.members("cooling") == [] and len(queue.members("free")) == 1


def test_a_server_whose_cooldown_is_ended_early_is_offered_at_once(queue):
    queue.with_slots(2)
    queue.cool_down("gpu", 1000)
    queue.enqueue(a("j", 1))
    assert queue.cool_down("gpu", 0, 0) == [0, 2]
    assert [offer.job for offer in queue.offer()] == ["j"]


def test_a_cooldown_leaves_leased_slots_and_other_servers_alone(queue):
    queue.with_servers(Server("gpu", 1), Server("gpu2", 1))
    (held,) = queue.enqueue(a("j", 1), limit=1)
    taken = queue.taken()
    assert queue.cool_down(held.server, 1000)[1] == 0
    assert queue.taken() == taken and len(queue.members("free")) == 1


def test_a_cooldown_that_ends_on_a_server_that_is_not_online_frees_nothing(queue):
    queue.with_slots(1)
    queue.cool_down("gpu", 1000)
    queue.client.hset(queue.key("servers"), "gpu", "paused 1\nzimg\n")
    queue.later(1000)
    queue.offer()
    assert queue.members("free") == queue.members("cooling") == []


def test_slots_above_the_limit_of_one_pass_leave_their_cooldown_in_the_next_pass(queue):
    queue.with_slots(150)
    queue.cool_down("gpu", 1000)
    queue.later(1000)
    queue.offer()
    queue.offer()
    assert len(queue.members("free")) == 150


# -- work of others (SLOT-1) -----------------------------------------------------------------------------------


def test_slot_1_the_slots_of_a_server_that_other_clients_use_are_not_offered_for_a_while(queue):
    queue.with_servers(Server("gpu", 4), Server("gpu2", 2))
    assert queue.run("occupy_slots", "gpu", 3, 500) == 3
    assert sorted(slot for slot in queue.members("free") if slot.startswith("gpu-")) == ["gpu-slot3"]
    assert len(queue.members("free")) == 3
    queue.later(500)
    queue.offer()
    assert len(queue.members("free")) == 6 and queue.members("cooling") == []


def test_slot_1_slots_that_are_leased_or_in_cooldown_count_as_used_by_other_clients_once(queue):
    queue.with_slots(3)
    queue.enqueue(a("j", 1))
    assert queue.run("occupy_slots", "gpu", 1, 500) == 1
    assert queue.run("occupy_slots", "gpu", 1, 500) == 1
    assert len(queue.members("cooling")) == 1 and len(queue.members("free")) == 1
    assert queue.run("occupy_slots", "gpu", 9, 500) == 2
    assert queue.taken() and queue.members("free") == []


def test_occupying_no_slot_leaves_no_trace(queue):
    queue.with_slots(2)
    before = queue.dump()
    assert queue.run("occupy_slots", "gpu", 0, 500) == 0
    assert queue.run("occupy_slots", "stranger", 5, 500) == 0
    assert queue.dump() == before


def test_occupying_does_not_shorten_a_cooldown(queue):
    queue.with_slots(1)
    queue.cool_down("gpu", 30_000)
    queue.run("occupy_slots", "gpu", 1, 500)
    queue.later(29_999)
    queue.offer()
    assert queue.members("free") == []


# -- time ------------------------------------------------------------------------------------------------------


def test_an_offer_is_open_for_the_time_it_was_given(queue):
    queue.with_slots(1)
    queue.enqueue(a("j", 1))
    assert queue.expiry_of("j") == START_MS + OFFER_MS


# -- busy servers ------------------------------------------------------------------------------------------------


def test_a_slot_whose_server_is_busy_is_tried_less_and_less_often(queue):
    queue.with_slots(2)
    queue.enqueue(a("j1", 1), limit=1)
    (held,) = queue.held()
    offer = Offered(held[0], held[1], held[3], "gpu", "zimg", 0, "")
    for cooldown_ms in (500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000):
        queue.release(offer, "", return_to_lane=True, cooldown_ms=500, signal="busy", limit=0)
        queue.set_free("gpu-slot1" if offer.slot == "gpu-slot0" else "gpu-slot0", None)
        queue.later(cooldown_ms - 1)
        assert queue.offer() == []
        queue.later(1)
        (offer,) = queue.offer()
    queue.release(offer, "", return_to_lane=True, signal="ok", limit=0)
    (offer,) = queue.offer()
    queue.release(offer, "", return_to_lane=True, cooldown_ms=500, signal="busy", limit=0)
    queue.later(500)
    assert len(queue.offer()) == 1, "after a run that went well it begins anew"


# -- changes under way -----------------------------------------------------------------------------------------


def test_slot_1_leases_on_numbers_that_a_server_has_lost_count_against_those_it_has(queue):
    queue.with_slots(4)
    held = queue.enqueue(*[a(f"j{n}", n) for n in range(1, 5)])
    for done in held[:2]:
        queue.release(done, "", limit=0)
    queue.sync(Server("gpu", 2))
    assert queue.enqueue(a("j5", 5), a("j6", 6)) == []
    _, offers = queue.release(held[2], "")
    assert [(offer.job, offer.slot) for offer in offers] == [("j5", held[1].slot)] or offers[0].slot == held[0].slot
    _, offers = queue.release(held[3], "")
    assert len(offers) == 1 and len(queue.taken()) == 2


def test_slots_that_are_added_back_are_offered_unless_an_older_lease_still_holds_them(queue):
    queue.with_slots(4)
    held = queue.enqueue(*[a(f"j{n}", n) for n in range(1, 5)])
    queue.release(held[0], "", limit=0)
    queue.sync(Server("gpu", 1))
    assert queue.enqueue(a("j5", 5), a("j6", 6)) == []
    queue.sync(Server("gpu", 4))
    assert [offer.slot for offer in queue.offer()] == [held[0].slot]


def test_a_server_that_is_registered_again_under_its_name_starts_without_its_old_state(queue):
    queue.with_slots(1)
    for n in range(3):
        (offer,) = queue.enqueue(a(f"f{n}", n))
        queue.release(offer, "", signal="failed", limit=0)
    queue.cool_down("gpu", 1000)
    assert queue.enqueue(a("j1", 9)) == []
    queue.sync()
    queue.sync(Server("gpu"))
    assert [offer.job for offer in queue.offer()] == ["j1"]
    assert queue.run("server_status")[0][6] == "closed"


def test_a_sync_repairs_a_free_slot_index_that_lacks_slots(queue):
    queue.with_slots(2)
    (index,) = queue.client.scan_iter(f"{queue.key('free')}:*")
    complete = queue.client.zrange(index, 0, -1)
    queue.client.delete(index)
    queue.sync(Server("gpu", 2), repairs=True)
    assert queue.client.zrange(index, 0, -1) == complete


def test_removed_servers_leave_no_keys(queue):
    queue.with_slots(1)
    queue.enqueue(a("first", 1))
    before = queue.dump()
    for n in range(20):
        queue.sync(Server("gpu"), Server(f"spot{n}"))
        (held,) = queue.enqueue(a(f"j{n}", 10 + n))
        queue.cool_down(f"spot{n}", 1000)
        queue.sync(Server("gpu"))
        queue.release(held, "", signal="failed", limit=0)
        queue.cool_down(f"spot{n}", 1000)
    after = queue.dump()
    assert after.keys() <= before.keys()
    assert after[queue.key("meta")].keys() == before[queue.key("meta")].keys()
    assert after[queue.key("stats:server:gpu")] == before[queue.key("stats:server:gpu")]


def test_a_count_of_leases_that_is_wrong_is_mended_by_a_repair(queue):
    queue.with_slots(2)
    queue.enqueue(a("j1", 1))
    queue.client.hset(queue.key("stats:server:gpu"), "taken", 7)
    queue.sync(Server("gpu", 2), repairs=True)
    assert queue.run("server_status")[0][4] == 1


# -- changes of the catalog ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 2])  # Every second version is sent as a list of changes.
def test_a_server_that_returns_with_fewer_slots_than_leases_gets_no_run_above_its_slots(queue, first):
    queue.version = first
    queue.with_slots(3)
    *ended, held = queue.enqueue(a("j1", 1), a("j2", 2), a("j3", 3))
    queue.sync()
    for one in ended:
        queue.release(one, "")
    queue.sync()
    queue.sync(Server("gpu", 1))
    assert queue.enqueue(a("j4", 4)) == []
    assert [offer.job for offer in queue.release(held, "")[1]] == ["j4"]


def _catalog(version: int, *servers: CatalogServer) -> CatalogSnapshot:
    return CatalogSnapshot(version, {}, {server.name: server for server in servers})


def _a_server(name: str, slots: int = 1) -> CatalogServer:
    return CatalogServer(name, "zimg", slots, "online", {"zimg": ""}, 0)


@pytest.fixture
def slots(queue):
    return Slots(queue.scripts, RoutingSettings())


def test_a_sync_sends_only_the_servers_that_have_changed(queue, slots):
    gpu0, gpu1 = _a_server("gpu0"), _a_server("gpu1")
    slots.sync_all(["zimg"], _catalog(1, gpu0, gpu1))
    queue.client.hdel(queue.key("servers"), "gpu0")  # It does not come back, as it has not changed.
    slots.sync_all(["zimg"], _catalog(2, gpu0, _a_server("gpu1", 2), _a_server("gpu2")))
    assert sorted(queue.client.hkeys(queue.key("servers"))) == [b"gpu1", b"gpu2"]
    slots.sync_all(["zimg"], _catalog(3, gpu0, _a_server("gpu2")))
    assert queue.client.hkeys(queue.key("servers")) == [b"gpu2"] and "gpu1-slot0" not in queue.members("free")


def test_a_fleet_that_lacks_earlier_changes_gets_the_whole_catalog(queue, slots):
    gpu0, gpu1 = _a_server("gpu0"), _a_server("gpu1")
    slots.sync_all(["zimg"], _catalog(1, gpu0))
    slots.sync_all(["zimg"], _catalog(2, gpu0, gpu1))
    queue.client.delete(*(queue.key(name) for name in FLEET_KEYS))
    assert slots.sync_all(["zimg"], _catalog(3, gpu0, gpu1))["zimg"].answer == "synced"
    assert sorted(queue.members("free")) == ["gpu0-slot0", "gpu1-slot0"]


def test_a_fleet_that_has_later_changes_of_another_process_keeps_them(queue, slots):
    other, gpu0 = Slots(queue.scripts, RoutingSettings()), _a_server("gpu0")
    slots.sync_all(["zimg"], _catalog(1, gpu0))
    other.sync_all(["zimg"], _catalog(2, gpu0, _a_server("gpu1")))
    slots.sync_all(["zimg"], _catalog(3, gpu0, _a_server("gpu1"), _a_server("gpu2")))
    assert sorted(queue.members("free")) == ["gpu0-slot0", "gpu1-slot0", "gpu2-slot0"]
