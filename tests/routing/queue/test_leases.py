"""Leases: one for each job and slot (LEASE-1), renewed and freed by their holder alone (LEASE-4)."""

import random
from collections import Counter

import pytest

from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.redis.scripts import Command
from tests.support.room import LEASE_MS, OFFER_MS, START_MS, Offered, Room, Server, a


@pytest.fixture
def offer(room: Room) -> Offered:
    """An open offer of the job `j` on the slot `gpu-slot0`; nothing else waits."""
    (made,) = room.with_slots(1).enqueue(a("j", 1))
    return made


@pytest.fixture
def held(room: Room, offer: Offered) -> Offered:
    """The same, claimed by `w1`."""
    assert room.claim(offer, "w1") == "claimed"
    return offer


def unchanged(room: Room, act, answer) -> None:
    """The act gives this answer and leaves no trace, now and later."""
    for _ in range(2):
        before = room.dump()
        assert act() == answer
        assert room.dump() == before
        room.later(1)


# -- offers: job and slot together, or neither -----------------------------------------------------------------


def test_an_offer_takes_the_job_and_the_slot_together(room, offer):
    assert room.waiting() == [] and room.members("free") == []
    assert room.taken() == {"gpu-slot0": "j"}
    assert room.expiry_of("j") == START_MS + OFFER_MS
    assert room.lease_of("j") == {
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


def test_a_job_without_a_slot_stays_where_it_is(room):
    room.with_servers(Server("other", 2, models=("flux",)))
    room.enqueue(a("j", 1))
    unchanged(room, room.offer, [])
    assert room.waiting() == ["j"] and len(room.members("free")) == 2


def test_a_slot_without_a_job_stays_free(room):
    room.with_slots(2)
    unchanged(room, room.offer, [])
    assert len(room.members("free")) == 2


def test_a_job_is_never_offered_twice(room):
    room.with_slots(3)
    offers = room.enqueue(*[a(f"j{n}", n) for n in range(1, 4)])
    assert sorted(offer.job for offer in offers) == ["j1", "j2", "j3"]
    assert len({offer.slot for offer in offers}) == 3
    assert room.waiting() == [] and room.offer() == []


# -- claim -----------------------------------------------------------------------------------------------------


def test_a_claim_gives_the_lease_an_owner_and_its_full_time(room, offer):
    room.later(5)
    assert room.run("claim", "j", offer.lease, "w1", LEASE_MS) == list(offer._replace(owner="w1"))
    assert room.lease_of("j")["owner"] == "w1"
    assert room.expiry_of("j") == START_MS + 5 + LEASE_MS


def test_what_one_has_claimed_cannot_be_claimed_again(room, held):
    unchanged(room, lambda: room.claim(held, "w1"), "lost")


def test_another_worker_cannot_claim_what_is_claimed(room, held):
    unchanged(room, lambda: room.claim(held, "w2"), "lost")


@pytest.mark.parametrize("wrong", [{"lease": "p0-9"}, {"job": "nobody"}])
def test_an_offer_that_is_gone_cannot_be_claimed(room, offer, wrong):
    unchanged(room, lambda: room.claim(offer._replace(**wrong), "w1"), "lost")


# -- offers that no worker has claimed ------------------------------------------------------------------------


def test_open_offers_never_exceed_the_capacity_of_the_workers(room):
    room.with_slots(5)
    jobs = [a(f"j{n}", n) for n in range(1, 7)]
    assert len(room.enqueue(*jobs, room=2)) == 2
    unchanged(room, lambda: room.offer(room=2), [])
    unchanged(room, lambda: room.offer(room=0), [])
    (more,) = room.offer(room=3)
    room.claim(more)
    assert [offer.job for offer in room.offer(room=3)] == ["j4"], "a claimed offer is not open"


def test_a_worker_that_continues_with_the_next_job_needs_no_further_capacity(room):
    room.with_slots(3)
    (mine,) = room.enqueue(a("j1", 1), a("j2", 2), a("j3", 3), room=1)
    room.claim(mine)
    _, offers = room.release(mine, claimant="w1", room=0)
    assert [(offer.job, offer.owner) for offer in offers] == [("j2", "w1")]


def test_the_oldest_open_offer_is_taken_before_any_newer_job(room):
    room.with_slots(3)
    room.enqueue(a("j1", 1), a("j2", 2), a("j3", 3), a("urgent", 4, priority=1), limit=2)
    first = room.offer(1, room=0, claimant="w1")
    assert [(offer.job, offer.owner, room.lease_of(offer.job)["owner"]) for offer in first] == [("urgent", "w1", "w1")]
    assert room.expiry_of("urgent") == room.now + LEASE_MS
    assert [offer.job for offer in room.offer(2, room=0, claimant="w1")] == ["j1"], "no other worker has capacity"
    assert [offer.job for offer in room.offer(1, room=0, claimant="w1")] == ["j2"], "none is open, so the next is made"


def test_a_job_that_is_offered_again_is_the_oldest_offer_of_all(room):
    room.with_slots(2)
    _, two = room.enqueue(a("j1", 1), a("j2", 2))
    room.claim(two)
    room.seize(two, "w1", "", new_lease="s1", only_expired=False)
    assert [offer.job for offer in room.offer(1, claimant="w2")] == ["j2"]


def test_an_open_offer_is_kept_in_its_slot(room, offer):
    room.later(OFFER_MS + 5)
    assert room.keep(offer) == "kept"
    assert room.expiry_of("j") == room.now + OFFER_MS and room.expired() == []


def test_only_an_open_offer_is_kept(room, held):
    unchanged(room, lambda: room.keep(held), "lost")


@pytest.mark.parametrize("stop", ["server", "fewer slots", "model", "tenant"])
def test_an_offer_that_may_not_be_started_now_is_kept_only_if_its_server_may_be_at_it(room, offer, stop):
    if stop == "server":
        room.sync(Server("gpu", 1, "paused"))
    elif stop == "fewer slots":
        room.sync(Server("other", 1))
    elif stop == "model":
        room.configure(state="frozen")
    else:
        room.rules["tenant default"] = "paused"
        room.sync(*room.servers)
    unchanged(room, lambda: room.keep(offer), "closed")
    assert room.keep(offer, resumes=True) == "kept"


def test_withdrawing_a_job_that_nobody_has_taken_up_frees_its_slot(room, offer):
    assert room.withdraw(a("j", 1)) == "freed"
    assert room.members("free") == ["gpu-slot0"] and room.taken() == {} and room.lease_of("j") == {}
    assert room.claim(offer) == "lost"


def test_a_job_that_was_withdrawn_does_not_come_back_when_its_last_run_frees_the_slot(room, held):
    room.enqueue(a("j", 1))  # its last run has ended in the database, and still holds the slot
    assert room.withdraw(a("j", 1)) == "asked"
    assert room.release(held, "w1", limit=0)[0] == "released"
    assert room.waiting() == []


def test_a_withdrawn_job_that_its_server_may_still_run_keeps_its_slot(room, held):
    room.seize(held, "w1", "", new_lease="s1", only_expired=False)
    assert room.withdraw(a("j", 1)) == "asked"
    assert room.taken() == {"gpu-slot0": "j"}


# -- workers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def report(room, monkeypatch):
    """Report the capacity of a worker, by the clock of the workers' key, and return the total capacity."""
    room.client.set("clock:{test:workers}", START_MS)
    workers = room.scripts.target("report_capacity", "test:workers", lambda total: total)
    return lambda worker="", count=-1, ttl_ms=1000: room.scripts.run(Command(workers, (worker, count, ttl_ms)))


def test_the_total_capacity_is_the_sum_reported_by_live_workers(room, report):
    assert report() is None
    assert report("w1", 3) == 3 and report("w2", 4) == 7 and report("w1", 1) == 5
    room.client.set("clock:{test:workers}", START_MS + 1001)
    assert report("w2", 2) == 2, "the report of w1 has expired"
    assert room.client.hkeys("test:workers") == [b"w2"]


def test_a_full_worker_counts_as_live_and_a_stopping_worker_does_not(report):
    assert report("w1", 0) == 0
    assert report("w1", -2) is None


def test_a_worker_that_leaves_has_no_capacity(report):
    report("w1", 3)
    report("w2", 4)
    assert report("w1", -1) == 4


def test_a_background_refresh_of_the_total_capacity_blocks_no_caller(room, report):
    report("w1", 3)
    workers, asked = WorkerCapacity(room.scripts), []
    workers.refresh_in_background(lambda: asked.append("again"))
    assert workers.total() == workers.total() == 0, "the last known total"
    assert asked == ["again"], "one refresh, until it is answered"
    workers.read_total()
    assert workers.total() == 3


# -- renew -----------------------------------------------------------------------------------------------------


def test_a_renewal_by_the_holder_gives_the_full_time_again(room, held):
    room.later(LEASE_MS - 1)
    assert room.renew("w1", held) == ["renewed"]
    assert room.expiry_of("j") == room.now + LEASE_MS


@pytest.mark.parametrize(("owner", "wrong"), [("w2", {}), ("", {}), ("w1", {"lease": "p0-9"}), ("w1", {"job": "x"})])
def test_only_the_holder_renews_its_lease(room, held, owner, wrong):
    unchanged(room, lambda: room.renew(owner, held._replace(**wrong)), ["lost"])


def test_renewals_are_answered_one_by_one_in_the_order_asked(room):
    room.with_slots(3)
    one, two, three = room.enqueue(a("j1", 1), a("j2", 2), a("j3", 3))
    room.claim(one, "w1")
    room.claim(two, "w2")
    room.claim(three, "w1")
    room.withdraw(a("j3", 3))
    room.later(100)
    assert room.renew("w1", three, two, one) == ["cancel", "lost", "renewed"]
    assert room.expiry_of("j2") == START_MS + LEASE_MS
    assert room.expiry_of("j1") == room.expiry_of("j3") == room.now + LEASE_MS


def test_a_renewal_is_answered_with_unknown_until_the_queue_is_rebuilt(room, held):
    room.client.flushall()
    room.set_clock(room.now)
    unchanged(room, lambda: room.renew("w1", held), ["unknown"])
    room.open(2)
    unchanged(room, lambda: room.renew("w1", held), ["lost"])


# -- release ---------------------------------------------------------------------------------------------------


def test_a_release_frees_the_slot_and_forgets_the_job(room, held):
    assert room.release(held) == ("released", [])
    assert room.members("free") == ["gpu-slot0"]
    assert room.taken() == {} and room.lease_of("j") == {} and room.expiry_of("j") is None and room.waiting() == []


@pytest.mark.parametrize(("owner", "wrong"), [("w2", {}), ("", {}), ("w1", {"lease": "p0-9"}), ("w1", {"job": "x"})])
@pytest.mark.parametrize("back", [True, False])
def test_nobody_else_releases(room, held, owner, wrong, back):
    unchanged(
        room, lambda: room.release(held._replace(**wrong), owner, return_to_lane=back, cooldown_ms=9), ("lost", [])
    )


def test_a_late_release_does_not_free_the_next_holders_slot(room, held):
    room.enqueue(a("next", 2))
    room.later(LEASE_MS)
    assert room.seize(held, "w1", only_expired=True) == "seized"
    _, (following,) = room.release(held._replace(lease="1.seized"), "reaper")
    room.claim(following, "w2")
    unchanged(room, lambda: room.release(held, "w1"), ("lost", []))
    assert room.taken() == {"gpu-slot0": "next"}


def test_a_release_is_harmless_the_second_time(room, held):
    room.release(held, return_to_lane=True, limit=0)
    before = room.dump()
    assert room.release(held, return_to_lane=True, limit=0) == ("lost", [])
    assert room.dump() == before


def test_the_slot_is_handed_on_in_the_same_step(room, held):
    room.enqueue(a("next", 2))
    answer, (following,) = room.release(held)
    assert (answer, following.job, following.slot, following.owner) == ("released", "next", "gpu-slot0", "")
    assert room.expiry_of("next") == START_MS + OFFER_MS


def test_only_the_first_offer_goes_straight_to_the_taker(room):
    room.with_slots(1)
    (held,) = room.enqueue(a("j", 1))
    room.claim(held)
    room.enqueue(a("n1", 2), a("n2", 3))
    room.sync(Server("gpu", 2))
    _, offers = room.release(held, claimant="w1")
    assert [(offer.job, offer.owner) for offer in offers] == [("n1", "w1"), ("n2", "")]
    assert room.expiry_of("n1") == START_MS + LEASE_MS and room.expiry_of("n2") == START_MS + OFFER_MS
    assert room.claim(offers[0], "w2") == "lost" and room.renew("w1", offers[0]) == ["renewed"]


def test_a_release_that_came_too_late_still_makes_offers(room, held):
    room.enqueue(a("next", 2))
    room.sync(Server("gpu", 2))
    answer, offers = room.release(held, "w2")
    assert answer == "lost" and [offer.job for offer in offers] == ["next"]
    assert room.taken()["gpu-slot0"] == "j"


def test_a_slot_in_cooldown_is_offered_after_it_and_not_before(room, held):
    room.enqueue(a("next", 2))
    assert room.release(held, return_to_lane=True, cooldown_ms=500) == ("released", [])
    room.later(499)
    assert room.offer() == []
    room.later(1)
    assert [offer.job for offer in room.offer()] == ["j"]


# -- expired, seize --------------------------------------------------------------------------------------------


def test_expired_names_leases_longest_expired_first_and_writes_nothing(room):
    room.with_slots(3)
    one, two, _ = room.enqueue(a("j1", 1), a("j2", 2), a("j3", 3))
    room.claim(two, "w1")  # sooner: LEASE_MS < OFFER_MS
    room.later(LEASE_MS - 1)
    assert room.expired() == []
    room.later(1)
    assert room.expired() == [["j2", two.lease, "w1", two.slot]]
    room.later(OFFER_MS - LEASE_MS)
    before = room.dump()
    assert [job for job, *_ in room.expired()] == ["j2", "j1", "j3"]
    assert room.expired(1) == [["j2", two.lease, "w1", two.slot]]
    assert room.expired()[1] == ["j1", one.lease, "", one.slot]
    assert room.dump() == before


def test_held_names_every_lease_with_the_time_that_it_lasts_and_writes_nothing(room):
    room.with_slots(2)
    one, two = room.enqueue(a("j1", 1), a("j2", 2))
    room.claim(one, "w1")
    room.later(5)
    before = room.dump()
    assert room.run("list_leases", 0, -1) == [
        [["j1", one.lease, "w1", one.slot], LEASE_MS - 5],
        [["j2", two.lease, "", two.slot], OFFER_MS - 5],
    ]
    assert room.dump() == before


def test_who_seizes_a_lease_holds_it_and_its_former_holder_does_not(room, held):
    room.later(3)
    assert room.seize(held, "w1", "reaper", new_lease="s1", only_expired=False) == "seized"
    assert room.expiry_of("j") == room.now + LEASE_MS
    mine = held._replace(lease="1.s1")
    unchanged(room, lambda: room.renew("w1", held), ["lost"])
    unchanged(room, lambda: room.release(held, "w1"), ("lost", []))
    unchanged(room, lambda: room.claim(held, "w1"), "lost")
    unchanged(room, lambda: room.seize(held, "w1", "w1", only_expired=False), "lost")
    assert room.renew("reaper", mine) == ["renewed"]
    assert room.release(mine, "reaper")[0] == "released"


@pytest.mark.parametrize(("owner", "wrong"), [("w2", {}), ("", {}), ("w1", {"lease": "p0-9"}), ("w1", {"job": "x"})])
def test_only_the_lease_that_was_seen_can_be_seized(room, held, owner, wrong):
    room.later(LEASE_MS)
    unchanged(room, lambda: room.seize(held._replace(**wrong), owner, only_expired=True), "lost")
    unchanged(room, lambda: room.seize(held._replace(**wrong), owner, only_expired=False), "lost")


def test_a_lease_that_was_renewed_meanwhile_is_not_seized_as_expired(room, held):
    room.later(LEASE_MS)
    room.renew("w1", held)
    unchanged(room, lambda: room.seize(held, "w1", only_expired=True), "lost")
    assert room.seize(held, "w1", only_expired=False) == "seized"


def test_a_lease_expires_at_the_very_millisecond(room, held):
    room.later(LEASE_MS - 1)
    assert room.expired() == [] and room.seize(held, "w1", only_expired=True) == "lost"
    room.later(1)
    assert room.expired() and room.seize(held, "w1", only_expired=True) == "seized"


def test_a_seized_lease_can_be_opened_for_another_worker(room, held):
    room.withdraw(a("j", 1))
    assert room.seize(held, "w1", "", new_lease="s1", only_expired=False) == "seized"
    again = held._replace(lease="1.s1")
    assert room.run("claim", "j", "1.s1", "w2", LEASE_MS)[2:6] == ["gpu-slot0", "gpu", "zimg", 0], "offered again"
    assert room.renew("w2", again) == ["cancel"], "the wish to cancel stays with the job"
    assert room.release(again, "w2", return_to_lane=True, limit=0)[0] == "released"
    assert room.waiting() == ["j"]


# -- restore ---------------------------------------------------------------------------------------------------


def test_a_restored_lease_is_held_by_the_worker_that_held_it(room):
    room.sync(Server("gpu", 2))
    assert room.restore((a("j", 4, 2), "p1-7", "w1", "gpu-slot1")) == 1
    room.open()
    held = Offered("j", "p1-7", "gpu-slot1", "gpu", "zimg", 0, "w1")
    assert room.taken() == {"gpu-slot1": "j"} and room.members("free") == ["gpu-slot0"]
    assert room.expiry_of("j") == START_MS + LEASE_MS
    assert room.renew("w1", held) == ["renewed"]
    assert room.release(held, "w1", return_to_lane=True, limit=0)[0] == "released"
    assert room.lane_of("2||default|zimg") == ["j"]
    assert int(room.key_of("2||default|zimg")) == 2 * (1 << 49) + 4


def test_thousands_of_leases_are_restored_in_one_call_each_with_its_slot(client):
    count = 4500
    room = Room(client).with_servers(Server("gpu", count))
    assert room.restore(*((a(f"j{n}", n), f"l{n}", "w1", f"gpu-slot{n}") for n in range(count))) == count
    assert len(room.taken()) == count and room.members("free") == []
    room.sync(Server("gpu", count))
    assert room.members("free") == []


def test_restoring_before_the_slots_are_known_keeps_the_slot_from_being_offered(room):
    room.restore((a("j", 1), "p1-7", "w1", "gpu-slot0"))
    room.with_slots(2)
    room.enqueue(a("other", 2), a("more", 3))
    assert room.taken() == {"gpu-slot0": "j", "gpu-slot1": "other"}


@pytest.mark.parametrize(
    "lease",
    [
        pytest.param((a("j", 1), "p9-9", "w9", "gpu-slot1"), id="the job holds one"),
        pytest.param((a("waits", 3), "p9-9", "w9", "gpu-slot1"), id="the job waits"),
    ],
)
def test_restore_leaves_alone_what_stands_there(room, held, lease):
    room.enqueue(a("waits", 3))
    room.sync(Server("gpu", 2))
    unchanged(room, lambda: room.restore(lease), 0)


def test_a_restored_lease_whose_slot_was_given_away_gets_the_slot_next(room):
    holder = room.with_slots(1).enqueue(a("holder", 1))[0]
    room.enqueue(a("waits", 5))
    assert room.restore((a("old", 2), "p1-7", "w1", "gpu-slot0"), (a("older", 3), "p1-8", "w1", "gpu-slot0")) == 2
    old, older = (
        Offered(job, lease, "gpu-slot0", "gpu", "zimg", 0, "w1") for job, lease in (("old", "p1-7"), ("older", "p1-8"))
    )
    assert room.taken() == {"gpu-slot0": "holder"} and room.renew("w1", old, older) == ["renewed"] * 2
    assert room.release(holder, "") == ("released", []), "the slot is not free: an older run is at it"
    assert room.taken() == {"gpu-slot0": "old"}
    assert room.release(older, "w1") == ("released", [])
    assert room.taken() == {"gpu-slot0": "old"} and room.members("free") == []
    assert [offer.job for offer in room.release(old, "w1")[1]] == ["waits"]
    assert not room.client.exists(room.key("slots:gpu-slot0"))


def test_an_open_offer_that_is_restored_can_be_claimed_and_is_not_made_of_a_slot_that_was_given_away(room):
    room.with_slots(2).enqueue(a("holder", 1))
    (taken,) = room.taken()
    (free,) = {"gpu-slot0", "gpu-slot1"} - {taken}
    assert room.restore((a("late", 2), "p1-7", "", taken), (a("j", 3), "p1-8", "", free)) == 1
    assert room.taken() == {taken: "holder", free: "j"}
    offer = Offered("j", "p1-8", free, "gpu", "zimg", 0, "")
    assert [room.claim(offer, owner) for owner in ("w1", "w2")] == ["claimed", "lost"]


def test_until_the_room_is_open_a_runs_lease_replaces_the_restored_offer_that_it_had_claimed(room):
    room.sync(Server("gpu", 1))
    offered, held = (a("j", 1), "p1-8", "", "gpu-slot0"), (a("j", 1), "p1-7", "w1", "gpu-slot0")
    assert room.restore(offered) == 1
    assert room.offer(claimant="w2") == [], "the slot may be another's by now"
    assert room.restore(held) == 1
    room.open()
    assert room.taken() == {"gpu-slot0": "j"} and room.offer(claimant="w2") == []
    assert room.renew("w1", Offered("j", "p1-7", "gpu-slot0", "gpu", "zimg", 0, "w1")) == ["renewed"]


def test_an_open_offer_in_an_open_room_is_not_replaced(room):
    room.with_slots(1)
    offer = Offered("j", "p1-8", "gpu-slot0", "gpu", "zimg", 0, "")
    room.restore((a("j", 1), "p1-8", "", "gpu-slot0"))
    unchanged(room, lambda: room.restore((a("j", 1), "p1-7", "w1", "gpu-slot0")), 0)
    assert room.claim(offer, "w2") == "claimed"


def test_a_cooling_slot_whose_lease_is_restored_is_taken(room):
    room.with_slots(1)
    room.cool_down("gpu", 1000)
    room.restore((a("j", 1), "p1-7", "w1", "gpu-slot0"))
    assert room.members("cooling") == [] and room.taken() == {"gpu-slot0": "j"}


# -- LEASE-1 over many steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_lease_1_a_job_and_a_slot_have_at_most_one_lease_whatever_happens(room, seed):
    draw = random.Random(seed)
    room.with_servers(Server("gpu-a", 2), Server("gpu-b", 1))
    known: list[Offered] = []
    for step in range(250):
        match draw.randrange(9):
            case 0 | 1:
                known += room.enqueue(a(f"j{draw.randrange(12)}", draw.randrange(12) + 1, 5))
            case 2 if known:
                room.claim(draw.choice(known), draw.choice(("w1", "w2")))
            case 3 | 4 if known:
                back, owner = draw.random() < 0.5, draw.choice(("", "w1", "w2"))
                known += room.release(draw.choice(known), owner, return_to_lane=back, cooldown_ms=draw.choice((0, 50)))[
                    1
                ]
            case 5 if known:
                room.seize(draw.choice(known), draw.choice(("", "w1")), "w2", new_lease=f"s{step}", only_expired=False)
            case 6:
                room.later(draw.choice((1, 60, LEASE_MS)))
                known += room.offer()
            case 7:
                room.sync(*draw.sample([Server("gpu-a", draw.randrange(1, 4)), Server("gpu-b", 1, "paused")], 2))
            case _ if known:  # also where another holds the slot by now
                room.restore((a(f"j{draw.randrange(12)}", 1), f"r{step}", "w1", draw.choice(known).slot))
        _check_leases(room)


def _check_leases(room: Room) -> None:
    leased, taken = room.members("leases"), room.taken()
    beside = [job for slot in taken for job in room.beside(slot)]
    assert sorted([*taken.values(), *beside]) == sorted(leased), "each lease has one slot, each taken slot one holder"
    assert all(room.lease_of(job)["slot"] == slot for slot, job in taken.items())
    waiting, free, cooling = room.waiting(), room.members("free"), room.members("cooling")
    assert not set(waiting) & set(leased)
    assert max(Counter([*free, *cooling, *taken]).values(), default=1) == 1
