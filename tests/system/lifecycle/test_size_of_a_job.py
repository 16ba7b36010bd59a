"""How much of the product one job runs through: counted in the web process and the worker, not by reading.

The processes note each line that they run (tests/support/traced).  Several jobs run one after another; what counts is
what all of them ran between the request that submits the job and the answer that shows its end, so that what runs by
the clock now and then does not count.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import PACKAGES, REPO
from tests.support.http_api import HttpApi
from tools.cluster.stack import Process, Stack, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MOST_FILES = 106
"""It may only fall; 104 were counted, and a run may differ by one or two.  The goal is 45."""
_JOBS = 5
_TRACED = Path(__file__).resolve().parents[2] / "support" / "traced"


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Stack]:
    folder = tmp_path / "windows"
    folder.mkdir()
    (folder / "window").write_text("1")
    env = {
        "PYTHONPATH": str(_TRACED),
        "TRACED_FOLDER": str(folder),
        "TRACED_ROOT": str(REPO),
        "TRACED_PACKAGES": " ".join(PACKAGES),
    }
    with Stack(tmp_path / "home", env) as running:
        yield running


def _begin(folder: Path, number: int, processes: list[Process]) -> None:
    """Begin a window and wait until all processes have written the lines that they ran in the last one."""
    text = folder / "window.next"
    text.write_text(str(number))
    os.replace(text, folder / "window")
    written = [folder / f"{number - 1}.{process.popen.pid}.json" for process in processes]
    eventually(lambda: all(path.exists() for path in written), "the last window is written")


def _ran(folder: Path, number: int, process: Process) -> set[tuple[str, int]]:
    return {(file, line) for file, line in json.loads((folder / f"{number}.{process.popen.pid}.json").read_text())}


def test_the_files_that_a_job_runs_through_are_no_more_than_before(
    traced: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    processes, api, folder = [traced.web(), traced.worker()], HttpApi(traced), Path(traced.env["TRACED_FOLDER"])
    api.register("traced", traced.server("traced", 1))
    api.ended(api.submit("traced", {"seconds": 0.05}))  # This job does the one-time work.
    for number in range(2, _JOBS + 2):
        _begin(folder, number, processes)
        api.ended(api.submit("traced", {"seconds": 0.05}))
    _begin(folder, _JOBS + 2, processes)

    by_process = {
        process.name: set.intersection(*(_ran(folder, number, process) for number in range(2, _JOBS + 2)))
        for process in processes
    }
    lines = set.union(*by_process.values())
    files = sorted({file for file, _ in lines})
    report = [
        f"One job ran {len(lines)} lines in {len(files)} files:",
        *(f"  {name}: {len(ran)} lines in {len({file for file, _ in ran})} files" for name, ran in by_process.items()),
        *(f"  {sum(other == file for other, _ in lines):5} {file}" for file in files),
    ]
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(report) + "\n")
    assert len(files) <= MOST_FILES
