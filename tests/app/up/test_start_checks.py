"""The checks before a start: ports, the state folder, settings."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.cli.output import api_client
from app.up import installation_folder as home_module
from app.up import valkey_server
from app.up.demonstration import mixed_jobs
from app.up.errors import UpError
from app.up.installation_folder import InstallationFolder, flower_password, write_addresses
from app.up.launcher import _welcome
from app.up.plan import read_plan, read_procfile
from app.up.ports import Port, check_ports, free_port, is_open
from routing.config import RoutingSettings
from slotkeeper.errors import InvalidSetting


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path / "home"))
    return monkeypatch


def test_a_taken_port_is_named_with_the_variable_to_change(taken: int) -> None:
    with pytest.raises(UpError, match=rf"Port {taken} for Flower is taken .* set SLOTKEEPER_FLOWER_PORT"):
        check_ports([Port(taken, "Flower", "SLOTKEEPER_FLOWER_PORT")])


def test_a_free_port_is_no_obstacle() -> None:
    port = free_port()
    check_ports([Port(port, "the API", "SLOTKEEPER_PORT")])
    assert not is_open("127.0.0.1", port)


def test_free_port_returns_no_port_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    few = sorted(free_port() for _ in range(3))
    monkeypatch.setattr("app.up.ports._given", set())
    monkeypatch.setattr("app.up.ports.random.SystemRandom", lambda: _Turns(few))
    assert [free_port() for _ in range(3)] == few
    with pytest.raises(UpError, match="No port from 10240 to 32767 is free"):
        free_port()


class _Turns:
    """Draws one after the other, each twice."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = cycle(number for number in numbers for _ in range(2))

    def choice(self, _: range) -> int:
        return next(self._numbers)


def test_a_port_in_time_wait_passes_the_check(taken: int) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()  # The side that closes first waits in TIME_WAIT.
        client.close()
    check_ports([Port(port, "the API", "SLOTKEEPER_PORT")])


def test_one_port_for_two_roles_is_refused() -> None:
    port = free_port()
    with pytest.raises(UpError, match="set SLOTKEEPER_PORT or SLOTKEEPER_REDIS_PORT to another one"):
        check_ports([Port(port, "the API", "SLOTKEEPER_PORT"), Port(port, "Valkey", "SLOTKEEPER_REDIS_PORT")])


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(UpError, match="SLOTKEEPER_HOST"):
        check_ports([Port(free_port(), "the API", "SLOTKEEPER_PORT", "192.0.2.1")])


def test_a_second_one_on_the_same_folder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    second = InstallationFolder(tmp_path / "home")
    with InstallationFolder(tmp_path / "home"), pytest.raises(UpError, match=rf"pid {os.getpid()}\) runs on"):
        second.__enter__()
    with InstallationFolder(tmp_path / "home"):  # and free again afterwards
        pass


def test_a_lock_file_that_was_left_behind_is_no_obstacle(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "up.lock").write_text("1\n")
    with InstallationFolder(home):
        assert (home / "up.lock").read_text() == f"{os.getpid()}\n"


def test_a_folder_that_cannot_be_made_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UpError, match=r"file/home cannot be used .*set SLOTKEEPER_HOME") as raised:
        InstallationFolder(tmp_path / "file" / "home").__enter__()
    assert "\n" not in raised.value.message


def test_a_full_disk_is_named_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 20))
    with pytest.raises(UpError, match="Only 3 MB are free"), InstallationFolder(tmp_path / "home"):
        pass


def test_the_folder_is_closed_to_others(tmp_path: Path) -> None:
    with InstallationFolder(tmp_path / "home"):
        assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_flowers_password_is_created_once_and_readable_only_by_its_owner(tmp_path: Path) -> None:
    password = flower_password(tmp_path)
    assert len(password) >= 20
    assert flower_password(tmp_path) == password
    assert stat.S_IMODE((tmp_path / "flower-password").stat().st_mode) == 0o600


def test_a_wrong_setting_is_named_with_its_variable(settings: pytest.MonkeyPatch) -> None:
    settings.setenv("SLOTKEEPER_PORT", "eighty")
    with pytest.raises(InvalidSetting, match="SLOTKEEPER_PORT='eighty' is wrong"):
        read_plan(demo=False)
    settings.setenv("SLOTKEEPER_BUSY_COOLDOWN_MS", "soon")
    with pytest.raises(InvalidSetting, match=r"^SLOTKEEPER_BUSY_COOLDOWN_MS='soon' is wrong"):
        RoutingSettings()


def test_an_open_address_without_keys_is_refused(settings: pytest.MonkeyPatch) -> None:
    settings.setenv("SLOTKEEPER_HOST", "0.0.0.0")
    with pytest.raises(InvalidSetting, match="SLOTKEEPER_REQUIRE_KEYS"):
        read_plan(demo=False)


def test_no_redis_port_is_checked_if_redis_url_is_set(settings: pytest.MonkeyPatch) -> None:
    settings.setenv("SLOTKEEPER_REDIS_URL", "redis://127.0.0.1:6379/0")
    assert "SLOTKEEPER_REDIS_PORT" not in [port.variable for port in read_plan(demo=False).ports()]


def test_a_relative_database_url_is_resolved_to_an_absolute_path(settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings.chdir(tmp_path)
    settings.setenv("SLOTKEEPER_DATABASE_URL", "sqlite:///here.db")
    assert read_plan(demo=False).database_url == f"sqlite:///{tmp_path}/here.db"


def test_a_password_in_the_database_url_is_kept(settings: pytest.MonkeyPatch) -> None:
    url = "postgresql://me:p%40ss@db.example/slotkeeper"
    settings.setenv("SLOTKEEPER_DATABASE_URL", url)
    assert read_plan(demo=False).environment()["SLOTKEEPER_DATABASE_URL"] == url


def test_the_demonstration_has_one_sync_model_and_two_async_models(settings: pytest.MonkeyPatch) -> None:
    servers = read_plan(demo=True).demo
    assert {server.model: "--async" in server.options for server in servers} == {
        "zimg": False,
        "flux": True,
        "trellis": True,
    }
    assert {job["model"] for job in mixed_jobs(5)} == {"zimg", "flux", "trellis"}


def test_a_state_folder_that_is_not_the_default_is_named_in_the_command(settings: pytest.MonkeyPatch) -> None:
    settings.setenv("SLOTKEEPER_HOME", "/srv/slots")
    assert read_plan(demo=False).command().startswith("SLOTKEEPER_HOME=/srv/slots ")
    settings.delenv("SLOTKEEPER_HOME")
    assert not read_plan(demo=False).command().startswith("SLOTKEEPER_HOME=")


def test_the_welcome_of_an_installation_with_keys_explains_how_to_get_one(settings: pytest.MonkeyPatch) -> None:
    assert "tenants add" not in _welcome(read_plan(demo=False), 1.0)
    settings.setenv("SLOTKEEPER_REQUIRE_KEYS", "true")
    welcome = _welcome(read_plan(demo=False), 1.0)
    assert "tenants add NAME --operate" in welcome and "SLOTKEEPER_KEY" in welcome


def test_commands_read_the_addresses_of_the_api_and_redis_from_the_state_folder(
    settings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings.setenv("SLOTKEEPER_HOME", str(tmp_path))
    for name in ("PORT", "URL", "REDIS_PORT", "REDIS_URL"):
        settings.delenv(f"SLOTKEEPER_{name}", raising=False)
    write_addresses(tmp_path, "http://127.0.0.1:8123", 7123)
    assert RoutingSettings().effective_redis_url == "redis://127.0.0.1:7123/0"
    assert api_client().url == "http://127.0.0.1:8123"
    settings.setenv("SLOTKEEPER_REDIS_PORT", "7200")
    settings.setenv("SLOTKEEPER_PORT", "8200")
    assert RoutingSettings().effective_redis_url == "redis://127.0.0.1:7200/0"
    assert api_client().url == "http://127.0.0.1:8200"


def test_demo_servers_use_the_configured_port_and_the_next_ones(settings: pytest.MonkeyPatch) -> None:
    settings.setenv("SLOTKEEPER_DEMO_PORT", "9100")
    assert [server.url for server in read_plan(demo=True).demo] == [
        f"http://127.0.0.1:{port}" for port in (9100, 9101, 9102)
    ]


def test_everything_that_takes_jobs_stops_before_the_servers_and_flower(settings: pytest.MonkeyPatch) -> None:
    turns = {role.name: role.stop_order for role in read_plan(demo=True).roles()}
    assert turns["web"] < turns["worker"] == turns["maintenance"]
    assert turns["worker"] < turns["flower"] == turns["zimg-api1"]


def test_the_procfile_has_the_roles_and_is_shipped_with_the_package() -> None:
    assert set(read_procfile()) == {"web", "worker", "maintenance", "webhooks", "relay", "beat", "flower"}
    root = Path(__file__).parents[3]
    assert (root / "Procfile").read_text() == (root / "app" / "up" / "Procfile").read_text()


def test_worker_and_maintenance_are_started_before_web(settings: pytest.MonkeyPatch) -> None:
    names = [role.name for role in read_plan(demo=True).roles()]
    assert names[:3] == ["worker", "maintenance", "web"]


def test_a_database_with_the_current_schema_is_not_migrated(settings: pytest.MonkeyPatch, sqlite_url: str) -> None:
    assert read_plan(demo=False).migration() is not None, "there is no schema yet"
    settings.setenv("SLOTKEEPER_DATABASE_URL", sqlite_url)
    assert read_plan(demo=False).migration() is None


def test_on_one_machine_each_role_runs_once_and_beat_and_relay_run_as_threads() -> None:
    roles = {role.name: role.command for role in read_plan(demo=False).roles()}
    assert set(read_procfile()) - set(roles) == {"beat", "relay"}
    assert "--embedded-beat" in roles["maintenance"]
    assert "--embedded-relay" in roles["webhooks"]


def test_the_procfile_contains_no_password() -> None:
    assert "auth" not in " ".join(read_procfile().values()).lower()


def test_a_valkey_on_the_path_replaces_a_missing_bundled_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(valkey_server, "_bundled", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UpError, match="install one, or name a running one in SLOTKEEPER_REDIS_URL"):
        valkey_server.find_valkey()
    _program(tmp_path / "redis-server", "echo Redis server v=6.0.16 sha=0")
    with pytest.raises(UpError, match=r"7\.0 or newer"):
        valkey_server.find_valkey()
    _program(tmp_path / "valkey-server", "echo Server v=8.1.1 sha=0")
    assert valkey_server.find_valkey() == str(tmp_path / "valkey-server")


def test_a_redis_that_does_not_answer_is_named() -> None:
    with pytest.raises(UpError, match="SLOTKEEPER_REDIS_URL does not answer"):
        valkey_server.check_remote(f"redis://127.0.0.1:{free_port()}/0")


def test_the_command_line_does_not_load_what_it_does_not_need() -> None:
    program = "import sys, app.cli.__main__; "
    program += "print(sorted({'rich', 'flask', 'celery', 'sqlalchemy', 'redis'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"


def _program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
