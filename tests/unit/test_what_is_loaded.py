"""What the processes of an installation load: each module costs every one of them memory for as long as it runs."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from foundation import garbage
from tasks import startup

# The module with which each process begins, and with what it does first.
PROCESSES = {
    "web": "import app.web.__main__; from migrations import migrate; migrate.check('sqlite:///none.db')",
    "worker": "from tasks.__main__ import program; program('worker'); import tasks.maintenance, tasks.worker",
    "webhooks": "import tasks.webhooks",
    "flower": "import cli.__main__; from tasks.__main__ import program; program('flower'); import tasks.signals",
    "supervisor": "import cli.__main__, local.launcher; local.launcher.read_plan(False).migration()",
}

ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2])}


def loaded(code: str, home: Path) -> set[str]:
    """The modules that are there after this code has run on an SQLite record in `home`."""
    script = f"import sys; {code}; print(*sys.modules)"
    env = {"SLOTKEEPER_HOME": str(home), **ENVIRONMENT}
    return set(subprocess.run([sys.executable, "-c", script], env=env, check=True, stdout=-1, text=True).stdout.split())


@pytest.mark.parametrize("process", PROCESSES)
def test_without_postgresql_nobody_loads_its_driver(process: str, tmp_path: Path) -> None:
    made = "make(RecordSettings().record_url, Limits())"
    engine = f"from foundation.config import *; from database.engines import make; {made}"
    assert not {"psycopg", "psycopg_binary"} & loaded(f"{PROCESSES[process]}; {engine}", tmp_path)


@pytest.mark.parametrize(
    ("process", "spared"),
    [
        ("supervisor", {"alembic", "celery", "flask", "kombu", "redis", "sqlalchemy"}),
        ("flower", {"aiohappyeyeballs", "flask", "opentelemetry", "prompt_toolkit", "psycopg", "rich", "sqlalchemy"}),
        ("webhooks", {"celery", "cryptography.hazmat", "flask", "kombu", "opentelemetry", "rich"}),
        ("worker", {"alembic", "cryptography.hazmat", "flask", "flower", "opentelemetry", "prompt_toolkit", "rich"}),
        ("web", {"alembic", "cryptography.hazmat", "opentelemetry", "rich"}),
    ],
)
def test_no_process_loads_what_it_has_no_use_for(process: str, spared: set[str], tmp_path: Path) -> None:
    assert not spared & loaded(PROCESSES[process], tmp_path)


def test_views_are_described_and_their_answers_schemas_built_when_the_document_is_asked_for() -> None:
    """What requests are checked by is there before the first."""
    script = (
        "from app.factory import with_routes; from app import job_answers, schemas; app = with_routes(); "
        "models = (schemas.SubmitBody, schemas.ListQuery, job_answers.JobDetail); "
        "print(len(app.paths), *(it.__pydantic_complete__ for it in models))"
    )
    said = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=True, stdout=-1, text=True).stdout
    assert said.split() == ["0", "True", "True", "False"]


THRESHOLDS = (
    "import gc; usual = gc.get_threshold()[0]; from foundation import garbage; loading = gc.get_threshold()[0]; "
    "garbage.collect_as_usual(); print(loading > usual, gc.get_threshold()[0] == usual)"
)


@pytest.mark.parametrize(
    ("argv0", "program", "spared"), [("-m", "app.web", "True"), ("-m", "theirs", "False"), ("-c", "tasks", "False")]
)
def test_a_program_looks_for_garbage_when_it_has_loaded_and_whoever_imports_us_always(
    argv0: str, program: str, spared: str
) -> None:
    """`python -m` calls itself so until it has found its module, which is when the package is imported."""
    script = f"import sys; sys.argv[0] = {argv0!r}; sys.orig_argv = ['python', '-m', {program!r}, 'one']; {THRESHOLDS}"
    said = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=True, stdout=-1, text=True).stdout
    assert said.split() == [spared, "True"]


def test_a_program_of_others_that_is_a_package_and_imports_us_looks_for_garbage_as_usual(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import gc; usual = gc.get_threshold(); import tasks")
    (tmp_path / "theirs" / "__main__.py").write_text("from theirs import gc, usual; print(gc.get_threshold() == usual)")
    env = {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{tmp_path}"}
    said = subprocess.run([sys.executable, "-m", "theirs"], env=env, check=True, stdout=-1, text=True).stdout
    assert said.split() == ["True"]


@pytest.mark.parametrize("package", ["tasks", "app.web"])
def test_each_program_begins_without_looking_for_garbage(package: str) -> None:
    begins = f"sys.argv[0] = '-m'; sys.orig_argv = ['python', '-m', '{package}']"
    script = f"import sys; {begins}; import {package}, gc; print(gc.get_threshold()[0])"
    said = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=True, stdout=-1, text=True).stdout
    assert int(said) > 100_000


def test_flower_which_does_nothing_of_ours_first_looks_for_garbage_when_it_has_loaded() -> None:
    """However it is started: it shows many tasks for long."""
    script = (
        "import sys; sys.argv[0] = '-m'; sys.orig_argv = ['python', '-m', 'tasks']; "
        "import gc; usual = gc.get_threshold(); "
        "from tasks.__main__ import program; program('flower'); print(gc.get_threshold() == usual)"
    )
    said = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=True, stdout=-1, text=True).stdout
    assert said.split() == ["True"]


def test_what_all_processes_do_first_ends_their_loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path))
    for part in ("compare_secret", "check_redis"):
        monkeypatch.setattr(startup, part, lambda: None)
    before = gc.get_threshold()
    gc.set_threshold(garbage._LOADING)
    try:
        startup.begin()
        assert gc.get_threshold() == garbage._usual
    finally:
        gc.set_threshold(*before)


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
