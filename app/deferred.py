"""Work that a view hands to the server that called it, so that no thread is held: waiting for a job, or a stream.

The process `web` sets CAN_DEFER in the WSGI environment.  With any other server the view responds at once.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from routing.progress import FIRST_ENTRY, EntryId
from slotkeeper.outbox.event_reader import OutboxEvent

CAN_DEFER = "slotkeeper.can_defer"
"""Key of the WSGI environment: whether the server accepts deferred work."""
DEFERRED = "slotkeeper.deferred"
"""Key of the WSGI environment, set by a view: its deferred work, a WaitForJob or a FollowEvents."""


@dataclass(frozen=True, slots=True)
class WaitForJob:
    """Call the view again when this job has ended, or after so many seconds."""

    job_id: str
    seconds: float
    gone_s: float | None = None  # `cancel_when_gone` of the job


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Selects the events of a stream.  A field that is None or empty selects all."""

    tenant: str | None = None
    models: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    batches: frozenset[str] = frozenset()
    job_id: str | None = None

    def matches(self, entry: OutboxEvent) -> bool:
        return (
            self.tenant in (None, entry.tenant)
            and self.job_id in (None, entry.event.job_id)
            and (not self.models or entry.model in self.models)
            and (not self.batches or entry.batch in self.batches)
            and (not self.types or entry.event.type in self.types)
        )


@dataclass(frozen=True, slots=True)
class FollowEvents:
    """Send these events after the head of the response.

    `after`: the last event that the client has; None: the stream begins with the next event.  `progress_after`: the
    last progress entry that the client has.
    """

    event_filter: EventFilter
    after: int | None
    progress_after: EntryId = FIRST_ENTRY
    gone_s: float | None = None  # `cancel_when_gone` of the job that is followed


def defer(environ: MutableMapping[str, Any], work: WaitForJob | FollowEvents) -> bool:
    """Hand `work` to the server.  Return False if the server does not accept deferred work."""
    if not environ.get(CAN_DEFER):
        return False
    environ[DEFERRED] = work
    return True
