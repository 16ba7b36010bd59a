"""A process that cannot start reports the reason in one line, and ends with status 1."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools.cluster.stack import REPO

SLOTKEEPER = [sys.executable, "-m", "app.cli"]
ROLES = {
    "web": [sys.executable, "-m", "app.server"],
    "worker": [sys.executable, "-m", "tasks", "worker"],
    "beat": [sys.executable, "-m", "tasks", "beat"],
    "flower": [sys.executable, "-m", "tasks", "flower"],
    "webhooks": [sys.executable, "-m", "tasks.webhooks"],
    "relay": [sys.executable, "-m", "tasks.relay"],
    "up": [*SLOTKEEPER, "up"],
    "flower command": [*SLOTKEEPER, "flower"],
    "health": [*SLOTKEEPER, "health", "worker"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the state folder of an installation that was never started."""
    home = tmp_path_factory.mktemp("home") / "var"
    _run([*SLOTKEEPER, "migrate"], home)
    return home


def _run(command: list[str], home: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    given = {f"SLOTKEEPER_{name}": value for name, value in settings.items()}
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLOTKEEPER_")}
    return subprocess.run(
        command,
        cwd=REPO,
        env={**env, "SLOTKEEPER_HOME": str(home), **given},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _refusal(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the line with which a process has refused to start."""
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1 and "Traceback" not in output, output
    (line,) = (line for line in output.splitlines() if line.startswith("Error: "))
    return line


@pytest.mark.parametrize("role", ROLES)
def test_a_wrong_setting_is_refused_in_one_line(role: str, home: Path) -> None:
    line = _refusal(_run(ROLES[role], home, LEASE_MS="soon"))
    assert line.startswith("Error: SLOTKEEPER_LEASE_MS='soon' is wrong: ")


@pytest.mark.parametrize("role", ["relay", "up"])
def test_the_refusal_of_a_database_url_does_not_show_its_password(role: str, home: Path) -> None:
    line = _refusal(_run(ROLES[role], home, DATABASE_URL="mysql://slotkeeper:s3cret@db/slotkeeper"))
    assert line.startswith("Error: SLOTKEEPER_DATABASE_URL is wrong: ") and "s3cret" not in line


@pytest.mark.parametrize("role", ["web", "up"])
def test_an_open_address_without_keys_is_refused_in_one_line(role: str, home: Path) -> None:
    assert "set SLOTKEEPER_REQUIRE_KEYS=true" in _refusal(_run(ROLES[role], home, HOST="0.0.0.0"))


@pytest.mark.parametrize("role", ["web", "up"])
@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot be read: No such file"), ("no certificate", "both must be PEM")]
)
def test_a_certificate_that_cannot_be_used_is_refused_in_one_line(
    role: str, home: Path, tmp_path: Path, content: str | None, reason: str
) -> None:
    certificate = tmp_path / "certificate.pem"
    if content is not None:
        certificate.write_text(content)
    line = _refusal(_run(ROLES[role], home, TLS_CERTIFICATE=str(certificate)))
    assert str(certificate) in line and reason in line


@pytest.mark.parametrize("role", ["web", "up"])
def test_a_port_that_is_taken_is_refused_in_one_line(role: str, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = _refusal(_run(ROLES[role], home, PORT=str(port)))
    assert str(port) in line and "SLOTKEEPER_PORT" in line


def test_a_missing_setting_of_a_sink_is_reported_in_one_line(home: Path) -> None:
    assert "SLOTKEEPER_EVENTS_KAFKA_SERVERS is missing" in _refusal(_run(ROLES["relay"], home, EVENTS_TO="kafka"))


def test_doctor_with_a_wrong_setting_checks_the_settings_alone(home: Path) -> None:
    ended = _run([*SLOTKEEPER, "doctor"], home, LEASE_MS="soon")
    assert ended.returncode == 1
    parts = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith(("FAIL", "WARN", "ok"))]
    assert parts == ["settings", "others"] and "'soon'" not in ended.stdout
