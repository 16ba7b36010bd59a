"""How the outside is told of offers and ends: by Celery."""

from functools import partial

from jobs.store import Moved
from jobs.tellings import Telling
from routing.queues import Offer
from tasks import messages
from tasks.publisher import publisher
from tasks.telling import teller


class CeleryAnnouncer:
    """Publishes wake-ups, and has webhooks sent and Celery's clients told."""

    def offered(self, offer: Offer) -> None:
        publisher().soon(partial(_wake, offer))

    def ended(self, moved: Moved, *, by_worker: bool) -> None:
        if moved.telling_id is not None:
            teller().soon(Telling(moved.telling_id, moved.job.id))


def _wake(offer: Offer) -> None:
    from tasks.wiring import dispatcher

    headers = dispatcher().store.headers(offer.job_id)
    if headers is not None:
        _, tier, failures, _ = headers
        messages.publish(offer, tier, failures)
