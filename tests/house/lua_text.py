"""The texts of scripts, for the tests that read them."""

import ast
import re
from collections import defaultdict
from functools import cache

from routing.scripts import LIBRARY
from tests.house.tree import name_of, python_files, syntax_tree

FUNCTION = r"(?:local function |function (?:\w+\.)?)(\w+)"  # of a fragment, or of a policy


def header(name: str) -> str:
    found = re.match(r"--\[\[(.*?)\]\]", LIBRARY.read_source(name), re.DOTALL)
    assert found, f"{name}.lua does not begin with a header"
    return found[1]


@cache
def body(name: str) -> str:
    """The script's own lines, without header and comments."""
    return re.sub(r"--[^\n]*", "", LIBRARY.read_source(name).split("]]", 1)[1])


def included(name: str) -> list[str]:
    """All fragments of a script, in order."""
    return LIBRARY.list_includes(name)


@cache
def called_functions(name: str) -> str:
    """The script with those of its fragments' functions, and of policies' decisions, that it reaches."""
    text = body(name)
    fragments = "".join(re.sub(r"--[^\n]*", "", LIBRARY.read_fragment(f)) for f in included(name))
    functions: dict[str, str] = {}
    one_line, more = r"[^\n]* end$", r".*?^\1end$"
    # Those of a block are indented.
    for _, function, lines in re.findall(rf"^( *){FUNCTION}\([^)]*\)({one_line}|{more})", fragments, re.S | re.M):
        functions[function] = functions.get(function, "") + lines + "\n"
    reached: set[str] = set()
    while fresh := {f for f in functions if f not in reached and re.search(rf"\b{f}\(", text)}:
        reached |= fresh
        text += "".join(f"{functions[f]}\n" for f in fresh)
    return text


@cache
def callers() -> dict[str, list[str]]:
    """Return script -> where the product calls it, as `routing/queue/leases.py: Leases.claim_command`."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in python_files():
        for scope in syntax_tree(path).body:
            for function in scope.body if isinstance(scope, ast.ClassDef) else [scope]:
                if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    name = f"{scope.name}.{function.name}" if isinstance(scope, ast.ClassDef) else function.name
                    for script in sorted({_called_script(node) for node in ast.walk(function)} - {""}):
                        found[script].append(f"{name_of(path)}: {name}")
    return found


def _called_script(node: ast.AST) -> str:
    """Return X of a call `lua.X(...)` or `self._lua.X(...)`, otherwise ""."""
    found = node.func if isinstance(node, ast.Call) else None
    if not isinstance(found, ast.Attribute):
        return ""
    return found.attr if ast.unparse(found.value) in ("lua", "self._lua") else ""
