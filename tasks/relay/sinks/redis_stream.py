"""The stream in Redis.  It is a copy: what Redis loses of it, or all of it, is filled anew from the record."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import structlog
from redis.exceptions import RedisError, ResponseError

from slotkeeper.redis.scripts import Command, Scripts
from tasks.relay.sinks.sink import CursorMismatch, PublishedEvent, SinkUnavailable

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


log = structlog.get_logger(__name__)


class RedisStreamSink:
    """A Sink that knows by itself how far it has come, so that it gets no event twice."""

    def __init__(self, stream: EventStream, max_length: int, find_event: Callable[[int], str | None]) -> None:
        """`find_event`: the text of an event by its number, as the record has it; None: it has none."""
        self._stream, self._find_event = stream, find_event
        self.retention: int | None = max_length
        self._last = 0

    def resume_after(self, position: int) -> int:
        try:
            found = self._stream.last()  # It may have been lost, or restored, or hold more than the cursor says.
            if found is not None and not self._ends_with_own_event(found, position):
                log.warning("event_stream_of_another_database", kept_as=self._stream.move_away())
                found = None
        except RedisError as error:
            raise SinkUnavailable(str(error)) from error
        self._last = found.number if found is not None else 0
        # Where it has lost some, they come again; of what came before its oldest it keeps none anyway.
        return max(self._last, position - (self.retention or 0))

    def _ends_with_own_event(self, found: Entry, position: int) -> bool:
        """Whether it ends with an event of this record, which may have been restored, or made anew."""
        known = self._find_event(found.number)
        if known is None or not found.body:  # One of them has let it go.
            return found.number <= position
        return known == found.body

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        try:
            last = self._stream.add(self._last, [Entry(event.number, event.body) for event in batch])
        except RedisError as error:
            raise SinkUnavailable(str(error)) from error
        if last != batch[-1].number:
            raise CursorMismatch
        self._last = last

    def close(self) -> None:
        pass
