"""What the processes of an installation load: each module costs every one of them memory for as long as it runs."""

import subprocess
import sys
from pathlib import Path

import pytest

# The module with which each process begins, and with what it does first.
PROCESSES = {
    "web": "import app.web.__main__",
    "worker": "import tasks.maintenance, tasks.worker",
    "webhooks": "import tasks.webhooks",
    "flower": "import tasks.celery_app, app.commands.local",
    "supervisor": "import app.up.launcher",
}


def loaded(code: str, home: Path) -> set[str]:
    """The packages that are there after this code has run on an SQLite record in `home`."""
    script = f"import sys; {code}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    env = {"SLOTKEEPER_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    return set(subprocess.run([sys.executable, "-c", script], env=env, check=True, stdout=-1, text=True).stdout.split())


@pytest.mark.parametrize("process", PROCESSES)
def test_without_postgresql_nobody_loads_its_driver(process: str, tmp_path: Path) -> None:
    engine = "from jobs.config import *; from jobs.engines import make; make(RecordSettings().record_url, Limits())"
    assert not {"psycopg", "psycopg_binary"} & loaded(f"{PROCESSES[process]}; {engine}", tmp_path)
