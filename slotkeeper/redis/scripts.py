"""Run scripts: one, or many in few round trips.

A Redis that does not know a script's function is sent its text, and the call once more.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, TypeVar

import structlog
from redis import Redis
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from slotkeeper.redis.keys import Keys
from slotkeeper.redis.script_library import Function, ScriptLibrary
from slotkeeper.redis.signatures import BoundScript, Caller, Command, RowLayout, pack_words

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

log = structlog.get_logger(__name__)

_MAX_CALLS = 100  # in one round trip: Redis serves no other client while it executes them
_MAX_TARGETS = 4096  # fleets, or keys of other scripts, whose packed words are cached
_UNKNOWN_FUNCTION = "Function not found"


class Scripts:
    """Runs the scripts of a library on the keys of one fleet at a time.  Thread-safe.  Methods raise redis errors."""

    def __init__(
        self, redis: Redis, keys: Keys, library: ScriptLibrary, fragments: Mapping[str, str] | None = None
    ) -> None:
        """fragments: replace those of the library by name."""
        self.redis = redis
        self.keys = keys
        self._library = library
        self._fragments = fragments
        self._functions: dict[str, Function] = {}
        self._bound: dict[type, Any] = {}

    def reconnect(self) -> None:
        """Close the connections that no call uses, so that the next calls reach the Redis behind the address now."""
        self.redis.connection_pool.disconnect(inuse_connections=False)

    def bind(self, declared: type) -> Any:
        """Return an object with a method for each script that the class declares.  A method returns a `Command`.

        Made once for each class.  Raises TypeError if a header says otherwise.
        """
        if declared not in self._bound:
            callers = self._library.make_callers(declared)
            made = {name: caller.pack(self._targets(name, caller)) for name, caller in callers.items()}
            self._bound[declared] = SimpleNamespace(**made)
        return self._bound[declared]

    def target(self, script: str, on: str, read: Callable[[Any], Any], rows: RowLayout | None = None) -> BoundScript:
        """Return a script bound to its keys.  on: a fleet, or the key of a script that works on one key."""
        keys = self.keys.fleet_keys(on) if self._library.is_on_fleet(script) else [on]
        words: tuple[str | int, ...] = ("FCALL", self._function(script).name, len(keys), *keys)
        return BoundScript(script, keys, words, pack_words(words), read, rows)

    def _targets(self, script: str, caller: Caller) -> Callable[[str], BoundScript]:
        return lru_cache(_MAX_TARGETS)(lambda on: self.target(script, on, caller.read(on), caller.rows))

    def run(self, command: Command[T]) -> T:
        """Run a script, and return its result."""
        (result,) = self.run_all([command])
        return result

    def run_all(self, commands: Sequence[Command[T]]) -> list[T]:
        """Run scripts in few round trips, and return their results.  Raises the first error."""
        replies = self._call_all(commands)
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        return [command.target.read(reply) for command, reply in zip(commands, replies, strict=True)]

    def run_each(self, commands: Mapping[K, Command[T]]) -> tuple[dict[K, T], dict[K, RedisError]]:
        """Run scripts in few round trips, and return their results, and the errors of those that failed.

        Raises redis errors that concern all of them.
        """
        replies = dict(zip(commands, self._call_all(list(commands.values())), strict=True))
        failed = {key: reply for key, reply in replies.items() if isinstance(reply, RedisError)}
        results = {key: commands[key].target.read(reply) for key, reply in replies.items() if key not in failed}
        return results, failed

    def load_command(self, script: str) -> tuple[Any, ...]:
        """Return the command that loads a script."""
        return "FUNCTION", "LOAD", "REPLACE", self._function(script).text

    def eval_command(self, command: Command[Any]) -> tuple[Any, ...]:
        """Return the command for a Redis that does not know the script, and is too full to load it."""
        _, _, *keys = command.target.words
        return "EVAL", self._function(command.target.script).eval_text, *keys, *command.args

    def existing(self, key: str, fleets: Sequence[str]) -> list[str]:
        """Return those of the fleets that have this key.  Much cheaper than a script for each."""
        with self.redis.pipeline(transaction=False) as pipe:
            for fleet in fleets:
                pipe.exists(self.keys.fleet_key(fleet, key))
            found = pipe.execute()
        return [fleet for fleet, exists in zip(fleets, found, strict=True) if exists]

    def members(self, key: str, asked: Mapping[str, Sequence[str]]) -> dict[str, list[bool]]:
        """Return whether the sorted set of each fleet has each of these members."""
        some = {fleet: found for fleet, found in asked.items() if found}
        with self.redis.pipeline(transaction=False) as pipe:
            for fleet, found in some.items():
                pipe.zmscore(self.keys.fleet_key(fleet, key), list(found))
            scores = dict(zip(some, pipe.execute(), strict=True))
        return {fleet: [score is not None for score in scores.get(fleet, ())] for fleet in asked}

    def hash(self, key: str) -> dict[str, str]:
        """Return all fields of a hash."""
        found: Mapping[Any, Any] = self.redis.hgetall(key)
        return {name.decode(): value.decode() for name, value in found.items()}

    def _call_all(self, commands: Sequence[Command[T]]) -> list[Any]:
        parts = (commands[n : n + _MAX_CALLS] for n in range(0, len(commands), _MAX_CALLS))
        return [reply for part in parts for reply in self._call(part)]

    def _call(self, commands: Sequence[Command[T]]) -> list[Any]:
        """Return the replies, among them ResponseErrors.  Calls of unknown functions are repeated after loading."""
        replies = [self._send_one(commands[0])] if len(commands) == 1 else self._send([c.words for c in commands])
        missing = [n for n, reply in enumerate(replies) if is_unknown_function(reply)]
        if missing:
            not_loaded = {script for script in {commands[n].target.script for n in missing} if not self._load(script)}
            again = [
                self.eval_command(commands[n]) if commands[n].target.script in not_loaded else commands[n].words
                for n in missing
            ]
            for n, reply in zip(missing, self._send(again), strict=True):
                replies[n] = reply
        return replies

    def _load(self, script: str) -> bool:
        """Load a script's function; another process may do the same.  Returns False if Redis is full."""
        try:
            self.redis.execute_command(*self.load_command(script))
        except OutOfMemoryError:
            return False
        return True

    def _send_one(self, command: Command[Any]) -> Any:
        """Return the reply, which may be a ResponseError.

        On a connection of the client's pool: the client's `execute_command` measures itself, and takes 80 µs more.
        """
        pool = self.redis.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_packed_command([command.packed])
            return connection.read_response()
        except ResponseError as error:
            return error
        finally:
            pool.release(connection)

    def _send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self.redis.pipeline(transaction=False) as pipe:
            for words in commands:
                pipe.execute_command(*words)
            return pipe.execute(raise_on_error=False)

    def _function(self, name: str) -> Function:
        if name not in self._functions:
            self._functions[name] = self._library.build_function(name, self._fragments)
        return self._functions[name]


def is_unknown_function(reply: object) -> bool:
    """Return whether Redis ran nothing because it does not know the function."""
    return isinstance(reply, ResponseError) and _UNKNOWN_FUNCTION in str(reply)


def log_failures(event: str, failed: Mapping[str, RedisError]) -> None:
    """Log what failed in some fleets."""
    for fleet, error in failed.items():
        log.error(event, fleet=fleet, error=str(error))
