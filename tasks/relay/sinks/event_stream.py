"""The stream of events in Redis: a copy of the newest ones in the record, for whoever reads it with XREAD.

An entry's id is its event's number and 0, so that Redis itself takes none twice and none out of order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from redis.exceptions import ResponseError

from slotkeeper.redis.scripts import Command, Scripts

_FIELD = b"event"


class Entry(NamedTuple):
    """An event by its number; `body`: as it is read."""

    number: int
    body: str


class StreamScripts(Protocol):
    """Of the stream, which belongs to no fleet."""

    def relay(self, key: str, *, last: int, cap: int, events: Sequence[Entry]) -> Command[int]: ...


class EventStream:
    """Reads and writes the stream.  Redis errors pass through."""

    def __init__(self, scripts: Scripts, max_length: int) -> None:
        """`max_length`: it keeps so many events, or a few more."""
        self._scripts, self._max_length = scripts, max_length
        self._lua: StreamScripts = scripts.bind(StreamScripts)
        self.key = scripts.keys.events()

    def add(self, last: int, events: Sequence[Entry]) -> int:
        """Add events behind `last`; answers what it ends with: if that is not theirs, nothing was added."""
        return self._scripts.run(self._lua.relay(self.key, last=last, cap=self._max_length, events=events))

    def last(self) -> Entry | None:
        """What it ends with; None: it has had none.  An empty body: that has been removed."""
        redis: Any = self._scripts.redis
        try:
            facts = redis.xinfo_stream(self.key)
        except ResponseError:  # There is none.
            return None
        number = int(facts["last-generated-id"].partition(b"-")[0])
        found = redis.xrevrange(self.key, f"{number}-0", f"{number}-0", count=1)
        return Entry(number, found[0][1][_FIELD].decode() if found else "")

    def move_away(self) -> str:
        """Begin anew; what was there stays under another name, which is answered, until that happens again."""
        former_key = f"{self.key}:before"
        self._scripts.redis.rename(self.key, former_key)
        return former_key
