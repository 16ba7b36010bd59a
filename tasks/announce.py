"""How the outside is told of offers and ends: by Celery."""

from functools import partial

from routing.queue.queues import Offer
from slotkeeper.jobs.record import Waiting
from slotkeeper.jobs.store import Moved, Store
from slotkeeper.outbox.tellings import Telling
from tasks import messages
from tasks.publisher import publisher
from tasks.telling import Teller


class CeleryAnnouncer:
    """Publishes wake-ups, and has Celery's clients told."""

    def __init__(self, store: Store, teller: Teller) -> None:
        self._store, self._teller = store, teller

    def offered(self, offer: Offer, new: Waiting | None) -> None:
        wake = partial(self._wake, offer) if new is None else partial(messages.publish, offer, new.priority, failures=0)
        publisher().soon(wake)

    def ended(self, moved: Moved) -> None:
        if moved.telling_id is not None:
            self._teller.soon(Telling(moved.telling_id, moved.job.id))

    def _wake(self, offer: Offer) -> None:
        """Publish an offer of a job that has waited, and may have run."""
        headers = self._store.headers(offer.job_id)
        if headers is not None:
            _, priority, failures, _ = headers
            messages.publish(offer, priority, failures)
