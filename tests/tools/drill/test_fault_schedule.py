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
from tools.drill.fault_schedule import Change, Kind, schedule, targets
from tools.drill.jobs import plan_deadline_bursts, plan_jobs
from tools.drill.setting import DrillSetup, unavailable_reason

AMONG = targets(
    ["worker-1", "worker-2"], ["a", "b", "c"], ["zimg", "flux"], doors=["redis", "broker", "database", "a", "b", "c"]
)


def test_the_same_seed_brings_the_same_faults() -> None:
    assert schedule(7, tuple(Kind), AMONG, 600, 5) == schedule(7, tuple(Kind), AMONG, 600, 5)
    assert schedule(7, tuple(Kind), AMONG, 600, 5) != schedule(8, tuple(Kind), AMONG, 600, 5)


@pytest.mark.parametrize("seed", range(20))
def test_faults_come_in_order_within_the_time_about_as_often_as_asked(seed: int) -> None:
    faults = schedule(seed, tuple(Kind), AMONG, 300, 5)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert times[0] > 0 and times[-1] < 300
    assert 45 <= len(faults) <= 75


@pytest.mark.parametrize("seed", range(20))
def test_nothing_happens_to_a_process_that_is_down(seed: int) -> None:
    up_again: dict[str, float] = {}
    for fault in schedule(seed, tuple(Kind), AMONG, 300, 1):
        assert fault.at_s > up_again.get(fault.target, 0)
        up_again[fault.target] = fault.at_s + fault.lasts_s


def test_two_operators_never_change_one_model_at_once() -> None:
    """The first to put things right again would end what the second has done."""
    until = dict.fromkeys(("zimg", "flux"), 0.0)
    for fault in schedule(3, (Kind.OPERATOR,), AMONG, 300, 1):
        assert fault.at_s > until[fault.target]
        until[fault.target] = fault.at_s + fault.lasts_s


@pytest.mark.parametrize("every_s", [0.5, 5.0])
def test_so_many_faults_as_asked_for_however_long_that_takes(every_s: float) -> None:
    faults = schedule(3, (Kind.WORKER,), AMONG, 1, every_s, count=400)
    assert len(faults) == 400
    assert faults[-1].at_s == pytest.approx(400 * every_s, rel=0.5)


def test_every_kind_gets_its_turn() -> None:
    counts = Counter(fault.kind for fault in schedule(1, tuple(Kind), AMONG, 600, 5))
    assert set(counts) == set(Kind) - {Kind.UNREAD}
    assert max(counts.values()) - min(counts.values()) <= 3


def test_only_what_was_asked_for_happens() -> None:
    assert {fault.kind for fault in schedule(1, (Kind.WEB, Kind.BEAT), AMONG, 300, 5)} == {Kind.WEB, Kind.BEAT}
    assert schedule(1, (), AMONG, 300, 5) == []


def test_a_worker_is_stopped_for_longer_than_a_lease() -> None:
    from routing.config import RoutingSettings

    lease_s = RoutingSettings.model_fields["lease_ms"].default / 1000
    stops = schedule(1, (Kind.STOP,), AMONG, 600, 5)
    assert stops and all(fault.lasts_s > lease_s for fault in stops)


def test_a_fault_with_several_manners_shows_all_of_them() -> None:
    faults = schedule(1, (Kind.OPERATOR, Kind.CLOCK, Kind.WORKER), AMONG, 1, 5, count=120)
    assert {fault.how for fault in faults if fault.kind is Kind.OPERATOR} == set(Change)
    assert {fault.how for fault in faults if fault.kind is Kind.CLOCK} == {"+30", "-30", "+3600", "-3600"}
    assert {fault.how for fault in faults if fault.kind is Kind.WORKER} == {""}


@pytest.mark.parametrize("kind", [Kind.COMMITS, Kind.DATABASE])
def test_what_only_postgresql_can_suffer_is_left_out_on_sqlite_with_a_sentence(kind: Kind) -> None:
    assert "--database postgresql" in str(unavailable_reason(kind, "sqlite"))
    assert unavailable_reason(kind, "postgresql") is None


def test_a_database_of_somebody_else_is_not_killed() -> None:
    assert unavailable_reason(Kind.DATABASE, "postgresql://somewhere/else") is not None
    assert unavailable_reason(Kind.COMMITS, "postgresql://somewhere/else") is None


def test_clocks_are_left_out_with_a_sentence_where_libfaketime_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_clocks, "library", lambda: None)
    assert "apt-get install faketime" in str(unavailable_reason(Kind.CLOCK, "sqlite"))


def test_a_proxy_stands_between_only_where_a_fault_needs_one() -> None:
    assert not DrillSetup(kinds=(Kind.WORKER, Kind.CLOCK)).has_proxy
    assert DrillSetup(kinds=(Kind.WORKER, Kind.SILENCE)).has_proxy


def test_a_drill_has_the_workers_and_slots_that_were_asked_for(tmp_path: Path) -> None:
    from app.up.guardian import Guardian

    with Guardian() as guardian, Proxy() as proxy:
        stack = Cluster(tmp_path, guardian, proxy, DrillSetup(workers=4, slots=18))
    assert stack.workers == ("worker-1", "worker-2", "worker-3", "worker-4")
    assert [server.slots for server in stack.servers] == [4, 4, 9, 1]


def test_orderly_restarts_are_of_every_role() -> None:
    assert (
        set(AMONG[Kind.RESTARTS])
        == set(AMONG[Kind.IMPATIENT])
        == {*("worker-1", "worker-2", "maintenance", "beat", "web")}
    )


def test_what_lasts_for_the_whole_drill_does_not_keep_faults_from_happening() -> None:
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


def test_the_same_seed_brings_the_same_jobs() -> None:
    def some(seed: int) -> object:
        return plan_jobs(seed, 300, ["a", "b"], 8, 40, 0.5)

    assert some(3) == some(3)
    assert some(3) != some(4)


def test_a_share_of_the_jobs_comes_at_once_and_the_rest_while_faults_go_on() -> None:
    times = [order.at_s for order in plan_jobs(3, 300, ["a"], 8, 40, 0.5)]
    assert times.count(0) in (150, 151)
    assert times == sorted(times)
    assert 25 < times[-1] < 32


def test_runs_are_short_unless_all_would_be_over_before_the_faults_are() -> None:
    many = [order.seconds for order in plan_jobs(3, 10_000, ["a"], 8, 40, 0.5, long=False)]
    few = [order.seconds for order in plan_jobs(3, 100, ["a"], 8, 40, 0.5, long=False)]
    assert min(many) >= 0.02 and max(many) <= 0.2
    assert sum(few) > 0.5 * 8 * 40


def test_a_mass_has_one_deadline_and_numbers_of_its_own() -> None:
    found = plan_deadline_bursts(3, 1000, [(5.0, 8.0), (20.0, 24.0)], 50, ["a", "b"])
    assert [order.number for order in found] == list(range(1000, 1100))
    assert {(order.at_s, order.expires_s) for order in found} == {(5.0, 8.0), (20.0, 24.0)}
    assert found == plan_deadline_bursts(3, 1000, [(5.0, 8.0), (20.0, 24.0)], 50, ["a", "b"])


def test_a_quarter_of_the_jobs_is_told_to_a_receiver_if_there_is_one() -> None:
    assert sum(order.hooked for order in plan_jobs(3, 400, ["a"], 8, 40, 0.5, hooks=True)) == 100
    assert not any(order.hooked for order in plan_jobs(3, 400, ["a"], 8, 40, 0.5))


def test_the_command_that_repeats_a_drill_names_the_seed_and_what_is_no_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    def stop(wishes: DrillOptions, _: object) -> None:
        told.append(wishes.command)
        raise Stopped

    monkeypatch.setattr(command_line, "run", stop)
    CliRunner().invoke(command_line.drill, ["--faults", "worker,web", "--seconds", "30", "--seed", "4", "--keep"])
    assert told == ["make drill DRILL_ARGS='--seed 4 --seconds 30.0 --faults worker,web'"]


def test_no_outgoing_connection_takes_a_port_of_the_drill_before_its_listener_comes() -> None:
    """Starting a PostgreSQL takes seconds, and the system gives any port from 32768 on to whoever connects."""
    found = {ports.free_port() for _ in range(20)}
    assert len(found) == 20
    assert all(1024 < port < 32_768 for port in found)
