"""The interface of all sinks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import orjson


class PublishedEvent(NamedTuple):
    """An event to be published.

    number: of the event in the database.
    key: the subject of the event; a sink keeps the order of events with the same key.
    event: the CloudEvent (tasks/relay/cloudevents.py).
    """

    number: int
    key: str
    type: str
    event: Mapping[str, Any]

    @property
    def body(self) -> str:
        """The event as JSON."""
        return orjson.dumps(self.event).decode()


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
