"""What a view leaves to the server that called it, so that no thread is held: an answer for later, or a stream.

The process `web` says in the WSGI environment that it takes over; any other server gets what can be said at once.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from routing.progress import FIRST_ENTRY, EntryId
from slotkeeper.outbox.event_reader import OutboxEvent

CAN_DEFER = "slotkeeper.takes_over"
"""In the WSGI environment: whether the server goes on where a view leaves off."""
DEFERRED = "slotkeeper.goes_on"
"""There: how it goes on, a view says; an UntilEnded or a Following."""


@dataclass(frozen=True, slots=True)
class WaitForJob:
    """Ask the view once more when this job has ended, or after so many seconds."""

    job_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Whose events are told; None, or nothing named: all."""

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
    """Go on with these events behind the answer's head.  `after`: the last that the client has; None: from now on.
    `heard`: the last that it has of what the job's server said.
    """

    wanted: EventFilter
    after: int | None
    progress_after: EntryId = FIRST_ENTRY


def defer(environ: MutableMapping[str, Any], how: WaitForJob | FollowEvents) -> bool:
    """Have the server go on.  False: it cannot."""
    if not environ.get(CAN_DEFER):
        return False
    environ[DEFERRED] = how
    return True
