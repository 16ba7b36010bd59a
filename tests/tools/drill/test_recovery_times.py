from slotkeeper.jobs.values import Event
from tools.cluster.cluster import ServerSpec
from tools.drill.fault_injection import InjectedFault
from tools.drill.fault_schedule import Fault, Kind
from tools.drill.history_checks import Receipt, Run
from tools.drill.recovery_times import assigned_slots, rerun_after, slot_recovery, summary

S = 1_000_000_000
SERVERS = [ServerSpec("a", "zimg", 1, 0), ServerSpec("b", "zimg", 1, 0)]


def injected(kind: Kind, at_s: int, target: str = "worker-1") -> InjectedFault:
    return InjectedFault(Fault(at_s, kind, target, 0.5), at_s * S, at_s * 1000, at_s * S)


def run(job_id: str, server: str, start_s: float, end_s: float) -> Run:
    return Run(job_id, 1, server, 0, round(start_s * S), round(end_s * S))


def receipts(*names: str, answered_s: float = 0) -> list[Receipt]:
    return [Receipt(name, "zimg", 5, round(answered_s * S), round(answered_s * S)) for name in names]


def test_the_recovery_time_is_that_of_the_slot_that_was_idle_longest() -> None:
    runs = [run("1", "a", 1, 2), run("2", "b", 1, 2), run("3", "a", 2.5, 3), run("4", "b", 7, 8), run("5", "a", 8, 9)]
    waiting = receipts("1", "2", "3", "4", "5")
    assert slot_recovery([injected(Kind.WORKER, 2)], runs, {}, waiting, SERVERS) == [(Kind.WORKER, 5.0)]


def test_a_fault_of_a_server_counts_only_its_slots() -> None:
    runs = [run("1", "a", 1, 2), run("2", "b", 1, 2), run("3", "a", 2.5, 3), run("4", "b", 7, 8), run("5", "a", 8, 9)]
    recovery = slot_recovery([injected(Kind.SERVER, 2, "a")], runs, {}, receipts("1", "2", "3", "4", "5"), SERVERS)
    assert recovery == [(Kind.SERVER, 0.5)]


def test_an_active_run_is_no_idle_time() -> None:
    runs = [run("1", "a", 1, 6), run("2", "a", 6.5, 7), run("3", "a", 8, 9)]
    assert slot_recovery([injected(Kind.BEAT, 2)], runs, {}, receipts("1", "2", "3"), SERVERS[:1]) == [(Kind.BEAT, 0.5)]


def test_a_slot_for_which_no_job_waited_does_not_count() -> None:
    runs = [run("1", "a", 1, 2), run("2", "a", 7, 8)]
    waiting = [*receipts("1"), *receipts("2", answered_s=6)]
    assert slot_recovery([injected(Kind.WORKER, 2)], runs, {}, waiting, SERVERS[:1]) == []


def test_the_slot_of_a_run_is_the_one_in_the_database() -> None:
    """The server reports its slot 0 for both runs."""
    servers = [ServerSpec("a", "zimg", 2, 0)]
    runs = [run("1", "a", 1, 2), run("2", "a", 3, 4), run("3", "a", 5, 6), run("4", "a", 7, 8)]
    events = {
        name: [Event(1, name, "job.started", 0, 1, {"slot": f"a-slot{slot}"})]
        for name, slot in (("1", 0), ("2", 1), ("3", 0), ("4", 1))
    }
    recovery = slot_recovery(
        [injected(Kind.WORKER, 2)], runs, assigned_slots(events), receipts("1", "2", "3", "4"), servers
    )
    assert recovery == [(Kind.WORKER, 3.0)]


def test_a_job_whose_worker_died_counts_until_its_next_start() -> None:
    job_events = [
        Event(1, "j", "job.started", 1_000, 1),
        Event(2, "j", "job.enqueued", 9_000, 1, {"why": "lease_expired"}),
        Event(3, "j", "job.started", 9_500, 2),
        Event(4, "j", "job.completed", 9_900, 2, {"why": "finished"}),
    ]
    assert rerun_after([injected(Kind.WORKER, 2), injected(Kind.WORKER, 20)], {"j": job_events}) == [7.5]
    assert rerun_after([injected(Kind.BEAT, 2)], {"j": job_events}) == []


def test_a_summary_has_the_median_and_the_maximum() -> None:
    assert summary([("web", 1.0), ("web", 3.0), ("web", 8.0)]) == {"web": {"faults": 3, "p50_s": 3.0, "max_s": 8.0}}
