"""The texts of scripts, for the tests that read them."""

import re
from functools import cache

from routing.scripts import LIBRARY

FUNCTION = r"(?:local function |function \w+\.)(\w+)"  # of a fragment, or of a policy


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
    one_line, more = r"[^\n]* end$", r".*?^end$"
    for function, lines in re.findall(rf"^{FUNCTION}\([^)]*\)({one_line}|{more})", fragments, re.S | re.M):
        functions[function] = functions.get(function, "") + lines + "\n"
    reached: set[str] = set()
    while fresh := {f for f in functions if f not in reached and re.search(rf"\b{f}\(", text)}:
        reached |= fresh
        text += "".join(f"{functions[f]}\n" for f in fresh)
    return text
