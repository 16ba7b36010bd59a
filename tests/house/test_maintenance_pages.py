"""Maintenance changes any number of rows in pages: none of its transactions delays other writers for long."""

import ast

import pytest

from tests.house.tree import REPO, name_of, python_files, syntax_tree

_MODULES = (
    "routing/maintenance/",
    "slotkeeper/jobs/ledger.py",
    "slotkeeper/outbox/retention.py",
    "tasks/maintenance.py",
)
"""What only maintenance calls, or maintenance above all."""
_FEW = {
    "store_findings": "one row for each check of invariants",
    "unit": "the same",
}
"""Functions whose statements concern few rows, and why."""


def unbounded_writes(tree: ast.Module) -> set[str]:
    """Return functions with a DELETE or UPDATE whose rows were not found before: a page of them, by their keys."""
    found = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            writes = [
                node
                for node in ast.walk(function)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in {"delete", "update"}
            ]
            names = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
            if writes and not names & {"in_", "limit"}:
                found.add(function.name)
    return found


def unbounded_texts(tree: ast.Module) -> list[str]:
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in texts if ("DELETE FROM" in text or "UPDATE " in text) and "LIMIT" not in text]


def test_the_rule_finds_what_it_is_for() -> None:
    everything = ast.parse("def purge(tx):\n    tx.execute(delete(jobs).where(jobs.c.old))\n")
    a_page = ast.parse("def purge(tx, ids):\n    tx.execute(delete(jobs).where(jobs.c.id.in_(ids)))\n")
    assert unbounded_writes(everything) == {"purge"} and unbounded_writes(a_page) == set()
    assert unbounded_texts(ast.parse("FOLD = 'DELETE FROM accepted'")) == ["DELETE FROM accepted"]


@pytest.mark.parametrize("path", [path for path in python_files() if name_of(path).startswith(_MODULES)], ids=name_of)
def test_each_delete_and_update_of_maintenance_is_limited_to_a_page(path) -> None:
    tree = syntax_tree(REPO / path)
    functions = unbounded_writes(tree) - set(_FEW)
    assert not functions, f"use slotkeeper.db.pages, or list with the reason: {sorted(functions)}"
    assert unbounded_texts(tree) == []
