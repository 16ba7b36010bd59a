"""What the processes of an installation load: each module costs every one of them memory for as long as it runs."""

import subprocess
import sys
from pathlib import Path

import pytest

# The module with which each process begins, and with what it does first.
PROCESSES = {
    "web": "import app.web.__main__; from migrations import migrate; migrate.check('sqlite:///none.db')",
    "worker": "from tasks.__main__ import program; program('worker'); import tasks.maintenance, tasks.worker",
    "webhooks": "import tasks.webhooks",
    "flower": "import cli.__main__; from tasks.__main__ import program; program('flower'); import tasks.signals",
    "supervisor": "import cli.__main__, local.launcher; local.launcher.read_plan(False)",
}


def loaded(code: str, home: Path) -> set[str]:
    """The modules that are there after this code has run on an SQLite record in `home`."""
    script = f"import sys; {code}; print(*sys.modules)"
    env = {"SLOTKEEPER_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    return set(subprocess.run([sys.executable, "-c", script], env=env, check=True, stdout=-1, text=True).stdout.split())


@pytest.mark.parametrize("process", PROCESSES)
def test_without_postgresql_nobody_loads_its_driver(process: str, tmp_path: Path) -> None:
    made = "make(RecordSettings().record_url, Limits())"
    engine = f"from foundation.config import *; from database.engines import make; {made}"
    assert not {"psycopg", "psycopg_binary"} & loaded(f"{PROCESSES[process]}; {engine}", tmp_path)


@pytest.mark.parametrize(
    ("process", "spared"),
    [
        ("supervisor", {"celery", "flask", "kombu", "redis", "sqlalchemy"}),
        ("flower", {"aiohappyeyeballs", "flask", "opentelemetry", "prompt_toolkit", "psycopg", "rich", "sqlalchemy"}),
        ("webhooks", {"celery", "cryptography.hazmat", "flask", "kombu", "opentelemetry", "rich"}),
        ("worker", {"alembic", "cryptography.hazmat", "flask", "flower", "opentelemetry", "prompt_toolkit", "rich"}),
        ("web", {"alembic", "cryptography.hazmat", "opentelemetry", "rich"}),
    ],
)
def test_no_process_loads_what_it_has_no_use_for(process: str, spared: set[str], tmp_path: Path) -> None:
    assert not spared & loaded(PROCESSES[process], tmp_path)


def test_a_worker_has_our_options_however_it_is_started(tmp_path: Path) -> None:
    names = "print(*(param.name for param in program('worker').params))"
    assert "embedded_beat" in loaded(f"from tasks.__main__ import program; {names}", tmp_path)


@pytest.mark.parametrize("process", ["web", "worker", "webhooks"])
def test_redis_is_asked_without_being_counted_for_a_telemetry_that_is_not_there(process: str, tmp_path: Path) -> None:
    counting = "print([connection.record_connection_count.__module__, client.record_operation_duration.__module__])"
    counts = loaded(f"{PROCESSES[process]}; from redis import client, connection; {counting}", tmp_path)
    assert {"['scripting.lean',", "'scripting.lean']"} <= counts
    as_library = loaded(f"import tasks.celery_app; from redis import client, connection; {counting}", tmp_path)
    assert {"['redis.observability.recorder',", "'redis.observability.recorder']"} <= as_library
