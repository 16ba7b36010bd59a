"""A Redis client whose writes go on when Redis has reached its maxmemory.

Such a Redis refuses each plain command that needs memory.  A script with the flag allow-oom still runs.  Celery's
messages, the bindings of its queues, and the marks of maintenance are small, and nothing frees memory without them.
"""

from typing import Any

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import OutOfMemoryError

ALLOW_OOM = "#!lua flags=allow-oom\n"
_ONE_COMMAND = f"{ALLOW_OOM}return redis.call(unpack(ARGV))"
# What Celery and maintenance write.  FCALL is not here: each of our scripts says itself whether it is refused.
_GO_ON = frozenset({"HINCRBY", "HSET", "LPUSH", "RPUSH", "SADD", "SET", "ZADD"})


class OomTolerantPipeline(Pipeline):
    """Sends again, one by one, the commands that a full Redis has refused."""

    def __init__(self, pool: Any, callbacks: Any, transaction: bool, shard_hint: Any) -> None:
        super().__init__(pool, callbacks, transaction, shard_hint)
        self._is_transaction = transaction

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        stack, client = list(self.command_stack), OomTolerantRedis(connection_pool=self.connection_pool)
        is_transaction = self._is_transaction or self.explicit_transaction
        try:
            found = super().execute(raise_on_error=raise_on_error and is_transaction)
        except OutOfMemoryError:  # Redis has run no command of the transaction.
            return [client.execute_command(*args, **options) for args, options in stack]
        for n, (args, options) in enumerate(stack):
            if isinstance(found[n], OutOfMemoryError) and args[0] in _GO_ON:
                found[n] = client.execute_command(*args, **options)
        if raise_on_error:
            self.raise_first_error(stack, found)
        return found


class OomTolerantRedis(Redis):
    """Sends again, as a script that Redis runs also when it is full, what Redis has refused."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute_command(*args, **options)
        except OutOfMemoryError:
            if args[0] not in _GO_ON:
                raise
            return super().execute_command("EVAL", _ONE_COMMAND, 0, *args)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> OomTolerantPipeline:
        return OomTolerantPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    def register_script(self, script: Any) -> Any:
        """Register a script that Redis runs also when it is full."""
        return super().register_script(ALLOW_OOM + script)
