"""Rules that every policy keeps (the same tests for each), and rules of single policies."""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.policies import POLICIES, longest_overtaking_s
from tests.routing.queue import policies
from tests.support.fleet_queue import LEASE_MS, START_MS, FleetQueue, Job, Offered, Server, a, a_config

ROWS = {**POLICIES, **{row.name: row for row in policies.ROWS}}
every_policy = pytest.mark.parametrize("policy", ROWS)
SECOND = 1000


@pytest.fixture(autouse=True)
def _with_policies_of_tests(monkeypatch):
    policies.install(monkeypatch)


def mixed(count: int, seed: int = 1, tenants: int = 5) -> list[Job]:
    """Jobs of all priorities and several tenants, some with a deadline, one accepted every 100 ms."""
    draw, deadlines = random.Random(seed), random.Random(seed)
    return [
        a(
            f"j{seq}",
            seq,
            draw.randint(1, 9),
            tenant=f"t{draw.randrange(tenants)}",
            created=START_MS + 100 * seq,
            deadline=deadlines.choice((0, START_MS + 1000 * deadlines.randint(1, 50))),
        )
        for seq in range(1, count + 1)
    ]


def by_acceptance(job: Job) -> int:
    return job.seq


def by_deadline(job: Job) -> tuple[float, int]:
    return job.deadline // 100 if job.deadline else math.inf, job.seq


ORDER_IN_LANE: dict[str, Callable[[Job], Any]] = {"edf": by_deadline}
"""Of policies that do not hold the jobs of a lane in the order of acceptance."""


def ids(jobs: list[Job]) -> list[str]:
    return [job.id for job in jobs]


# -- rules of every policy ---------------------------------------------------------------------------------------


@every_policy
def test_every_job_is_offered_once_and_lanes_keep_the_order_of_acceptance(queue, policy):
    jobs = mixed(400)
    queue.configure(policy=policy)
    queue.enqueue(*random.Random(3).sample(jobs, len(jobs)))
    queue.with_slots(1)
    drained = queue.drain()
    assert sorted(drained) == sorted(ids(jobs))
    place = {job: n for n, job in enumerate(drained)}
    for lane in {job.lane for job in jobs}:
        inside = [job for job in jobs if job.lane == lane]
        expected = sorted(inside, key=ORDER_IN_LANE.get(policy, by_acceptance))
        assert sorted(inside, key=lambda job: place[job.id]) == expected
    assert queue.lanes() == [] and queue.run("queue_counts")[4] == []


@every_policy
def test_a_job_that_returns_to_its_lane_is_offered_before_later_jobs(queue, policy):
    queue.configure(policy=policy).with_slots(1)
    jobs = [a(f"j{n}", n, created=START_MS + n) for n in range(1, 6)]
    queue.enqueue(*jobs)
    (first,) = queue.held()
    held = Offered(first[0], first[1], first[3], "gpu", "zimg", 0, "")
    _, (again,) = queue.release(held, "", return_to_lane=True)
    following, then, *_ = ids(sorted(jobs, key=ORDER_IN_LANE.get(policy, by_acceptance)))
    assert again.job == following
    assert queue.drain() == [] and queue.release(again, "")[1][0].job == then


@every_policy
def test_a_position_is_the_number_of_jobs_that_are_offered_before(queue, policy):
    jobs = mixed(120, tenants=1 if ROWS[policy].is_by_tenant else 4)
    queue.configure(policy=policy)
    queue.enqueue(*jobs)
    before = queue.dump()
    ahead = {job.id: queue.position(job) for job in jobs}
    assert queue.dump() == before, "asking changes nothing"
    queue.with_slots(1)
    assert [ahead[job] for job in queue.drain()] == [["waiting", n] for n in range(len(jobs))]


@every_policy
def test_the_position_that_is_returned_on_entry_is_the_position_of_the_job(queue, policy):
    queue.configure(policy=policy)
    for job in mixed(60):
        ahead, run_ms = queue.place_on_entry(job)
        assert (["waiting", ahead], run_ms) == (queue.position(job), None)


def test_a_job_that_is_offered_when_it_is_enqueued_has_no_position(queue):
    queue.with_slots(1)
    assert queue.place_on_entry(a("first", 1))[0] is None
    assert queue.place_on_entry(a("second", 2))[0] == 0
    assert queue.place_on_entry(a("first", 1))[0] is None, "the job still holds its slot"


def test_under_fair_the_position_counts_the_turns_of_other_tenants(queue):
    queue.configure(policy="fair", weights={"t0": 2})
    jobs = mixed(200)
    queue.enqueue(*jobs)
    ahead = {job.id: queue.position(job)[1] for job in jobs}
    queue.with_slots(1)
    off = [abs(ahead[job] - n) for n, job in enumerate(drain_for(queue, 1000))]
    assert max(off) <= 6, "exact but for ties between tenants"


@every_policy
def test_enqueuing_jobs_twice_does_not_change_their_order(queue, policy):
    jobs = mixed(100)
    queue.configure(policy=policy)
    queue.enqueue(*jobs)
    before = queue.dump()
    queue.enqueue(*jobs)
    assert queue.dump() == before


@pytest.mark.parametrize("old", ROWS)
@pytest.mark.parametrize("new", ROWS)
def test_after_a_change_of_policy_the_order_equals_that_of_a_new_queue_with_this_policy(queue, client, old, new):
    jobs = mixed(150)
    queue.configure(policy=old)
    queue.enqueue(*jobs)
    queue.configure(policy=new).begin()
    queue.with_slots(1).enqueue(*jobs, limit=0)  # A policy that orders lanes differently has the queue filled again.
    fresh = FleetQueue(client, "zimg", prefix="fresh").configure(policy=new)
    fresh.enqueue(*jobs)
    fresh.with_slots(1)
    drained = queue.drain()
    assert sorted(drained) == sorted(ids(jobs))
    if ROWS[new].is_by_tenant:  # ties between tenants fall by name, whatever was before
        assert Counter(by_tenant(jobs, drained)[:50]) == Counter(by_tenant(jobs, fresh.drain())[:50])
    else:
        assert drained == fresh.drain()


@pytest.mark.parametrize("seed", range(3))
def test_edf_offers_the_earliest_deadline_first_in_any_order_of_arrival(queue, seed):
    kinds = itertools.cycle(("", "gpu=A100"))
    jobs = [replace(job, constraints=next(kinds)) for job in mixed(300, seed)]
    queue.configure(policy="edf")
    shuffled = random.Random(seed).sample(jobs, len(jobs))
    for start in range(0, len(jobs), 50):
        queue.enqueue(*shuffled[start : start + 50])
    queue.with_servers(Server("gpu", 1, attributes={"gpu": "A100"}))
    assert queue.drain() == ids(sorted(jobs, key=by_deadline))


def test_under_edf_a_job_that_returns_to_its_lane_precedes_later_deadlines(queue):
    first, second = (a(name, n, deadline=START_MS + 1000 * n) for n, name in ((1, "first"), (2, "second")))
    queue.configure(policy="edf").with_slots(1)
    (offer,) = queue.enqueue(second)
    assert queue.enqueue(first, a("last", 3)) == []
    _, (following,) = queue.release(offer, "", return_to_lane=True)
    assert (following.job, queue.waiting()) == ("first", ["second", "last"])


def test_under_edf_the_job_of_a_restored_lease_returns_to_its_position(queue):
    jobs = [a(f"j{n}", n, deadline=START_MS + 10_000 - 1000 * n) for n in range(1, 4)]
    queue.configure(policy="edf").with_slots(1)
    queue.restore((jobs[1], "l1", "w1", "gpu-slot0"))
    queue.enqueue(jobs[0], jobs[2])
    held = Offered("j2", "l1", "gpu-slot0", "gpu", "zimg", 0, "")
    queue.release(held, "w1", return_to_lane=True, limit=0)
    assert queue.drain() == ["j3", "j2", "j1"]


def test_models_of_other_policies_take_turns_with_edf_by_priority_and_time(queue):
    queue.configure("zimg", policy="edf").configure("flux", policy="priority")
    queue.with_servers(Server("gpu", 1, models=("zimg", "flux")))
    waiting = [
        a("z1", 1, model="zimg", created=START_MS + 1, deadline=START_MS + 60_000),
        a("f2", 2, model="flux", created=START_MS + 2),
        a("z3", 3, model="zimg", created=START_MS + 3, deadline=START_MS + 1000),
        a("f4", 4, 1, model="flux", created=START_MS + 4),
    ]
    queue.enqueue(*waiting, limit=0)
    assert queue.drain() == ["f4", "f2", "z3", "z1"]


def by_tenant(jobs: list[Job], order: list[str]) -> list[str]:
    tenant = {job.id: job.tenant for job in jobs}
    return [tenant[job] for job in order]


@every_policy
def test_the_jobs_of_a_paused_tenant_stay_queued_until_the_tenant_is_resumed(queue, policy):
    jobs = mixed(60, tenants=2)
    queue.configure(policy=policy)
    queue.enqueue(*jobs)
    queue.rules["tenant t0"] = "paused"
    queue.with_slots(1)
    others = [job.id for job in jobs if job.tenant == "t1"]
    assert sorted(queue.drain()) == sorted(others)
    del queue.rules["tenant t0"]
    queue.sync(*queue.servers)
    drained = queue.drain()
    assert sorted(drained) == sorted(set(ids(jobs)) - set(others))


@every_policy
@pytest.mark.parametrize("rule", ["paused", "no slot left"])
def test_the_positions_of_a_blocked_tenants_jobs_count_its_other_jobs(queue, policy, rule):
    jobs = mixed(60, tenants=1)
    limits = {"tenant_slots": 1} if rule == "no slot left" else {}
    queue.configure(policy=policy, **limits)
    if limits:
        queue.with_slots(2).enqueue(a("holds", 0, 1, tenant="t0"))
    queue.enqueue(*jobs)
    if not limits:
        queue.rules["tenant t0"] = "paused"
        queue.sync(*queue.servers)
    ahead = sorted(queue.position(job)[1] for job in jobs)
    assert ahead == list(range(60))


@every_policy
def test_a_tenant_holds_no_more_slots_than_it_may(queue, policy):
    queue.configure(policy=policy, tenant_slots=2, tenant_slot_limits={"t1": 3}).with_slots(10)
    jobs = mixed(40, tenants=3)
    queue.enqueue(*jobs, limit=100)
    held = Counter(by_tenant(jobs, list(queue.taken().values())))
    assert held == {"t0": 2, "t1": 3, "t2": 2}
    # Whoever gives one back gets the next.
    first = queue.held()[0]
    offered = Offered(first[0], first[1], first[3], "gpu", "zimg", 0, "")
    (tenant,) = by_tenant(jobs, [offered.job])
    _, (following,) = queue.release(offered, "", limit=100)
    assert by_tenant(jobs, [following.job]) == [tenant]


@every_policy
def test_a_tenant_holds_at_most_max_slots_of_a_fleet(queue, policy):
    """Of all models together; a limit for all is that of each tenant without its own."""
    for model in ("zimg", "flux"):
        queue.configure(model, policy=policy)
    queue.rules |= {"slots t0": "3", "slots ": "4"}
    queue.with_servers(Server("gpu", models=("zimg", "flux"), slots=20))
    jobs = [a(f"j{n}", n, tenant=f"t{n % 3}", model=("zimg", "flux")[n // 3 % 2]) for n in range(36)]
    held = queue.enqueue(*jobs, limit=100)
    assert Counter(by_tenant(jobs, list(queue.taken().values()))) == {"t0": 3, "t1": 4, "t2": 4}
    for _ in range(5):  # Whoever gives one back gets the next, of whichever model.
        offer = held.pop(0)
        _, (following,) = queue.release(offer, "", limit=100)
        assert by_tenant(jobs, [following.job]) == by_tenant(jobs, [offer.job])
        held.append(following)
    queue.rules["slots t0"] = "5"
    del queue.rules["slots "]
    queue.sync(*queue.servers)
    queue.offer()
    assert Counter(by_tenant(jobs, list(queue.taken().values())))["t0"] == 5


@every_policy
@pytest.mark.parametrize("state", ["paused", "frozen"])
def test_jobs_of_a_stopped_model_are_not_offered_until_the_model_resumes(queue, policy, state):
    queue.configure(policy=policy, state=state).with_slots(2)
    assert queue.enqueue(a("j1", 1)) == []
    queue.configure(policy=policy, state="draining")
    assert [offer.job for offer in queue.offer()] == ["j1"], "queued jobs continue; only new jobs are refused"


def test_an_unknown_policy_orders_by_priority_until_another_policy_is_chosen(queue):
    jobs = mixed(60)
    queue.configure(policy="of-tomorrow", tier_head_start=1)
    queue.enqueue(*jobs)
    by_priority = [queue.position(job)[1] for job in sorted(jobs, key=lambda job: (job.priority, job.seq))]
    assert by_priority == list(range(60))
    queue.configure(policy="fifo").with_slots(1)
    assert queue.drain() == ids(jobs)


@every_policy
def test_a_first_job_is_offered_whatever_the_policy_of_a_model_that_shares_its_server(queue, policy):
    queue.configure("zimg", policy=policy, affinity=0).configure("flux", affinity=0)
    queue.enqueue(a("flux", 2, model="flux", created=queue.now), a("zimg", 1, created=queue.now))
    queue.with_servers(Server("gpu", 1, models=("zimg", "flux")))
    assert sorted(queue.drain()) == ["flux", "zimg"]


# -- aging: a bound that can be printed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "seed"), [("aging", seed) for seed in range(25)] + [("doubling", seed) for seed in range(5)]
)
def test_under_aging_no_job_is_overtaken_by_a_job_created_later_than_the_printed_bound(queue, policy, seed):
    draw = random.Random(seed)
    config = a_config(policy, tier_head_start=draw.choice([0.5, 3, 20]))
    queue.configure(policy=policy, tier_head_start=config.tier_head_start).with_slots(1)
    jobs, started, offers, seq = {}, [], [], 0
    for _ in range(300):
        for _ in range(draw.choice([0, 0, 1, 1, 1, 2, 5])):
            seq += 1
            # Most jobs are of the highest priority; under strict priorities the few others would starve.
            job = a(f"j{seq}", seq, 1 if draw.random() < 0.7 else draw.randint(2, 9), created=queue.now)
            jobs[job.id] = job
            offers += queue.enqueue(job)
        if offers:
            offer = offers.pop(0)
            started.append(offer.job)
            offers += queue.release(offer, "")[1]
        queue.later(draw.randint(1, 800))
    place = {job: n for n, job in enumerate(started)}
    for late in jobs.values():
        bound_s = longest_overtaking_s(late.priority, config)
        assert bound_s is not None
        if late.id in place:
            before = [jobs[job] for job in started[: place[late.id]]]
            assert all(job.created <= late.created + bound_s * SECOND for job in before)


def test_under_priority_the_least_urgent_starve_and_under_aging_they_do_not(queue):
    """Shows that the test above can fail: the same load under strict priorities."""
    for policy, starves in (("priority", True), ("aging", False)):
        here = FleetQueue(queue.client, prefix=policy).configure(policy=policy, tier_head_start=1).with_slots(1)
        offers = here.enqueue(a("busy", 1, 1), a("low", 2, 9, created=here.now))
        started = []
        for seq in range(3, 60):
            here.later(SECOND)
            here.enqueue(a(f"j{seq}", seq, 1, created=here.now))
            _, offers = here.release(offers[0], "")
            started.append(offers[0].job)
        assert ("low" not in started) is starves


def test_no_job_overtakes_a_fifo_job_or_a_job_of_the_highest_priority():
    assert longest_overtaking_s(9, ModelConfig(policy="fifo")) == 0
    assert longest_overtaking_s(1, ModelConfig(policy="priority")) == 0
    assert longest_overtaking_s(2, ModelConfig(policy="priority")) is None
    assert longest_overtaking_s(4, ModelConfig(policy="aging", tier_head_start=10)) == 30


# -- fair: slot time by weight -----------------------------------------------------------------------------------


def drain_for(queue: FleetQueue, runs: int, took_ms: dict[str, int] | None = None) -> list[str]:
    """Run jobs one after another, each as long as `took_ms` of its id says (100 ms if not), on the clock."""
    order = []
    offers = queue.offer(1)
    while offers and len(order) < runs:
        order.append(offers[0].job)
        queue.later((took_ms or {}).get(offers[0].job, 100))
        _, offers = queue.release(offers[0], "", limit=1, signal="ok")
    return order


def test_under_fair_each_tenant_gets_slot_time_by_its_weight(queue):
    queue.configure(policy="fair", weights={"heavy": 3, "half": 0.5})
    draw = random.Random(4)
    jobs, took = [], {}
    for seq in range(1, 1500):
        tenant = draw.choice(["heavy", "half", "plain"])
        job = a(f"j{seq}", seq, draw.randint(1, 9), tenant=tenant)
        # The plain one has jobs ten times as long as the others': it gets fewer of them, not more time.
        took[job.id] = draw.randint(50, 150) * (10 if tenant == "plain" else 1)
        jobs.append(job)
    queue.enqueue(*jobs)
    queue.with_slots(1)
    ran = drain_for(queue, 500, took)
    used: dict[str, int] = defaultdict(int)
    for job, tenant in zip(ran, by_tenant(jobs, ran), strict=True):
        used[tenant] += took[job]
    shares = {"heavy": used["heavy"] / 3, "half": used["half"] / 0.5, "plain": used["plain"] / 1}
    assert max(shares.values()) - min(shares.values()) <= 0.08 * max(shares.values())


def test_under_fair_priorities_count_inside_a_tenant_only(queue):
    queue.configure(policy="fair")
    queue.enqueue(*[a(f"urgent{n}", n, 1, tenant="loud") for n in range(1, 20)])
    queue.enqueue(a("late", 50, 9, tenant="quiet"), a("later", 51, 2, tenant="quiet"))
    queue.with_slots(1)
    drained = drain_for(queue, 100)
    assert drained.index("later") < drained.index("late") <= 4


def test_under_fair_a_tenant_that_was_idle_has_saved_nothing(queue):
    queue.configure(policy="fair").with_slots(1)
    queue.enqueue(*[a(f"busy{n}", n, tenant="busy") for n in range(1, 40)], limit=0)
    drain_for(queue, 20)
    queue.release(Offered("busy21", queue.lease_of("busy21")["lease"], "gpu-slot0", "gpu", "zimg", 0, ""), "", limit=0)
    queue.enqueue(*[a(f"new{n}", 100 + n, tenant="new") for n in range(1, 20)], limit=0)
    order = drain_for(queue, 10)
    assert 4 <= sum(job.startswith("new") for job in order) <= 6, "half of the turns, and not all of them"


def test_under_fair_a_long_run_is_charged_while_it_runs(queue):
    queue.configure(policy="fair").with_slots(2)
    queue.enqueue(*[a(f"long{n}", n, tenant="long") for n in range(1, 9)], limit=1)
    (held,) = queue.held()
    long = Offered(held[0], held[1], held[3], "gpu", "zimg", 0, "")
    queue.claim(long)
    for _ in range(5):
        queue.later(SECOND)
        assert queue.renew("w1", long) == ["renewed"]
    queue.enqueue(*[a(f"short{n}", 50 + n, tenant="short") for n in range(1, 30)], limit=0)
    assert all(job.startswith("short") for job in drain_for(queue, 20)), "the long run has used five seconds"


def test_under_fair_what_a_run_really_took_replaces_the_estimate(queue):
    queue.configure(policy="fair").with_slots(1)
    jobs = [a(f"{tenant}{n}", 2 * n + m, tenant=tenant) for n in range(1, 200) for m, tenant in enumerate(("x", "y"))]
    queue.enqueue(*jobs, limit=0)
    took = {job.id: 10 if job.tenant == "x" else 1000 for job in jobs}
    order = drain_for(queue, 150, took)
    xs, ys = sum(job.startswith("x") for job in order), sum(job.startswith("y") for job in order)
    assert xs > 20 * ys


def test_tags_of_tenants_without_jobs_are_deleted(queue):
    queue.configure(policy="fair").with_slots(1)
    for n in range(1, 600):
        queue.enqueue(a(f"j{n}", n, tenant=f"t{n}"), limit=0)
    drain_for(queue, 1000)
    assert queue.client.zcard(queue.key("tags:zimg")) < 64
    assert queue.client.hlen(queue.key("held")) == 0 and queue.client.hlen(queue.key("lanes")) == 0


# -- placement -----------------------------------------------------------------------------------------------------


A100 = Server("big", 1, attributes={"gpu": "A100", "memory": 80.0, "region": "eu,us"})
T4 = Server("small", 1, attributes={"gpu": "T4", "memory": 16.0, "region": "us", "zimg:version": "2"})


@pytest.mark.parametrize(
    ("constraints", "where"),
    [
        ("", {"big", "small"}),
        ("gpu=A100", {"big"}),
        ("gpu=A100,T4", {"big", "small"}),
        ("gpu=A10", set()),
        ("memory>=40", {"big"}),
        ("memory<=20", {"small"}),
        ("memory>=16\nregion=us", {"big", "small"}),
        ("region=eu", {"big"}),
        ("gpu>=1", set()),
        ("pool=fast", set()),
        ("version=2", {"small"}),
    ],
)
def test_a_job_is_offered_only_where_its_needs_are_met(queue, constraints, where):
    queue.with_servers(A100, T4)
    found = {
        offer.server
        for offer in queue.enqueue(a("j1", 1, constraints=constraints), a("j2", 2, constraints=constraints))
    }
    assert found == where


def test_a_job_without_a_suitable_free_slot_does_not_block_the_jobs_behind_it(queue):
    queue.with_servers(A100, T4)
    queue.enqueue(a("first", 1, constraints="gpu=A100"), a("stuck", 2, 1, constraints="gpu=A100"), a("free to go", 3))
    assert queue.taken() == {"big-slot0": "stuck", "small-slot0": "free to go"}
    assert queue.waiting() == ["first"]


def test_the_less_loaded_of_equal_servers_is_chosen(queue):
    queue.with_servers(Server("a", 4), Server("b", 4), Server("c", 4))
    offers = queue.enqueue(*[a(f"j{n}", n) for n in range(1, 7)])
    assert Counter(offer.server for offer in offers) == {"a": 2, "b": 2, "c": 2}


def test_a_server_whose_runs_fail_is_chosen_last_until_that_is_long_ago(queue):
    queue.with_servers(Server("bad", 1), Server("good", 1))
    (offer,) = queue.enqueue(a("j1", 1, constraints=""), limit=1)
    queue.release(offer, "", signal="failed")
    for n in range(2, 6):
        (following,) = queue.enqueue(a(f"j{n}", n))
        assert following.server != offer.server
        queue.release(following, "")
    queue.later(30 * 60 * SECOND)
    assert queue.run("server_status")[0][-1][0][1][1] == "0.000"


def test_a_faster_server_and_a_heavier_one_are_chosen_first(queue):
    queue.with_servers(Server("slow", 1), Server("fast", 1))
    for n in range(1, 40):
        (offer,) = queue.enqueue(a(f"j{n}", n))
        queue.later(1000 if offer.server == "slow" else 100)
        queue.release(offer, "", signal="ok")
    assert {queue.enqueue(a(f"k{n}", 50 + n))[0].server for n in (1,)} == {"fast"}
    queue.sync(Server("slow", 1, weight=20), Server("fast", 1))
    (heavy,) = queue.enqueue(a("k2", 52))
    assert heavy.server == "slow"


# -- several models on one server ----------------------------------------------------------------------------------


def mixed_models(count: int, models: int, seed: int = 5) -> list[Job]:
    draw = random.Random(seed)
    return [a(f"j{seq}", seq, model=f"m{draw.randrange(models)}") for seq in range(1, count + 1)]


def run_shared(queue: FleetQueue, jobs: list[Job], took_ms: int = 1000) -> tuple[list[tuple[int, str]], int]:
    """Run all on two servers with two slots each; answers (when, job) in order of the starts, and the swaps."""
    names = tuple(sorted({job.model for job in jobs}))
    queue.enqueue(*jobs, limit=0)
    queue.with_servers(Server("one", 2, models=names), Server("two", 2, models=names))
    running, starts = [], []
    running += [(queue.now + took_ms, offer) for offer in queue.offer()]
    starts += [(queue.now, offer.job) for _, offer in running]
    while running:
        at, offer = running.pop(0)
        queue.set_clock(at)
        for following in queue.release(offer, "", signal="ok")[1]:
            starts.append((at, following.job))
            running.append((at + took_ms, following))
    swaps = sum(row[11] for row in queue.run("server_status"))
    return starts, swaps


def test_affinity_saves_four_of_five_swaps_on_four_models_over_two_servers(queue, client):
    jobs = mixed_models(600, 4)
    for model in range(4):
        queue.configure(f"m{model}", affinity=0)
    _, plain = run_shared(queue, jobs)
    queue = FleetQueue(client, prefix="affinity")
    for model in range(4):
        queue.configure(f"m{model}", affinity=30)
    starts, kept = run_shared(queue, jobs)
    assert len({job for _, job in starts}) == 600
    assert plain > 300 and kept <= 0.2 * plain


@pytest.mark.parametrize("affinity_s", [2, 10])
def test_a_job_whose_turn_has_come_is_passed_over_no_longer_than_the_affinity(queue, affinity_s):
    """A stream of one model never ends; the others' jobs get their turn within the bound, and one run."""
    queue.configure("m0", affinity=affinity_s).configure("m1", affinity=affinity_s)
    queue.with_servers(Server("only", 1, models=("m0", "m1")))
    (offer,) = queue.enqueue(a("j1", 1, model="m0"))
    queue.enqueue(a("other", 2, model="m1"))
    came = queue.now
    for seq in range(3, 60):
        queue.enqueue(a(f"j{seq}", seq, model="m0"))
        queue.later(500)
        _, (offer,) = queue.release(offer, "", signal="ok")
        if offer.job == "other":
            break
    assert offer.job == "other"
    assert affinity_s * SECOND <= queue.now - came <= affinity_s * SECOND + 1000


def swaps(offer: Offered) -> bool:
    """Whether the server has to load the job's model."""
    return bool(offer.changes_model)


def test_a_server_changes_its_model_if_its_last_job_was_of_another_or_is_not_known(queue):
    queue.configure("m0", affinity=0).configure("m1", affinity=0)
    queue.with_servers(Server("only", 1, models=("m0", "m1")))
    found = []
    for seq, model in enumerate(("m0", "m0", "m1", "m1", "m0"), 1):
        (offer,) = queue.enqueue(a(f"j{seq}", seq, model=model))
        found.append(swaps(offer))
        queue.release(offer, "", signal="ok")
    assert found == [True, False, True, False, True]


def test_only_the_first_of_two_concurrent_runs_of_a_model_counts_as_a_change_of_the_model(queue):
    queue.with_servers(Server("only", 2, models=("m0", "m1")))
    (before,) = queue.enqueue(a("j1", 1, model="m0"))
    queue.release(before, "", signal="ok")
    (first,) = queue.enqueue(a("j2", 2, model="m1"))
    (second,) = queue.enqueue(a("j3", 3, model="m1"))
    assert [swaps(first), swaps(second)] == [True, False]


def _changing(queue: FleetQueue, *models: str) -> tuple[Job, Offered]:
    """A server of these models has run the first, and is given a job of the last."""
    queue.with_servers(Server("only", 1, models=models))
    (before,) = queue.enqueue(a("before", 1, model=models[0]))
    queue.release(before, "", signal="ok")
    job = a("j", 2, model=models[-1])
    (offer,) = queue.enqueue(job)
    return job, offer


@pytest.mark.parametrize("signal", ["", "busy", "failed", "refused"])
def test_a_model_change_is_announced_to_the_server_again_if_the_announcing_run_did_not_end_well(queue, signal):
    """Perhaps the server received no request: its slot was busy, or the database was unavailable at the start."""
    _, offer = _changing(queue, "m0", "m1")
    _, (again,) = queue.release(offer, "", return_to_lane=True, signal=signal)
    assert (again.job, swaps(again)) == (offer.job, True)


def test_a_model_change_is_announced_to_the_server_again_if_the_announcing_job_was_withdrawn(queue):
    job, _ = _changing(queue, "m0", "m1")
    assert queue.withdraw(job) == "freed"
    (offer,) = queue.enqueue(a("next", 3, model="m1"))
    assert swaps(offer)


def test_a_server_of_one_model_swaps_no_model_after_any_outcome_of_a_run(queue):
    _, offer = _changing(queue, "m0")
    _, (again,) = queue.release(offer, "", return_to_lane=True)
    assert not swaps(again)


def test_the_loaded_model_of_a_server_is_unknown_after_a_cooldown(queue):
    _, offer = _changing(queue, "m0")
    queue.release(offer, "", signal="ok")
    queue.cool_down("only", 1)
    queue.cool_down("only", 0)
    (offer,) = queue.enqueue(a("next", 3, model="m0"))
    assert swaps(offer)


def test_the_loaded_model_of_a_server_is_unknown_after_one_of_its_leases_was_restored(queue):
    job = a("j", 2)
    (before,) = queue.with_slots(1).enqueue(a("i", 1))
    queue.release(before, "", signal="ok")
    (offer,) = queue.enqueue(job)
    assert not swaps(offer)
    queue.client.flushdb()
    queue.set_clock(queue.now)
    queue.with_slots(1)
    queue.restore((job, offer.lease, "", offer.slot))
    assert swaps(Offered(*queue.run("claim", job.id, offer.lease, "w1", LEASE_MS)))


# -- breakers --------------------------------------------------------------------------------------------------------


def fail(queue: FleetQueue, count: int, first: int = 1, model: str = "zimg", same: bool = False) -> None:
    for n in range(count):
        (offer,) = queue.enqueue(a("same" if same else f"f{first + n}", first + n, model=model), limit=1)
        queue.release(offer, "", signal="failed", limit=0)


def breaker_of(queue: FleetQueue, server: str = "gpu") -> str:
    return next(row[6] for row in queue.run("server_status") if row[0] == server)


def why_of(queue: FleetQueue) -> list:
    """When the server's next probe is due, what opened its breaker, and how often in a row that has happened."""
    return queue.run("server_status")[0][7:10]


def test_an_open_breaker_reports_its_end_time_and_its_cause(queue):
    queue.with_slots(1)
    assert why_of(queue) == [0, "", 0]
    fail(queue, 3)
    assert why_of(queue) == [queue.now + 5000, "failures", 1]
    queue.later(5000)
    (probe,) = queue.enqueue(a("j1", 11))
    queue.release(probe, "", signal="failed", limit=0)
    assert why_of(queue) == [queue.now + 10_000, "probe", 2]
    queue.later(10_000)
    (probe,) = queue.enqueue(a("j2", 12))
    queue.release(probe, "", signal="ok", limit=0)
    assert why_of(queue) == [0, "", 0]
    fail(queue, 3, first=21)
    queue.run("reset_breaker", "server", "gpu")
    assert why_of(queue) == [0, "", 0]


def test_a_breaker_opens_after_consecutive_failures_and_allows_one_probe(queue):
    queue.with_slots(3)
    fail(queue, 3)
    assert breaker_of(queue) == "open"
    assert queue.enqueue(a("j1", 11), a("j2", 12), a("j3", 13)) == []
    queue.later(5000)
    (probe,) = queue.offer()
    assert probe.job == "j1" and breaker_of(queue) == "probing"
    assert queue.offer() == []
    _, offers = queue.release(probe, "", signal="ok")
    assert [offer.job for offer in offers] == ["j2", "j3"] and breaker_of(queue) == "closed"


def test_a_refused_job_counts_as_a_success_for_the_breaker_and_not_for_the_mean_run_time(queue):
    queue.with_slots(1)
    for n in (1, 11):
        fail(queue, 2, first=n)
        (offer,) = queue.enqueue(a(f"refused{n}", n + 5))
        queue.later(10)
        queue.release(offer, "", signal="refused")
    assert breaker_of(queue) == "closed"
    (held,) = queue.enqueue(a("held", 21))
    assert queue.place_on_entry(a("waits", 22)) == (0, None)
    queue.later(10)
    queue.release(held, "", signal="ok")
    assert queue.place_on_entry(a("waits too", 23)) == (0, 10)


def test_a_probe_that_fails_opens_the_breaker_for_twice_as_long(queue):
    queue.with_slots(1)
    fail(queue, 3)
    queue.enqueue(*[a(f"j{n}", 10 + n) for n in range(1, 6)])
    for n, wait_ms in enumerate((5000, 10_000, 20_000, 40_000, 40_000), 1):
        queue.later(wait_ms - 1)
        assert queue.offer() == []
        queue.later(1)
        (probe,) = queue.offer()
        assert probe.job == f"j{n}"
        assert queue.release(probe, "", signal="failed", return_to_lane=True) == ("released", [])


@pytest.mark.parametrize("constraints", ["", "gpu=A100"])
def test_a_probe_is_no_job_that_failed_there_last_while_another_waits(queue, constraints):
    queue.with_servers(Server("gpu", attributes={"gpu": "A100"}))
    fail(queue, 3)
    queue.enqueue(*[a(f"f{n}", n) for n in range(1, 4)], a("good", 99, 9, tenant="other", constraints=constraints))
    queue.later(5000)
    assert [offer.job for offer in queue.offer()] == ["good"]


def test_jobs_that_failed_before_may_probe_if_no_other_waits_and_prolong_no_breaker(queue):
    queue.with_slots(1)
    for n in range(3):
        (held,) = queue.enqueue(a(f"bad{n}", n), limit=1)
        queue.release(held, "", signal="failed", limit=0)
    queue.enqueue(*[a(f"bad{n}", n) for n in range(3)])
    for _ in range(4):
        queue.later(4999)
        assert queue.offer() == []
        queue.later(1)
        (probe,) = queue.offer()
        queue.release(probe, "", signal="failed", return_to_lane=True)


def test_two_failing_jobs_that_are_retried_do_not_prevent_other_jobs_from_starting(queue):
    """No other client submits a job in the meantime."""
    queue.with_slots(2)
    for _ in range(30):
        queue.enqueue(a("bad1", 1), a("bad2", 2), limit=0)
        for held in queue.offer():
            queue.release(held, "", signal="failed", limit=0)
        queue.later(30_000)
    offers = queue.enqueue(a("g1", 11), a("g2", 12), a("g3", 13))
    assert [offer.job for offer in offers] == ["g1", "g2"]


def test_a_breaker_that_an_operator_resets_allows_all_offers(queue):
    queue.with_slots(1)
    fail(queue, 3)
    queue.cool_down("gpu", 1000)
    assert queue.enqueue(a("j1", 11)) == []
    assert queue.run("reset_breaker", "server", "gpu") == 1
    assert breaker_of(queue) == "closed" and [offer.job for offer in queue.offer()] == ["j1"]


def test_a_probe_without_a_signal_lets_another_probe_start(queue):
    queue.with_slots(1)
    fail(queue, 3)
    queue.enqueue(a("j1", 11))
    queue.later(5000)
    (probe,) = queue.offer()
    _, (again,) = queue.release(probe, "", return_to_lane=True)
    assert again.job == "j1" and breaker_of(queue) == "probing"


def test_interrupted_failures_and_repeated_failures_of_one_job_do_not_open_the_breaker(queue):
    queue.with_slots(1)
    for n in range(10):
        fail(queue, 2, first=10 * n + 1)
        (offer,) = queue.enqueue(a(f"good{n}", 10 * n + 5))
        queue.release(offer, "", signal="ok", limit=0)
    fail(queue, 9, first=200, same=True)
    assert breaker_of(queue) == "closed"


def test_a_breaker_also_opens_at_a_high_failure_rate(queue):
    queue.with_slots(1)
    for n in range(60):
        (offer,) = queue.enqueue(a(f"j{n}", n + 1), limit=1)
        outcome, hardly_ever_in_a_row = "ok" if n % 10 == 0 else "failed", (10, 0.8, 5_000, 40_000)
        queue.release(offer, "", signal=outcome, limit=0, breaker=hardly_ever_in_a_row)
        if breaker_of(queue) == "open":
            break
    assert breaker_of(queue) == "open" and why_of(queue)[1] == "rate" and n == 19, "the twentieth run"


def test_a_models_breaker_leaves_the_other_models_of_the_server_alone(queue):
    queue.configure("bad", breaker_failures=2).configure("good")
    queue.with_servers(Server("gpu", 2, models=("bad", "good")))
    fail(queue, 2, model="bad")
    assert queue.enqueue(a("b", 11, model="bad")) == []
    assert [offer.job for offer in queue.enqueue(a("g", 12, model="good"))] == ["g"]
    queue.later(5000)
    assert [offer.job for offer in queue.offer()] == ["b"]


def test_a_lost_lease_of_a_probe_does_not_block_the_breaker_forever(queue):
    queue.with_slots(1)
    fail(queue, 3)
    queue.enqueue(a("j1", 11), a("j2", 12))
    queue.later(5000)
    (probe,) = queue.offer()
    queue.client.delete(queue.key(f"leases:{probe.job}"))
    queue.client.hdel(queue.key("slots"), probe.slot)
    queue.set_free(probe.slot, queue.now)
    assert [offer.job for offer in queue.offer()] == ["j2"]
