"""One word for one thing: what ARCHITECTURE's glossary says that a thing is not called is nowhere part of a name."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import REPO, name_of, product_files, python_files

# Whose names the glossary rules; the other rooms try, play and migrate, and have words of their own.
ROOMS = frozenset(
    {
        *("jobs", "routing", "dispatch", "admission", "upkeep", "insight"),
        *("audit", "registry", "outbox", "tasks", "app", "cli"),
    }
)
_CHAPTER = (REPO / "ARCHITECTURE.md").read_text("utf-8").split("\n## Glossary\n", 1)[1].split("\n## ", 1)[0]
GLOSSARY = {
    word: [other for other in others.split(", ") if other]
    for word, others in re.findall(r"^\| (?!word )([a-z -]+?) \| [^|]+? \| ?([^|]*?) ?\|$", _CHAPTER, re.MULTILINE)
}
GONE = sorted({other for others in GLOSSARY.values() for other in others})
# What clients say and the record keeps; the glossary says so.
KEPT = frozenset({"tier_head_start"})


def names_in(path: Path) -> Iterator[str]:
    """The names in code, without its texts and comments."""
    text = path.read_text("utf-8")
    if path.suffix == ".lua":
        yield from re.findall(
            r"[A-Za-z_]\w*", re.sub(r"--\[\[.*?\]\]|--[^\n]*|\"[^\"\n]*\"", "", text, flags=re.DOTALL)
        )
        return
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from (it.string for it in tokens if it.type == tokenize.NAME)


def words_of(name: str) -> set[str]:
    """`freeStaleLeases`, `free_stale_lease` → free, stale, lease; a plural counts as its singular."""
    words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return words | {word.removesuffix("s") for word in words}


@pytest.mark.parametrize(("name", "words"), [("free_ghosts", {"free", "ghost"}), ("GhostURL", {"ghost", "url"})])
def test_a_name_is_read_word_by_word(name: str, words: set[str]) -> None:
    assert words <= words_of(name)


def test_the_glossary_has_what_a_reader_of_the_core_needs() -> None:
    assert {"job", "run", "lease", "slot", "fleet", "lane", "offer", "claimant", "stale lease"} <= GLOSSARY.keys()
    assert len(GLOSSARY) >= 30
    assert all(re.fullmatch(r"[a-z]+", other) for other in GONE), "one word each, so that names can be searched for it"
    assert not {part for word in GLOSSARY for part in word.split()} & set(GONE)


def test_a_thing_has_no_second_name() -> None:
    found = {
        f"{name_of(path)}: {name}"
        for path in product_files()
        if path.suffix in {".py", ".lua"} and name_of(path).split("/")[0] in ROOMS
        for name in names_in(path)
        if name not in KEPT and not words_of(name).isdisjoint(GONE)
    }
    assert sorted(found) == [], "ARCHITECTURE's glossary has another word for it"


def test_a_name_that_is_kept_stands_in_the_glossary() -> None:
    assert all(f"`{name}`" in _CHAPTER for name in KEPT)


def test_a_moment_that_a_function_is_told_has_its_unit_in_its_name() -> None:
    """`now_ms`, ms since the epoch; `now_s`, of the steady clock."""
    found = {
        f"{name_of(path)}:{it.lineno} {it.arg}"
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.arguments)
        for it in (*node.posonlyargs, *node.args, *node.kwonlyargs)
        if it.arg == "now" and it.annotation is not None and re.match(r"int|float", ast.unparse(it.annotation))
    }
    assert sorted(found) == []
