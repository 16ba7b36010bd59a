"""The files of the product, for the tests that walk them."""

import ast
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("slotkeeper", "routing", "tasks", "app", "tools", "migrations")


@cache
def product_files() -> tuple[Path, ...]:
    found = [path for package in PACKAGES for path in sorted((REPO / package).rglob("*")) if path.is_file()]
    return (*[path for path in found if path.suffix in {".py", ".lua", ".mako"}], REPO / "celeryconfig.py")


def python_files() -> list[Path]:
    return [path for path in product_files() if path.suffix == ".py"]


@cache
def syntax_tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is parsed once for all tests of a process."""
    return ast.parse(path.read_text("utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(REPO).as_posix()
