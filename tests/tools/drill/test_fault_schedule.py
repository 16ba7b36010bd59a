from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.up import ports
from app.up.errors import Stopped
from tools.cluster import process_clocks
from tools.cluster.cluster import Cluster
from tools.cluster.tcp_proxy import Proxy
from tools.drill import __main__ as command_line
from tools.drill.drill import DrillOptions
from tools.drill.drill_setup import cluster_spec, server_specs, unavailable_reason
from tools.drill.fault_schedule import Change, Kind, schedule, targets
from tools.drill.workload import plan_deadline_bursts, plan_jobs

AMONG = targets(
    ["worker-1", "worker-2"],
    ["a", "b", "c"],
    ["zimg", "flux"],
    proxy_ports=["redis", "broker", "database", "a", "b", "c"],
)


def test_the_same_seed_gives_the_same_faults() -> None:
    assert schedule(7, tuple(Kind), AMONG, 600, 5) == schedule(7, tuple(Kind), AMONG, 600, 5)
    assert schedule(7, tuple(Kind), AMONG, 600, 5) != schedule(8, tuple(Kind), AMONG, 600, 5)


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_in_order_within_the_time_and_about_as_often_as_requested(seed: int) -> None:
    faults = schedule(seed, tuple(Kind), AMONG, 300, 5)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert times[0] > 0 and times[-1] < 300
    assert 45 <= len(faults) <= 75


@pytest.mark.parametrize("seed", range(20))
def test_no_fault_is_scheduled_for_a_process_that_is_down(seed: int) -> None:
    undone_at: dict[str, float] = {}
    for fault in schedule(seed, tuple(Kind), AMONG, 300, 1):
        assert fault.at_s > undone_at.get(fault.target, 0)
        undone_at[fault.target] = fault.at_s + fault.lasts_s


def test_two_operators_never_change_one_model_at_once() -> None:
    """Undoing the first change would also end the second one."""
    until = dict.fromkeys(("zimg", "flux"), 0.0)
    for fault in schedule(3, (Kind.OPERATOR,), AMONG, 300, 1):
        assert fault.at_s > until[fault.target]
        until[fault.target] = fault.at_s + fault.lasts_s


@pytest.mark.parametrize("every_s", [0.5, 5.0])
def test_a_count_gives_exactly_that_number_of_faults(every_s: float) -> None:
    faults = schedule(3, (Kind.WORKER,), AMONG, 1, every_s, count=400)
    assert len(faults) == 400
    assert faults[-1].at_s == pytest.approx(400 * every_s, rel=0.5)


def test_every_kind_is_about_equally_often() -> None:
    counts = Counter(fault.kind for fault in schedule(1, tuple(Kind), AMONG, 600, 5))
    assert set(counts) == set(Kind) - {Kind.UNREAD}
    assert max(counts.values()) - min(counts.values()) <= 3


def test_only_requested_kinds_of_faults_are_scheduled() -> None:
    assert {fault.kind for fault in schedule(1, (Kind.WEB, Kind.BEAT), AMONG, 300, 5)} == {Kind.WEB, Kind.BEAT}
    assert schedule(1, (), AMONG, 300, 5) == []


def test_a_worker_is_stopped_for_longer_than_a_lease() -> None:
    from routing.config import RoutingSettings

    lease_s = RoutingSettings.model_fields["lease_ms"].default / 1000
    stops = schedule(1, (Kind.STOP,), AMONG, 600, 5)
    assert stops and all(fault.lasts_s > lease_s for fault in stops)


def test_a_kind_with_several_variants_has_all_of_them() -> None:
    faults = schedule(1, (Kind.OPERATOR, Kind.CLOCK, Kind.WORKER), AMONG, 1, 5, count=120)
    assert {fault.how for fault in faults if fault.kind is Kind.OPERATOR} == set(Change)
    assert {fault.how for fault in faults if fault.kind is Kind.CLOCK} == {"+30", "-30", "+3600", "-3600"}
    assert {fault.how for fault in faults if fault.kind is Kind.WORKER} == {""}


@pytest.mark.parametrize("kind", [Kind.COMMITS, Kind.DATABASE])
def test_faults_of_postgresql_are_left_out_on_sqlite_with_a_reason(kind: Kind) -> None:
    assert "--database postgresql" in str(unavailable_reason(kind, "sqlite"))
    assert unavailable_reason(kind, "postgresql") is None


def test_a_database_that_the_drill_did_not_start_is_not_killed() -> None:
    assert unavailable_reason(Kind.DATABASE, "postgresql://somewhere/else") is not None
    assert unavailable_reason(Kind.COMMITS, "postgresql://somewhere/else") is None


def test_faults_of_clocks_are_left_out_with_a_reason_if_libfaketime_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_clocks, "library", lambda: None)
    assert "apt-get install faketime" in str(unavailable_reason(Kind.CLOCK, "sqlite"))


def test_a_drill_has_a_proxy_only_if_a_fault_needs_one() -> None:
    assert not cluster_spec((Kind.WORKER, Kind.CLOCK)).has_proxy
    assert cluster_spec((Kind.WORKER, Kind.SILENCE)).has_proxy


def test_a_drill_has_the_requested_workers_and_slots(tmp_path: Path) -> None:
    from app.up.guardian import Guardian

    with Guardian() as guardian, Proxy() as proxy:
        stack = Cluster(tmp_path, guardian, proxy, cluster_spec((), workers=4), server_specs(tmp_path, 18))
    assert stack.workers == ("worker-1", "worker-2", "worker-3", "worker-4")
    assert [server.slots for server in stack.servers] == [4, 4, 9, 1, 2]


def test_every_role_is_restarted() -> None:
    assert (
        set(AMONG[Kind.RESTARTS])
        == set(AMONG[Kind.IMPATIENT])
        == {*("worker-1", "worker-2", "maintenance", "beat", "web")}
    )


def test_a_fault_of_the_whole_drill_does_not_prevent_others() -> None:
    faults = schedule(1, (Kind.UNREAD, Kind.WEB), AMONG, 300, 5)
    assert len(faults) > 40 and {fault.kind for fault in faults} == {Kind.WEB}
    assert schedule(1, (Kind.UNREAD,), AMONG, 300, 5) == []


def test_only_jobs_for_plain_servers_are_answered_with_faulty_json() -> None:
    jobs = plan_jobs(3, 2000, ["sync", "plain"], 8, 40, 0.5)
    assert {job.model for job in jobs if "garbles" in job.payload} == {"plain"}


def test_kills_without_a_kind_of_fault_are_refused() -> None:
    refused = CliRunner().invoke(command_line.drill, ["--kills", "3", "--faults", "none"])
    assert refused.exit_code == 2
    assert "--kills needs" in refused.output


def test_the_same_seed_gives_the_same_jobs() -> None:
    def plan(seed: int) -> object:
        return plan_jobs(seed, 300, ["a", "b"], 8, 40, 0.5)

    assert plan(3) == plan(3)
    assert plan(3) != plan(4)


def test_a_share_of_the_jobs_is_submitted_at_once_and_the_rest_during_faults() -> None:
    times = [job.at_s for job in plan_jobs(3, 300, ["a"], 8, 40, 0.5)]
    assert times.count(0) in (150, 151)
    assert times == sorted(times)
    assert 25 < times[-1] < 32


def test_runs_are_short_unless_all_would_end_before_the_faults() -> None:
    many = [job.seconds for job in plan_jobs(3, 10_000, ["a"], 8, 40, 0.5, long=False)]
    few = [job.seconds for job in plan_jobs(3, 100, ["a"], 8, 40, 0.5, long=False)]
    assert min(many) >= 0.02 and max(many) <= 0.2
    assert sum(few) > 0.5 * 8 * 40


def test_the_jobs_of_a_burst_share_one_deadline_and_have_unique_numbers() -> None:
    jobs = plan_deadline_bursts(3, 1000, [(5.0, 8.0), (20.0, 24.0)], 50, ["a", "b"])
    assert [job.number for job in jobs] == list(range(1000, 1100))
    assert {(job.at_s, job.expires_s) for job in jobs} == {(5.0, 8.0), (20.0, 24.0)}
    assert jobs == plan_deadline_bursts(3, 1000, [(5.0, 8.0), (20.0, 24.0)], 50, ["a", "b"])


def test_a_quarter_of_the_jobs_has_a_webhook_if_there_is_a_receiver() -> None:
    assert sum(job.hooked for job in plan_jobs(3, 400, ["a"], 8, 40, 0.5, hooks=True)) == 100
    assert not any(job.hooked for job in plan_jobs(3, 400, ["a"], 8, 40, 0.5))


def test_the_command_that_repeats_a_drill_has_the_seed_and_each_option_that_is_no_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[str] = []

    def stop(options: DrillOptions, _: object) -> None:
        commands.append(options.command)
        raise Stopped

    monkeypatch.setattr(command_line, "run", stop)
    CliRunner().invoke(command_line.drill, ["--faults", "worker,web", "--seconds", "30", "--seed", "4", "--keep"])
    assert commands == ["make drill DRILL_ARGS='--seed 4 --seconds 30.0 --faults worker,web'"]


def test_free_ports_are_below_those_of_outgoing_connections() -> None:
    """Starting a PostgreSQL takes seconds, and the system gives ports from 32768 on to outgoing connections."""
    free_ports = {ports.free_port() for _ in range(20)}
    assert len(free_ports) == 20
    assert all(1024 < port < 32_768 for port in free_ports)
