"""The request, as Celery calls it, of a run that no message brought, or whose message has done its work.

Little of it is needed where nobody looks.
"""

from collections.abc import Callable, Mapping
from typing import Any

from celery.utils.functional import noop
from celery.worker.request import Request
from celery.worker.state import task_ready

from routing.queues import Offer
from tasks import messages

Whole = Callable[[Offer, int, Mapping[str, Any]], Request]
"""Makes all of a request, of what an OwnRequest is made of."""


def own_requests(base: Any, whole: Whole, task: Any, eventer: Any) -> Any:
    """A class like `base`, made of an offer, of the failures before it, and of how it came (messages.HANDED_ON)."""

    class OwnRequest(base):
        """Has what every run is asked for; for the rest a whole one is made when somebody asks, as `inspect` does."""

        name = _type = messages.TASK
        carries_offer = True
        _task, _eventer = task, eventer
        _parent_id = None
        _connection_errors = ()
        _on_ack = staticmethod(noop)

        def __init__(self, offer: Offer, failures: int, way: Mapping[str, Any]) -> None:
            self._told = offer, failures, way
            self.id = self._root_id = offer.job_id
            self._argsrepr, self._kwargsrepr = messages.written_args(offer.model)

        def on_success(self, failed__retval__runtime: Any, **_: Any) -> None:
            """As Celery does, but its id is not kept among those that a message may bring a second time."""
            task_ready(self)

        def __getattr__(self, name: str) -> Any:
            if name == "_whole":  # Two threads that ask at once get the same.
                return self.__dict__.setdefault(name, whole(*self.__dict__["_told"]))
            return getattr(self._whole, name)

    return OwnRequest
