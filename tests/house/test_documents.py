"""The files and headers that documents, docstrings and comments name exist."""

import ast
import io
import re
import subprocess
import time
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slotkeeper.jobs.states import END_SENTENCES
from tasks.periods import PERIODS_S
from tasks.servers import RunDetails, ServerAdapter
from tests.house.tree import PACKAGES, REPO, name_of

# Rows, sections and findings of papers that a reader of this repository does not have.
_CITATION = re.compile(r"\bR\d{1,3}\b|\btest_r\d+_|\bS[1-9]\b|\b[Ff]indings? [A-Z]?\d|\bDESIGN\b|\bREQUIREMENTS\b")
_FILE = re.compile(r"(?<![\w/.<*-])((?:[\w.-]+/)*[\w-]+\.(?:py|lua|md|cfg|toml|mako|html|js|css))\b(?!\()")
# Files of users and of other projects.
_ELSEWHERE = {"agent.toml", "load.toml", "tasks.py", "Node.js", "NAME.toml", "mymodel.py", "story.py"}


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True)
    found = [name for name in listed.stdout.splitlines() if (REPO / name).is_file()]
    return tuple(found) or tuple(name_of(path) for path in REPO.rglob("*") if path.is_file())


def read_text_for_readers(name: str) -> str:
    """Return a document, or the comments and docstrings of code."""
    text = (REPO / name).read_text("utf-8")
    match Path(name).suffix:
        case ".py":
            return "\n".join([*_docstrings(text), *_comments(text)])
        case ".lua":
            return "\n".join(re.findall(r"--\[\[.*?\]\]|--[^\n]*", text, re.DOTALL))
        case _:
            return text


def _docstrings(text: str) -> list[str]:
    """Return all docstrings, also those of attributes."""
    nodes = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _comments(text: str) -> list[str]:
    """Return the comments of a file in which one names a file; others are not read, which takes long."""
    if not any(_FILE.search(line.partition("#")[2]) for line in text.splitlines()):
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def _files_with_text() -> list[str]:
    return [name for name in tracked() if name.endswith((".py", ".lua", ".md")) or name in ("Makefile", "Procfile")]


def test_no_document_outside_this_repository_is_cited() -> None:
    here = name_of(Path(__file__))
    found = [
        f"{name}:{number} {line.strip()}"
        for name in _files_with_text()
        if name != here
        for number, line in enumerate((REPO / name).read_text("utf-8").splitlines(), 1)
        if _CITATION.search(line)
    ]
    assert found == [], "say the rule in plain words instead"


def test_every_file_that_is_named_exists() -> None:
    """By its path, or by the end of it: `lua/offer.lua`."""
    ends = {"/".join(parts[n:]) for name in tracked() for parts in [name.split("/")] for n in range(len(parts))}
    found = {
        f"{name}: {file}"
        for name in _files_with_text()
        if name != "CHANGELOG.md"
        for file in _FILE.findall(read_text_for_readers(name))
        if file.lstrip("./") not in ends | _ELSEWHERE
    }
    assert sorted(found) == []


def test_every_function_that_a_document_names_exists() -> None:
    """By a path, a colon and a name, between backticks."""
    missing = []
    for document in (name for name in tracked() if name.endswith(".md") and name != "CHANGELOG.md"):
        for file, name in re.findall(r"`((?:\w+/)+\w+\.py): (\w+)`", (REPO / document).read_text("utf-8")):
            defined = rf"^ *(?:async )?(?:def|class) {name}\b|^ *{name}\b.*[:=]"
            if not re.search(defined, (REPO / file).read_text("utf-8"), re.MULTILINE):
                missing.append(f"{document}: {file}: {name}")
    assert missing == []


# -- the slot protocol's headers -----------------------------------------------------------------------------------

_PROTOCOL = REPO / "docs/reference/slot-protocol.md"
_TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
_CALL = RunDetails("job-1", 1, {}, callback_url="http://here/", callback_token="t", traceparent=_TRACE, model="zimg")
_SERVER = ServerAdapter("http://127.0.0.1:9/generate")
_STEPS = {
    "submit": (_SERVER.compiled.submit, _CALL),
    "status": (_SERVER.compiled.status[0], _CALL),
    "cancel": (_SERVER.compiled.cancel[0], _CALL),
    "health": (_SERVER.compiled.health, None),
}


def _headers(step: Any, call: RunDetails | None) -> set[str]:
    """Return the names of the headers with which the request of a step is sent."""
    requests = _SERVER.requests
    return set(requests.build(step, requests.template_values(call, "r"), time.monotonic() + 1).headers)


@pytest.mark.parametrize("call", list(_STEPS))
def test_the_protocols_headers_are_those_that_are_sent(call: str) -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", _PROTOCOL.read_text("utf-8"), re.MULTILINE)
    documented = {header for header, calls in rows if calls == "every call" or call in calls.split(", ")}
    assert documented == _headers(*_STEPS[call]) - {"Content-Type", "Accept"}


def test_the_protocol_names_the_headers_in_which_the_api_accepts_the_token_of_a_push() -> None:
    push = _PROTOCOL.read_text("utf-8").split("\n## Push\n", 1)[1].split("\n## ", 1)[0]
    view = (REPO / "app/api/push_views.py").read_text("utf-8")
    assert set(re.findall(r'headers\.get\("([\w-]+)"', view)) == {"X-Callback-Token"} and "read_bearer" in view
    assert all(re.search(rf"\b{name}\b", push) for name in ("Authorization", "X-Callback-Token"))


def test_the_page_of_maintenance_has_every_task_with_its_period() -> None:
    page = (REPO / "docs/reference/maintenance.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\d.]+) s \| `(\w+)` \|", page, re.MULTILINE)
    assert {name: float(period_s) for period_s, name in rows} == PERIODS_S


def test_the_page_of_jobs_has_the_sentence_of_each_end() -> None:
    page = (REPO / "docs/reference/jobs.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([A-Z][^|]+\.) \|$", page, re.MULTILINE)
    assert rows == [(reason.value, sentence) for reason, sentence in END_SENTENCES.items()]


_ARCHITECTURE = (REPO / "ARCHITECTURE.md").read_text("utf-8")


def test_architecture_names_every_package() -> None:
    assert [name for name in PACKAGES if not re.search(rf"^{name}/ ", _ARCHITECTURE, re.MULTILINE)] == []
