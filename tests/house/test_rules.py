"""Rules for all code of the product."""

import ast
import builtins
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory

import celeryconfig
from migrations import migrate
from slotkeeper.jobs.states import TRANSITIONS, Reason, State
from tasks.celery_app import celery
from tests.house.rule import for_each
from tests.house.tree import PACKAGES, REPO, name_of, product_files, python_files, syntax_tree

LONGEST_FUNCTION, LONGEST_FILE, LONGEST_LINE = 60, 600, 120
# Written for people at a terminal; everything else logs.
MAY_PRINT = ("app/cli/", "tools/")


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in python_files():
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name_of(path)}:{node.lineno} {node.name}", node


# -- structure -------------------------------------------------------------------------------------------------


def test_imports_follow_the_contracts_of_the_import_linter():
    """The contracts are in setup.cfg."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_contracts_cover_every_package_of_the_product():
    config = configparser.ConfigParser()
    config.read(REPO / "setup.cfg")
    assert set(config["importlinter"]["root_packages"].split()) == set(PACKAGES)
    shipped = {line.rstrip("*") for line in config["options.packages.find"]["include"].split()}
    assert shipped == set(PACKAGES) - {"tools"}, "tools stay in the checkout"


def test_no_function_is_longer_than_a_screen():
    """But a migration, which is a list of what it does and is never changed again."""
    too_long = [where for where, node in functions() if (node.end_lineno or 0) - node.lineno + 1 > LONGEST_FUNCTION]
    assert [where for where in too_long if not where.startswith("migrations/versions/")] == []


def test_the_migrations_have_one_head_and_one_base():
    """Two branches with a new migration each conflict here, before an installation migrates."""
    steps = ScriptDirectory.from_config(migrate._config("sqlite:///unused"))
    assert len(steps.get_heads()) == 1
    assert len(steps.get_bases()) == 1


def test_no_file_is_longer_than_can_be_read_at_once():
    assert [name_of(path) for path in product_files() if len(path.read_text("utf-8").splitlines()) > LONGEST_FILE] == []


def _loads(path: Path, *, in_functions: bool) -> set[str]:
    """The modules that are loaded with this one, or when its functions are called; not those that only types need."""
    found: set[str] = set()
    nodes: list[ast.AST] = [syntax_tree(path)]
    while nodes:
        for node in ast.iter_child_nodes(nodes.pop()):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif (in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)) and not (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            ):
                nodes.append(node)
    return found


@pytest.mark.parametrize("in_functions", [False, True], ids=["at once", "late"])
def test_no_two_modules_load_each_other(in_functions: bool):
    """Neither directly nor by way of others; an import within a function saves loading, and hides no circle."""
    paths = {name_of(path).removesuffix(".py").replace("/", "."): path for path in python_files()}
    loads = {name: (_loads(path, in_functions=in_functions) & paths.keys()) - {name} for name, path in paths.items()}
    while True:
        wanted = set[str]().union(*loads.values())
        free = {name for name, asked in loads.items() if name not in wanted or not asked & loads.keys()}
        if not free:
            break
        loads = {name: asked for name, asked in loads.items() if name not in free}
    assert sorted(loads) == []


def test_every_module_has_a_docstring():
    silent = [
        name_of(path)
        for path in python_files()
        if path.name != "__init__.py" and not ast.get_docstring(syntax_tree(path))
    ]
    assert silent == []


def test_the_product_contains_no_todo_marks_and_no_local_paths():
    forbidden = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|(?<![\w.\"'])/(?:home|root|work|Users)/|[A-Z]:\\\\Users")
    found = [
        f"{name_of(path)}:{number} {line.strip()}"
        for path in product_files()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert found == []


def test_only_the_command_line_prints():
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in python_files()
        if not name_of(path).startswith(MAY_PRINT)
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "breakpoint"}
    ]
    assert found == []


def test_lines_of_scripts_fit_the_page():
    """Python's are ruff's affair."""
    lua = [path for path in product_files() if path.suffix == ".lua"]
    long = [
        f"{name_of(path)}:{number}"
        for path in lua
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(line) > LONGEST_LINE
    ]
    assert lua and long == []


def test_an_argument_that_is_a_time_has_its_unit_in_its_name() -> None:
    """`now_ms`, ms since the epoch; `now_s`, of the steady clock."""
    found = {
        f"{name_of(path)}:{argument.lineno} {argument.arg}"
        for path in python_files()
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.arguments)
        for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs)
        if argument.arg == "now"
        and argument.annotation is not None
        and re.match(r"int|float", ast.unparse(argument.annotation))
    }
    assert sorted(found) == []


def test_every_exception_that_a_docstring_names_exists():
    trees = {path: syntax_tree(path) for path in product_files() if path.suffix == ".py"}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    known = {node.name for node in nodes if isinstance(node, ast.ClassDef)} | set(dir(builtins))
    known |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    known |= {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    found = {
        f"{name_of(path)}: {word}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, documented)
        for raised in re.findall(r"\b[Rr]aises ([^.]*)", ast.get_docstring(node) or "")
        for word in re.findall(r"\b[A-Z][a-z]+[A-Z][A-Za-z]+\b", raised)
        if word not in known
    }
    assert sorted(found) == []


# -- tables against code ---------------------------------------------------------------------------------------


def test_every_reason_is_the_reason_of_a_transition():
    assert {why for _, why in TRANSITIONS} == set(Reason)


def test_every_state_can_be_reached():
    assert {edge.to for edge in TRANSITIONS.values()} == set(State)


@for_each([*State, *Reason])
def test_every_state_and_every_reason_is_explained(word):
    assert f"| `{word}` |" in (REPO / "docs/reference/jobs.md").read_text("utf-8")


@for_each(sorted(celeryconfig.beat_schedule))
def test_every_task_on_beats_schedule_is_registered(entry):
    celery.loader.import_default_modules()
    assert celeryconfig.beat_schedule[entry]["task"] in celery.tasks


@for_each(sorted(celeryconfig.beat_schedule))
def test_a_task_of_beat_has_no_expiry_because_the_clocks_of_two_hosts_may_differ(entry):
    assert "expires" not in celeryconfig.beat_schedule[entry].get("options", {})


@for_each(sorted(celeryconfig.task_routes))
def test_every_route_leads_from_a_task_that_there_is(pattern):
    celery.loader.import_default_modules()
    rule = re.compile(re.escape(pattern).replace(r"\*", ".*"))
    assert any(rule.fullmatch(name) for name in celery.tasks)


def test_every_celery_task_except_infer_is_routed_to_its_own_queue():
    celery.loader.import_default_modules()
    ours = [name for name, task in celery.tasks.items() if task.__module__.startswith("tasks.")]
    routed = [p.removesuffix("*") for p in celeryconfig.task_routes]
    assert [name for name in ours if not name.startswith(tuple(routed))] == ["infer"]


# -- release ---------------------------------------------------------------------------------------------------


def test_the_version_is_the_newest_in_the_changelog():
    config = configparser.ConfigParser()
    config.read(REPO / "setup.cfg")
    page = REPO / "CHANGELOG.md"
    assert page.exists(), "CHANGELOG.md is missing"
    newest = re.search(r"^## \[?v?(\d+\.\d+\.\d+)", page.read_text("utf-8"), re.MULTILINE)
    assert newest, "CHANGELOG.md has no heading `## <version>`"
    assert config["metadata"]["version"] == newest[1]
