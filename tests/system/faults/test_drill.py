"""A short drill, as anybody would run it: a whole Slotkeeper, six faults, and nothing may be lost."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

DRILL = (sys.executable, "-m", "tools.drill")
SHORT = ("--jobs", "300", "--seconds", "24", "--kill-every", "4", "--seed", "5")
KINDS = ("worker", "stop", "redis", "flush", "web", "server")
OUTSIDE = ("cuts", "delays", "receivers", "deadlines")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose TMPDIR is `tmp_path`, so that the test finds the drill's processes by their folder."""
    return {**os.environ, "TMPDIR": str(tmp_path)}


def processes_of(folder: Path) -> list[str]:
    """Command lines of all processes that have this folder in their environment."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("processes can be told by their environment on Linux only")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], Any], what: str, within_s: float) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"waited {within_s} s in vain: {what}"
        time.sleep(0.05)


def test_a_short_drill_loses_nothing_and_runs_nothing_twice_at_once(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    command = [*DRILL, *SHORT, "--faults", ",".join(KINDS), "--json", str(tmp_path / "card.json")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    card = json.loads((tmp_path / "card.json").read_text())
    assert (card["passed"], card["seed"], card["accepted"]) == (True, 5, 300)
    assert set(card["faults"]) == set(KINDS)
    assert sum(card["ended"].values()) == card["accepted"]
    none = ("lost", "unexpected", "overlaps", "order_violations", "reversals", "unheard", "gave_up", "doubled_ids")
    assert {name: card[name] for name in none} == dict.fromkeys(none, 0)
    assert card["balanced"] and card["refusals"] == {} and card["left_over"] == []
    assert card["leases_agree_after_s"] is not None
    assert processes_of(tmp_path) == []


@pytest.mark.postgres
def test_a_short_drill_of_the_world_outside_on_postgresql_breaks_nothing(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="slotkeeper-test-") as folder:
        Path(folder).chmod(0o711)  # PostgreSQL is not run by root, and pytest's own folder is for root alone.
        kinds = ("worker", *OUTSIDE)
        command = [*DRILL, *SHORT, "--faults", ",".join(kinds), "--database", "postgresql"]
        command += ["--json", str(tmp_path / "card.json")]
        ended = subprocess.run(
            command, env=environment | {"TMPDIR": folder}, capture_output=True, text=True, timeout=280, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        card = json.loads((tmp_path / "card.json").read_text())
        assert set(card["faults"]) == set(kinds)
        assert set(card["conduct"].values()) == {0}
        assert processes_of(Path(folder)) == []


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_drill_leaves_no_process_and_no_files(
    signal_number: signal.Signals, tmp_path: Path, environment: dict[str, str]
) -> None:
    drill = subprocess.Popen([*DRILL, *SHORT], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert drill.stdout is not None
        assert drill.stdout.readline().startswith(
            "seed 5: "
        )  # the rest is the number of jobs, which depends on the machine
        wait_until(lambda: len(processes_of(tmp_path)) > 8, "everything runs", 30)
        drill.send_signal(signal_number)
        assert drill.wait(30) == 130
    finally:
        drill.kill()
        drill.communicate()
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
