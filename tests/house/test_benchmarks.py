"""Benchmarks have scripts in texts, which no linter reads."""

import ast
import builtins
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def _scripts() -> list[tuple[str, str]]:
    """Where each stands, and its text."""
    found = []
    for file in sorted((REPO / "tools" / "benchmarks").glob("*.py")):
        for it in ast.parse(file.read_text("utf-8")).body:
            if (
                isinstance(it, ast.Assign)
                and isinstance(it.value, ast.Constant)
                and isinstance(it.targets[0], ast.Name)
            ):
                text = str(it.value.value)
                if text.startswith(("\nimport ", "\nfrom ")):
                    found.append((f"{file.name}: {it.targets[0].id}", text))
    return found


@pytest.mark.parametrize(("where", "text"), [pytest.param(*it, id=it[0]) for it in _scripts()])
def test_a_script_of_a_benchmark_uses_no_name_that_it_has_not_made(where: str, text: str) -> None:
    made, used = set(dir(builtins)), set()
    for it in ast.walk(ast.parse(text)):
        match it:
            case ast.alias(name=name, asname=other):
                made.add(other or name.partition(".")[0])
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                made.add(name)
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name):
                made.add(name)
    assert used <= made, where


def test_there_are_such_scripts() -> None:
    assert _scripts()
