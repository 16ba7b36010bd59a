"""The code blocks of README and docs/, read by Sybil, and what a comment before a block says about running it.

A block runs in the order of its page unless an HTML comment stands before it:

    <!-- not run: it needs a GPU -->                       parsed only
    <!-- second terminal, until: Running on -->            started, and left running when it has printed this
"""

import ast
import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser

from tests.house.tree import REPO

PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
RUNNABLE = ("sh", "python")
_NOT_RUN = re.compile(r"<!-- not run: ([^\n]+) -->\n\s*\Z")
_SECOND_TERMINAL = re.compile(r"<!-- second terminal, until: ([^\n]+) -->\n\s*\Z")


@dataclass(frozen=True)
class Snippet:
    """One code block of a page."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str | None
    """The reason, if it is only parsed."""
    until: str | None
    """The text that a program in a second terminal prints when it is ready."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"


def snippets(page: Path) -> list[Snippet]:
    """Return the code blocks of a page in their order."""
    parsers = [CodeBlockParser(language, _evaluate_nothing) for language in CHECKS]
    return [_snippet(page, example) for example in Document.parse(str(page), *parsers).examples()]


def _evaluate_nothing(example: Example) -> None:
    """Sybil parses; the tests evaluate, since shell blocks of one page share a shell."""


def _snippet(page: Path, example: Example) -> Snippet:
    before = example.document.text[: example.region.start]
    not_run, until = _NOT_RUN.search(before), _SECOND_TERMINAL.search(before)
    language = example.region.lexemes["arguments"]
    return Snippet(page, example.line, language, str(example.parsed), not_run and not_run[1], until and until[1])


def _check_shell(code: str) -> None:
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _check_json(code: str) -> None:
    """One value, or one a line."""
    try:
        json.loads(code)
    except json.JSONDecodeError:
        for line in code.splitlines():
            json.loads(line)


CHECKS: dict[str, Callable[[str], object]] = {
    "sh": _check_shell,
    "python": ast.parse,
    "json": _check_json,
    "toml": tomllib.loads,
}
"""By language: raises an error if code is not in it."""
