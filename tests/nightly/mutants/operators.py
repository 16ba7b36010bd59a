"""A mutant, and the changes that take its guard out.

A place in the product is a module and a qualified name, "app.request_json:read_body", or a module alone, which means
the code of that module outside of its functions and classes.  Within it a change is found by syntax, so neither the
format of the file nor what else it contains matters.  Other files, Lua first of all, have no syntax tree here: in them
a change is found by its text, whatever the white space.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import indent

REPO = Path(__file__).resolve().parents[3]
_LUA_FOLDERS = ("routing/lua",)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_ATOMS = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript)


class MisplacedMutantError(Exception):
    """The place of a mutant is not found, or is found more than once."""


@dataclass(frozen=True)
class Edit:
    """A part of a text, by its positions, and what stands there instead."""

    begin: int
    end: int
    new: str

    def apply(self, text: str) -> str:
        return text[: self.begin] + self.new + text[self.end :]


@dataclass(frozen=True)
class Source:
    """A Python file and its syntax tree."""

    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, text: str) -> "Source":
        return cls(text, ast.parse(text))

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """The positions of a node in the text."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._position(node.lineno, node.col_offset), self._position(node.end_lineno, node.end_col_offset)

    def _position(self, line: int, byte: int) -> int:
        """The syntax tree counts bytes from the beginning of a line."""
        lines = _lines(self.text)
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:byte].decode())


@cache
def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


class Scope:
    """The code of one place, node by node, with the statement that each node belongs to."""

    def __init__(self, source: Source, name: str) -> None:
        self.source, self.name = source, name
        self.nodes: list[tuple[ast.AST, ast.stmt | None]] = []
        root = _find_definition(source.tree, name)
        if isinstance(root, _FUNCTIONS):
            self._collect(root, root)
        else:
            for statement in root.body:
                if not isinstance(statement, _DEFINITIONS):
                    self._collect(statement, statement)

    def _collect(self, node: ast.AST, statement: ast.stmt) -> None:
        self.nodes.append((node, statement))
        if isinstance(node, ast.JoinedStr):
            return  # Python 3.11 does not say where the parts of a formatted string stand.
        for child in ast.iter_child_nodes(node):
            self._collect(child, child if isinstance(child, ast.stmt) else statement)

    def select(self, matches: Callable[[ast.AST], bool], within: str) -> list[ast.AST]:
        """The nodes that match, in statements that contain the text `within`."""
        wanted = _normalize(within)
        return [
            node
            for node, statement in self.nodes
            if matches(node) and (not wanted or statement is None or wanted in _unparse(statement))
        ]


def _find_definition(tree: ast.Module, name: str) -> ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    found: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef = tree
    for part in filter(None, name.split(".")):
        inner = [node for node in _definitions(found.body) if node.name == part]
        if len(inner) != 1:
            raise MisplacedMutantError(f"{name!r} is defined {len(inner)} times")
        found = inner[0]
    return found


def _definitions(body: Sequence[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Those of a block, and of the blocks of its conditions and loops."""
    for statement in body:
        if isinstance(statement, _DEFINITIONS):
            yield statement
        else:
            for block in ("body", "orelse", "finalbody"):
                yield from _definitions(getattr(statement, block, []))


@cache
def _normalize(text: str) -> str:
    """Spell a text as the syntax tree is spelled, if it is an expression or the first line of a block."""
    text = text.strip()
    if (expression := _parse_expression(text)) is not None:
        return _unparse(expression)
    if text.endswith(":"):
        with suppress(SyntaxError):
            return _spell(ast.unparse(ast.parse(f"{text} pass")).splitlines()[0])
    return _spell(text)  # It is the beginning of a statement.


def _spell(text: str) -> str:
    """Use one kind of quotation marks, and single spaces."""
    return " ".join(text.replace("'", '"').split())


@cache
def _unparse(node: ast.AST) -> str:
    return _spell(ast.unparse(node))


def _single(found: Sequence[ast.AST], what: str) -> ast.AST:
    if len(found) != 1:
        lines = ", ".join(str(getattr(node, "lineno", "?")) for node in found)
        raise MisplacedMutantError(f"{what} matches {len(found)} times" + (f", in lines {lines}" if found else ""))
    return found[0]


@dataclass(frozen=True)
class Operator:
    """A change of a Python scope.  `within`: a text that the statement of the place contains."""

    old: str
    new: str = ""
    within: str = ""

    def edit(self, scope: Scope) -> Edit:
        raise NotImplementedError

    def _find(self, scope: Scope, matches: Callable[[ast.AST], bool]) -> ast.AST:
        return _single(scope.select(matches, self.within), repr(self))


class Decide(Operator):
    """A condition of `if`, `elif`, `while`, a ternary, `case` or a comprehension that always has the same answer."""

    def edit(self, scope: Scope) -> Edit:
        wanted = _normalize(self.old)
        found = [
            condition
            for node in scope.select(lambda node: True, self.within)
            for condition in _conditions(node)
            if wanted in _unparse(condition)
        ]
        condition = _single(found, repr(self))
        assert isinstance(condition, ast.expr)
        return Edit(*scope.source.span(condition), self.new)


def _conditions(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            return [node.test]
        case ast.comprehension():
            return node.ifs
        case ast.match_case(guard=ast.expr() as guard):
            return [guard]
    return []


class Drop(Operator):
    """A statement that is not there: the one that begins with a text, else the simple one that contains it."""

    def edit(self, scope: Scope) -> Edit:
        wanted = _normalize(self.old)
        statements = scope.select(lambda node: isinstance(node, ast.stmt), self.within)
        found = [node for node in statements if _unparse(node).startswith(wanted)] or [
            node for node in statements if not hasattr(node, "body") and wanted in _unparse(node)
        ]
        statement = _single(found, repr(self))
        assert isinstance(statement, ast.stmt)
        begin, end = scope.source.span(statement)
        is_alone = any(block == [statement] for node, _ in scope.nodes for block in _blocks(node))
        is_elif = scope.source.text.startswith("elif", begin)
        return Edit(begin, end, "pass" if is_alone and not is_elif else "")


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


class DropCall(Operator):
    """A call in a chain of methods that is not there, by its text from the point on: `.where(jobs.c.id == 1)`."""

    def edit(self, scope: Scope) -> Edit:
        wanted = _normalize(self.old)
        call = self._find(scope, lambda node: _method_call(node).startswith(wanted))
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        return Edit(_end_of_receiver(scope.source, call), scope.source.span(call)[1], "")


def _method_call(node: ast.AST) -> str:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    return _unparse(node).removeprefix(_unparse(node.func.value))


def _end_of_receiver(source: Source, call: ast.Call) -> int:
    """Return the position of the dot; the expression before it may have parentheses, which belong to no node."""
    assert isinstance(call.func, ast.Attribute)
    end_of_name = source.span(call.func)[1]
    return source.text.rindex(".", 0, end_of_name - len(call.func.attr) + 1)


class Swap(Operator):
    """An expression, or a statement, in whose place another stands."""

    def edit(self, scope: Scope) -> Edit:
        old, new = _parse_expression(self.old), _parse_expression(self.new)
        wanted = ast.parse(self.old).body[0] if old is None or new is None else old
        node = self._find(scope, lambda node: _is_equal(node, wanted))
        assert isinstance(node, ast.expr | ast.stmt)
        begin, end = scope.source.span(node)
        if isinstance(node, ast.expr):
            return Edit(begin, end, self.new if isinstance(new, _ATOMS) else f"({self.new})")
        margin = " " * (begin - scope.source.text.rfind("\n", 0, begin) - 1)
        return Edit(begin, end, indent(self.new, margin).removeprefix(margin))


class SwapEntry(Operator):
    """An entry of a dictionary, "key: value", in whose place another stands, or none."""

    def edit(self, scope: Scope) -> Edit:
        old = _parse_expression(f"{{{self.old}}}")
        assert isinstance(old, ast.Dict)
        [wanted_key], [wanted] = old.keys, old.values
        assert wanted_key is not None
        found = {
            value: key
            for node in scope.select(lambda node: isinstance(node, ast.Dict), self.within)
            if isinstance(node, ast.Dict)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None and _is_equal(key, wanted_key) and _is_equal(value, wanted)
        }
        value = _single(list(found), repr(self))
        assert isinstance(value, ast.expr)
        return _edit_item(scope.source, scope.source.span(found[value])[0], scope.source.span(value)[1], self.new)


class SwapArgument(Operator):
    """An argument of a call, "name=value", in whose place another stands, or none."""

    def edit(self, scope: Scope) -> Edit:
        call = _parse_expression(f"call({self.old})")
        assert isinstance(call, ast.Call)
        [wanted] = call.keywords
        argument = self._find(scope, lambda node: _is_equal(node, wanted))
        assert isinstance(argument, ast.keyword)
        return _edit_item(scope.source, *scope.source.span(argument), self.new)


def _edit_item(source: Source, begin: int, end: int, new: str) -> Edit:
    """Replace a part of a list, or remove it with the comma that follows."""
    if not new and (comma := re.compile(r"\s*,").match(source.text, end)):
        end = comma.end()
    return Edit(begin, end, new)


def _parse_expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _is_equal(node: ast.AST, other: ast.AST) -> bool:
    return type(node) is type(other) and ast.dump(node) == ast.dump(other)


@dataclass(frozen=True)
class TextSwap:
    """A text of a file that is not Python, in whose place another stands.  Any white space counts as a space."""

    old: str
    new: str

    def edit(self, text: str) -> Edit:
        pattern = r"\s+".join(map(re.escape, self.old.split()))
        found = list(re.finditer(pattern, text))
        if len(found) != 1:
            lines = ", ".join(str(text.count("\n", 0, one.start()) + 1) for one in found)
            raise MisplacedMutantError(f"{self} matches {len(found)} times" + (f", in lines {lines}" if found else ""))
        return Edit(found[0].start(), found[0].end(), self.new)


def never(text: str, *, within: str = "") -> Operator:
    """Let the condition that contains this text always be False."""
    return Decide(text, "False", within)


def always(text: str, *, within: str = "") -> Operator:
    """Let the condition that contains this text always be True."""
    return Decide(text, "True", within)


def drop(text: str, *, within: str = "") -> Operator:
    """Remove the statement that begins with this text, or the simple statement that contains it."""
    return Drop(text, within=within)


def drop_call(text: str, *, within: str = "") -> Operator:
    """Remove the call from its chain of methods."""
    return DropCall(text, within=within)


def swap(old: str, new: str, *, within: str = "") -> Operator:
    """Put another expression or statement in the place of the one that is equal to `old`."""
    return Swap(old, new, within)


def swap_entry(old: str, new: str, *, within: str = "") -> Operator:
    """Put another entry in the place of this one of a dictionary; "": none."""
    return SwapEntry(old, new, within)


def swap_argument(old: str, new: str, *, within: str = "") -> Operator:
    """Put another argument in the place of this one, "name=value", of a call; "": none."""
    return SwapArgument(old, new, within)


def text_swap(old: str, new: str) -> TextSwap:
    """Put another text in the place of `old`, in a file that is not Python."""
    return TextSwap(old, new)


lua_swap = text_swap

Change = Operator | TextSwap


@dataclass(frozen=True)
class Mutant:
    """One guard taken out."""

    name: str
    place: str
    """Of Python "module:qualified name" or a module alone; else "lua:script" or "file:path"."""
    changes: Change | tuple[Change, ...]
    kills: Sequence[str]
    """The tests that must fail then: the names of their functions, "file::function" where a name is not unique."""
    breaks: str
    """The invariant that no longer holds, or what else the guard is for."""
    still: str = "test_a_job_runs_from_its_submit_to_its_completion"
    """A test that must pass all the same: a mutant that breaks everything proves nothing."""
    postgres: bool = False
    """Its tests need PostgreSQL; others are tried on SQLite alone, which is faster."""

    @property
    def file(self) -> str:
        """The file of the place, seen from the repository.  Raises MisplacedMutantError if there is none."""
        kind, _, rest = self.place.partition(":")
        if kind == "file":
            return rest
        if kind == "lua":
            found = [path for folder in _LUA_FOLDERS if (REPO / (path := f"{folder}/{rest}.lua")).is_file()]
        else:
            base = kind.replace(".", "/")
            found = [path for path in (f"{base}.py", f"{base}/__init__.py") if (REPO / path).is_file()]
        if len(found) != 1:
            raise MisplacedMutantError(f"{self.name!r}: {self.place} names {len(found)} files, not one")
        return found[0]

    def apply(self, text: str) -> str:
        """The file without the guard.

        Raises MisplacedMutantError unless its place is found exactly once and the result is valid.
        """
        try:
            for change in self.changes if isinstance(self.changes, tuple) else (self.changes,):
                text = self._apply_one(change, text)
            if self.file.endswith(".py"):
                ast.parse(text)
        except (MisplacedMutantError, SyntaxError) as error:
            raise MisplacedMutantError(f"{self.name!r} in {self.place}: {error}") from None
        return text

    def _apply_one(self, change: Change, text: str) -> str:
        if isinstance(change, TextSwap):
            return change.edit(text).apply(text)
        return change.edit(_find_scope(text, self.place.partition(":")[2])).apply(text)


@cache
def _find_scope(text: str, name: str) -> Scope:
    return Scope(_parse(text), name)


@cache
def _parse(text: str) -> Source:
    return Source.parse(text)
