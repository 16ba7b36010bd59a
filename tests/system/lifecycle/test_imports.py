"""The modules that the processes of an installation load: each module costs memory in every process."""

import subprocess
import sys
from pathlib import Path

import pytest

# The module with which each process begins, and with what it does first.
PROCESSES = {
    "web": "import app.server.__main__; from migrations import migrate; migrate.check('sqlite:///none.db')",
    "worker": "from tasks.__main__ import program; program('worker'); import tasks.maintenance, tasks.worker.worker",
    "webhooks": "import tasks.webhooks.delivery_loop",
    "flower": "import app.cli.__main__; from tasks.__main__ import program; program('flower')"
    "; import tasks.extensions.signal_handlers",
    "command": "from click.testing import CliRunner; import app.cli.__main__ as cli"
    "; CliRunner().invoke(cli.main, ['health', 'relay', '--live'])",
    "readiness probe": "from click.testing import CliRunner; import app.cli.__main__ as cli"
    "; CliRunner().invoke(cli.main, ['health', 'worker'])",
    "supervisor": "import app.cli.__main__, app.up.launcher; app.up.launcher.read_plan(False).migration()",
}

ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2])}


def loaded(code: str, home: Path) -> set[str]:
    """The modules that are there after this code has run on an SQLite record in `home`."""
    script = f"import sys; {code}; print(*sys.modules)"
    env = {"SLOTKEEPER_HOME": str(home), **ENVIRONMENT}
    return set(subprocess.run([sys.executable, "-c", script], env=env, check=True, stdout=-1, text=True).stdout.split())


@pytest.mark.parametrize("process", PROCESSES)
def test_no_process_loads_the_postgresql_driver_for_a_sqlite_database(process: str, tmp_path: Path) -> None:
    made = "make_engine(StorageSettings().sqlalchemy_url, DatabaseTimeouts())"
    engine = f"from slotkeeper.config import *; from slotkeeper.db.database import make_engine; {made}"
    assert not {"psycopg", "psycopg_binary"} & loaded(f"{PROCESSES[process]}; {engine}", tmp_path)


@pytest.mark.parametrize(
    ("process", "spared"),
    [
        ("supervisor", {"alembic", "celery", "flask", "kombu", "redis", "sqlalchemy"}),
        ("flower", {"aiohappyeyeballs", "flask", "prompt_toolkit", "psycopg", "sqlalchemy"}),
        ("webhooks", {"celery", "cryptography.hazmat", "flask", "kombu"}),
        ("worker", {"alembic", "cryptography.hazmat", "flask", "flower", "prompt_toolkit", "requests"}),
        ("command", {"alembic", "celery", "flask", "kombu", "redis", "requests", "sqlalchemy"}),
        ("readiness probe", {"alembic", "celery", "flask", "kombu", "requests"}),
        ("web", {"alembic", "cryptography.hazmat", "requests"}),
    ],
)
def test_no_process_loads_what_it_has_no_use_for(process: str, spared: set[str], tmp_path: Path) -> None:
    assert not spared & loaded(PROCESSES[process], tmp_path)


def test_the_worker_program_has_the_options_that_slotkeeper_adds(tmp_path: Path) -> None:
    names = "print(*(param.name for param in program('worker').params))"
    assert "embedded_beat" in loaded(f"from tasks.__main__ import program; {names}", tmp_path)
