"""Tests use fixtures by name and do not import them.  `tests/fixtures/__init__.py` lists the shared ones."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.fixtures import __doc__ as documentation
from tests.house.tree import REPO, syntax_tree

TESTS = sorted((REPO / "tests").rglob("*.py"))
SHARED = {path.stem for path in (REPO / "tests/fixtures").glob("[!_]*.py")}


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _having(pattern: str) -> set[str]:
    return {
        path.relative_to(REPO).as_posix() for path in TESTS if re.search(pattern, path.read_text("utf-8"), re.MULTILINE)
    }


def test_no_module_imports_fixtures_or_test_modules_or_reexports_names() -> None:
    hidden = re.compile(r"^tests\.fixtures\.(?!__doc__$)|^tests\.(\w+\.)*(conftest|test_\w+)\.")
    found = [f"{path.relative_to(REPO)}: {name}" for path in TESTS for name in _imports(path) if hidden.search(name)]
    assert found == []
    assert _having(r"^__all__\b") == set()


def test_shared_fixtures_are_registered_in_one_place() -> None:
    assert _having(r"^pytest_plugins\b") == {"tests/conftest.py"}
    named = re.findall(r'"tests\.fixtures\.(\w+)"', (REPO / "tests/conftest.py").read_text("utf-8"))
    assert sorted(named) == sorted(SHARED)
    assert re.findall(r"^(\w+) {2}", documentation or "", re.MULTILINE) == named


def test_a_fixture_is_defined_in_its_test_module_a_conftest_or_the_shared_fixtures() -> None:
    homes = re.compile(r"tests/fixtures/\w+\.py|tests/(\w+/)*(conftest|test_\w+)\.py")
    assert [path for path in _having(r"^@pytest\.fixture") if not homes.fullmatch(path)] == []
