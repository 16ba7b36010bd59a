"""The Makefile on machines that lack something.  (What it does where nothing lacks is shown by running it.)"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*words: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    return subprocess.run(
        ["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def python(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def setup(folder: Path, interpreter: str) -> str:
    done = make("setup", f"VENV={folder / 'venv'}", f"PYTHON={interpreter}")
    assert done.returncode != 0
    assert not (folder / "venv").exists()
    return done.stderr.splitlines()[0]


def test_a_missing_python_is_reported_in_one_sentence(tmp_path: Path) -> None:
    assert "there is no 'no-python' here: install it" in setup(tmp_path, "no-python")


def test_a_python_that_is_too_old_is_reported_in_one_sentence(tmp_path: Path) -> None:
    old = python(tmp_path, 'case "$1" in --version) echo Python 3.10.12;; *) exit 1;; esac')
    assert "needs Python 3.11 or newer, and" in (message := setup(tmp_path, old))
    assert "Python 3.10.12" in message


def test_a_python_without_venv_is_reported_in_one_sentence(tmp_path: Path) -> None:
    bare = python(tmp_path, 'case "$2" in *ensurepip*) exit 1;; esac')
    assert "apt install python3-venv" in setup(tmp_path, bare)


@pytest.mark.parametrize("existed", [True, False])
def test_an_environment_that_was_there_before_is_not_removed_by_a_failure(tmp_path: Path, existed: bool) -> None:
    failing = python(tmp_path, f'case "$2" in venv) mkdir -p "{tmp_path}/venv"; exit 1;; esac')
    if existed:
        (tmp_path / "venv").mkdir()
        (tmp_path / "venv" / "mine").touch()
    assert make("setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={failing}").returncode != 0
    assert (tmp_path / "venv" / "mine").exists() == (tmp_path / "venv").exists() == existed


def test_help_lists_every_target() -> None:
    message = make("help").stdout
    for target in ("setup", "run", "demo", "test", "test-all", "test-nightly", "drill", "check", "bench", "help"):
        assert f"make {target} " in message


def test_continuous_integration_runs_what_the_readme_names() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert script[0] == "#!/usr/bin/env bash"
    assert [line.split(" ||")[0] for line in script if line.startswith("make ")] == [
        "make lint",
        "make test",
        "make test-system",
    ]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
