"""Messages that are due and not begun: tenants take turns, and of each tenant its receivers do.

So a tenant with thousands of receivers has no more turns than one with a single receiver.
"""

from collections import OrderedDict, deque
from urllib.parse import urlsplit

from jobs.webhooks import Due
from tasks.berths import Berth, Berths

_KEPT_OF_LINE = 256  # messages of one receiver and tenant that are remembered as due
_MANY = 50_000
_LOOKS = 32  # receivers of a tenant that one turn looks at


def host_of(url: str) -> str:
    """Whom a message is for, as far as its bounds are concerned."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2].lower() or url
    except ValueError:
        return url


class Lines:
    """A line for each tenant and receiver.  Not safe between threads."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, deque[str]]] = OrderedDict()
        self._ids: set[str] = set()

    def add(self, due: Due) -> None:
        lines = self._tenants.setdefault(due.tenant, OrderedDict())
        line = lines.setdefault(host_of(due.url), deque())
        most = _KEPT_OF_LINE if len(self._ids) < _MANY else 1  # Others' piles leave room for everybody's first.
        if due.id not in self._ids and len(line) < most:
            line.append(due.id)
            self._ids.add(due.id)

    def take(self, berths: Berths, most: int) -> list[tuple[str, Berth]]:
        """Up to `most` messages that may begin now, one of each tenant in turn."""
        taken: list[tuple[str, Berth]] = []
        turns = deque(self._tenants)
        while turns and len(taken) < most:
            tenant = turns.popleft()
            host = self._next_host(berths, tenant)
            if host is None:
                continue
            taken.append((self._pop(tenant, host), berths.take(host, tenant)))
            if tenant in self._tenants:
                self._tenants.move_to_end(tenant)
                turns.append(tenant)
        return taken

    def _next_host(self, berths: Berths, tenant: str) -> str | None:
        """The tenant's next receiver that may be tried.  Those looked at in vain go behind the others."""
        lines = self._tenants[tenant]
        if not berths.has_room_for(tenant):
            return None
        for _ in range(min(_LOOKS, len(lines))):
            host = next(iter(lines))
            if berths.admits(host, tenant):
                return host
            lines.move_to_end(host)
        return None

    def _pop(self, tenant: str, host: str) -> str:
        lines = self._tenants[tenant]
        message = lines[host].popleft()
        self._ids.discard(message)
        if lines[host]:
            lines.move_to_end(host)
        else:
            del lines[host]
        if not lines:
            del self._tenants[tenant]
        return message
