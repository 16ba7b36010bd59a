"""Very many different constraints: an offer reads only the groups that the fleet's servers can run."""

import pytest

from routing.admission.submit_limits import LimitScripts
from routing.queue.lanes import class_name
from tests.support.fleet_queue import RECORD, FleetQueue, Server, a

SMALL, LARGE = Server("small", attributes={"memory": 40}), Server("large", attributes={"memory": 80})
POLICIES = pytest.mark.parametrize("policy", ["priority", "fair"])


def asks(job: str, seq: int, memory: int, tenant: str = "default", priority: int = 5):
    return a(job, seq, priority, tenant=tenant, constraints=f"memory>={memory}")


def calls_of(queue: FleetQueue, act) -> int:
    """How many commands Redis runs for it, those inside of scripts included."""
    queue.client.config_resetstat()
    act()
    return sum(row["calls"] for row in queue.client.info("commandstats").values())


@POLICIES
def test_constraints_that_no_server_meets_do_not_slow_down_an_offer(queue, policy):
    queue.configure(policy=policy).with_servers(SMALL)

    def one_job(seq):
        (held,) = queue.enqueue(asks(f"ok{seq}", seq, 24, "other"))
        queue.release(held, "", signal="ok")

    one_job(1)
    before = calls_of(queue, lambda: one_job(2))
    queue.enqueue(*[asks(f"x{n}", 10 + n, 100 + n) for n in range(500)])
    assert calls_of(queue, lambda: one_job(3)) <= before + 2


@POLICIES
def test_an_offer_makes_no_more_calls_for_many_constraints_that_the_same_servers_meet(queue, policy):
    queue.configure(policy=policy).with_servers(Server("other", models=("flux",)), LARGE)
    queue.enqueue(asks("first", 1, 1))

    def one_job(seq):
        (other,) = queue.enqueue(a(f"f{seq}", seq, model="flux"))
        queue.release(other, "", signal="ok")

    queue.enqueue(asks("x", 2, 2))
    one_job(3)
    before = calls_of(queue, lambda: one_job(4))
    queue.enqueue(*[asks(f"x{n}", 10 + n, 3 + n, f"t{n}") for n in range(70)])
    assert calls_of(queue, lambda: one_job(5)) <= before + 2


def test_jobs_with_many_different_constraints_start_in_the_order_of_the_policy(queue):
    queue.with_servers(LARGE)
    queue.cool_down("large", 1000)
    jobs = [asks(f"x{n}", n, 1 + n % 7, f"t{n % 2}", 1 + n * 5 % 9) for n in range(30)]
    queue.enqueue(*jobs)
    queue.later(1000)
    assert queue.drain() == [job.id for job in sorted(jobs, key=lambda job: (job.priority, job.seq))]


def test_under_fair_the_most_urgent_job_of_a_tenant_comes_first_among_different_constraints(queue):
    queue.configure(policy="fair").with_servers(LARGE)
    queue.cool_down("large", 1000)
    queue.enqueue(*[asks(f"x{n}", n, 1 + n) for n in range(20)], asks("urgent", 99, 40, priority=1))
    queue.later(1000)
    assert queue.drain()[0] == "urgent"


def test_a_new_server_gets_the_jobs_that_no_other_server_could_run_in_order(queue):
    queue.with_servers(SMALL)
    queue.enqueue(*[asks(f"x{n}", 10 - n, 50 + n) for n in range(5)])
    assert queue.offer() == []
    queue.sync(SMALL, LARGE)
    assert queue.drain() == ["x4", "x3", "x2", "x1", "x0"]


def test_a_server_gets_no_job_whose_constraints_it_no_longer_meets(queue):
    queue.with_servers(Server("gpu", attributes={"memory": 80}))
    (held,) = queue.enqueue(asks("j1", 1, 60), asks("j2", 2, 60), asks("j3", 3, 30))
    queue.sync(Server("gpu", attributes={"memory": 40}))
    _, offers = queue.release(held, "")
    assert [offer.job for offer in offers] == ["j3"]


def test_a_job_is_never_offered_to_a_server_that_stopped_meeting_its_constraints(queue):
    queue.with_servers(Server("gpu", attributes={"memory": 80}))
    (held,) = queue.enqueue(asks("j1", 1, 60), asks("j2", 2, 60))
    queue.version += 1
    queue.run("sync_catalog", RECORD, queue.version, -1, 0, 1, 1, *Server("gpu", attributes={"memory": 40}).args)
    assert queue.release(held, "") == ("released", [])


def test_the_keys_of_constraints_are_deleted_with_their_last_job(queue):
    queue.with_servers(SMALL)
    queue.cool_down("small", 1000)
    before = queue.dump().keys()
    jobs = [asks("met", 1, 30), asks("unmet", 2, 90), a("any", 3)]
    queue.enqueue(*jobs)
    for job in jobs:
        assert queue.withdraw(job) == "withdrawn"
    assert queue.dump().keys() <= before


def test_the_position_of_a_job_does_not_count_jobs_that_no_server_can_run(queue):
    queue.with_servers(SMALL)
    queue.cool_down("small", 1000)
    queue.enqueue(*[asks(f"x{n}", n, 100 + n % 2, "mean") for n in range(1, 9)], a("other", 10), asks("met", 11, 30))
    assert queue.position(asks("met", 11, 30)) == ["waiting", 1]
    assert queue.position(asks("x8", 8, 100, "mean")) == ["waiting", 3], (
        "only jobs with the same constraints are before it"
    )


def test_the_queued_jobs_of_a_tenant_are_counted_even_if_no_server_meets_their_constraints(queue):
    queue.with_servers(SMALL)
    queue.enqueue(*[asks(f"x{n}", n, 100 + n, "mean") for n in range(1, 9)])
    assert queue.run("model_status", "mean|zimg", 0)[:2] == [8, 8]


def test_equal_constraints_of_several_jobs_are_counted_once(queue):
    queue.enqueue(asks("a1", 1, 1, "a"), asks("a2", 2, 2, "a", 1), asks("a3", 3, 2, "a", 9), asks("b1", 4, 3, "b"))
    queue.enqueue(a("plain", 5, tenant="a"))
    known, new = (class_name("zimg", f"memory>={n}") for n in (3, 4))
    scripts: LimitScripts = queue.scripts.bind(LimitScripts)

    def count(*classes: str) -> tuple[int, ...]:
        return queue.scripts.run(
            scripts.count_constraints(queue.fleet, account="a|zimg", models=["flux", "zimg"], classes=classes)
        )

    assert count() == (2, 3)
    assert count(known) == (3, 3)
    assert count(known, new, new) == (4, 4)
