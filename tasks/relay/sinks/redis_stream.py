"""A sink that publishes to a stream in Redis.  The stream is a copy: events that Redis loses are published again."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import structlog
from redis.exceptions import RedisError, ResponseError

from slotkeeper.redis.scripts import Command, Scripts
from tasks.relay.sinks.sink import CursorMismatch, PublishedEvent, SinkUnavailable

_FIELD = b"event"


class Entry(NamedTuple):
    """An event in the stream.  `body`: its JSON."""

    number: int
    body: str


class StreamScripts(Protocol):
    """The Lua scripts of the stream, which belongs to no fleet."""

    def relay(self, key: str, *, last: int, cap: int, events: Sequence[Entry]) -> Command[int]: ...


class EventStream:
    """Reads and writes the stream.  Redis errors pass through."""

    def __init__(self, scripts: Scripts, max_length: int) -> None:
        """Create a client.  `max_length`: how many events the stream keeps, or a few more."""
        self._scripts, self._max_length = scripts, max_length
        self._lua: StreamScripts = scripts.bind(StreamScripts)
        self.key = scripts.keys.events()

    def add(self, last: int, events: Sequence[Entry]) -> int:
        """Add events if the stream ends with the event `last`, and return the number of its last event.

        If that is not the last of `events`, nothing was added.
        """
        return self._scripts.run(self._lua.relay(self.key, last=last, cap=self._max_length, events=events))

    def last(self) -> Entry | None:
        """Return the last event; None: there is no stream.  Its body is "" if the event was removed."""
        redis: Any = self._scripts.redis
        try:
            info = redis.xinfo_stream(self.key)
        except ResponseError:  # The stream does not exist.
            return None
        number = int(info["last-generated-id"].partition(b"-")[0])
        found = redis.xrevrange(self.key, f"{number}-0", f"{number}-0", count=1)
        return Entry(number, found[0][1][_FIELD].decode() if found else "")

    def move_away(self) -> str:
        """Rename the stream, so that the next events start an empty one, and return the new name.

        A stream that was renamed before is overwritten.
        """
        former_key = f"{self.key}:before"
        self._scripts.redis.rename(self.key, former_key)
        return former_key


log = structlog.get_logger(__name__)


class RedisStreamSink:
    """A Sink that stores its own position, the number of its last event, so that it receives no event twice."""

    def __init__(self, stream: EventStream, max_length: int, find_event: Callable[[int], str | None]) -> None:
        """Create a sink.

        find_event: returns the published JSON of the event with this number; None: it is not in the database.
        """
        self._stream, self._find_event = stream, find_event
        self.retention: int | None = max_length
        self._last = 0

    def resume_after(self, position: int) -> int:
        try:
            found = self._stream.last()  # The stream may be lost or restored, or be ahead of the cursor.
            if found is not None and not self._ends_with_own_event(found, position):
                log.warning("event_stream_of_another_database", kept_as=self._stream.move_away())
                found = None
        except RedisError as error:
            raise SinkUnavailable(str(error)) from error
        self._last = found.number if found is not None else 0
        # Lost events are published again, but not those that are too old for the stream to keep.
        return max(self._last, position - (self.retention or 0))

    def _ends_with_own_event(self, found: Entry, position: int) -> bool:
        """Return whether the stream's last event is from this database, which may have been restored or replaced."""
        stored = self._find_event(found.number)
        if stored is None or not found.body:  # The event was removed from the database or the stream.
            return found.number <= position
        return stored == found.body

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
