"""What all sinks of events are."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import orjson


class PublishedEvent(NamedTuple):
    """An event as it is published.  `key`: what it is about; those of one key stay in their order.

    `event`: the CloudEvent (tasks/relay/cloudevents.py).
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
    """It does not take events now; whether it has got some of those that it was given is not known."""


class CursorMismatch(Exception):
    """It does not stand where it was believed to: ask it anew where to go on.  Nothing was taken."""


class Sink(Protocol):
    """One place that events are published to.  For one thread."""

    @property
    def retention(self) -> int | None:
        """So many of the newest events: what is older when it is begun with is of no use to it; None: all."""

    def resume_after(self, position: int) -> int:
        """Return the event after which to continue; by the database, the sink has all up to `position`.

        Raises SinkUnavailable.
        """

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        """Answers when the sink itself keeps all of them, each behind those before it of its key.

        Raises SinkUnavailable, CursorMismatch.
        """

    def close(self) -> None:
        """Let go of connections."""
