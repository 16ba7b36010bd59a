"""The generated reference pages are those that the code makes now."""

import subprocess
import sys
from pathlib import Path

from tools.reference import REPO


def outdated(folder: Path) -> list[str]:
    """Ask a fresh process: click keeps the help option of the first context in which a command was used."""
    command = [sys.executable, "-m", "tools.reference", "--check"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    return done.stdout.split()


def test_the_generated_pages_are_up_to_date() -> None:
    assert outdated(REPO) == [], "run: python -m tools.reference"
