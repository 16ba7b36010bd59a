"""A Redis that lost its last writes is noticed at once, and offers nothing until the queue is rebuilt."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from tests.support.room import LEASE_MS, Room, Server, a
from tools.cluster.valkey_process import Valkey


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Valkey]:
    """A server that a test may stop and start."""
    with Valkey(tmp_path, settings={"save": ""}) as server:
        yield server


def states(client: Redis) -> dict[bytes, bytes]:
    return {key: client.dump(key) for key in client.scan_iter() if not key.startswith(b"clock:")}


def put_back(client: Redis, kept: dict[bytes, bytes]) -> None:
    for key in client.scan_iter():
        if not key.startswith(b"clock:"):
            client.delete(key)
    for key, value in kept.items():
        client.restore(key, 0, value)


def seen(room: Room, epoch: str, offers: int, *held) -> list:
    return room.run(
        "renew", "w1", LEASE_MS, epoch, offers, *[text for offer in held for text in (offer.job, offer.lease)]
    )


def test_a_redis_that_was_started_again_offers_nothing_until_the_room_is_filled(own):
    with own.client() as client:
        room = Room(client).with_slots(2)
        (held,) = room.enqueue(a("j1", 1))
        client.save()
    own.stop()
    own.start()
    with own.client() as client:
        room.client = room.scripts.redis = client
        assert room.enqueue(a("j2", 2)) == [] and room.offer() == []
        assert room.run("queue_counts")[0] == 0
        assert room.claim(held) == "lost", "its slot may be another's by now"
        assert room.run("renew", "w1", LEASE_MS, "", 0, "j9", "x") == ["1", 1, ["unknown"]]
        assert room.open(2) == "opened"
        assert room.waiting() == [] and room.taken() == {}, "what Redis kept is forgotten"
        room.sync(Server("gpu", 2))
        assert [offer.job for offer in room.enqueue(a("j1", 1))] == ["j1"]


def test_a_redis_that_was_a_replica_in_between_offers_nothing_until_the_room_is_filled(own):
    with own.client() as client:
        room = Room(client).with_slots(2)
        assert [offer.job for offer in room.enqueue(a("j1", 1))] == ["j1"]
        client.replicaof("127.0.0.1", "1")
        client.replicaof("NO", "ONE")
        room.later(100)
        assert room.enqueue(a("j2", 2)) == [] and room.offer() == []
        assert room.begin() == "cleared"


def test_a_room_is_not_opened_if_redis_was_started_again_while_it_was_filled(own):
    with own.client() as client:
        room = Room(client)
        room.begin()
        room.sync(Server("gpu"))
        client.save()
    own.stop()
    own.start()
    with own.client() as client:
        room.client = room.scripts.redis = client
        assert room.run("open_queue", 1) == "lost"


def test_who_begins_later_forgets_nothing_of_what_is_being_filled(room):
    room.with_slots(1)
    room.run("discard_queue", 1)
    assert room.begin() == "cleared"
    room.enqueue(a("j1", 1))
    assert room.begin() == "ready" and room.waiting() == ["j1"]
    room.open()
    assert room.begin() == "open" and room.waiting() == ["j1"]


def test_a_room_that_was_closed_on_purpose_keeps_its_leases_and_forgets_what_waits(room):
    room.with_slots(2)
    running, offered = room.enqueue(a("running", 1), a("offered", 2))
    room.claim(running)
    room.enqueue(a("waits", 3))
    assert room.run("close_queue", room.version) == "closed"
    assert room.begin() == "emptied"
    assert room.waiting() == [] and room.run("queue_counts")[4] == []
    assert room.taken() == {"gpu-slot0": "running", "gpu-slot1": "offered"}
    assert room.claim(offered, "w2") == "lost", "nothing begins before the room is filled"
    room.sync(*room.servers)
    room.enqueue(a("offered", 2), a("waits", 3))
    assert room.open(7) == "opened" and room.waiting() == ["waits"]
    assert room.renew("w1", running) == ["renewed"] and room.claim(offered, "w2") != "lost"


def test_a_newer_room_elsewhere_closes_this_one_and_all_of_it_is_forgotten(room):
    room.with_slots(1)
    room.enqueue(a("j1", 1))
    assert room.run("discard_queue", 2) == "changed" and room.run("queue_counts")[0] == 1
    assert room.run("discard_queue", 1) == "closed" and room.run("queue_counts")[0] == 0
    assert room.begin() == "cleared" and room.taken() == {}


@pytest.mark.parametrize("close", ["close_queue", "discard_queue"])
def test_only_a_new_filling_gets_another_name(room, close):
    room.with_slots(1)
    before = room.client.hget(room.key("meta"), "filling")
    room.run(close, room.version if close == "close_queue" else 1)
    room.begin()
    after = room.client.hget(room.key("meta"), "filling")
    assert (after == before) == (close == "close_queue")
    room.begin()
    assert room.client.hget(room.key("meta"), "filling") == after


def test_fewer_offers_than_somebody_has_seen_close_the_room(room):
    room.with_slots(2)
    room.enqueue(a("j1", 1))
    kept = states(room.client)
    (second,) = room.enqueue(a("j2", 2))
    room.claim(second)
    epoch, offers, _ = seen(room, "", 0, second)
    put_back(room.client, kept)
    assert seen(room, epoch, offers, second)[2] == ["unknown"]
    assert room.offer() == [] and room.enqueue(a("j3", 3)) == []
    assert room.begin() == "cleared"


@pytest.mark.parametrize(("epoch", "offers"), [("1", 2), ("another", 99), ("", 0)])
def test_a_room_that_has_lost_nothing_stays_open(room, epoch, offers):
    room.with_slots(2)
    room.enqueue(a("j1", 1), a("j2", 2))
    assert seen(room, epoch, offers) == ["1", 2, []]
    assert room.run("queue_counts")[0] == 1


def test_means_outlive_a_lost_moment_and_not_another_record(room):
    room.configure().with_slots(1)
    (held,) = room.enqueue(a("j1", 1))
    room.later(500)
    room.release(held, "", signal="ok")
    room.run("close_queue", room.version)
    room.open()
    room.sync(*room.servers)
    assert room.run("model_status", "default|zimg", 0)[2] == 500
    assert room.run("sync_catalog", "another record", 1, -1, 0, 1, 0)[0] == "foreign"
    assert room.begin("another record") == "cleared"
    assert room.run("model_status", "default|zimg", 0)[2] is None


def test_a_room_of_another_record_takes_nothing_from_it_before_it_is_filled_from_it(room):
    room.with_slots(1)
    room.enqueue(a("j1", 1), a("j2", 2))
    assert room.run("sync_catalog", "another record", 99, -1, 0, 1, 0)[0] == "foreign"
    assert room.client.hkeys(room.key("servers")) == [b"gpu"] and room.taken() == {"gpu-slot0": "j1"}
    assert room.run("queue_counts")[0] == 0
    assert room.begin("another record") == "cleared"
    assert room.run("sync_catalog", "another record", 1, -1, 0, 1, 1, *Server("new").args)[0] == "synced"
    assert room.members("free") == ["new-slot0"] and room.waiting() == []


def test_what_a_caller_saw_of_the_catalog_must_still_hold_for_it_to_close_the_room(room):
    room.with_slots(1)
    assert room.run("close_queue", room.version - 1) == "changed" and room.run("queue_counts")[0] == 1
    assert room.run("close_queue", room.version) == "closed" and room.run("queue_counts")[0] == 0


def test_slot_1_who_gets_a_slot_that_its_server_has_lost_still_costs_it_another_one(room):
    room.with_slots(2)
    held = {offer.slot: offer for offer in room.enqueue(a("one", 1), a("two", 2))}
    room.restore((a("old", 3), "x-1", "w1", "gpu-slot1"))
    room.sync(Server("gpu", 1))
    assert room.release(held["gpu-slot0"], "")[1] == [] and room.enqueue(a("next", 4)) == []
    assert room.release(held["gpu-slot1"], "")[1] == [], "the one slot that is left is what the older run costs"
    assert room.taken() == {"gpu-slot1": "old"}


# -- leases that were lost -------------------------------------------------------------------------------------------


def test_a_run_that_began_while_the_room_was_filled_is_taken_out_of_its_lane(room):
    room.sync(Server("gpu"))
    room.begin()
    room.enqueue(a("j1", 1), a("j2", 2))
    assert room.restore((a("j1", 1), "x-1", "w1", "gpu-slot0")) == 1
    assert room.open() == "opened"
    assert room.waiting() == ["j2"] and room.taken() == {"gpu-slot0": "j1"} and room.offer() == []


def test_slot_1_a_run_whose_slot_was_given_away_costs_its_server_another_one(room):
    room.with_slots(2)
    (other,) = room.enqueue(a("other", 1))
    assert room.restore((a("old", 2), "x-1", "w1", other.slot)) == 1
    assert room.enqueue(a("next", 3)) == [], "two run on the two slots"
    room.sync(Server("gpu", 2))
    assert room.offer() == []
    _, offers = room.release(other, "")
    assert [(offer.job, offer.slot != other.slot) for offer in offers] == [("next", True)]
