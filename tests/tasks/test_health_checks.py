"""The servers that maintenance checks, and that no server delays the check of another."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest

from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.maintenance.server_report import ServerReport
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.registry.values import Server
from tasks import health_checks
from tasks.health_checks import HealthChecks, HealthTarget
from tests.support.api import Api
from tests.support.builders import at_once, eventually
from tests.support.ends import decided, end_in_order
from tests.support.threads import no_thread_left


def _asked(api: Api) -> list[str]:
    servers = api.dispatcher.catalog.refresh().servers.values()
    return [target.server.name for target in health_checks.select_targets(servers)]


def _end(api: Api, run: ActiveRun, outcome: Outcome) -> None:
    end_in_order(api.dispatcher, run, decided(api.dispatcher, run, outcome))


def test_a_server_with_only_when_used_is_checked_only_while_a_job_runs_there(api: Api) -> None:
    api.model(preset="kserve-v1", description={"health": {"only_when_used": True}})
    api.register()
    assert _asked(api) == []
    run = api.started()
    assert _asked(api) == ["gpu1"]
    _end(api, run, Outcome(OutcomeKind.DONE))
    assert _asked(api) == []


def test_a_paused_server_is_checked_only_while_a_job_runs_there(api: Api) -> None:
    api.register()
    assert _asked(api) == ["gpu1"]
    run = api.started()
    assert api.client.patch("/admin/servers/gpu1", json={"state": "paused"}).status_code == 200
    assert _asked(api) == ["gpu1"]
    _end(api, run, Outcome(OutcomeKind.DONE))
    assert _asked(api) == []


def test_a_server_that_may_still_run_an_ended_job_is_checked(api: Api) -> None:
    api.model(preset="kserve-v1", description={"health": {"only_when_used": True}})
    api.register()
    _end(api, api.started(), Outcome(OutcomeKind.CANCELED, server_still_running=True))
    assert _asked(api) == ["gpu1"]


# -- each server once at a time ----------------------------------------------------------------------------------


def _target(name: str) -> HealthTarget:
    return HealthTarget(Server(name, "zimg", 1, "online", {"zimg": f"http://{name}:1/"}, 0), None)


class Gate:
    """Holds the checks of servers until it is opened.  `asked`: their names."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.asked: list[str] = []

    async def pass_through(self, server: str) -> None:
        self.asked.append(server)
        while not self._opened.is_set():
            await asyncio.sleep(0.01)

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def make_checks() -> Iterator[Callable[[Any], HealthChecks]]:
    made: list[HealthChecks] = []

    def make(check: Any) -> HealthChecks:
        made.append(HealthChecks(check))
        return made[-1]

    yield make
    for checks in made:
        checks.close()


def test_servers_that_hang_do_not_delay_the_reports_of_others(
    gate: Gate, make_checks: Callable[[Any], HealthChecks], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(target: HealthTarget, _: object) -> ServerReport:
        if target.server.name.startswith("hangs"):
            await gate.pass_through(target.server.name)
        return ServerReport(up=True)

    monkeypatch.setattr(health_checks, "_SLOW_S", 0.0)
    checks = make_checks(check)
    hanging = [_target(f"hangs{n}") for n in range(health_checks.MAX_CONCURRENT + 50)]
    first = checks.start(hanging[: health_checks.MAX_CONCURRENT // 2])
    assert checks.start([_target("well")])["well"].result(10).up
    assert not any(report.done() for report in first.values())
    gate.open()
    for report in checks.start(hanging).values():
        report.result(10)
    gate.close()
    checks.start(hanging)  # All were slow the last time.
    assert checks.start([_target("new")])["new"].result(10).up


def test_a_server_has_one_check_at_a_time_and_its_error_affects_no_other_server(
    gate: Gate, make_checks: Callable[[Any], HealthChecks]
) -> None:
    async def check(target: HealthTarget, _: object) -> ServerReport:
        await gate.pass_through(target.server.name)
        if target.server.name == "odd":
            raise ValueError("a template that cannot be filled")
        return ServerReport(up=True)

    checks = make_checks(check)
    first, second = checks.start([_target("odd"), _target("well")]), checks.start([_target("well")])
    gate.open()
    assert second["well"] is first["well"] and first["well"].result(10).up
    assert isinstance(first["odd"].exception(10), ValueError)
    assert sorted(gate.asked) == ["odd", "well"]
    assert health_checks.take_arrived(first).keys() == {"well"}


def test_without_a_thread_for_the_loop_the_next_round_asks() -> None:
    with no_thread_left(), pytest.raises(RuntimeError):
        health_checks.health_checks()
    assert health_checks.health_checks().start([_target("well")])["well"].result(10).up is None


def test_a_late_report_is_applied_by_one_of_the_next_rounds(
    gate: Gate, make_checks: Callable[[Any], HealthChecks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds may be under way at once: the check of all servers, and that of urgent ones."""
    monkeypatch.setattr(health_checks, "_REPORTS_LIMIT_S", 0.01)

    async def check(target: HealthTarget, _: object) -> ServerReport:
        await gate.pass_through(target.server.name)
        return ServerReport(up=True)

    checks = make_checks(check)
    late = checks.start([_target("late")])
    assert list(checks.reports_as_they_arrive(dict(late))) == []
    gate.open()
    late["late"].result(10)
    rounds = at_once(*[lambda: [name for batch in checks.reports_as_they_arrive({}) for name in batch]] * 4)
    assert sorted(chain.from_iterable(rounds)) == ["late"]


def test_a_quarantined_run_is_checked_again_after_a_check_that_failed(
    make_checks: Callable[[Any], HealthChecks], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = QuarantinedSlot("j", 1, "gpu", "gpu-slot0", "zimg", "acme", "r1", "lost", 0, 0, 0)
    checked: list[str] = []

    async def fail(row: QuarantinedSlot, _: object) -> None:
        checked.append(row.job_id)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(health_checks, "database", lambda: None)
    monkeypatch.setattr(health_checks.quarantine, "list_all", lambda _: [row])
    monkeypatch.setattr(health_checks, "check_quarantined_run", fail)
    checks = make_checks(health_checks.read_report)
    for number in (1, 2):
        eventually(lambda number=number: checks.check_quarantined_runs() or len(checked) >= number)
