"""Turns over many offers: jobs that wait for a rare server, for a server of another model, or with a new weight."""

import random

import pytest
from redis import Redis

from tests.support.fleet_queue import START_MS, FleetQueue, Job, Offered, Server, a, fragments_with_limits

SECOND = 1000
COMMON, RARE = Server("common", 1), Server("rare", 1, attributes={"gpu": "A100"})


def on(queue: FleetQueue, server: str) -> Offered:
    """What runs there."""
    row = next(row for row in queue.held() if row[3].startswith(f"{server}-slot"))
    return Offered(row[0], row[1], row[3], server, "zimg", 0, row[2])


def turn(queue: FleetQueue, server: str, took_ms: int = 100) -> str:
    """Let what runs on a server end; answers what comes after it there."""
    queue.later(took_ms)
    held = on(queue, server)
    queue.release(held, held.owner, signal="ok")
    return on(queue, server).job


# -- fair: jobs that fit few servers -------------------------------------------------------------------------------


@pytest.fixture
def scarce(queue: FleetQueue) -> FleetQueue:
    """A tenant waits for the rare server, which is busy, while others go on on the common one."""
    queue.configure(policy="fair").with_servers(RARE)
    queue.enqueue(rare("busy", 1, "busy"), rare("q1", 2, "q"))
    queue.with_servers(RARE, COMMON)
    queue.enqueue(*[a(f"c{n}", 1000 + n, tenant="common") for n in range(100)])
    return queue


def rare(job: str, seq: int, tenant: str, priority: int = 5) -> Job:
    return a(job, seq, priority, tenant=tenant, constraints="gpu=A100")


def others_go_on(queue: FleetQueue) -> None:
    for _ in range(10):
        turn(queue, "common")


def test_under_fair_a_tenant_that_waits_for_a_rare_server_keeps_its_place_when_it_submits_more(scarce):
    others_go_on(scarce)
    scarce.enqueue(rare("n1", 3, "newcomer"))
    others_go_on(scarce)
    scarce.enqueue(rare("q2", 4, "q"))
    assert turn(scarce, "rare") == "q1"


def test_under_fair_a_tenant_that_waits_for_a_rare_server_keeps_its_place_when_it_withdraws_a_job(scarce):
    second = rare("q2", 4, "q")
    scarce.enqueue(second)
    others_go_on(scarce)
    scarce.enqueue(rare("n1", 3, "newcomer"))
    others_go_on(scarce)
    scarce.withdraw(second)
    assert turn(scarce, "rare") == "q1"


def test_under_fair_the_most_urgent_job_of_a_tenant_precedes_its_jobs_that_have_waited_longer(scarce):
    others_go_on(scarce)
    scarce.enqueue(rare("urgent", 4, "q", 1))
    assert turn(scarce, "rare") == "urgent"


def test_under_fair_the_position_of_a_job_that_waits_for_a_rare_server_counts_no_later_job(scarce):
    others_go_on(scarce)
    scarce.enqueue(rare("n1", 3, "newcomer"))
    assert scarce.position(rare("q1", 2, "q")) == ["waiting", 0]


# -- fair: what changes while jobs wait and run --------------------------------------------------------------------


def test_under_fair_a_new_weight_also_counts_for_slot_time_used_before(queue):
    """Ten seconds at a weight of 0.001 count as hours of slot time; with a new weight no tenant waits for hours."""
    queue.configure(policy="fair", weights={"slow": 0.001}).with_slots(1)
    queue.enqueue(*[a(f"{tenant}{n}", 2 * n + (tenant == "plain"), tenant=tenant)
                   for n in range(60) for tenant in ("slow", "plain")], limit=1)  # fmt: skip
    for _ in range(5):
        turn(queue, "gpu", 10 * SECOND)
    queue.configure(policy="fair", weights={"slow": 2})
    assert sum(turn(queue, "gpu", SECOND).startswith("slow") for _ in range(30)) >= 15


def test_under_fair_the_removal_of_a_weight_also_applies_to_earlier_usage(queue):
    queue.configure(policy="fair", weights={"slow": 0.001}).with_slots(1)
    queue.enqueue(*[a(f"{tenant}{n}", 2 * n + (tenant == "plain"), tenant=tenant)
                   for n in range(60) for tenant in ("slow", "plain")], limit=1)  # fmt: skip
    for _ in range(5):
        turn(queue, "gpu", 10 * SECOND)
    del queue.rules["account slow|zimg"]
    queue.sync(*queue.servers)
    assert sum(turn(queue, "gpu", SECOND).startswith("slow") for _ in range(40)) >= 15


def test_fair_starts_without_old_tags_when_it_is_chosen_again(queue):
    queue.configure(policy="fair").with_slots(1)
    queue.enqueue(*[a(f"early{n}", n, tenant="early") for n in range(200)])
    for _ in range(50):
        turn(queue, "gpu", SECOND)
    queue.enqueue(*[a(f"late{n}", 500 + n, tenant="late") for n in range(50)])
    queue.configure(policy="fifo")
    assert queue.client.exists(queue.key("tags:zimg")) == 0
    for _ in range(50):
        assert turn(queue, "gpu", SECOND).startswith("early")
    queue.configure(policy="fair")
    following = [turn(queue, "gpu", SECOND)[:4] for _ in range(20)]
    assert 8 <= following.count("late") <= 12


def test_tags_are_deleted_although_the_fleet_offers_other_models_in_between(queue):
    """The fleet counts offers for all its models, so the offers of one model may all have odd numbers."""
    queue.configure("zimg", policy="fair").configure("flux", policy="fifo")
    queue.with_servers(Server("gpu", 1), Server("other", 1, models=("flux",)))
    queue.enqueue(*[a(f"steady{n}", n, tenant="steady") for n in range(1, 1000)], limit=1)
    queue.enqueue(*[a(f"f{n}", 1000 + n, model="flux") for n in range(1000)])
    for n in range(300):
        queue.enqueue(a(f"once{n}", 2000 + n, tenant=f"once{n}"))
        for server in ("gpu", "other", "gpu", "other"):
            turn(queue, server)
    assert queue.client.zcard(queue.key("tags:zimg")) < 32


def test_under_fair_runs_too_short_to_be_measured_still_give_a_position(queue):
    queue.configure(policy="fair").with_slots(1)
    queue.enqueue(*[a(f"j{n}", n, tenant=f"t{n % 3}") for n in range(30)])
    for _ in range(3):
        turn(queue, "gpu", 0)
    place, ahead = queue.position(a("j29", 29, tenant="t2"))
    assert place == "waiting" and 20 <= ahead <= 26


# -- several models on one server ------------------------------------------------------------------------------------


def share(queue: FleetQueue, *configs: dict[str, object]) -> None:
    """A server for models m0, m1, …, one for each configuration."""
    for n, config in enumerate(configs):
        queue.configure(f"m{n}", **config)
    queue.with_servers(Server("gpu", 1, models=tuple(f"m{n}" for n in range(len(configs)))))


def step(queue: FleetQueue) -> str:
    """Half a second later a run ends; answers what comes next."""
    return turn(queue, "gpu", 500)


def test_a_passed_over_job_keeps_its_affinity_wait_when_a_more_urgent_job_runs_in_between(queue):
    share(queue, {"affinity": 5}, {"affinity": 5})
    queue.enqueue(a("first", 1, model="m0"))
    queue.enqueue(a("other", 2, model="m1"))
    came = queue.now
    for n in range(3, 100):  # every second job of the loaded model is more urgent and precedes "other"
        queue.enqueue(a(f"j{n}", n, 1 if n % 2 else 5, model="m0"), a(f"k{n}", 1000 + n, 5, model="m0"))
        if step(queue) == "other":
            break
    assert queue.now - came <= 7 * SECOND, "the affinity time, and the runs before and after it"


def test_a_turn_of_a_third_model_does_not_extend_the_time_for_which_a_job_is_passed_over(queue):
    share(queue, {"affinity": 5}, {"affinity": 5}, {"affinity": 5})
    queue.enqueue(a("first", 1, model="m0"))
    queue.enqueue(*[a(f"{model}-{n}", 100 + n, model=model) for n in range(200) for model in ("m0", "m1")])
    queue.enqueue(a("other", 50, model="m2"), a("before", 40, model="m1"))
    came = queue.now
    while step(queue) != "other":
        assert queue.now - came <= 7 * SECOND


def test_the_time_of_one_model_that_is_passed_over_is_not_that_of_another(queue):
    share(queue, {"affinity": 2}, {"affinity": 2}, {"affinity": 10})
    queue.enqueue(a("first", 1, model="m0"))
    queue.enqueue(*[a(f"j{n}", 100 + n, model="m0") for n in range(100)])
    queue.enqueue(a("patient", 2, model="m2"))
    for _ in range(6):
        assert step(queue).startswith("j")
    queue.enqueue(a("hasty", 3, model="m1"))
    queue.withdraw(a("patient", 2, model="m2"))
    assert [step(queue)[0] for _ in range(5)] == ["j", "j", "j", "j", "h"]


def test_the_waiting_time_of_a_withdrawn_job_does_not_count_for_the_next_job(queue):
    share(queue, {"affinity": 3}, {"affinity": 3})
    queue.enqueue(a("first", 1, model="m0"))
    queue.enqueue(*[a(f"j{n}", 100 + n, model="m0") for n in range(100)])
    gone = a("gone", 2, model="m1")
    queue.enqueue(gone)
    for _ in range(3):
        step(queue)
    queue.withdraw(gone)
    for _ in range(10):
        step(queue)
    queue.enqueue(a("new", 3, model="m1"))
    assert [step(queue)[0] for _ in range(7)] == ["j"] * 6 + ["n"]


def test_under_aging_a_models_last_priority_is_not_starved_by_another_models_first_one(queue):
    aging = {"policy": "aging", "tier_head_start": 1.0, "affinity": 0}
    share(queue, aging, aging)
    queue.enqueue(a("first", 1, 1, "m0", created=queue.now), a("low", 2, 9, "m1", created=queue.now))
    for n in range(3, 100):
        queue.enqueue(a(f"j{n}", n, 1, "m0", created=queue.now))
        if step(queue) == "low":
            break
    # Of priority 9 it waits for what is accepted until eight head starts after it.
    assert 7 * SECOND <= queue.now - START_MS <= 9 * SECOND


def test_under_fair_priorities_of_one_model_do_not_count_against_those_of_another(queue):
    fair = {"policy": "fair", "affinity": 0}
    share(queue, fair, fair)
    queue.enqueue(a("first", 1, 1, "m0"), a("low", 2, 9, "m1"), *[a(f"j{n}", n, 1, "m0") for n in range(3, 50)])
    assert step(queue) == "low"


# -- breakers --------------------------------------------------------------------------------------------------------


def test_a_server_is_probed_again_when_its_probe_continues_on_another_server(queue):
    queue.with_servers(Server("a", 1))
    for n in range(3):
        (failed,) = queue.enqueue(a(f"f{n}", n), limit=1)
        queue.release(failed, "", signal="failed", limit=0)
    queue.enqueue(a("j1", 11))
    queue.later(5 * SECOND)
    (probe,) = queue.offer()
    queue.sync(Server("a", 1), Server("b", 1))
    _, (elsewhere,) = queue.release(probe, "", return_to_lane=True, cooldown_ms=500, signal="busy")
    assert (elsewhere.job, elsewhere.server) == ("j1", "b")
    queue.later(500)
    assert [(offer.job, offer.server) for offer in queue.enqueue(a("j2", 12))] == [("j2", "a")]


# -- positions over many lanes ---------------------------------------------------------------------------------------


def crowd(count: int, policy: str) -> list[Job]:
    """So many tenants with a job each, and one with few jobs that need something special."""
    draw = random.Random(6)
    jobs = [a(f"j{n}", n, draw.randint(1, 9), tenant=f"t{n}", created=START_MS + n) for n in range(1, count)]
    return jobs + [a(f"special{n}", count + n, 5, tenant="special", constraints="gpu=A100") for n in range(200)]


@pytest.mark.parametrize("policy", ["fifo", "priority"])
@pytest.mark.parametrize("count", [513, 1100, 4000])
def test_the_position_among_very_many_lanes_is_estimated_well(queue, policy, count):
    jobs = crowd(count, policy)
    queue.configure(policy=policy).sync(COMMON, RARE)
    queue.enqueue(*jobs, limit=0)
    place = {"fifo": lambda job: job.seq, "priority": lambda job: (job.priority, job.seq)}[policy]
    order = sorted(jobs, key=place)
    for n in range(0, len(order), len(order) // 7):
        assert abs(queue.position(order[n])[1] - n) <= 0.05 * len(order), order[n]


def test_a_position_reads_a_bounded_number_of_lanes_for_any_number_of_classes(queue):
    queue.configure(policy="fifo").sync(Server("gpu", attributes={"memory": 300}))
    jobs = [a(f"j{n}", n, 1 + n % 9, tenant=f"t{n % 7}", constraints=f"memory>={n % 300}") for n in range(5400)]
    queue.enqueue(*jobs, limit=0)
    queue.client.config_resetstat()
    assert abs(queue.position(jobs[-1])[1] - 5399) <= 270
    looks = sum(row["calls"] for row in queue.client.info("commandstats").values())
    assert looks <= 3000


# -- very many groups ----------------------------------------------------------------------------------------------


@pytest.fixture
def crowded(client: Redis) -> FleetQueue:
    """Return a queue with the lowest limit on groups, and three servers with a model each."""
    queue = FleetQueue(client, fragments=fragments_with_limits(many_groups=0, kinds_at_once=1))
    return queue.with_servers(*(Server(f"gpu{n}", 2, models=(f"m{n}",)) for n in range(3)))


def test_with_very_many_groups_each_kind_of_server_gets_its_turn(crowded: FleetQueue) -> None:
    crowded.enqueue(*(a(f"j{n}", n, model=f"m{n % 3}") for n in range(30)), limit=0)
    served = []
    for _ in range(6):
        (offer,) = crowded.offer(limit=1)
        served.append(offer.model)
        crowded.release(offer, "", limit=0)
    assert sorted(served[:3]) == sorted(served[3:]) == ["m0", "m1", "m2"]


def test_kinds_whose_jobs_cannot_start_now_hide_no_others(crowded: FleetQueue) -> None:
    for model in ("m0", "m1"):
        crowded.configure(model, state="paused")
    crowded.enqueue(*(a(f"j{n}", n, model=f"m{n % 3}") for n in range(6)), limit=0)
    assert [offer.model for offer in crowded.offer()] == ["m2", "m2"]
    crowded.configure("m0")
    assert [offer.model for offer in crowded.offer()] == ["m0", "m0"]


def test_a_skipped_kind_is_considered_again_when_it_gets_a_job_or_a_free_slot(crowded: FleetQueue) -> None:
    first, _ = crowded.enqueue(*(a(f"j{n}", n, model="m0") for n in range(3)))
    assert crowded.members("meta:ready") == [], "no kind has a free slot and a waiting job"
    assert [offer.job for offer in crowded.enqueue(a("j3", 3, model="m1"))] == ["j3"]
    assert [offer.job for offer in crowded.release(first, "", signal="ok")[1]] == ["j2"]


def test_a_job_enqueued_while_its_model_had_many_kinds_is_offered_when_the_model_has_few(crowded: FleetQueue) -> None:
    few = crowded.servers
    crowded.enqueue(*(a(f"j{n}", n, model="m0") for n in range(3)))
    crowded.sync(*few, *(Server(f"own{n}", models=("m3",), attributes={"host": f"h{n}"}) for n in range(65)))
    crowded.enqueue(a("j3", 3, model="m1"), limit=0)
    crowded.sync(*few)
    assert [offer.job for offer in crowded.offer()] == ["j3"]
