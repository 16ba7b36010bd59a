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

    def __init__(self, store: JobStore, result_notifier: ResultNotifier) -> None:
        self._store, self._result_notifier = store, result_notifier

    def wake_worker(self, offer: Offer, new: QueuedJob | None) -> None:
        publish = (
            partial(self._publish_waiting_job, offer)
            if new is None
            else partial(offer_messages.publish_offer, offer, new.priority, failures=0)
        )
        publish_queue().put(publish)

    def notify_ended(self, transition: Transition) -> None:
        if transition.notification_id is not None:
            self._result_notifier.put(ResultNotification(transition.notification_id, transition.job.id))

    def _publish_waiting_job(self, offer: Offer) -> None:
        """Publish an offer of a job that has waited, and may have run."""
        headers = self._store.get_message_headers(offer.job_id)
        if headers is not None:
            _, priority, failures, _ = headers
            offer_messages.publish_offer(offer, priority, failures)
