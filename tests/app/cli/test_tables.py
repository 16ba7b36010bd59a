"""Tables of commands, on terminals of several widths and in a pipe."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import click
import pytest

from tools.cluster.stack import REPO

JOB_ID = "01a22521-1006-7507-8b66-f05d682b8702"
PRINT_JOBS = f"""
from app.cli.job_commands import print_jobs
job = dict(job_id={JOB_ID!r}, model="zimg-large", status="completed", priority=5, attempts=1, slot="zimg-api1-slot0",
           created_at="2026-01-01T00:00:00+00:00", error=dict(code="max_retries_exceeded"))
print_jobs([job], as_json=False)
"""


def _printed(code: str, columns: int) -> list[str]:
    """Return the lines that a program prints on a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, cwd=REPO, env=env):
        os.close(theirs)
        printed = b""
        with suppress(OSError):  # Linux raises it when the program has ended.
            while read := os.read(ours, 65536):
                printed += read
    os.close(ours)
    return click.unstyle(printed.decode()).splitlines()


@pytest.mark.parametrize(
    ("columns", "left_out"),
    [(120, ""), (80, "error"), (60, "slot, age, error"), (20, "model, status, priority, attempts, slot, age, error")],
)
def test_columns_that_do_not_fit_are_omitted_from_the_right_and_none_is_truncated(columns: int, left_out: str) -> None:
    lines = _printed(PRINT_JOBS, columns)
    notes = [line for line in lines if "too narrow" in line]
    assert all(len(line) <= columns for line in lines if line not in notes)
    assert any(JOB_ID[-8:] in line for line in lines), "the short id is shown, and commands accept it"
    assert "…" not in "".join(lines)
    assert notes == (
        [f"This terminal is too narrow for: {left_out}.  A wider one, a pipe and --json have them."] if left_out else []
    )


def test_output_to_a_pipe_contains_all_columns_and_complete_ids() -> None:
    done = subprocess.run([sys.executable, "-c", PRINT_JOBS], cwd=REPO, capture_output=True, text=True, check=True)
    assert JOB_ID in done.stdout and "max_retries_exceeded" in done.stdout
    assert "…" not in done.stdout and done.stderr == ""
