"""The interface of all sinks."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from slotkeeper.outbox.event_reader import OutboxEvent
from tasks.relay import cloudevents


class PublishedEvent(NamedTuple):
    """An event to be published.  `source`: that of its CloudEvent."""

    entry: OutboxEvent
    source: str

    @property
    def number(self) -> int:
        """The number of the event in the database."""
        return self.entry.event.id

    @property
    def type(self) -> str:
        return self.entry.event.type

    @property
    def key(self) -> str:
        """The subject of the event.  A sink keeps the order of events with the same key."""
        return cloudevents.subject_of(self.entry)

    @property
    def body(self) -> str:
        """The CloudEvent as JSON."""
        return cloudevents.to_json(self.entry, self.source)


class SinkUnavailable(Exception):
    """The sink did not respond, or did not confirm a batch.  It may have received any part of the batch."""


class CursorMismatch(Exception):
    """The sink's last event is not the one that was expected; call `resume_after` again.  Nothing was published."""


class Sink(Protocol):
    """A destination of events.  For one thread."""

    @property
    def retention(self) -> int | None:
        """How many of the newest events a new sink receives; None: all that are stored."""

    def resume_after(self, position: int) -> int:
        """Return the number of the event after which to continue.

        `position`: the sink's cursor in the database.  Raises SinkUnavailable.
        """

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        """Publish a batch, and return when the sink has stored all of it.  The order within each key is kept.

        Raises SinkUnavailable, CursorMismatch.
        """

    def close(self) -> None:
        """Close the connections."""
