"""How the outside is told of offers and ends: by Celery."""

from functools import partial

from routing.queue.queues import Offer
from slotkeeper.jobs.store import JobStore, Transition
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.outbox.result_notifications import ResultNotification
from tasks import offer_messages
from tasks.publisher import publish_queue
from tasks.results import ResultNotifier


class CeleryNotifier:
    """Publishes wake-ups, and has Celery's clients told."""

    def __init__(self, store: JobStore, teller: ResultNotifier) -> None:
        self._store, self._teller = store, teller

    def wake_worker(self, offer: Offer, new: QueuedJob | None) -> None:
        wake = (
            partial(self._wake, offer)
            if new is None
            else partial(offer_messages.publish_offer, offer, new.priority, failures=0)
        )
        publish_queue().put(wake)

    def notify_ended(self, moved: Transition) -> None:
        if moved.notification_id is not None:
            self._teller.put(ResultNotification(moved.notification_id, moved.job.id))

    def _wake(self, offer: Offer) -> None:
        """Publish an offer of a job that has waited, and may have run."""
        headers = self._store.get_message_headers(offer.job_id)
        if headers is not None:
            _, priority, failures, _ = headers
            offer_messages.publish_offer(offer, priority, failures)
