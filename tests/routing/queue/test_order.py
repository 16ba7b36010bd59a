"""Whose turn it is: order in a lane, across lanes, after a retry, after a change of policy (ORDER-1)."""

import random

import pytest

from tests.support.room import Job, Room, Server, a

PRIORITY_STEP = 1 << 49
LARGEST_SEQ = PRIORITY_STEP - 1


def ids(jobs: list[Job]) -> list[str]:
    return [job.id for job in jobs]


# -- order -----------------------------------------------------------------------------------------------------


def test_jobs_of_a_lane_are_offered_in_the_order_of_acceptance(room):
    jobs = [a(f"j{seq}", seq) for seq in range(1, 30)]
    shuffled = random.Random(7).sample(jobs, len(jobs))
    room.enqueue(*shuffled)
    room.with_slots(1)
    assert room.drain() == ids(jobs)


@pytest.mark.parametrize("policy", ["fifo", "priority"])
def test_the_policy_decides_whether_the_priority_or_the_acceptance_counts(room, policy):
    draw = random.Random(11)
    jobs = [a(f"j{seq}", seq, priority=draw.randint(1, 9)) for seq in range(1, 60)]
    room.configure(policy=policy)
    room.enqueue(*draw.sample(jobs, len(jobs)))
    room.with_slots(1)
    by_priority = sorted(jobs, key=lambda job: (job.priority, job.seq))
    assert room.drain() == ids(jobs if policy == "fifo" else by_priority)


def test_three_priority_jobs_accepted_30_microseconds_apart_stay_in_order(room):
    jobs = [a(name, LARGEST_SEQ - 2 + n, priority=1) for n, name in enumerate("zyx")]
    room.enqueue(*reversed(jobs))
    room.with_slots(1)
    assert room.drain() == ["z", "y", "x"]


@pytest.mark.parametrize("policy", ["fifo", "priority"])
@pytest.mark.parametrize("priority", [1, 5, 9])
def test_acceptance_numbers_are_exact_up_to_two_to_the_49_in_every_priority(room, priority, policy):
    numbers = [1, 2, (1 << 48) + 1, LARGEST_SEQ - 1, LARGEST_SEQ]
    jobs = [a(f"j{n}", n, priority) for n in numbers]
    room.configure(policy=policy)
    room.enqueue(*reversed(jobs))
    for job in jobs:
        assert room.seq_of(job) == job.seq
    assert room.key_of(jobs[0].lane) == (0 if policy == "fifo" else priority * PRIORITY_STEP) + 1
    room.with_slots(1)
    seen = []
    offers = room.offer(1)
    while offers:  # the number goes through the lease and back into the lane unchanged
        assert int(room.lease_of(offers[0].job)["seq"]) == numbers[len(seen)]
        room.release(offers[0], "", return_to_lane=True, limit=0)
        assert room.seq_of(jobs[len(seen)]) == numbers[len(seen)]
        room.withdraw(jobs[len(seen)])
        seen.append(offers[0].job)
        offers = room.offer(1)
    assert seen == ids(jobs)


def test_the_largest_number_of_a_priority_still_comes_before_the_smallest_of_the_next(room):
    jobs = [
        a(f"t{priority}{end}", seq, priority)
        for priority in range(1, 10)
        for end, seq in (("a", 1), ("b", LARGEST_SEQ))
    ]
    room.enqueue(*random.Random(3).sample(jobs, len(jobs)))
    room.with_slots(1)
    assert room.drain() == ids(jobs)


def test_a_job_that_comes_back_stands_where_it_stood(room):
    room.with_slots(1)
    (offer, *_) = room.enqueue(a("first", 1), a("second", 2), a("third", 3))
    room.claim(offer)
    assert room.release(offer, return_to_lane=True, limit=0)[0] == "released"
    assert room.drain() == ["first", "second", "third"]


def test_a_job_that_comes_back_into_an_empty_lane_makes_the_lane_again(room):
    room.with_slots(1)
    (offer,) = room.enqueue(a("alone", 7, priority=3))
    assert room.lanes() == [] and room.client.hlen(room.key("lanes")) == 0
    room.release(offer, "", return_to_lane=True, limit=0)
    assert room.lane_of("3||default|zimg") == ["alone"]
    assert room.key_of("3||default|zimg") == 3 * PRIORITY_STEP + 7


def test_a_delayed_job_returns_with_its_priority_and_its_number(room):
    room.enqueue(a("late", 9, priority=5), a("less urgent", 1, priority=6))
    room.enqueue(a("retried", 4, priority=5))  # its time has come
    room.with_slots(1)
    assert room.drain() == ["retried", "late", "less urgent"]


# -- enqueue ---------------------------------------------------------------------------------------------------


def test_enqueue_returns_the_number_of_new_jobs_and_offers_each_free_slot_at_once(room):
    room.with_slots(2)
    added, offers = room.enqueued(a("j1", 1), a("j2", 2), a("j3", 3))
    assert added == 3
    assert [(offer.job, offer.server, offer.model, offer.owner) for offer in offers] == [
        ("j1", "gpu", "zimg", ""),
        ("j2", "gpu", "zimg", ""),
    ]
    assert room.waiting() == ["j3"]
    assert [offer.number for offer in offers] == [1, 2]
    assert len({offer.lease for offer in offers}) == 2


def test_a_job_that_waits_or_is_offered_is_left_as_it_is(room):
    room.with_slots(1)
    jobs = [a("offered", 1), a("waits", 2), a("waits too", 3)]
    room.enqueue(*jobs)
    before = room.dump()
    room.later(60_000)
    assert room.enqueued(*jobs) == (0, [])
    assert room.dump() == before


def test_enqueue_offers_no_more_than_its_limit(room):
    room.with_slots(5)
    jobs = [a(f"j{n}", n) for n in range(1, 6)]
    assert [offer.job for offer in room.enqueue(*jobs, limit=2)] == ["j1", "j2"]
    assert room.enqueue(limit=0) == []
    assert [offer.job for offer in room.offer(2)] == ["j3", "j4"]


def test_nothing_is_offered_before_the_queue_is_open(room):
    room.sync(Server("gpu", 2))
    assert room.enqueue(a("second", 2)) == []
    assert room.offer() == []
    room.enqueue(a("first", 1))
    assert room.open() == "opened"
    assert [offer.job for offer in room.offer()] == ["first", "second"]


def test_a_room_is_opened_once(room):
    assert room.open(1) == "opened"
    before = room.dump()
    assert room.open(2) == "open"
    assert room.dump() == before


# -- withdraw --------------------------------------------------------------------------------------------------


def test_a_waiting_job_can_be_withdrawn_and_leaves_nothing(room):
    empty = room.dump()
    room.enqueue(a("j", 1))
    assert room.withdraw(a("j", 1)) == "withdrawn"
    assert room.dump() == empty


def test_withdrawing_the_head_lets_the_next_job_decide_the_lanes_place(room):
    room.configure(policy="fifo")
    room.enqueue(a("h", 1), a("x", 5), a("other", 3, priority=2))
    room.withdraw(a("h", 1))
    room.with_slots(1)
    assert room.drain() == ["other", "x"]


def test_the_holder_of_a_job_that_is_withdrawn_is_asked_to_cancel_it(room):
    room.with_slots(1)
    (offer,) = room.enqueue(a("j", 1))
    room.claim(offer)
    assert room.renew("w1", offer) == ["renewed"]
    assert room.withdraw(a("j", 1)) == "asked"
    assert room.renew("w1", offer) == ["cancel"]
    assert room.taken() == {"gpu-slot0": "j"}


def test_the_wish_to_cancel_ends_with_the_lease(room):
    room.with_slots(1)
    (offer,) = room.enqueue(a("j", 1))
    room.claim(offer)
    room.withdraw(a("j", 1))
    _, (again,) = room.release(offer, return_to_lane=True)
    room.claim(again)
    assert room.renew("w1", again) == ["renewed"]


def test_withdrawing_an_absent_job_leaves_no_trace(room):
    room.enqueue(a("other", 1))
    before = room.dump()
    assert room.withdraw(a("j", 2)) == "absent"
    assert room.dump() == before


# -- position --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fifo", "priority"])
def test_position_counts_the_jobs_of_the_model_that_come_first(room, policy):
    draw = random.Random(5)
    jobs = [a(f"j{seq}", seq, draw.randint(1, 9)) for seq in range(1, 40)]
    room.configure(policy=policy)
    room.enqueue(*jobs, a("foreign", 0, 1, "flux"))
    key = {"fifo": lambda job: job.seq, "priority": lambda job: (job.priority, job.seq)}[policy]
    before = room.dump()
    for ahead, job in enumerate(sorted(jobs, key=key)):
        assert room.position(job) == ["waiting", ahead]
    assert room.dump() == before


def test_position_of_an_offered_and_of_an_absent_job(room):
    room.with_slots(1)
    room.enqueue(a("j", 1))
    assert room.position(a("j", 1)) == ["offered"]
    assert room.position(a("nobody", 2)) == ["absent"]


# -- a change of policy ----------------------------------------------------------------------------------------


def test_a_change_of_policy_reorders_a_hundred_lanes_and_loses_no_job(room):
    draw = random.Random(2)
    models = [f"m{n}" for n in range(12)]
    jobs = [a(f"j{seq}", seq, draw.randint(1, 9), draw.choice(models)) for seq in range(1, 700)]
    for model in models:
        room.configure(model, policy="fifo", affinity=0)
    room.enqueue(*jobs)
    lanes = room.lanes()
    assert len(lanes) >= 100
    inside = {lane: room.lane_of(lane) for lane in lanes}
    for model in models:
        room.configure(model, policy="priority", affinity=0)
    assert {lane: room.lane_of(lane) for lane in room.lanes()} == inside
    room.with_servers(Server("gpu", 1, models=tuple(models)))
    assert room.drain() == ids(sorted(jobs, key=lambda job: (job.priority, job.seq)))


def test_a_job_that_returns_after_a_change_of_policy_does_not_bring_the_old_policy_back(room):
    room.with_slots(1)
    (running,) = room.enqueue(a("running", 1, 5), a("five", 2, 5), a("six", 3, 6), a("five again", 4, 5))
    room.configure(policy="fifo")
    room.release(running, "", return_to_lane=True, limit=0)
    assert room.drain() == ["running", "five", "six", "five again"]


# -- depths ----------------------------------------------------------------------------------------------------


def test_depths_counts_jobs_by_model_and_slots_by_what_they_do(room):
    assert room.run("queue_counts") == [0, 0, 0, 0, [], 0]
    room.with_servers(Server("gpu", 3), Server("sick", 2))
    room.cool_down("sick", 1000)
    room.enqueue(a("j1", 1), limit=1)
    room.enqueue(a("j2", 2), a("j3", 3), a("u", 4, 1), limit=0)
    assert room.run("queue_counts") == [1, 2, 2, 1, [["zimg", 3]], 1]


def test_depths_writes_nothing(room: Room):
    room.with_slots(2)
    room.enqueue(a("j1", 1), a("j2", 2), a("j3", 3))
    before = room.dump()
    room.run("queue_counts")
    assert room.dump() == before
