"""The code blocks of README and docs/, read by Sybil, and what a comment before a block says about running it.

A block runs in the order of its page unless an HTML comment stands before it:

    <!-- not run: it needs a GPU -->                       parsed only
    <!-- second terminal, until: Running on -->            started, and left running when it has printed this

A text block after `<!-- prints -->` is what the block before it prints.
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
_PRINTS = re.compile(r"\s*<!-- prints -->\n\s*```text\n(.*?)```", re.DOTALL)
# A terminal shows the end of an id, and a time without its date.
_CHANCE = (
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b(?=[a-z]*[0-9])[0-9a-f]{8}\b"), "ID"),
    (re.compile(r"ID(, ID)+"), "ID"),
    (re.compile(r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z|\b[0-9]{2}:[0-9]{2}:[0-9]{2}\b"), "TIME"),
    (re.compile(r"\b[0-9]+(\.[0-9]+)?\b"), "N"),
    (re.compile(r"slot[0-9]+\b"), "slotN"),
    (re.compile(r"[ \u2500]+"), " "),
)
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
    prints: str | None = None
    """All that it prints, as the page shows it."""

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
    prints = _PRINTS.match(example.document.text, example.region.end)
    return Snippet(
        page,
        example.line,
        language,
        str(example.parsed),
        not_run and not_run[1],
        until and until[1],
        prints and prints[1],
    )


def without_chance(printed: str) -> str:
    """Return what a program prints without what differs from one reader to the next: ids, numbers and widths."""
    for pattern, replacement in _CHANCE:
        printed = pattern.sub(replacement, printed)
    return "\n".join(filter(None, (line.strip() for line in printed.splitlines())))


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
