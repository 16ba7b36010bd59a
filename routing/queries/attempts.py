"""The attempts of a job, read from its events."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slotkeeper.jobs.events import EVENT_TYPES, TRANSITION_TYPES
from slotkeeper.jobs.states import State
from slotkeeper.jobs.values import Event


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a job and what came of it.  `ended_ms` None: it is still running."""

    attempt: int
    server: str | None
    slot: str | None
    started_ms: int
    ended_ms: int | None
    outcome: str | None
    error: dict[str, Any] | None


def attempts(trail: Iterable[Event]) -> list[Attempt]:
    """Fold a job's events into its attempts, oldest first."""
    found: list[Attempt] = []
    started: Event | None = None
    for event in trail:
        if event.type == EVENT_TYPES[State.RUNNING]:
            if started is not None:
                found.append(_attempt(started, None))
            started = event
        elif started is not None and event.type in TRANSITION_TYPES:
            found.append(_attempt(started, event))
            started = None
    if started is not None:
        found.append(_attempt(started, None))
    return found


def _attempt(started: Event, ended: Event | None) -> Attempt:
    return Attempt(
        attempt=started.attempt,
        server=started.data.get("server"),
        slot=started.data.get("slot"),
        started_ms=started.at_ms,
        ended_ms=ended.at_ms if ended else None,
        outcome=ended.data.get("why") if ended else None,
        error=ended.data.get("error") if ended else None,
    )
