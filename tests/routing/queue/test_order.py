"""The order of jobs: in a lane, across lanes, after a retry, after a change of policy (ORDER-1)."""

import random

import pytest

from tests.support.fleet_queue import FleetQueue, Job, Server, a

PRIORITY_STEP = 1 << 49
LARGEST_SEQ = PRIORITY_STEP - 1


def ids(jobs: list[Job]) -> list[str]:
    return [job.id for job in jobs]


# -- order -----------------------------------------------------------------------------------------------------


def test_jobs_of_a_lane_are_offered_in_the_order_of_acceptance(queue):
    jobs = [a(f"j{seq}", seq) for seq in range(1, 30)]
    shuffled = random.Random(7).sample(jobs, len(jobs))
    queue.enqueue(*shuffled)
    queue.with_slots(1)
    assert queue.drain() == ids(jobs)


@pytest.mark.parametrize("policy", ["fifo", "priority"])
def test_the_policy_decides_whether_jobs_are_ordered_by_priority_or_by_acceptance(queue, policy):
    draw = random.Random(11)
    jobs = [a(f"j{seq}", seq, priority=draw.randint(1, 9)) for seq in range(1, 60)]
    queue.configure(policy=policy)
    queue.enqueue(*draw.sample(jobs, len(jobs)))
    queue.with_slots(1)
    by_priority = sorted(jobs, key=lambda job: (job.priority, job.seq))
    assert queue.drain() == ids(jobs if policy == "fifo" else by_priority)


def test_three_priority_jobs_accepted_30_microseconds_apart_stay_in_order(queue):
    jobs = [a(name, LARGEST_SEQ - 2 + n, priority=1) for n, name in enumerate("zyx")]
    queue.enqueue(*reversed(jobs))
    queue.with_slots(1)
    assert queue.drain() == ["z", "y", "x"]


@pytest.mark.parametrize("policy", ["fifo", "priority"])
@pytest.mark.parametrize("priority", [1, 5, 9])
def test_acceptance_numbers_are_exact_up_to_two_to_the_49_in_every_priority(queue, priority, policy):
    numbers = [1, 2, (1 << 48) + 1, LARGEST_SEQ - 1, LARGEST_SEQ]
    jobs = [a(f"j{n}", n, priority) for n in numbers]
    queue.configure(policy=policy)
    queue.enqueue(*reversed(jobs))
    for job in jobs:
        assert queue.seq_of(job) == job.seq
    assert queue.key_of(jobs[0].lane) == (0 if policy == "fifo" else priority * PRIORITY_STEP) + 1
    queue.with_slots(1)
    seen = []
    offers = queue.offer(1)
    while offers:  # the number goes through the lease and back into the lane unchanged
        assert int(queue.lease_of(offers[0].job)["seq"]) == numbers[len(seen)]
        queue.release(offers[0], "", return_to_lane=True, limit=0)
        assert queue.seq_of(jobs[len(seen)]) == numbers[len(seen)]
        queue.withdraw(jobs[len(seen)])
        seen.append(offers[0].job)
        offers = queue.offer(1)
    assert seen == ids(jobs)


def test_the_largest_sequence_number_of_a_priority_precedes_the_smallest_of_the_next_priority(queue):
    jobs = [
        a(f"t{priority}{end}", seq, priority)
        for priority in range(1, 10)
        for end, seq in (("a", 1), ("b", LARGEST_SEQ))
    ]
    queue.enqueue(*random.Random(3).sample(jobs, len(jobs)))
    queue.with_slots(1)
    assert queue.drain() == ids(jobs)


def test_a_job_that_returns_to_its_lane_keeps_its_place(queue):
    queue.with_slots(1)
    (offer, *_) = queue.enqueue(a("first", 1), a("second", 2), a("third", 3))
    queue.claim(offer)
    assert queue.release(offer, return_to_lane=True, limit=0)[0] == "released"
    assert queue.drain() == ["first", "second", "third"]


def test_a_job_that_returns_to_an_empty_lane_creates_the_lane_again(queue):
    queue.with_slots(1)
    (offer,) = queue.enqueue(a("alone", 7, priority=3))
    assert queue.lanes() == [] and queue.client.hlen(queue.key("lanes")) == 0
    queue.release(offer, "", return_to_lane=True, limit=0)
    assert queue.lane_of("3||default|zimg") == ["alone"]
    assert queue.key_of("3||default|zimg") == 3 * PRIORITY_STEP + 7


def test_a_delayed_job_returns_with_its_priority_and_its_number(queue):
    queue.enqueue(a("late", 9, priority=5), a("less urgent", 1, priority=6))
    queue.enqueue(a("retried", 4, priority=5))  # its time has come
    queue.with_slots(1)
    assert queue.drain() == ["retried", "late", "less urgent"]


# -- enqueue ---------------------------------------------------------------------------------------------------


def test_enqueue_returns_the_number_of_new_jobs_and_offers_each_free_slot_at_once(queue):
    queue.with_slots(2)
    added, offers = queue.enqueued(a("j1", 1), a("j2", 2), a("j3", 3))
    assert added == 3
    assert [(offer.job, offer.server, offer.model, offer.owner) for offer in offers] == [
        ("j1", "gpu", "zimg", ""),
        ("j2", "gpu", "zimg", ""),
    ]
    assert queue.waiting() == ["j3"]
    assert [offer.number for offer in offers] == [1, 2]
    assert len({offer.lease for offer in offers}) == 2


def test_enqueuing_a_queued_or_offered_job_again_changes_nothing(queue):
    queue.with_slots(1)
    jobs = [a("offered", 1), a("waits", 2), a("waits too", 3)]
    queue.enqueue(*jobs)
    before = queue.dump()
    queue.later(60_000)
    assert queue.enqueued(*jobs) == (0, [])
    assert queue.dump() == before


def test_enqueue_offers_no_more_than_its_limit(queue):
    queue.with_slots(5)
    jobs = [a(f"j{n}", n) for n in range(1, 6)]
    assert [offer.job for offer in queue.enqueue(*jobs, limit=2)] == ["j1", "j2"]
    assert queue.enqueue(limit=0) == []
    assert [offer.job for offer in queue.offer(2)] == ["j3", "j4"]


def test_nothing_is_offered_before_the_queue_is_open(queue):
    queue.sync(Server("gpu", 2))
    assert queue.enqueue(a("second", 2)) == []
    assert queue.offer() == []
    queue.enqueue(a("first", 1))
    assert queue.open() == "opened"
    assert [offer.job for offer in queue.offer()] == ["first", "second"]


def test_a_queue_is_opened_once(queue):
    assert queue.open(1) == "opened"
    before = queue.dump()
    assert queue.open(2) == "open"
    assert queue.dump() == before


# -- withdraw --------------------------------------------------------------------------------------------------


def test_a_waiting_job_can_be_withdrawn_and_leaves_nothing(queue):
    empty = queue.dump()
    queue.enqueue(a("j", 1))
    assert queue.withdraw(a("j", 1)) == "withdrawn"
    assert queue.dump() == empty


def test_after_the_first_job_is_withdrawn_the_next_job_decides_the_position_of_the_lane(queue):
    queue.configure(policy="fifo")
    queue.enqueue(a("h", 1), a("x", 5), a("other", 3, priority=2))
    queue.withdraw(a("h", 1))
    queue.with_slots(1)
    assert queue.drain() == ["other", "x"]


def test_the_holder_of_a_withdrawn_job_is_asked_to_cancel_the_job(queue):
    queue.with_slots(1)
    (offer,) = queue.enqueue(a("j", 1))
    queue.claim(offer)
    assert queue.renew("w1", offer) == ["renewed"]
    assert queue.withdraw(a("j", 1)) == "asked"
    assert queue.renew("w1", offer) == ["cancel"]
    assert queue.taken() == {"gpu-slot0": "j"}


def test_the_wish_to_cancel_ends_with_the_lease(queue):
    queue.with_slots(1)
    (offer,) = queue.enqueue(a("j", 1))
    queue.claim(offer)
    queue.withdraw(a("j", 1))
    _, (again,) = queue.release(offer, return_to_lane=True)
    queue.claim(again)
    assert queue.renew("w1", again) == ["renewed"]


def test_withdrawing_an_absent_job_leaves_no_trace(queue):
    queue.enqueue(a("other", 1))
    before = queue.dump()
    assert queue.withdraw(a("j", 2)) == "absent"
    assert queue.dump() == before


# -- position --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fifo", "priority"])
def test_the_position_counts_the_jobs_of_the_same_model_ahead(queue, policy):
    draw = random.Random(5)
    jobs = [a(f"j{seq}", seq, draw.randint(1, 9)) for seq in range(1, 40)]
    queue.configure(policy=policy)
    queue.enqueue(*jobs, a("foreign", 0, 1, "flux"))
    key = {"fifo": lambda job: job.seq, "priority": lambda job: (job.priority, job.seq)}[policy]
    before = queue.dump()
    for ahead, job in enumerate(sorted(jobs, key=key)):
        assert queue.position(job) == ["waiting", ahead]
    assert queue.dump() == before


def test_position_of_an_offered_and_of_an_absent_job(queue):
    queue.with_slots(1)
    queue.enqueue(a("j", 1))
    assert queue.position(a("j", 1)) == ["offered"]
    assert queue.position(a("nobody", 2)) == ["absent"]


# -- a change of policy ----------------------------------------------------------------------------------------


def test_a_change_of_policy_reorders_a_hundred_lanes_and_loses_no_job(queue):
    draw = random.Random(2)
    models = [f"m{n}" for n in range(12)]
    jobs = [a(f"j{seq}", seq, draw.randint(1, 9), draw.choice(models)) for seq in range(1, 700)]
    for model in models:
        queue.configure(model, policy="fifo", affinity=0)
    queue.enqueue(*jobs)
    lanes = queue.lanes()
    assert len(lanes) >= 100
    inside = {lane: queue.lane_of(lane) for lane in lanes}
    for model in models:
        queue.configure(model, policy="priority", affinity=0)
    assert {lane: queue.lane_of(lane) for lane in queue.lanes()} == inside
    queue.with_servers(Server("gpu", 1, models=tuple(models)))
    assert queue.drain() == ids(sorted(jobs, key=lambda job: (job.priority, job.seq)))


def test_a_job_that_returns_after_a_change_of_policy_is_ordered_by_the_new_policy(queue):
    queue.with_slots(1)
    (running,) = queue.enqueue(a("running", 1, 5), a("five", 2, 5), a("six", 3, 6), a("five again", 4, 5))
    queue.configure(policy="fifo")
    queue.release(running, "", return_to_lane=True, limit=0)
    assert queue.drain() == ["running", "five", "six", "five again"]


# -- depths ----------------------------------------------------------------------------------------------------


def test_depths_counts_jobs_by_model_and_slots_by_what_they_do(queue):
    assert queue.run("queue_counts") == [0, 0, 0, 0, [], 0]
    queue.with_servers(Server("gpu", 3), Server("sick", 2))
    queue.cool_down("sick", 1000)
    queue.enqueue(a("j1", 1), limit=1)
    queue.enqueue(a("j2", 2), a("j3", 3), a("u", 4, 1), limit=0)
    assert queue.run("queue_counts") == [1, 2, 2, 1, [["zimg", 3]], 1]


def test_depths_writes_nothing(queue: FleetQueue):
    queue.with_slots(2)
    queue.enqueue(a("j1", 1), a("j2", 2), a("j3", 3))
    before = queue.dump()
    queue.run("queue_counts")
    assert queue.dump() == before
