"""Lua scripts: one file for each atomic act, assembled from shared fragments.

A line `-- @include lib/<name>` is replaced by that fragment, once; a folder, such as `lib/policies`, stands for all
that is in it.  Scripts run as functions of Redis: what the fragments define is made when the function is loaded, and
not anew at each call.  A function's name carries the hash of its text, so releases do not disturb each other; a Redis
that does not know it is sent the text.  What a script takes and returns stands in its header, see signatures.py.
"""

import hashlib
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, TypeVar

import structlog
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio import connection as live
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from slotkeeper.redis.full import OomTolerantRedis
from slotkeeper.redis.keys import Keys
from slotkeeper.redis.signatures import (
    BoundScript,
    Caller,
    Command,
    RowLayout,
    Signature,
    make_caller,
    pack_words,
    parse_signature,
    render_locals,
)
from slotkeeper.redis.suitability import UnsuitableRedis, explain_wrong_url

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

log = structlog.get_logger(__name__)

# A script stands in the room that calls it, and a fragment in the lowest room whose scripts share it.
_FOLDERS = tuple(files(room).joinpath("lua") for room in ("routing", "tasks.relay"))
# Calls in one round trip: Redis serves nobody else while it works them off.
_AT_ONCE = 100
# Fleets, or keys of other scripts, whose words are kept.
_REMEMBERED = 4096
_INCLUDE = re.compile(r"^-- @include (lib/\w+)$", re.MULTILINE)
_HEADER = re.compile(r"\A--\[\[.*?\]\]\n", re.DOTALL)
_COMMENT = re.compile(r"^\s*--[^\n]*\n", re.MULTILINE)
# A line of a fragment that must be run at each call: names of keys, and what is remembered while one call lasts.
_OF_A_CALL = re.compile(r"^local ([\w, ]+?)(?: = (KEYS\[.*\]|\{\}))?$", re.MULTILINE)
# Headers say so of scripts that bring in new work.  All others free memory, or running jobs need them.
_REFUSED = re.compile(r"^  Refused when Redis is full$", re.MULTILINE)
_WRITES_NOTHING = re.compile(r"Writes nothing$", re.MULTILINE)
_MISSING = "Function not found"
# Lua collects its garbage when its memory, some 0.5 MB, has grown to so many hundredths of what it was.  With 200, as
# it is otherwise, a fifth of each call's time is spent on that.
_PAUSE = 500
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


@cache
def script_names() -> tuple[str, ...]:
    """The names of all scripts."""
    entries = (entry.name for folder in _FOLDERS for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".lua") for name in entries if name.endswith(".lua")))


@cache
def read_source(name: str) -> str:
    """The text of `lua/<name>.lua` as it stands in its file."""
    files_of_name = (folder.joinpath(*f"{name}.lua".split("/")) for folder in _FOLDERS)
    return next(file for file in files_of_name if file.is_file()).read_text("utf-8")


def read_fragment(name: str, replaced: Mapping[str, str] | None = None) -> str:
    """The text that a line `-- @include <name>` stands for.  `replaced` as for `assemble`."""
    given = replaced or {}
    parts = _in_folder(name) | {part for part in given if part.startswith(f"{name}/")} or {name}
    return "".join(given.get(part) or read_source(part) for part in sorted(parts))


@cache
def _in_folder(name: str) -> frozenset[str]:
    """The fragments in this folder; none: it is a file."""
    folder = _FOLDERS[0].joinpath(*name.split("/"))
    found = folder.iterdir() if folder.is_dir() else ()
    return frozenset(f"{name}/{entry.name.removesuffix('.lua')}" for entry in found)


@cache
def read_signature(name: str) -> Signature:
    """What the header of `lua/<name>.lua` declares."""
    found = _HEADER.match(read_source(name))
    return parse_signature(found[0] if found else "")


def assemble(name: str, fragments: Mapping[str, str] | None = None) -> str:
    """A script in one piece.  `fragments` replaces included fragments by name, as tests do with the clock."""
    return "".join(_parts(name, fragments))


def _parts(name: str, fragments: Mapping[str, str] | None) -> tuple[str, str]:
    """What a script shares with others, and its own lines."""
    script = _HEADER.sub("", read_source(name))
    shared = "".join(read_fragment(found, fragments) for found in _INCLUDE.findall(script))
    return shared, render_locals(read_signature(name)) + _INCLUDE.sub("", script)


@dataclass(frozen=True, slots=True)
class Function:
    """A script as a function of Redis.  `text`: the library that holds it alone, and has its name.

    `eval_text`: the same for EVAL, for a Redis that is full and therefore loads no function.
    """

    name: str
    text: str
    eval_text: str


def build_function(name: str, fragments: Mapping[str, str] | None = None) -> Function:
    """A script as a function: its fragments stand outside, its own lines inside.  `fragments` as for `assemble`."""
    shared, own = _parts(name, fragments)
    at_each_call = "".join(f"  {words} = {value or 'nil'}\n" for words, value in _OF_A_CALL.findall(shared))
    declared = _OF_A_CALL.sub(r"local \1", shared)
    text = _COMMENT.sub("", _FUNCTION.format(declared=declared, own=own, at_each_call=at_each_call, pause=_PAUSE))
    unique = f"slotkeeper_{name}_{_sha1(text)[:16]}"
    flags = ", ".join(f'"{flag}"' for flag in _flags(name))
    register = f'redis.register_function({{ function_name = "{unique}", callback = call, flags = {{ {flags} }} }})\n'
    eval_text = _EVAL.format(flags=",".join(_flags(name)), text=text)
    return Function(unique, f"#!lua name={unique}\n{text}{register}", eval_text)


def _flags(name: str) -> list[str]:
    """What Redis shall know of a function before it runs it."""
    if _WRITES_NOTHING.search(read_source(name)):
        return ["no-writes"]
    return [] if _REFUSED.search(read_source(name)) else ["allow-oom"]


def connect(url: str, timeout_s: float) -> Redis:
    """A client for scripts that change something: it never sends one twice.

    redis-py retries by default, and a script that was only slow would run again and again.
    Raises UnsuitedRedis: this is no URL of a single Redis.
    """
    try:
        return OomTolerantRedis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=30,
        )
    except ValueError:  # Its text may hold the password.
        raise UnsuitableRedis(explain_wrong_url(url)) from None


_LIVE: dict[type, type[live.AbstractConnection]] = {
    Connection: live.Connection,
    SSLConnection: live.SSLConnection,
    UnixDomainSocketConnection: live.UnixDomainSocketConnection,
}
_ADDRESS = re.compile(r"host|port|path|db|username|password|protocol|client_name|ssl_\w+")


def make_async_connection(redis: Redis) -> live.AbstractConnection:
    """A connection for an event loop to the Redis of this client."""
    pool = redis.connection_pool
    found = {name: value for name, value in pool.connection_kwargs.items() if _ADDRESS.fullmatch(name)}
    return _LIVE[pool.connection_class](socket_timeout=None, **found)


def make_async_client(redis: Redis) -> AsyncRedis:
    """A client for an event loop to the Redis of this client."""
    pool = redis.connection_pool
    found = {name: value for name, value in pool.connection_kwargs.items() if _ADDRESS.fullmatch(name)}
    timeout_s = pool.connection_kwargs.get("socket_timeout")
    kind = _LIVE[pool.connection_class]
    return AsyncRedis(
        connection_pool=live.ConnectionPool(
            connection_class=kind, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, **found
        )
    )


@cache
def _callers(declared: type) -> dict[str, Caller]:
    """Of the scripts that a class declares, each by a method."""
    methods = {name: it for name, it in vars(declared).items() if not name.startswith("_")}
    return {name: make_caller(name, read_signature(name), method) for name, method in methods.items()}


class Scripts:
    """Runs scripts on the keys of one fleet at a time."""

    def __init__(self, redis: Redis, keys: Keys, fragments: Mapping[str, str] | None = None) -> None:
        self.redis = redis
        self.keys = keys
        self._fragments = fragments
        self._functions: dict[str, Function] = {}
        self._bound: dict[type, Any] = {}

    def bind(self, declared: type) -> Any:
        """These scripts on the keys of `Keys`: an object with a method for each, as the class declares them.

        Made once for each class.  Raises TypeError: a header says otherwise.
        """
        if declared not in self._bound:
            made = {name: it.pack(self._targets(name, it)) for name, it in _callers(declared).items()}
            self._bound[declared] = SimpleNamespace(**made)
        return self._bound[declared]

    def target(self, script: str, on: str, read: Callable[[Any], Any], rows: RowLayout | None = None) -> BoundScript:
        """`on`: a fleet, or the key of a script that works on one."""
        keys = self.keys.fleet_keys(on) if "@include lib/fleet" in read_source(script) else [on]
        words: tuple[str | int, ...] = ("FCALL", self._function(script).name, len(keys), *keys)
        return BoundScript(script, keys, words, pack_words(words), read, rows)

    def _targets(self, script: str, found: Caller) -> Callable[[str], BoundScript]:
        return lru_cache(_REMEMBERED)(lambda on: self.target(script, on, found.read(on), found.rows))

    def run(self, command: Command[T]) -> T:
        """Run a script.  Raises redis errors."""
        (answer,) = self.run_all([command])
        return answer

    def run_all(self, commands: Sequence[Command[T]]) -> list[T]:
        """Run scripts in few round trips.  Raises the first error."""
        found = self._answers(commands)
        for answer in found:
            if isinstance(answer, RedisError):
                raise answer
        return [command.target.read(answer) for command, answer in zip(commands, found, strict=True)]

    def run_each(self, commands: Mapping[K, Command[T]]) -> tuple[dict[K, T], dict[K, RedisError]]:
        """Run scripts in few round trips; their answers, and the errors of those that failed.

        Raises redis errors that concern all of them.
        """
        found = dict(zip(commands, self._answers(list(commands.values())), strict=True))
        failed = {key: answer for key, answer in found.items() if isinstance(answer, RedisError)}
        read = {key: commands[key].target.read(answer) for key, answer in found.items() if key not in failed}
        return read, failed

    def _answers(self, commands: Sequence[Command[T]]) -> list[Any]:
        parts = (commands[n : n + _AT_ONCE] for n in range(0, len(commands), _AT_ONCE))
        return [answer for part in parts for answer in self._call(part)]

    def _call(self, commands: Sequence[Command[T]]) -> list[Any]:
        """The answers, or ResponseErrors.  What Redis does not know is sent once more, after its text."""
        answers = self._send([command.words for command in commands])
        missing = [n for n, answer in enumerate(answers) if is_unknown_function(answer)]
        if missing:
            not_loaded = {script for script in {commands[n].target.script for n in missing} if not self._load(script)}
            again = [
                self.eval_command(commands[n]) if commands[n].target.script in not_loaded else commands[n].words
                for n in missing
            ]
            for n, answer in zip(missing, self._send(again), strict=True):
                answers[n] = answer
        return answers

    def _load(self, script: str) -> bool:
        """Send Redis the text of a script; another process may do the same.  False: Redis is full."""
        try:
            self.redis.execute_command(*self.load_command(script))
        except OutOfMemoryError:
            return False
        return True

    def _send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        if len(commands) == 1:  # A pipeline would take a connection of its own.
            try:
                return [self.redis.execute_command(*commands[0])]
            except ResponseError as error:
                return [error]
        with self.redis.pipeline(transaction=False) as pipe:
            for words in commands:
                pipe.execute_command(*words)
            return pipe.execute(raise_on_error=False)

    def load_command(self, script: str) -> tuple[Any, ...]:
        """What Redis is sent first, if it does not know the script."""
        return "FUNCTION", "LOAD", "REPLACE", self._function(script).text

    def eval_command(self, command: Command[Any]) -> tuple[Any, ...]:
        """What a Redis is sent that does not know the script, and is too full to load it."""
        _, _, *keys = command.target.words
        return "EVAL", self._function(command.target.script).eval_text, *keys, *command.args

    def existing(self, key: str, fleets: Sequence[str]) -> list[str]:
        """Those of the fleets that have this key: a look at many that costs a small part of a script for each."""
        with self.redis.pipeline(transaction=False) as pipe:
            for fleet in fleets:
                pipe.exists(self.keys.fleet_key(fleet, key))
            found = pipe.execute()
        return [fleet for fleet, exists in zip(fleets, found, strict=True) if exists]

    def members(self, key: str, asked: Mapping[str, Sequence[str]]) -> dict[str, list[bool]]:
        """Whether the sorted set of each fleet has each of these members."""
        some = {fleet: found for fleet, found in asked.items() if found}
        with self.redis.pipeline(transaction=False) as pipe:
            for fleet, found in some.items():
                pipe.zmscore(self.keys.fleet_key(fleet, key), list(found))
            answers = dict(zip(some, pipe.execute(), strict=True))
        return {fleet: [score is not None for score in answers.get(fleet, ())] for fleet in asked}

    def hash(self, key: str) -> dict[str, str]:
        """All fields of a hash.  Raises redis errors."""
        found: Mapping[Any, Any] = self.redis.hgetall(key)
        return {name.decode(): value.decode() for name, value in found.items()}

    def _function(self, name: str) -> Function:
        if name not in self._functions:
            self._functions[name] = build_function(name, self._fragments)
        return self._functions[name]


def is_unknown_function(answer: object) -> bool:
    """Whether Redis has run nothing, because it does not know the function."""
    return isinstance(answer, ResponseError) and _MISSING in str(answer)


def log_failures(what: str, failed: Mapping[str, RedisError]) -> None:
    """Log what could not be done in some fleets; the others go on."""
    for fleet, error in failed.items():
        log.error(what, fleet=fleet, error=str(error))


def _sha1(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
