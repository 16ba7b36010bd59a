"""No regular expression of the product needs more than linear time, whatever text a server or a client sends.

Each is applied to 64 KiB of repetitions of its parts.  A pattern with quadratic time would hold the interpreter's lock
for minutes, and so block all threads of the process.
"""

import ast
import gc
import importlib
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tasks.servers import rules
from tests.house.tree import name_of, python_files, syntax_tree

_BYTES = (2 << 10, 64 << 10)
"""The first finds a pattern of many ways soon."""
_LIMIT_S = 0.15  # processor time; linear patterns take some ms
_METHODS = frozenset({"search", "match", "fullmatch", "finditer", "sub", "findall", "split"})
_FREE = (
    "slotkeeper/redis/script_library.py",
    "slotkeeper/redis/signatures.py",
    "tools/",
    "migrations/",
)  # read only files of the repository
_SAMPLES = {"s": " ", "d": "0", "w": "a", "S": "x", "D": "x", "n": "\n", "t": "\t", "r": "\r"}
_UNITS = (" ", "\n", "\t", "a", "0", "-", ".", "=", ",", ";", ":", "/", "<", ">", '"', "{", "}", "{{", "{{ ", "[", "é")


class Use(NamedTuple):
    """A pattern, and the method that the product calls."""

    where: str
    pattern: "re.Pattern[str] | re.Pattern[bytes]"
    method: str


def _parts(pattern: str) -> list[str]:
    """Return the runs of literal characters of a pattern, each class of characters as one that it may hold."""
    runs, run, at = list[str](), "", 0
    while at < len(pattern):
        character, at = pattern[at], at + 1
        if character == "\\":
            run, at = run + _SAMPLES.get(pattern[at], pattern[at]), at + 1
        elif character == "[":
            at = pattern.index("]", at + 1) + 1
            runs, run = [*runs, run], ""
        elif character in "(){}|*+?^$.":
            runs, run = [*runs, run], ""
        else:
            run += character
    return [part for part in (*runs, run) if part]


def _attacks(pattern: str, size: int) -> Iterator[str]:
    """Yield texts that begin as the pattern does, and go on with one part again and again."""
    parts = _parts(pattern)
    begins = ["", *("".join(parts[: n + 1]) for n in range(min(len(parts), 4)))]
    units = dict.fromkeys([*_UNITS, *parts, *begins[1:]])
    for begin in begins:
        for unit in units:
            yield begin + unit * (size // len(unit)) + "\0"


def _uses() -> Iterator[Use]:
    for path in python_files():
        name = name_of(path)
        if name.startswith(_FREE):
            continue
        calls = [node for node in ast.walk(syntax_tree(path)) if isinstance(node, ast.Call)]
        for call in calls:
            if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
                yield from _use_of(name, call.func.value.id, call.func.attr, call)


def _use_of(file: str, owner: str, method: str, call: ast.Call) -> Iterator[Use]:
    """Yield the pattern of a call like `_NAME.search(text)` or `re.search("pattern", text)`."""
    if method not in _METHODS:
        return
    where = f"{file}:{call.lineno}"
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    if owner == "re":
        given = call.args[0]
        assert isinstance(given, ast.Constant | ast.Name), f"{where}: compile the pattern under a name of the module"
        source = given.value if isinstance(given, ast.Constant) else getattr(module, given.id)
        yield Use(where, re.compile(source), method)
    elif owner.isupper():
        found = getattr(module, owner)
        if isinstance(found, re.Pattern):
            yield Use(where, found, method)


USES = [
    *_uses(),
    Use("tasks/servers/rules.py: a metric", rules._metric_pattern("jobs_active"), "search"),
    Use("tasks/servers/rules.py: an id", rules._mention_pattern("r-1"), "search"),
]


def _cpu_s(act: Callable[[Any], object], given: Any) -> float:
    """Return the processor time of a call, the shortest of up to three: other work of this process may fall into it."""
    took_s = math.inf
    gc.disable()  # A full collection takes longer than any pattern.
    try:
        for _ in range(3):
            began_s = time.thread_time()
            act(given)
            took_s = min(took_s, time.thread_time() - began_s)
            if took_s < _LIMIT_S:
                break
    finally:
        gc.enable()
    return took_s


@pytest.mark.parametrize("use", USES, ids=[use.where for use in USES])
def test_a_pattern_takes_linear_time_on_repetitions_of_its_own_parts(use: Use):
    source = use.pattern.pattern
    text = source.decode("latin-1") if isinstance(source, bytes) else source
    acts: dict[str, Callable[[Any], object]] = {
        "finditer": lambda attack: deque(use.pattern.finditer(attack), maxlen=0),
        "sub": lambda attack: use.pattern.sub(lambda found: found[0], attack),
    }
    act = acts.get(use.method, getattr(use.pattern, use.method))
    for size in _BYTES:
        for attack in _attacks(text, size):
            took_s = _cpu_s(act, attack.encode() if isinstance(source, bytes) else attack)
            assert took_s < _LIMIT_S, f"{use.method} of {text!r}: {took_s:.2f} s for {attack[:40]!r}… of {size} bytes"


def test_a_pattern_of_many_ways_is_found():
    use = Use("a title", re.compile(r"<title[^>]*>\s*([^<]{1,200}?)\s*<", re.IGNORECASE), "search")
    with pytest.raises(AssertionError, match="search of"):
        test_a_pattern_takes_linear_time_on_repetitions_of_its_own_parts(use)
