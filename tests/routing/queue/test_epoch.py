"""A Redis that lost its last writes is noticed at once, and offers nothing until the queue is rebuilt."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from tests.support.fleet_queue import LEASE_MS, FleetQueue, Server, a
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


def seen(queue: FleetQueue, epoch: str, offers: int, *held) -> list:
    return queue.run(
        "renew", "w1", LEASE_MS, epoch, offers, *[text for offer in held for text in (offer.job, offer.lease)]
    )


def test_a_restarted_redis_offers_no_job_until_the_queue_is_rebuilt(own):
    with own.client() as client:
        queue = FleetQueue(client).with_slots(2)
        (held,) = queue.enqueue(a("j1", 1))
        client.save()
    own.stop()
    own.start()
    with own.client() as client:
        queue.client = queue.scripts.redis = client
        assert queue.enqueue(a("j2", 2)) == [] and queue.offer() == []
        assert queue.run("queue_counts")[0] == 0
        assert queue.claim(held) == "lost", "another job may hold the slot"
        assert queue.run("renew", "w1", LEASE_MS, "", 0, "j9", "x") == ["1", 1, ["unknown"]]
        assert queue.open(2) == "opened"
        assert queue.waiting() == [] and queue.taken() == {}, "the jobs and leases that Redis kept are discarded"
        queue.sync(Server("gpu", 2))
        assert [offer.job for offer in queue.enqueue(a("j1", 1))] == ["j1"]


def test_a_redis_that_was_a_replica_in_between_offers_no_job_until_the_queue_is_rebuilt(own):
    with own.client() as client:
        queue = FleetQueue(client).with_slots(2)
        assert [offer.job for offer in queue.enqueue(a("j1", 1))] == ["j1"]
        client.replicaof("127.0.0.1", "1")
        client.replicaof("NO", "ONE")
        queue.later(100)
        assert queue.enqueue(a("j2", 2)) == [] and queue.offer() == []
        assert queue.begin() == "cleared"


def test_a_queue_is_not_opened_if_redis_restarted_while_it_was_filled(own):
    with own.client() as client:
        queue = FleetQueue(client)
        queue.begin()
        queue.sync(Server("gpu"))
        client.save()
    own.stop()
    own.start()
    with own.client() as client:
        queue.client = queue.scripts.redis = client
        assert queue.run("open_queue", 1) == "lost"


def test_a_second_begin_keeps_the_jobs_of_a_queue_that_is_being_filled(queue):
    queue.with_slots(1)
    queue.run("discard_queue", 1)
    assert queue.begin() == "cleared"
    queue.enqueue(a("j1", 1))
    assert queue.begin() == "ready" and queue.waiting() == ["j1"]
    queue.open()
    assert queue.begin() == "open" and queue.waiting() == ["j1"]


def test_a_queue_that_was_closed_on_purpose_keeps_its_leases_and_discards_its_waiting_jobs(queue):
    queue.with_slots(2)
    running, offered = queue.enqueue(a("running", 1), a("offered", 2))
    queue.claim(running)
    queue.enqueue(a("waits", 3))
    assert queue.run("close_queue", queue.version) == "closed"
    assert queue.begin() == "emptied"
    assert queue.waiting() == [] and queue.run("queue_counts")[4] == []
    assert queue.taken() == {"gpu-slot0": "running", "gpu-slot1": "offered"}
    assert queue.claim(offered, "w2") == "lost", "no job starts before the queue is filled"
    queue.sync(*queue.servers)
    queue.enqueue(a("offered", 2), a("waits", 3))
    assert queue.open(7) == "opened" and queue.waiting() == ["waits"]
    assert queue.renew("w1", running) == ["renewed"] and queue.claim(offered, "w2") != "lost"


def test_a_newer_queue_elsewhere_closes_an_older_queue_and_discards_its_contents(queue):
    queue.with_slots(1)
    queue.enqueue(a("j1", 1))
    assert queue.run("discard_queue", 2) == "changed" and queue.run("queue_counts")[0] == 1
    assert queue.run("discard_queue", 1) == "closed" and queue.run("queue_counts")[0] == 0
    assert queue.begin() == "cleared" and queue.taken() == {}


@pytest.mark.parametrize("close", ["close_queue", "discard_queue"])
def test_a_reopened_queue_keeps_the_name_of_its_filling_and_a_discarded_queue_gets_a_new_name(queue, close):
    queue.with_slots(1)
    before = queue.client.hget(queue.key("meta"), "filling")
    queue.run(close, queue.version if close == "close_queue" else 1)
    queue.begin()
    after = queue.client.hget(queue.key("meta"), "filling")
    assert (after == before) == (close == "close_queue")
    queue.begin()
    assert queue.client.hget(queue.key("meta"), "filling") == after


def test_an_offer_count_below_the_count_that_a_worker_has_seen_closes_the_queue(queue):
    queue.with_slots(2)
    queue.enqueue(a("j1", 1))
    kept = states(queue.client)
    (second,) = queue.enqueue(a("j2", 2))
    queue.claim(second)
    epoch, offers, _ = seen(queue, "", 0, second)
    put_back(queue.client, kept)
    assert seen(queue, epoch, offers, second)[2] == ["unknown"]
    assert queue.offer() == [] and queue.enqueue(a("j3", 3)) == []
    assert queue.begin() == "cleared"


@pytest.mark.parametrize(("epoch", "offers"), [("1", 2), ("another", 99), ("", 0)])
def test_a_queue_that_has_lost_no_write_stays_open(queue, epoch, offers):
    queue.with_slots(2)
    queue.enqueue(a("j1", 1), a("j2", 2))
    assert seen(queue, epoch, offers) == ["1", 2, []]
    assert queue.run("queue_counts")[0] == 1


def test_mean_run_times_survive_a_rebuild_and_not_a_change_of_the_database(queue):
    queue.configure().with_slots(1)
    (held,) = queue.enqueue(a("j1", 1))
    queue.later(500)
    queue.release(held, "", signal="ok")
    queue.run("close_queue", queue.version)
    queue.open()
    queue.sync(*queue.servers)
    assert queue.run("model_status", "default|zimg", 0)[2] == 500
    assert queue.run("sync_catalog", "another record", 1, -1, 0, 1, 0)[0] == "foreign"
    assert queue.begin("another record") == "cleared"
    assert queue.run("model_status", "default|zimg", 0)[2] is None


def test_a_queue_accepts_no_catalog_of_another_database_before_it_is_rebuilt_from_that_database(queue):
    queue.with_slots(1)
    queue.enqueue(a("j1", 1), a("j2", 2))
    assert queue.run("sync_catalog", "another record", 99, -1, 0, 1, 0)[0] == "foreign"
    assert queue.client.hkeys(queue.key("servers")) == [b"gpu"] and queue.taken() == {"gpu-slot0": "j1"}
    assert queue.run("queue_counts")[0] == 0
    assert queue.begin("another record") == "cleared"
    assert queue.run("sync_catalog", "another record", 1, -1, 0, 1, 1, *Server("new").args)[0] == "synced"
    assert queue.members("free") == ["new-slot0"] and queue.waiting() == []


def test_a_queue_is_closed_only_if_the_callers_catalog_version_is_current(queue):
    queue.with_slots(1)
    assert queue.run("close_queue", queue.version - 1) == "changed" and queue.run("queue_counts")[0] == 1
    assert queue.run("close_queue", queue.version) == "closed" and queue.run("queue_counts")[0] == 0


def test_slot_1_a_run_restored_on_a_removed_slot_still_uses_one_slot_of_its_server(queue):
    queue.with_slots(2)
    held = {offer.slot: offer for offer in queue.enqueue(a("one", 1), a("two", 2))}
    queue.restore((a("old", 3), "x-1", "w1", "gpu-slot1"))
    queue.sync(Server("gpu", 1))
    assert queue.release(held["gpu-slot0"], "")[1] == [] and queue.enqueue(a("next", 4)) == []
    assert queue.release(held["gpu-slot1"], "")[1] == [], "the older run uses the one slot that is left"
    assert queue.taken() == {"gpu-slot1": "old"}


# -- leases that were lost -------------------------------------------------------------------------------------------


def test_a_run_that_started_while_the_queue_was_filled_is_removed_from_its_lane(queue):
    queue.sync(Server("gpu"))
    queue.begin()
    queue.enqueue(a("j1", 1), a("j2", 2))
    assert queue.restore((a("j1", 1), "x-1", "w1", "gpu-slot0")) == 1
    assert queue.open() == "opened"
    assert queue.waiting() == ["j2"] and queue.taken() == {"gpu-slot0": "j1"} and queue.offer() == []


def test_slot_1_a_restored_run_whose_slot_is_taken_occupies_another_slot_of_its_server(queue):
    queue.with_slots(2)
    (other,) = queue.enqueue(a("other", 1))
    assert queue.restore((a("old", 2), "x-1", "w1", other.slot)) == 1
    assert queue.enqueue(a("next", 3)) == [], "both slots are taken"
    queue.sync(Server("gpu", 2))
    assert queue.offer() == []
    _, offers = queue.release(other, "")
    assert [(offer.job, offer.slot != other.slot) for offer in offers] == [("next", True)]
