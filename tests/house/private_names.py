"""Finds where product code uses what libraries keep private, by the syntax tree.

A name is private if it begins with one underscore.  Found are:

- imports of a private module or name: `from celery._state import x`, `from re import _parser`;
- assignments to `sys.modules`;
- `thing._name`, unless `thing` is `self`, `cls` or `super()`, the file itself defines the name, or a document of the
  library names it (DOCUMENTED);
- in a class that derives from a library's: a private name of that class, overridden or used.  What the library assigns
  to its instances alone is seen where neither the class nor an own base of it defines the name.
- bases that libraries do not offer as such (UNDOCUMENTED).
"""

import ast
import builtins
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tests.house.tree import PACKAGES, REPO, syntax_tree

DOCUMENTED = {
    "_asdict": "a named tuple's",
    "_exit": "os",
    "_fields": "a named tuple's",
    "_get_current_object": "Werkzeug's LocalProxy",
    "_make": "a named tuple's",
    "_mapping": "SQLAlchemy's Row",
    "_replace": "a named tuple's",
}
UNDOCUMENTED = {
    "asyncio.selector_events",
    "celery.concurrency",
    "celery.events.dispatcher",
    "celery.worker.request",
    "celery.worker.strategy",
    "flask.sansio",
    "flower",
    "hiredis",
    "kombu.asynchronous",
    "redis._parsers",
    "werkzeug.routing.Map",
    "werkzeug.routing.MapAdapter",
}
"""Classes, or modules of classes, that the library's documents do not offer as bases."""


class Use(NamedTuple):
    """A use of a private name: `name` as written, qualified as far as the file shows."""

    file: str
    name: str
    line: int


@dataclass
class _Module:
    file: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)  # name in this file -> full name

    @property
    def dotted(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def defined(self) -> set[str]:
        """Private names that this file defines anywhere."""
        return _defined(self.tree)


def _defined(tree: ast.AST) -> set[str]:
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Constant(value=str(name)) if name.isidentifier():  # of __slots__
                found.add(name)
    return found


def _read(path: Path, root: Path) -> _Module:
    module = _Module(path.relative_to(root).as_posix(), syntax_tree(path))
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    module.imports[name.asname or name.name.split(".")[0]] = (
                        name.name if name.asname else name.name.split(".")[0]
                    )
            case ast.ImportFrom(module=str(source), names=names, level=0):
                for name in names:
                    module.imports[name.asname or name.name] = f"{source}.{name.name}"
    return module


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_own(full_name: str) -> bool:
    return full_name.split(".")[0] in {*PACKAGES, "tests", "celeryconfig"}


def _dotted(module: _Module, node: ast.expr) -> str | None:
    """The full name of an expression such as `lib.part.Thing`."""
    match node:
        case ast.Name(id=name):
            return module.imports.get(name, name)
        case ast.Attribute(value=value, attr=name):
            front = _dotted(module, value)
            return None if front is None else f"{front}.{name}"
        case ast.Subscript(value=value):  # a generic base
            return _dotted(module, value)
    return None


def _load(full_name: str) -> object | None:
    """Return the library's object of this name; None: there is no such module."""
    parts = full_name.split(".")
    if len(parts) == 1:
        return getattr(builtins, full_name, None)
    for size in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:size]))
        except ImportError:
            continue
        for part in parts[size:]:
            found = getattr(found, part, None)
        return found
    return None


class PrivateNames:
    """The uses in some files.  Classes are looked up among all of them."""

    def __init__(self, paths: list[Path], root: Path = REPO) -> None:
        self._modules = [_read(path, root) for path in paths]
        self._classes: dict[str, tuple[_Module, ast.ClassDef]] = {}
        for module in self._modules:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    self._classes[f"{module.dotted}.{node.name}"] = (module, node)

    def uses(self) -> list[Use]:
        return sorted({use for module in self._modules for use in self._of(module)})

    def _of(self, module: _Module) -> Iterator[Use]:
        file = module.file
        for node in ast.walk(module.tree):
            match node:
                case ast.ImportFrom(module=str(source), names=names, level=0) if not _is_own(source):
                    for name in names:
                        if any(map(_is_private, [*source.split("."), name.name])):
                            yield Use(file, f"{source}.{name.name}", node.lineno)
                case ast.Import(names=names):
                    for name in names:
                        if not _is_own(name.name) and any(map(_is_private, name.name.split("."))):
                            yield Use(file, name.name, node.lineno)
                case ast.Subscript(value=target, ctx=ast.Store() | ast.Del()):
                    if _dotted(module, target) == "sys.modules":
                        yield Use(file, "sys.modules", node.lineno)
                case ast.Attribute(value=value, attr=name) if _is_private(name):
                    if not _is_of_own_object(value) and name not in DOCUMENTED and name not in module.defined:
                        yield Use(file, f"{ast.unparse(value)}.{name}", node.lineno)
                case ast.ClassDef():
                    yield from self._of_class(module, node)

    def _of_class(self, module: _Module, node: ast.ClassDef) -> Iterator[Use]:
        own, libraries = self._bases(module, node)
        if not libraries:
            return
        for base in libraries:
            if any(base == name or base.startswith(f"{name}.") for name in UNDOCUMENTED):
                yield Use(module.file, f"{node.name}({base})", node.lineno)
        defined = {name for _, definition in own for name in _defined(definition)}
        loaded = [found for base in libraries if (found := _load(base)) is not None]
        for name, line in _named(node).items():
            if name in DOCUMENTED:
                continue
            if name not in defined or any(hasattr(base, name) for base in loaded):
                yield Use(module.file, f"{node.name}.{name}", line)

    def _bases(self, module: _Module, node: ast.ClassDef) -> tuple[list[tuple[_Module, ast.ClassDef]], list[str]]:
        """Own classes, this one first, from which it derives, and the libraries' classes behind them."""
        own, libraries = [(module, node)], list[str]()
        for at, definition in own:
            for base in definition.bases:
                full = _dotted(at, base)
                known = self._classes.get(full or "") or self._classes.get(f"{at.dotted}.{full}")
                if known is not None:
                    if known not in own:
                        own.append(known)
                elif full is not None and not _is_own(full):
                    libraries.append(full)
        return own, libraries


def _is_of_own_object(value: ast.expr) -> bool:
    match value:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False


def _named(node: ast.ClassDef) -> dict[str, int]:
    """Private names that a class defines, or uses of itself: name -> first line."""
    found = dict[str, int]()
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if _is_private(name):
                found.setdefault(name, statement.lineno)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if _is_private(name):
                found.setdefault(name, statement.lineno)
    for sub in ast.walk(node):
        if isinstance(sub, ast.Attribute) and _is_private(sub.attr) and _is_of_own_object(sub.value):
            found.setdefault(sub.attr, sub.lineno)
    return found
