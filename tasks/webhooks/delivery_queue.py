"""Messages that are due and not begun: tenants take turns, and of each tenant its receivers do.

So a tenant with thousands of receivers has no more turns than one with a single receiver.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from urllib.parse import urlsplit

from tasks.berths import DeliveryLimits, Permit

_KEPT_OF_LINE = 256  # messages of one receiver and tenant that are remembered as due
_MANY = 50_000
_LOOKS = 32  # receivers of a tenant that one turn looks at


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
        lines = self._tenants.setdefault(due.tenant, OrderedDict())
        line = lines.setdefault(due.receiver, deque())
        most = _KEPT_OF_LINE if len(self._ids) < _MANY else 1  # Others' piles leave room for everybody's first.
        if due.id not in self._ids and len(line) < most:
            line.append(due)
            self._ids.add(due.id)

    def take(self, berths: DeliveryLimits, most: int) -> list[tuple[DueMessage, Permit]]:
        """Up to `most` messages that may begin now, one of each tenant in turn."""
        taken: list[tuple[DueMessage, Permit]] = []
        turns = deque(self._tenants)
        while turns and len(taken) < most:
            tenant = turns.popleft()
            receiver = self._next_receiver(berths, tenant)
            if receiver is None:
                continue
            taken.append((self._pop(tenant, receiver), berths.take(receiver, tenant)))
            if tenant in self._tenants:
                self._tenants.move_to_end(tenant)
                turns.append(tenant)
        return taken

    def _next_receiver(self, berths: DeliveryLimits, tenant: str) -> str | None:
        """The tenant's next receiver that may be tried.  Those looked at in vain go behind the others."""
        lines = self._tenants[tenant]
        if not berths.has_room_for(tenant):
            return None
        for _ in range(min(_LOOKS, len(lines))):
            receiver = next(iter(lines))
            if berths.admits(receiver, tenant):
                return receiver
            lines.move_to_end(receiver)
        return None

    def _pop(self, tenant: str, receiver: str) -> DueMessage:
        lines = self._tenants[tenant]
        message = lines[receiver].popleft()
        self._ids.discard(message.id)
        if lines[receiver]:
            lines.move_to_end(receiver)
        else:
            del lines[receiver]
        if not lines:
            del self._tenants[tenant]
        return message
