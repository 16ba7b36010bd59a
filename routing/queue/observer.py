"""Who watches jobs come and go.  The core tells it what happens and reads nothing else of it."""

from collections.abc import Sequence
from typing import Protocol


class Observer(Protocol):
    """Nothing that is promised hangs on what it knows.  Redis errors may pass through."""

    def started(self, fleet: str, model: str, job_id: str, started_ms: int) -> None:
        """A job has begun its first attempt.  Only noted here, for a slot waits."""

    def withdrawn(self, fleet: str, model: str, job_ids: Sequence[str]) -> None:
        """These jobs wait no more and will not start: they were canceled, or their deadline passed."""

    def removed(self, fleet: str, model: str) -> None:
        """A model was removed."""

    def learn(self) -> None:
        """Work up what was noted.  Called when nobody waits."""
