"""The command line accepts each command that a page, a document or a message names."""

import ast
import html
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from app.cli.__main__ import main
from tests.house.tree import syntax_tree
from tools.cluster.stack import REPO

_CODE = re.compile(r"<code>(slotkeeper .*?)</code>", re.DOTALL)
_TICKED = re.compile(r"`(slotkeeper [^`]+)`")
_LINE = re.compile(r"^(?:\$ )?(slotkeeper [^#\n]+)", re.MULTILINE)
_SHOWN = re.compile(r"(?:^\s*|: )(slotkeeper [a-z][a-z-]* [^`\n]+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}")
_SKIPPED = {"tests", "docs"}
_PACKAGES = sorted({path.parent.name for path in REPO.glob("*/__init__.py")} - _SKIPPED)
_DOCUMENTS = sorted([*(REPO / "docs").rglob("*.md"), *(REPO / "docs").rglob("*.y*ml"), *REPO.glob("*.md")])


def _documented_commands() -> Iterator[tuple[str, str]]:
    """Yield the file and the text of each command."""
    for path in sorted((REPO / "app/page/templates").glob("*.html")):
        for found in _CODE.findall(path.read_text()):
            yield path.name, html.unescape(_TEMPLATE.sub("x", found))
    for path in (document for document in _DOCUMENTS if document.name != "CHANGELOG.md"):
        text = path.read_text()
        for found in _TICKED.findall(_BLOCK.sub("", text)):
            yield path.name, found
        for block in _BLOCK.findall(text):
            for found in _LINE.findall(block.replace("\\\n", " ")):
                yield path.name, found
    for package in _PACKAGES:
        for path in sorted((REPO / package).rglob("*.py")):
            for text in _texts(path):
                for found in (*_TICKED.findall(text), *_SHOWN.findall(text)):
                    yield str(path.relative_to(REPO)), found


def _texts(path: Path) -> Iterator[str]:
    """Yield the strings of a module; the expressions of an f-string become "x"."""
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)


def _words(command: str) -> list[str]:
    """Return the words of a command, without redirections, later commands and ellipses."""
    command = re.sub(r'"?\$\(.*', "x", command)  # another command's output
    command = re.split(r"\s(?:[|<>&;]|2>|&&)", " ".join(command.split()))[0]
    words = shlex.split(command.replace("[", " ").replace("]", " "))[1:]
    return [word for word in words if word.strip(".…") and word != "|"]


def problem(command: str) -> str | None:
    """Return why the command line refuses a command; None: it does not.  Only a name is checked without arguments."""
    context = click.Context(main, **main.context_settings)
    words, found = _words(command), main
    while isinstance(found, click.Group) and words and not words[0].startswith("-"):
        inner = found.get_command(context, words[0])
        if inner is None:
            if found.invoke_without_command:
                break
            return f"there is no command {words[0]!r}"
        found, words = inner, words[1:]  # type: ignore[assignment]
    if not words:
        return None
    context = click.Context(found, parent=context)
    try:
        given, left, _ = found.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        return error.message
    if left and not found.context_settings.get("ignore_unknown_options") and not isinstance(found, click.Group):
        return f"{left[0]!r} is too much"
    missing = [
        param.name
        for param in found.params
        if isinstance(param, click.Argument) and param.required and not given.get(str(param.name))
    ]
    return f"{missing[0]!r} is missing" if missing and not all(word.startswith("-") for word in words) else None


_ALL = sorted(set(_documented_commands()))


def test_there_are_commands_in_pages_documents_and_messages() -> None:
    places = {where for where, _ in _ALL}
    assert {"overview.html", "README.md"} <= places and any(where.startswith("app/cli/") for where in places)


def test_each_documented_command_exists() -> None:
    problems = {f"{where}: {command}": problem(command) for where, command in _ALL}
    assert {command: why for command, why in problems.items() if why is not None} == {}


def test_a_command_that_does_not_exist_is_reported() -> None:
    wrong = ("servers add gpu1", "presets list x", "submit --wat", "wat")
    assert [command for command in wrong if problem(f"slotkeeper {command}") is None] == []
