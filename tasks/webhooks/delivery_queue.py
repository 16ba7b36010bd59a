"""Messages that are due and not begun: tenants take turns, and of each tenant its receivers do.

So a tenant with thousands of receivers has no more turns than one with a single receiver.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from urllib.parse import urlsplit

from tasks.berths import DeliveryLimits, Permit

_MAX_PER_RECEIVER = 256  # messages of one receiver and tenant that are remembered as due
_MAX_REMEMBERED = 50_000
_MAX_RECEIVERS_TRIED = 32  # receivers of a tenant that one turn looks at


@dataclass(frozen=True, slots=True)
class DueMessage:
    """A message that is due.  `receiver`: whom it is for, as far as its bounds are concerned."""

    id: Hashable
    receiver: str
    tenant: str


def host_of_url(url: str) -> str:
    """Whom a message is for, as far as its bounds are concerned."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2].lower() or url
    except ValueError:
        return url


CanSend = Callable[[str, str], bool]
"""Whether a message of this receiver and tenant could begin now."""


class FairQueue:
    """A line for each tenant and receiver.  Not safe between threads."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, deque[DueMessage]]] = OrderedDict()
        self._ids: set[Hashable] = set()

    def add(self, due: DueMessage) -> None:
        queues = self._tenants.setdefault(due.tenant, OrderedDict())
        queue = queues.setdefault(due.receiver, deque())
        limit = (
            _MAX_PER_RECEIVER if len(self._ids) < _MAX_REMEMBERED else 1
        )  # Others' piles leave room for everybody's first.
        if due.id not in self._ids and len(queue) < limit:
            queue.append(due)
            self._ids.add(due.id)

    def take(self, limits: DeliveryLimits, limit: int) -> list[tuple[DueMessage, Permit]]:
        """Up to `limit` messages that may begin now, one of each tenant in turn."""
        taken: list[tuple[DueMessage, Permit]] = []
        turns = deque(self._tenants)
        while turns and len(taken) < limit:
            tenant = turns.popleft()
            receiver = self._next_receiver(limits, tenant)
            if receiver is None:
                continue
            taken.append((self._pop(tenant, receiver), limits.acquire(receiver, tenant)))
            if tenant in self._tenants:
                self._tenants.move_to_end(tenant)
                turns.append(tenant)
        return taken

    def _next_receiver(self, limits: DeliveryLimits, tenant: str) -> str | None:
        """The tenant's next receiver that may be tried.  Those looked at in vain go behind the others."""
        queues = self._tenants[tenant]
        if not limits.may_send_for(tenant):
            return None
        for _ in range(min(_MAX_RECEIVERS_TRIED, len(queues))):
            receiver = next(iter(queues))
            if limits.may_send(receiver, tenant):
                return receiver
            queues.move_to_end(receiver)
        return None

    def _pop(self, tenant: str, receiver: str) -> DueMessage:
        queues = self._tenants[tenant]
        message = queues[receiver].popleft()
        self._ids.discard(message.id)
        if queues[receiver]:
            queues.move_to_end(receiver)
        else:
            del queues[receiver]
        if not queues:
            del self._tenants[tenant]
        return message
