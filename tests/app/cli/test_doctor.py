"""The doctor checks all parts concurrently, limits the time of each check, and names remedies."""

import base64
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from redis.exceptions import AuthenticationError

from app.cli import doctor_checks, doctor_runner
from app.cli.__main__ import main
from app.cli.doctor_checks import CHECKS
from app.cli.findings import Finding, worst_level
from app.up.ports import free_port
from routing.maintenance import task_runs
from slotkeeper.clock import now_ms
from slotkeeper.config import StorageSettings
from slotkeeper.serve import ReferenceServer, ServeConfig
from tasks import services
from tests.support.api import Api, clear_wiring
from tests.support.ends import cool_down
from tests.support.scripted import Scripted, answer
from tools.cluster.stack import REPO


def _findings_of(part: str) -> list[Finding]:
    return doctor_runner.run_check(part, CHECKS[part])


# -- how they are asked ----------------------------------------------------------------------------------------


def test_a_hanging_check_delays_no_other_and_is_reported_as_failed() -> None:
    hangs = threading.Event()

    def silent() -> Iterator[Finding]:
        hangs.wait(60)
        yield Finding("silent", "ok", "late")

    began = time.monotonic()
    found = list(
        doctor_runner.run_in_parallel({"silent": silent, "well": lambda: iter([Finding("well", "ok", "yes")])}, 0.2)
    )
    took_s = time.monotonic() - began
    hangs.set()
    assert took_s < 4
    assert [(finding.part, finding.level) for finding in found] == [("well", "ok"), ("silent", "fail")]
    assert found[1].remedy


def test_a_check_that_fails_is_a_finding() -> None:
    def broken() -> Iterator[Finding]:
        raise OSError("no route")
        yield

    (found,) = list(doctor_runner.run_in_parallel({"broken": broken}))
    assert (found.level, "no route" in found.message) == ("fail", True)


@pytest.mark.parametrize(
    "levels, worst", [((), "ok"), (("ok", "ok"), "ok"), (("ok", "warn"), "warn"), (("fail", "warn"), "fail")]
)
def test_the_worst_counts(levels: tuple[str, ...], worst: str) -> None:
    assert worst_level([Finding("x", level, "") for level in levels]) == worst


def test_the_help_and_the_documents_name_every_part() -> None:
    names = {part: {"folder": "state folder", "servers": "inference servers"}.get(part, part) for part in CHECKS}
    help_text = " ".join(CliRunner().invoke(main, ["doctor", "--help"]).output.split())
    monitoring = " ".join((REPO / "docs/how-to/monitoring.md").read_text().split())
    (sentence,) = re.findall("`slotkeeper doctor` checks ([^.]*)", monitoring)
    for place, text in (("the help of `doctor`", help_text), ("docs/how-to/monitoring.md", sentence)):
        missing = [part for part, name in names.items() if name.lower() not in text.lower()]
        assert not missing, f"{place} does not name {missing}"
    rows = re.findall(r"^\| ([a-z, ]+) \|", (REPO / "docs/how-to/troubleshooting.md").read_text(), re.MULTILINE)
    missing = sorted(CHECKS.keys() - {part for row in rows for part in row.split(", ")})
    assert not missing, f"docs/how-to/troubleshooting.md has no row for {missing}"


def test_a_redis_with_another_password_is_reported_as_such() -> None:
    def broken() -> Iterator[Finding]:
        raise AuthenticationError("Authentication required.")
        yield

    (found,) = doctor_runner.run_check("redis", broken)
    assert "password" in found.remedy and "does not run" not in found.remedy


# -- what they find --------------------------------------------------------------------------------------------


def test_the_checks_of_a_healthy_installation_report_no_failure(api: Api) -> None:
    for part in ("settings", "database", "redis"):
        found = _findings_of(part)
        assert not [finding for finding in found if finding.level == "fail"], found
    assert "schema" in _findings_of("database")[0].message


def test_doctor_reports_an_unreachable_database_and_redis_with_a_remedy(
    mortal_api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal_api.valkey.kill()
    monkeypatch.setenv("SLOTKEEPER_DATABASE_URL", "postgresql://nobody@127.0.0.1:9/none")
    clear_wiring()
    done = CliRunner().invoke(main, ["doctor", "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["level"]) == (1, "fail")
    by_part = {finding["part"]: finding for finding in found["findings"]}
    assert by_part.keys() == CHECKS.keys()
    for part in ("database", "redis"):
        assert by_part[part]["level"] == "fail" and by_part[part]["remedy"], part
    for part in ("workers", "maintenance", "servers"):  # One fault has one remedy.
        assert by_part[part]["level"] == "warn" and by_part[part]["message"].startswith("Not checked: "), part


def test_a_state_folder_that_is_missing_open_or_not_needed_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("SLOTKEEPER_HOME", str(home))
    for name in ("DATABASE_URL", "REDIS_URL", "SECRET"):
        monkeypatch.delenv(f"SLOTKEEPER_{name}", raising=False)
    (missing,) = _findings_of("folder")
    assert missing.level == "fail" and "slotkeeper migrate" in missing.remedy
    home.mkdir(mode=0o755)
    (is_open,) = _findings_of("folder")
    assert is_open.level == "fail" and f"chmod 700 {home}" in is_open.remedy
    home.chmod(0o700)
    assert [found.level for found in _findings_of("folder")] == ["ok"]
    home.rmdir()
    for name, value in {
        "DATABASE_URL": "postgresql://db/slotkeeper",
        "REDIS_URL": "redis://redis:6379/0",
        "SECRET": base64.b64encode(bytes(32)).decode(),
    }.items():
        monkeypatch.setenv(f"SLOTKEEPER_{name}", value)
    (elsewhere,) = _findings_of("folder")
    assert elsewhere.level == "warn" and "no worker's death can be proved" in elsewhere.message
    home.mkdir(mode=0o700)
    (elsewhere,) = _findings_of("folder")
    assert elsewhere.level == "ok" and "No state folder is needed" in elsewhere.message


def test_a_closed_api_port_is_no_problem_if_the_api_runs_on_another_host(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOTKEEPER_PORT", str(free_port()))
    assert [found.level for found in _findings_of("port")] == ["warn"]
    services.processes().report("web-1", {"role": "web", "host": "api-host", "pid": 1})
    (found,) = _findings_of("port")
    assert (found.level, found.message) == ("ok", "The API runs on api-host.")
    services.processes().report("web-2", {"role": "web", "host": socket.gethostname(), "pid": 2})
    assert [found.level for found in _findings_of("port")] == ["warn"]


def test_a_clock_that_was_set_is_reported_for_a_day(api: Api) -> None:
    (found,) = _findings_of("clocks")
    assert found.level == "ok"
    hour_ms = 3_600_000
    with api.database.engine.begin() as connection:
        for at_ms, by_ms in ((now_ms() - hour_ms, 7_200_000), (now_ms() - 25 * hour_ms, -1000)):
            connection.exec_driver_sql(f"INSERT INTO counters VALUES ('clock_step:{at_ms}', {by_ms})")
    (found,) = _findings_of("clocks")
    assert found.level == "warn" and "set by +7200.0 s" in found.message and "time-sync.target" in found.remedy


def test_doctor_reports_a_database_of_another_schema(api: Api) -> None:
    with api.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    (found,) = _findings_of("database")
    assert (found.level, "migrate" in found.message, found.remedy) == ("fail", True, "")


def test_doctor_reports_that_no_worker_and_no_maintenance_runs(api: Api) -> None:
    assert [finding.level for finding in _findings_of("workers")] == ["fail"]
    assert [finding.level for finding in _findings_of("maintenance")] == ["fail"]


def test_doctor_names_a_late_maintenance_task(api: Api) -> None:
    scripts = services.scripts()
    task_runs.mark_sweep(scripts)
    task_runs.TaskRunRecorder(scripts).note("sweep", 0.1)
    assert [finding.level for finding in _findings_of("maintenance")] == ["ok"]
    scripts.redis.hset(scripts.keys.tasks(), "reap", "1000 0.1")
    (found,) = _findings_of("maintenance")
    assert (found.level, "reap" in found.message) == ("warn", True)


def test_doctor_names_a_worker_whose_canary_is_late(api: Api) -> None:
    services.processes().report("worker@a/1", {"role": "worker", "host": "a", "version": "1", "canary_age_ms": 60_000})
    services.processes().report("web@a/2", {"role": "web", "host": "a", "version": "2"})
    found = _findings_of("workers")
    assert ["worker@a/1" in finding.message for finding in found] == [True, False]
    assert "releases 1, 2" in found[1].message


def test_doctor_names_a_process_that_drops_log_lines(api: Api) -> None:
    assert [finding.level for finding in _findings_of("logs")] == ["ok"]
    services.processes().report("worker@a/1", {"role": "worker", "host": "a", "log_lines_dropped": 7})
    services.processes().report("web@a/2", {"role": "web", "host": "a", "log_lines_dropped": 0})
    (found,) = _findings_of("logs")
    assert found.level == "warn" and "worker@a/1 (7 lines)" in found.message and "web@a/2" not in found.message


@pytest.mark.parametrize("mode, level", [(0o600, "ok"), (0o644, "fail"), (0o640, "fail")])
def test_doctor_reports_a_secret_file_that_other_users_can_read(
    api: Api, tmp_path: Path, mode: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLOTKEEPER_SECRET", raising=False)
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path / "own"))
    path = StorageSettings().home / "secret"
    path.parent.mkdir(mode=0o700)
    path.write_text("AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
    path.chmod(mode)
    services.scripts().redis.delete(services.scripts().keys.secret())
    from tasks.security import keyring

    keyring.installation_secrets.cache_clear()
    (found,) = _findings_of("secret")
    assert found.level == level, found


def test_doctor_reports_a_secret_that_differs_from_that_of_other_processes(api: Api) -> None:
    services.scripts().redis.set(services.scripts().keys.secret(), "another")
    assert [finding.level for finding in _findings_of("secret")] == ["fail"]


def test_the_doctor_names_a_running_process_with_another_secret(api: Api) -> None:
    services.processes().report("worker@b/1", {"role": "worker", "host": "b", "secret": "another"})
    (found,) = _findings_of("secret")
    assert found.level == "fail" and "worker@b/1" in found.message


@pytest.mark.parametrize(
    "name, value, level, part_of_message",
    [
        ("SLOTKEEPER_THREADS", "none", "fail", "SLOTKEEPER_THREADS"),
        ("SLOTKEEPER_REQUIRE_KEY", "true", "warn", "is no setting"),
        ("SLOTKEEPER_METRICS_KEY", "mk", "warn", "has no effect, because"),
        ("SLOTKEEPER_HOST", "0.0.0.0", "fail", "opens the API"),
    ],
)
def test_doctor_reports_invalid_and_contradictory_settings(
    api: Api, name: str, value: str, level: str, part_of_message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    found = [finding for finding in _findings_of("settings") if part_of_message in finding.message]
    assert found and found[0].level == level, _findings_of("settings")
    assert found[0].remedy


def test_a_wrong_setting_of_two_processes_is_reported_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTKEEPER_PORT", "x")
    assert [finding.message.partition(":")[0] for finding in _findings_of("settings")] == ["SLOTKEEPER_PORT"]


def test_no_value_of_a_setting_is_shown(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTKEEPER_SECRET", "not base64 and quite private")
    monkeypatch.setenv("SLOTKEEPER_METRICS_KEY", "mk_private")
    found: list[Any] = [*_findings_of("settings"), *_findings_of("secret")]
    assert "private" not in str(found)


# -- without false alarms --------------------------------------------------------------------------------------

_FIRST_IMPORTS = """
import sys, threading
from importlib.machinery import PathFinder
from app.cli import doctor_checks, doctor_runner

found = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread() and PathFinder.find_spec(name, path):
            found.append(name)

doctor_checks.prepare()
sys.meta_path.insert(0, Finder())
list(doctor_runner.run_in_parallel(doctor_checks.CHECKS))
print(" ".join(sorted(set(found))))
"""


@pytest.mark.parametrize("broker", ["", "amqp://127.0.0.1:9//"])
def test_no_check_imports_a_module_for_the_first_time_in_its_thread(
    api: Api, broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First imports in several threads at once fail at random; how the checks are timed does not matter here."""
    api.register(endpoint="http://127.0.0.1:9/generate")
    monkeypatch.setenv("SLOTKEEPER_BROKER_URL", broker)
    done = subprocess.run([sys.executable, "-c", _FIRST_IMPORTS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_one_slow_write_on_a_busy_host_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = [0.0], iter([0.3, 0.01])

    def write() -> None:
        now[0] += next(took)

    monkeypatch.setattr(doctor_checks.time, "monotonic", lambda: now[0])
    assert doctor_checks._measure_fastest_s(write) == pytest.approx(0.01)


# -- inference servers -----------------------------------------------------------------------------------------


def test_doctor_reports_that_no_server_is_registered(api: Api) -> None:
    (found,) = _findings_of("servers")
    assert (found.level, "slotkeeper servers register" in found.remedy) == ("warn", True)


def test_a_server_that_answers_is_well(api: Api) -> None:
    with ReferenceServer(lambda payload: payload, ServeConfig(port=0)) as server:
        api.register(endpoint=server.url + "/generate", slots=2)
        (found,) = _findings_of("servers")
    assert (found.level, found.message) == ("ok", "Answering: 1, with 2 slots.")


def test_the_doctor_names_an_unreachable_server_and_its_address(api: Api) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}/generate"
    api.register(endpoint=endpoint)
    (found,) = _findings_of("servers")
    assert (found.level, found.message.startswith("gpu1: It does not answer")) == ("fail", True)
    assert endpoint in found.remedy


def test_doctor_reports_a_servers_own_error_without_a_network_remedy(api: Api) -> None:
    api.model(preset="cog")
    with Scripted(lambda _: answer({"status": "SETUP_FAILED"})) as server:
        api.register(endpoint=server.url)
        (found,) = _findings_of("servers")
    assert (found.level, "cannot run jobs (/status is SETUP_FAILED)" in found.message) == ("fail", True)
    assert "reach" not in found.remedy and "log" in found.remedy


def test_a_server_that_never_answers_delays_no_other_check(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_SERVERS_LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api.register(endpoint=f"http://127.0.0.1:{free_port()}/generate")
        api.register(server="gpu2", endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}/generate")
        found = _findings_of("servers")
    assert [(finding.level, finding.message.partition(":")[0]) for finding in found] == [
        ("fail", "gpu1"),
        ("fail", "gpu2"),
    ]
    assert "0.5 s" in found[1].message


def test_a_paused_server_is_not_checked(api: Api) -> None:
    api.register()
    assert api.client.patch("/admin/servers/gpu1", json={"state": "paused"}).status_code == 200
    (found,) = _findings_of("servers")
    assert (found.level, "1 are stopped" in found.message) == ("ok", True)


def test_doctor_reports_slots_in_cooldown(api: Api) -> None:
    with ReferenceServer(lambda payload: payload, ServeConfig(port=0)) as server:
        api.register(endpoint=server.url + "/generate", slots=2)
        cool_down(api.dispatcher, "zimg", "gpu1")
        (found,) = _findings_of("servers")
    assert (found.level, found.message) == ("warn", "gpu1: 2 of its 2 slots are in cooldown.")
