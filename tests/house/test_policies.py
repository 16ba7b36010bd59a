"""A policy is one file and one row of a table: no other code depends on its name."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from routing.scripts import LIBRARY
from slotkeeper.registry.policies import DEFAULT_POLICY, POLICIES
from tests.house.rule import for_each
from tests.house.tree import REPO, name_of, product_files, python_files, syntax_tree

FOLDER = REPO / "routing" / "lua" / "lib" / "policies"
TABLE = "slotkeeper/registry/policies.py"
# Fields of a job with the name of a policy.
FIELDS = {"priority"}


def _compared_words(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield strings that an operator or a case of a match compares with something."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                yield from (
                    word for side in (node.left, *node.comparators) for word in ast.walk(side) if _is_word(word)
                )
            case ast.MatchValue():
                yield from (word for word in ast.walk(node) if _is_word(word))


def _is_word(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _local(name: str) -> str:
    """Return the variable of a policy in its fragment, which shares its names with later fragments."""
    return f"by_{name}" if name in FIELDS else name


def test_each_policy_of_the_table_has_one_file_that_begins_with_its_name():
    assert {path.stem for path in FOLDER.iterdir()} == set(POLICIES)
    for name in POLICIES:
        text = LIBRARY.read_source(f"lib/policies/{name}")
        assert text.startswith(f"-- {name}: ") and f'local {_local(name)} = new_policy("{name}")\n' in text
        assert ("policies.default" in text) == (name == DEFAULT_POLICY)


def test_a_policy_names_no_other():
    for name in POLICIES:
        words = set(re.findall(r"\w+", re.sub(r"--[^\n]*", "", LIBRARY.read_source(f"lib/policies/{name}"))))
        others = POLICIES.keys() - {name}
        assert words.isdisjoint(others - FIELDS | set(map(_local, others))), name


@for_each([path for path in product_files() if path.suffix == ".lua"])
def test_no_other_script_names_a_policy(path: Path):
    if path.parent != FOLDER:
        words = set(re.findall(r"[\"'](\w+)[\"']", path.read_text("utf-8")))
        assert words.isdisjoint(POLICIES)


@for_each([path for path in python_files() if {"migrations", "benchmarks"}.isdisjoint(path.parts)])
def test_no_other_module_names_a_policy(path: Path):
    """Also not by a name that has another meaning elsewhere."""
    if name_of(path) == TABLE:
        return
    tree = syntax_tree(path)
    words = {node.value for node in ast.walk(tree) if _is_word(node)} - FIELDS  # type: ignore[attr-defined]
    assert words.isdisjoint(POLICIES) and {word.value for word in _compared_words(tree)}.isdisjoint(POLICIES)


def test_a_row_adds_a_policy_to_the_configuration_and_to_the_api():
    """In a separate process, because pydantic builds its models at import."""
    text = (
        "from slotkeeper.registry import policies\n"
        "policies.POLICIES['mine'] = policies.Policy('mine', 'mine', lambda at, step_s: None, 'Mine {priority}.')\n"
        "from app.schemas.model_schemas import ConfigBody as Body\n"
        "field = Body.model_json_schema()['properties']['policy']\n"
        "print(policies.longest_wait(Body(policy='mine')), field['enum'][-1], '`mine`: mine' in field['description'])\n"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Mine", "5.", "mine", "True"]


@for_each(["docs/reference/policies.md", "docs/explanation/queue.md"])
def test_documents_have_the_same_policies_as_the_table_in_its_order(page: str):
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (REPO / page).read_text("utf-8"), re.MULTILINE)
    found = [(name, says) for name, says in rows if name in POLICIES]
    assert [name for name, _ in found] == list(POLICIES)
    if page == "docs/reference/policies.md":
        assert [says for name, says in found if not says.startswith(POLICIES[name].next_is)] == []


def test_every_script_that_orders_jobs_includes_all_policies():
    for name in LIBRARY.script_names():
        included = LIBRARY.list_includes(name)
        assert ("lib/policy" in included) == ("lib/policies" in included), name
