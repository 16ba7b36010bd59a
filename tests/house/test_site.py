"""The site of the documents is built without a warning: no link, anchor or table of contents is broken."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import REPO


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Return a folder with the same pages, in which a test may add one."""
    pages = subprocess.run(
        ["git", "ls-files", "-co", "*.md", "docs", "deploy"], cwd=REPO, capture_output=True, text=True
    )
    for name in {*pages.stdout.splitlines(), "setup.cfg", "Procfile"}:
        copy = tmp_path / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPO / name, copy)
    return tmp_path / "checkout"


def build(documents: Path) -> subprocess.CompletedProcess[str]:
    """Read all pages and resolve all links, as `make docs` does, but write nothing."""
    command = [sys.executable, "-m", "sphinx", "-qWn", "--keep-going", "-b", "dummy", "-c", "docs", ".", "../site"]
    return subprocess.run(command, cwd=documents, capture_output=True, text=True, check=False)


def test_the_site_is_built_without_a_warning(documents: Path) -> None:
    done = build(documents)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_broken_link_and_a_broken_anchor_are_found(documents: Path) -> None:
    (documents / "docs/wrong.md").write_text("---\norphan: true\n---\n# Wrong\n\n[a](gone.md) [b](index.md#gone)\n")
    done = build(documents)
    assert (
        done.returncode != 0
        and "gone.md" in done.stderr
        and "local id not found in doc 'docs/index': 'gone'" in done.stderr
    )
