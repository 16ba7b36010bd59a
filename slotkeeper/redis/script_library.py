"""Assemble Lua scripts from their files and fragments, as functions of Redis.

A line `-- @include lib/<name>`, in a script or a fragment, asks for that fragment; a folder, such as `lib/policies`,
stands for all files in it.  Each fragment stands once in the result, after those that it includes.  Scripts run as
functions: the fragments are executed when the function is loaded, and not at each call.  A function's name holds the
hash of its text, so that releases do not disturb each other.  The header of a script is its signature, see
signatures.py.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources.abc import Traversable

from slotkeeper.redis.signatures import Caller, Signature, make_caller, parse_signature, render_locals

_INCLUDE = re.compile(r"^-- @include (lib/\w+)$", re.MULTILINE)
_HEADER = re.compile(r"\A--\[\[.*?\]\]\n", re.DOTALL)
_COMMENT = re.compile(r"^\s*--[^\n]*\n", re.MULTILINE)
# A line of a fragment that must be executed at each call: names of keys, and variables that last one call.
_PER_CALL = re.compile(r"^local ([\w, ]+?)(?: = (KEYS\[.*\]|\{\}))?$", re.MULTILINE)
# In the headers of scripts that add work.  All others free memory, or running jobs need them.
_REFUSED_WHEN_FULL = re.compile(r"^  Refused when Redis is full$", re.MULTILINE)
_ON_FLEET = re.compile(r"^  Keys: ", re.MULTILINE)
_WRITES_NOTHING = re.compile(r"Writes nothing$", re.MULTILINE)
# Percentage to which Lua's memory, some 0.5 MB, grows before a garbage collection.  With the default of 200, a fifth of
# each call's time is spent on that.
_GC_PAUSE = 500
_FUNCTION = """\
local KEYS, ARGV
local is_tuned = false
{declared}
local function run()
{own}
end
local function call(keys, args)
  KEYS, ARGV = keys, args
{at_each_call}
  if not is_tuned then
    is_tuned = true
    collectgarbage("setpause", {pause})
  end
  return run()
end
"""
_EVAL = """\
#!lua flags={flags}
local given_keys, given_args = KEYS, ARGV
{text}return call(given_keys, given_args)
"""


@dataclass(frozen=True, slots=True)
class Function:
    """A script as a function of Redis.

    text: of a library that holds only this function, and has its name.  eval_text: the same for EVAL, for a Redis that
    is full and therefore loads no function.
    """

    name: str
    text: str
    eval_text: str


class ScriptLibrary:
    """The scripts of one folder: `<name>.lua`, and fragments `lib/<name>.lua`.

    The argument `fragments` of the methods replaces fragments by name, as tests do with the clock.
    """

    def __init__(self, folder: Traversable) -> None:
        self._folder = folder
        self.read_source = cache(self._read_source)
        self.read_signature = cache(self._read_signature)
        self.make_callers = cache(self._make_callers)

    def script_names(self) -> tuple[str, ...]:
        """Return the names of all scripts."""
        names = (entry.name for entry in self._folder.iterdir())
        return tuple(sorted(name.removesuffix(".lua") for name in names if name.endswith(".lua")))

    def read_fragment(self, name: str, fragments: Mapping[str, str] | None = None) -> str:
        """Return the text of a fragment, or of all files of a folder, with their lines `-- @include`."""
        given = fragments or {}
        parts = self._list_folder(name) | {part for part in given if part.startswith(f"{name}/")} or {name}
        return "".join(given.get(part) or self.read_source(part) for part in sorted(parts))

    def list_includes(self, name: str, fragments: Mapping[str, str] | None = None) -> list[str]:
        """Return the names of all fragments of a script, each after those that it includes itself.

        Raises ValueError if fragments include each other.
        """
        found: list[str] = []
        self._collect_includes(self.read_source(name), fragments, found, ())
        return found

    def _collect_includes(
        self, text: str, fragments: Mapping[str, str] | None, found: list[str], path: tuple[str, ...]
    ) -> None:
        for name in _INCLUDE.findall(text):
            if name in path:
                raise ValueError(f"these fragments include each other: {', '.join((*path, name))}")
            if name not in found:
                self._collect_includes(self.read_fragment(name, fragments), fragments, found, (*path, name))
                found.append(name)

    def assemble(self, name: str, fragments: Mapping[str, str] | None = None) -> str:
        """Return a script with its fragments, as one text."""
        return "".join(self._read_parts(name, fragments))

    def build_function(self, name: str, fragments: Mapping[str, str] | None = None) -> Function:
        """Return a script as a function: its fragments outside of it, its own lines inside."""
        shared, own = self._read_parts(name, fragments)
        at_each_call = "".join(f"  {words} = {value or 'nil'}\n" for words, value in _PER_CALL.findall(shared))
        declared = _PER_CALL.sub(r"local \1", shared)
        text = _FUNCTION.format(declared=declared, own=own, at_each_call=at_each_call, pause=_GC_PAUSE)
        text = _COMMENT.sub("", text)
        unique = f"slotkeeper_{name}_{_sha1(text)[:16]}"
        flags = self._flags(name)
        quoted = ", ".join(f'"{flag}"' for flag in flags)
        register = (
            f'redis.register_function({{ function_name = "{unique}", callback = call, flags = {{ {quoted} }} }})\n'
        )
        eval_text = _EVAL.format(flags=",".join(flags), text=text)
        return Function(unique, f"#!lua name={unique}\n{text}{register}", eval_text)

    def is_on_fleet(self, name: str) -> bool:
        """Return whether a script works on the keys of a fleet, and not on a single key, as its header says."""
        return _ON_FLEET.search(self.read_source(name)) is not None

    def _read_source(self, name: str) -> str:
        """Return the text of a file, `<name>.lua`."""
        return self._folder.joinpath(*f"{name}.lua".split("/")).read_text("utf-8")

    def _read_signature(self, name: str) -> Signature:
        """Return what the header of a script declares."""
        found = _HEADER.match(self.read_source(name))
        return parse_signature(found[0] if found else "")

    def _make_callers(self, declared: type) -> dict[str, Caller]:
        """Return the callers of the scripts that a class declares, each by a method.  Raises TypeError."""
        methods = {name: method for name, method in vars(declared).items() if not name.startswith("_")}
        return {name: make_caller(name, self.read_signature(name), method) for name, method in methods.items()}

    def _read_parts(self, name: str, fragments: Mapping[str, str] | None) -> tuple[str, str]:
        """Return the fragments of a script, and its own lines."""
        script = _HEADER.sub("", self.read_source(name))
        shared = "".join(self.read_fragment(found, fragments) for found in self.list_includes(name, fragments))
        return _INCLUDE.sub("", shared), render_locals(self.read_signature(name)) + _INCLUDE.sub("", script)

    def _list_folder(self, name: str) -> frozenset[str]:
        """Return the fragments in this folder; none if it is a file."""
        folder = self._folder.joinpath(*name.split("/"))
        found = folder.iterdir() if folder.is_dir() else ()
        return frozenset(f"{name}/{entry.name.removesuffix('.lua')}" for entry in found)

    def _flags(self, name: str) -> list[str]:
        """Return the flags with which Redis registers the function."""
        source = self.read_source(name)
        if _WRITES_NOTHING.search(source):
            return ["no-writes"]
        return [] if _REFUSED_WHEN_FULL.search(source) else ["allow-oom"]


def _sha1(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
