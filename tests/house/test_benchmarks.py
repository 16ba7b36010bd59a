"""Benchmarks have SQL in texts, which no linter reads."""

import ast
import re
from pathlib import Path

import pytest

from slotkeeper.db.schema import metadata

REPO = Path(__file__).resolve().parents[2]
_INSERT = re.compile(r"INSERT INTO (\w+) \(([\w, ]+)\)")
_TABLE = re.compile(r"(?:FROM|UPDATE|JOIN) ([a-z_]+)\b")
_NAMES_OF_SQL = {"n"}  # of a common table expression


def _statements() -> list[tuple[str, str]]:
    """File and line, and the text."""
    found = []
    for file in sorted((REPO / "tools" / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.search(r"\b(INSERT INTO|SELECT|UPDATE) ", node.value)
            ):
                found.append((f"{file.name}:{node.lineno}", node.value))
    return found


@pytest.mark.parametrize("statement", [pytest.param(text, id=where) for where, text in _statements()])
def test_a_statement_of_a_benchmark_names_tables_and_columns_of_the_schema(statement: str) -> None:
    for table, columns in _INSERT.findall(statement):
        assert set(columns.split(", ")) <= set(metadata.tables[table].columns.keys())
    assert set(_TABLE.findall(statement)) - _NAMES_OF_SQL <= metadata.tables.keys()


def test_the_benchmarks_contain_sql_statements() -> None:
    assert sum(len(_INSERT.findall(text)) for _, text in _statements()) >= 4
