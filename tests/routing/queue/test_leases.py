"""Leases: one for each job and slot (LEASE-1), renewed and freed by their holder alone (LEASE-4)."""

import random
from collections import Counter

import pytest

from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.redis.scripts import Command
from tests.support.fleet_queue import LEASE_MS, OFFER_MS, START_MS, FleetQueue, Offered, Server, a


@pytest.fixture
def offer(queue: FleetQueue) -> Offered:
    """An open offer of the job `j` on the slot `gpu-slot0`; nothing else waits."""
    (made,) = queue.with_slots(1).enqueue(a("j", 1))
    return made


@pytest.fixture
def held(queue: FleetQueue, offer: Offered) -> Offered:
    """The same, claimed by `w1`."""
    assert queue.claim(offer, "w1") == "claimed"
    return offer


def unchanged(queue: FleetQueue, act, answer) -> None:
    """The act gives this answer and leaves no trace, now and later."""
    for _ in range(2):
        before = queue.dump()
        assert act() == answer
        assert queue.dump() == before
        queue.later(1)


# -- offers: job and slot together, or neither -----------------------------------------------------------------


def test_an_offer_takes_the_job_and_the_slot_together(queue, offer):
    assert queue.waiting() == [] and queue.members("free") == []
    assert queue.taken() == {"gpu-slot0": "j"}
    assert queue.expiry_of("j") == START_MS + OFFER_MS
    assert queue.lease_of("j") == {
        "lease": offer.lease,
        "owner": "",
        "slot": "gpu-slot0",
        "lane": "5||default|zimg",
        "needs": "",
        "seq": "1",
        "created": str(START_MS),
        "offer": "1",
        "since": str(START_MS),
        "charged": "0",
        "swap": "1",  # the model that the server ran before is unknown
    }


def test_a_job_without_a_slot_stays_where_it_is(queue):
    queue.with_servers(Server("other", 2, models=("flux",)))
    queue.enqueue(a("j", 1))
    unchanged(queue, queue.offer, [])
    assert queue.waiting() == ["j"] and len(queue.members("free")) == 2


def test_a_slot_without_a_job_stays_free(queue):
    queue.with_slots(2)
    unchanged(queue, queue.offer, [])
    assert len(queue.members("free")) == 2


def test_a_job_is_never_offered_twice(queue):
    queue.with_slots(3)
    offers = queue.enqueue(*[a(f"j{n}", n) for n in range(1, 4)])
    assert sorted(offer.job for offer in offers) == ["j1", "j2", "j3"]
    assert len({offer.slot for offer in offers}) == 3
    assert queue.waiting() == [] and queue.offer() == []


# -- claim -----------------------------------------------------------------------------------------------------


def test_a_claim_gives_the_lease_an_owner_and_the_full_duration(queue, offer):
    queue.later(5)
    assert queue.run("claim", "j", offer.lease, "w1", LEASE_MS) == list(offer._replace(owner="w1"))
    assert queue.lease_of("j")["owner"] == "w1"
    assert queue.expiry_of("j") == START_MS + 5 + LEASE_MS


def test_a_claimed_offer_cannot_be_claimed_again_by_its_owner(queue, held):
    unchanged(queue, lambda: queue.claim(held, "w1"), "lost")


def test_another_worker_cannot_claim_what_is_claimed(queue, held):
    unchanged(queue, lambda: queue.claim(held, "w2"), "lost")


@pytest.mark.parametrize("wrong", [{"lease": "p0-9"}, {"job": "nobody"}])
def test_an_offer_that_does_not_exist_cannot_be_claimed(queue, offer, wrong):
    unchanged(queue, lambda: queue.claim(offer._replace(**wrong), "w1"), "lost")


# -- offers that no worker has claimed ------------------------------------------------------------------------


def test_open_offers_never_exceed_the_capacity_of_the_workers(queue):
    queue.with_slots(5)
    jobs = [a(f"j{n}", n) for n in range(1, 7)]
    assert len(queue.enqueue(*jobs, capacity=2)) == 2
    unchanged(queue, lambda: queue.offer(capacity=2), [])
    unchanged(queue, lambda: queue.offer(capacity=0), [])
    (more,) = queue.offer(capacity=3)
    queue.claim(more)
    assert [offer.job for offer in queue.offer(capacity=3)] == ["j4"], "a claimed offer is not open"


def test_a_worker_that_continues_with_the_next_job_needs_no_further_capacity(queue):
    queue.with_slots(3)
    (mine,) = queue.enqueue(a("j1", 1), a("j2", 2), a("j3", 3), capacity=1)
    queue.claim(mine)
    _, offers = queue.release(mine, claimant="w1", capacity=0)
    assert [(offer.job, offer.owner) for offer in offers] == [("j2", "w1")]


def test_the_oldest_open_offer_is_taken_before_any_newer_job(queue):
    queue.with_slots(3)
    queue.enqueue(a("j1", 1), a("j2", 2), a("j3", 3), a("urgent", 4, priority=1), limit=2)
    first = queue.offer(1, capacity=0, claimant="w1")
    assert [(offer.job, offer.owner, queue.lease_of(offer.job)["owner"]) for offer in first] == [("urgent", "w1", "w1")]
    assert queue.expiry_of("urgent") == queue.now + LEASE_MS
    assert [offer.job for offer in queue.offer(2, capacity=0, claimant="w1")] == ["j1"], "no other worker has capacity"
    assert [offer.job for offer in queue.offer(1, capacity=0, claimant="w1")] == ["j2"], (
        "none is open, so the next is made"
    )


def test_a_job_that_is_offered_again_is_the_oldest_offer_of_all(queue):
    queue.with_slots(2)
    _, two = queue.enqueue(a("j1", 1), a("j2", 2))
    queue.claim(two)
    queue.seize(two, "w1", "", new_lease="s1", only_expired=False)
    assert [offer.job for offer in queue.offer(1, claimant="w2")] == ["j2"]


def test_an_open_offer_is_kept_in_its_slot(queue, offer):
    queue.later(OFFER_MS + 5)
    assert queue.keep(offer) == "kept"
    assert queue.expiry_of("j") == queue.now + OFFER_MS and queue.expired() == []


def test_only_an_open_offer_is_kept(queue, held):
    unchanged(queue, lambda: queue.keep(held), "lost")


@pytest.mark.parametrize("stop", ["server", "fewer slots", "model", "tenant"])
def test_an_offer_that_may_not_be_started_now_is_kept_only_if_its_server_may_be_at_it(queue, offer, stop):
    if stop == "server":
        queue.sync(Server("gpu", 1, "paused"))
    elif stop == "fewer slots":
        queue.sync(Server("other", 1))
    elif stop == "model":
        queue.configure(state="frozen")
    else:
        queue.rules["tenant default"] = "paused"
        queue.sync(*queue.servers)
    unchanged(queue, lambda: queue.keep(offer), "closed")
    assert queue.keep(offer, resumes=True) == "kept"


def test_withdrawing_an_unclaimed_job_releases_its_slot(queue, offer):
    assert queue.withdraw(a("j", 1)) == "freed"
    assert queue.members("free") == ["gpu-slot0"] and queue.taken() == {} and queue.lease_of("j") == {}
    assert queue.claim(offer) == "lost"


def test_a_withdrawn_job_does_not_return_to_its_lane_when_its_last_run_releases_the_slot(queue, held):
    queue.enqueue(a("j", 1))  # its last run has ended in the database, and still holds the slot
    assert queue.withdraw(a("j", 1)) == "asked"
    assert queue.release(held, "w1", limit=0)[0] == "released"
    assert queue.waiting() == []


def test_a_withdrawn_job_that_its_server_may_still_run_keeps_its_slot(queue, held):
    queue.seize(held, "w1", "", new_lease="s1", only_expired=False)
    assert queue.withdraw(a("j", 1)) == "asked"
    assert queue.taken() == {"gpu-slot0": "j"}


# -- workers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def report(queue, monkeypatch):
    """Report the capacity of a worker, by the clock of the workers' key, and return the total capacity."""
    queue.client.set("clock:{test:workers}", START_MS)
    workers = queue.scripts.target("report_capacity", "test:workers", lambda total: total)
    return lambda worker="", count=-1, ttl_ms=1000: queue.scripts.run(Command(workers, (worker, count, ttl_ms)))


def test_the_total_capacity_is_the_sum_reported_by_live_workers(queue, report):
    assert report() is None
    assert report("w1", 3) == 3 and report("w2", 4) == 7 and report("w1", 1) == 5
    queue.client.set("clock:{test:workers}", START_MS + 1001)
    assert report("w2", 2) == 2, "the report of w1 has expired"
    assert queue.client.hkeys("test:workers") == [b"w2"]


def test_a_full_worker_counts_as_live_and_a_stopping_worker_does_not(report):
    assert report("w1", 0) == 0
    assert report("w1", -2) is None


def test_a_worker_that_leaves_has_no_capacity(report):
    report("w1", 3)
    report("w2", 4)
    assert report("w1", -1) == 4


def test_a_background_refresh_of_the_total_capacity_blocks_no_caller(queue, report):
    report("w1", 3)
    workers, asked = WorkerCapacity(queue.scripts), []
    workers.refresh_in_background(lambda: asked.append("again"))
    assert workers.total() == workers.total() == 0, "the last known total"
    assert asked == ["again"], "one refresh, until it is answered"
    workers.read_total()
    assert workers.total() == 3


# -- renew -----------------------------------------------------------------------------------------------------


def test_a_renewal_by_the_holder_restores_the_full_duration(queue, held):
    queue.later(LEASE_MS - 1)
    assert queue.renew("w1", held) == ["renewed"]
    assert queue.expiry_of("j") == queue.now + LEASE_MS


@pytest.mark.parametrize(("owner", "wrong"), [("w2", {}), ("", {}), ("w1", {"lease": "p0-9"}), ("w1", {"job": "x"})])
def test_only_the_holder_renews_its_lease(queue, held, owner, wrong):
    unchanged(queue, lambda: queue.renew(owner, held._replace(**wrong)), ["lost"])


def test_a_renewal_of_several_leases_returns_one_reply_for_each_in_the_order_of_the_request(queue):
    queue.with_slots(3)
    one, two, three = queue.enqueue(a("j1", 1), a("j2", 2), a("j3", 3))
    queue.claim(one, "w1")
    queue.claim(two, "w2")
    queue.claim(three, "w1")
    queue.withdraw(a("j3", 3))
    queue.later(100)
    assert queue.renew("w1", three, two, one) == ["cancel", "lost", "renewed"]
    assert queue.expiry_of("j2") == START_MS + LEASE_MS
    assert queue.expiry_of("j1") == queue.expiry_of("j3") == queue.now + LEASE_MS


def test_a_renewal_is_answered_with_unknown_until_the_queue_is_rebuilt(queue, held):
    queue.client.flushall()
    queue.set_clock(queue.now)
    unchanged(queue, lambda: queue.renew("w1", held), ["unknown"])
    queue.open(2)
    unchanged(queue, lambda: queue.renew("w1", held), ["lost"])


# -- release ---------------------------------------------------------------------------------------------------


def test_a_release_frees_the_slot_and_removes_the_job(queue, held):
    assert queue.release(held) == ("released", [])
    assert queue.members("free") == ["gpu-slot0"]
    assert queue.taken() == {} and queue.lease_of("j") == {} and queue.expiry_of("j") is None and queue.waiting() == []


@pytest.mark.parametrize(("owner", "wrong"), [("w2", {}), ("", {}), ("w1", {"lease": "p0-9"}), ("w1", {"job": "x"})])
@pytest.mark.parametrize("back", [True, False])
def test_only_the_holder_releases_a_lease(queue, held, owner, wrong, back):
    unchanged(
        queue, lambda: queue.release(held._replace(**wrong), owner, return_to_lane=back, cooldown_ms=9), ("lost", [])
    )


def test_a_late_release_does_not_free_the_next_holders_slot(queue, held):
    queue.enqueue(a("next", 2))
    queue.later(LEASE_MS)
    assert queue.seize(held, "w1", only_expired=True) == "seized"
    _, (following,) = queue.release(held._replace(lease="1.seized"), "reaper")
    queue.claim(following, "w2")
    unchanged(queue, lambda: queue.release(held, "w1"), ("lost", []))
    assert queue.taken() == {"gpu-slot0": "next"}


def test_a_release_is_harmless_the_second_time(queue, held):
    queue.release(held, return_to_lane=True, limit=0)
    before = queue.dump()
    assert queue.release(held, return_to_lane=True, limit=0) == ("lost", [])
    assert queue.dump() == before


def test_a_release_offers_the_slot_to_the_next_job_in_the_same_step(queue, held):
    queue.enqueue(a("next", 2))
    answer, (following,) = queue.release(held)
    assert (answer, following.job, following.slot, following.owner) == ("released", "next", "gpu-slot0", "")
    assert queue.expiry_of("next") == START_MS + OFFER_MS


def test_a_release_claims_only_the_first_offer_for_the_claimant(queue):
    queue.with_slots(1)
    (held,) = queue.enqueue(a("j", 1))
    queue.claim(held)
    queue.enqueue(a("n1", 2), a("n2", 3))
    queue.sync(Server("gpu", 2))
    _, offers = queue.release(held, claimant="w1")
    assert [(offer.job, offer.owner) for offer in offers] == [("n1", "w1"), ("n2", "")]
    assert queue.expiry_of("n1") == START_MS + LEASE_MS and queue.expiry_of("n2") == START_MS + OFFER_MS
    assert queue.claim(offers[0], "w2") == "lost" and queue.renew("w1", offers[0]) == ["renewed"]


def test_a_release_of_a_lost_lease_still_makes_offers(queue, held):
    queue.enqueue(a("next", 2))
    queue.sync(Server("gpu", 2))
    answer, offers = queue.release(held, "w2")
    assert answer == "lost" and [offer.job for offer in offers] == ["next"]
    assert queue.taken()["gpu-slot0"] == "j"


def test_a_slot_in_cooldown_is_offered_after_it_and_not_before(queue, held):
    queue.enqueue(a("next", 2))
    assert queue.release(held, return_to_lane=True, cooldown_ms=500) == ("released", [])
    queue.later(499)
    assert queue.offer() == []
    queue.later(1)
    assert [offer.job for offer in queue.offer()] == ["j"]


# -- expired, seize --------------------------------------------------------------------------------------------


def test_expired_names_leases_longest_expired_first_and_writes_nothing(queue):
    queue.with_slots(3)
    one, two, _ = queue.enqueue(a("j1", 1), a("j2", 2), a("j3", 3))
    queue.claim(two, "w1")  # sooner: LEASE_MS < OFFER_MS
    queue.later(LEASE_MS - 1)
    assert queue.expired() == []
    queue.later(1)
    assert queue.expired() == [["j2", two.lease, "w1", two.slot]]
    queue.later(OFFER_MS - LEASE_MS)
    before = queue.dump()
    assert [job for job, *_ in queue.expired()] == ["j2", "j1", "j3"]
    assert queue.expired(1) == [["j2", two.lease, "w1", two.slot]]
    assert queue.expired()[1] == ["j1", one.lease, "", one.slot]
    assert queue.dump() == before


def test_held_names_every_lease_with_the_time_that_it_lasts_and_writes_nothing(queue):
    queue.with_slots(2)
    one, two = queue.enqueue(a("j1", 1), a("j2", 2))
    queue.claim(one, "w1")
    queue.later(5)
    before = queue.dump()
    assert queue.run("list_leases", 0, -1) == [
        [["j1", one.lease, "w1", one.slot], LEASE_MS - 5],
        [["j2", two.lease, "", two.slot], OFFER_MS - 5],
    ]
    assert queue.dump() == before


def test_a_seized_lease_belongs_to_the_reaper_and_no_longer_to_its_former_holder(queue, held):
    queue.later(3)
    assert queue.seize(held, "w1", "reaper", new_lease="s1", only_expired=False) == "seized"
    assert queue.expiry_of("j") == queue.now + LEASE_MS
    mine = held._replace(lease="1.s1")
    unchanged(queue, lambda: queue.renew("w1", held), ["lost"])
    unchanged(queue, lambda: queue.release(held, "w1"), ("lost", []))
    unchanged(queue, lambda: queue.claim(held, "w1"), "lost")
    unchanged(queue, lambda: queue.seize(held, "w1", "w1", only_expired=False), "lost")
    assert queue.renew("reaper", mine) == ["renewed"]
    assert queue.release(mine, "reaper")[0] == "released"


@pytest.mark.parametrize(("owner", "wrong"), [("w2", {}), ("", {}), ("w1", {"lease": "p0-9"}), ("w1", {"job": "x"})])
def test_a_lease_that_differs_from_the_observed_lease_cannot_be_seized(queue, held, owner, wrong):
    queue.later(LEASE_MS)
    unchanged(queue, lambda: queue.seize(held._replace(**wrong), owner, only_expired=True), "lost")
    unchanged(queue, lambda: queue.seize(held._replace(**wrong), owner, only_expired=False), "lost")


def test_a_lease_that_was_renewed_in_the_meantime_is_not_seized_as_expired(queue, held):
    queue.later(LEASE_MS)
    queue.renew("w1", held)
    unchanged(queue, lambda: queue.seize(held, "w1", only_expired=True), "lost")
    assert queue.seize(held, "w1", only_expired=False) == "seized"


def test_a_lease_expires_at_the_very_millisecond(queue, held):
    queue.later(LEASE_MS - 1)
    assert queue.expired() == [] and queue.seize(held, "w1", only_expired=True) == "lost"
    queue.later(1)
    assert queue.expired() and queue.seize(held, "w1", only_expired=True) == "seized"


def test_a_seized_lease_can_be_opened_for_another_worker(queue, held):
    queue.withdraw(a("j", 1))
    assert queue.seize(held, "w1", "", new_lease="s1", only_expired=False) == "seized"
    again = held._replace(lease="1.s1")
    assert queue.run("claim", "j", "1.s1", "w2", LEASE_MS)[2:6] == ["gpu-slot0", "gpu", "zimg", 0], "offered again"
    assert queue.renew("w2", again) == ["cancel"], "the wish to cancel stays with the job"
    assert queue.release(again, "w2", return_to_lane=True, limit=0)[0] == "released"
    assert queue.waiting() == ["j"]


# -- restore ---------------------------------------------------------------------------------------------------


def test_a_restored_lease_is_held_by_the_worker_that_held_it(queue):
    queue.sync(Server("gpu", 2))
    assert queue.restore((a("j", 4, 2), "p1-7", "w1", "gpu-slot1")) == 1
    queue.open()
    held = Offered("j", "p1-7", "gpu-slot1", "gpu", "zimg", 0, "w1")
    assert queue.taken() == {"gpu-slot1": "j"} and queue.members("free") == ["gpu-slot0"]
    assert queue.expiry_of("j") == START_MS + LEASE_MS
    assert queue.renew("w1", held) == ["renewed"]
    assert queue.release(held, "w1", return_to_lane=True, limit=0)[0] == "released"
    assert queue.lane_of("2||default|zimg") == ["j"]
    assert int(queue.key_of("2||default|zimg")) == 2 * (1 << 49) + 4


def test_thousands_of_leases_are_restored_in_one_call_each_with_its_slot(client):
    count = 4500
    queue = FleetQueue(client).with_servers(Server("gpu", count))
    assert queue.restore(*((a(f"j{n}", n), f"l{n}", "w1", f"gpu-slot{n}") for n in range(count))) == count
    assert len(queue.taken()) == count and queue.members("free") == []
    queue.sync(Server("gpu", count))
    assert queue.members("free") == []


def test_restoring_before_the_slots_are_known_keeps_the_slot_from_being_offered(queue):
    queue.restore((a("j", 1), "p1-7", "w1", "gpu-slot0"))
    queue.with_slots(2)
    queue.enqueue(a("other", 2), a("more", 3))
    assert queue.taken() == {"gpu-slot0": "j", "gpu-slot1": "other"}


@pytest.mark.parametrize(
    "lease",
    [
        pytest.param((a("j", 1), "p9-9", "w9", "gpu-slot1"), id="the job holds one"),
        pytest.param((a("waits", 3), "p9-9", "w9", "gpu-slot1"), id="the job waits"),
    ],
)
def test_restore_changes_no_queued_job_and_no_existing_lease(queue, held, lease):
    queue.enqueue(a("waits", 3))
    queue.sync(Server("gpu", 2))
    unchanged(queue, lambda: queue.restore(lease), 0)


def test_a_restored_lease_whose_slot_was_given_away_gets_the_slot_next(queue):
    holder = queue.with_slots(1).enqueue(a("holder", 1))[0]
    queue.enqueue(a("waits", 5))
    assert queue.restore((a("old", 2), "p1-7", "w1", "gpu-slot0"), (a("older", 3), "p1-8", "w1", "gpu-slot0")) == 2
    old, older = (
        Offered(job, lease, "gpu-slot0", "gpu", "zimg", 0, "w1") for job, lease in (("old", "p1-7"), ("older", "p1-8"))
    )
    assert queue.taken() == {"gpu-slot0": "holder"} and queue.renew("w1", old, older) == ["renewed"] * 2
    assert queue.release(holder, "") == ("released", []), "the slot is not free: an older run is at it"
    assert queue.taken() == {"gpu-slot0": "old"}
    assert queue.release(older, "w1") == ("released", [])
    assert queue.taken() == {"gpu-slot0": "old"} and queue.members("free") == []
    assert [offer.job for offer in queue.release(old, "w1")[1]] == ["waits"]
    assert not queue.client.exists(queue.key("slots:gpu-slot0"))


def test_a_restored_offer_can_be_claimed_and_an_offer_of_a_taken_slot_is_not_restored(queue):
    queue.with_slots(2).enqueue(a("holder", 1))
    (taken,) = queue.taken()
    (free,) = {"gpu-slot0", "gpu-slot1"} - {taken}
    assert queue.restore((a("late", 2), "p1-7", "", taken), (a("j", 3), "p1-8", "", free)) == 1
    assert queue.taken() == {taken: "holder", free: "j"}
    offer = Offered("j", "p1-8", free, "gpu", "zimg", 0, "")
    assert [queue.claim(offer, owner) for owner in ("w1", "w2")] == ["claimed", "lost"]


def test_before_the_queue_is_open_a_restored_run_replaces_the_restored_offer_that_it_had_claimed(queue):
    queue.sync(Server("gpu", 1))
    offered, held = (a("j", 1), "p1-8", "", "gpu-slot0"), (a("j", 1), "p1-7", "w1", "gpu-slot0")
    assert queue.restore(offered) == 1
    assert queue.offer(claimant="w2") == [], "another job may hold the slot"
    assert queue.restore(held) == 1
    queue.open()
    assert queue.taken() == {"gpu-slot0": "j"} and queue.offer(claimant="w2") == []
    assert queue.renew("w1", Offered("j", "p1-7", "gpu-slot0", "gpu", "zimg", 0, "w1")) == ["renewed"]


def test_restore_does_not_replace_an_open_offer_in_an_open_queue(queue):
    queue.with_slots(1)
    offer = Offered("j", "p1-8", "gpu-slot0", "gpu", "zimg", 0, "")
    queue.restore((a("j", 1), "p1-8", "", "gpu-slot0"))
    unchanged(queue, lambda: queue.restore((a("j", 1), "p1-7", "w1", "gpu-slot0")), 0)
    assert queue.claim(offer, "w2") == "claimed"


def test_a_cooling_slot_whose_lease_is_restored_is_taken(queue):
    queue.with_slots(1)
    queue.cool_down("gpu", 1000)
    queue.restore((a("j", 1), "p1-7", "w1", "gpu-slot0"))
    assert queue.members("cooling") == [] and queue.taken() == {"gpu-slot0": "j"}


# -- LEASE-1 over many steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_lease_1_a_job_and_a_slot_have_at_most_one_lease_whatever_happens(queue, seed):
    draw = random.Random(seed)
    queue.with_servers(Server("gpu-a", 2), Server("gpu-b", 1))
    known: list[Offered] = []
    for step in range(250):
        match draw.randrange(9):
            case 0 | 1:
                known += queue.enqueue(a(f"j{draw.randrange(12)}", draw.randrange(12) + 1, 5))
            case 2 if known:
                queue.claim(draw.choice(known), draw.choice(("w1", "w2")))
            case 3 | 4 if known:
                back, owner = draw.random() < 0.5, draw.choice(("", "w1", "w2"))
                known += queue.release(
                    draw.choice(known), owner, return_to_lane=back, cooldown_ms=draw.choice((0, 50))
                )[1]
            case 5 if known:
                queue.seize(draw.choice(known), draw.choice(("", "w1")), "w2", new_lease=f"s{step}", only_expired=False)
            case 6:
                queue.later(draw.choice((1, 60, LEASE_MS)))
                known += queue.offer()
            case 7:
                queue.sync(*draw.sample([Server("gpu-a", draw.randrange(1, 4)), Server("gpu-b", 1, "paused")], 2))
            case _ if known:  # also where another holds the slot by now
                queue.restore((a(f"j{draw.randrange(12)}", 1), f"r{step}", "w1", draw.choice(known).slot))
        _check_leases(queue)


def _check_leases(queue: FleetQueue) -> None:
    leased, taken = queue.members("leases"), queue.taken()
    beside = [job for slot in taken for job in queue.beside(slot)]
    assert sorted([*taken.values(), *beside]) == sorted(leased), "each lease has one slot, each taken slot one holder"
    assert all(queue.lease_of(job)["slot"] == slot for slot, job in taken.items())
    waiting, free, cooling = queue.waiting(), queue.members("free"), queue.members("cooling")
    assert not set(waiting) & set(leased)
    assert max(Counter([*free, *cooling, *taken]).values(), default=1) == 1
