"""Messages that are due and not begun: tenants take turns, and of each tenant its receivers do.

So a tenant with thousands of receivers has no more turns than one with a single receiver.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

MAX_PER_HOST = 8  # to a receiver that answers
_MAX_REMEMBERED_HOSTS = 20_000  # receivers


class LimitGroup(Enum):
    """Berths that are counted together.  A try may belong to several parts."""

    ALL = "all"
    UNPROVEN = "unproven"  # to receivers whose last try did not succeed, or that were never tried
    FAILING = "failing"  # to receivers whose last try failed


MAX_IN_GROUP = {LimitGroup.ALL: 512, LimitGroup.UNPROVEN: 400, LimitGroup.FAILING: 128}


class DeliveryLimits:
    """Counts the tries under way.  Not safe between threads: its owner has the lock."""

    def __init__(self) -> None:
        self._hosts: Counter[str] = Counter()
        self._taken: Counter[LimitGroup] = Counter()
        self._taken_by_tenant: Counter[tuple[str, LimitGroup]] = Counter()
        self._last_results: OrderedDict[str, bool] = OrderedDict()  # receiver -> whether its last try succeeded

    @property
    def running(self) -> int:
        return self._taken[LimitGroup.ALL]

    def may_send_for(self, tenant: str) -> bool:
        """Whether one more try of this tenant may begin, if its receiver answers."""
        return self._has_permit(tenant, LimitGroup.ALL)

    def may_send(self, host: str, tenant: str) -> bool:
        """Whether one more try may begin."""
        last_try_succeeded = self._last_results.get(host)
        if not all(self._has_permit(tenant, group) for group in _groups_of(last_try_succeeded)):
            return False
        return self._hosts[host] < (MAX_PER_HOST if last_try_succeeded else 1)

    def _has_permit(self, tenant: str, group: LimitGroup) -> bool:
        return self._taken_by_tenant[tenant, group] < MAX_IN_GROUP[group] - self._taken[group]

    def acquire(self, host: str, tenant: str) -> "Permit":
        """Begin a try."""
        permit = Permit(host, tenant, self._last_results.get(host))
        self._hosts[host] += 1
        for group in _groups_of(permit.last_try_succeeded):
            self._taken[group] += 1
            self._taken_by_tenant[tenant, group] += 1
        return permit

    def release(self, permit: "Permit", succeeded: bool | None) -> None:
        """End a try; `succeeded` None: it was not made after all."""
        _decrement(self._hosts, permit.host)
        for group in _groups_of(permit.last_try_succeeded):
            _decrement(self._taken, group)
            _decrement(self._taken_by_tenant, (permit.tenant, group))
        if succeeded is not None:
            self._last_results[permit.host] = succeeded
            self._last_results.move_to_end(permit.host)
            if len(self._last_results) > _MAX_REMEMBERED_HOSTS:
                self._last_results.popitem(last=False)


class Permit:
    """One delivery under way.  `last_try_succeeded`: how the receiver's last delivery ended; None: there was none."""

    __slots__ = ("host", "last_try_succeeded", "tenant")

    def __init__(self, host: str, tenant: str, last_try_succeeded: bool | None) -> None:
        self.host, self.tenant, self.last_try_succeeded = host, tenant, last_try_succeeded


def _groups_of(last_try_succeeded: bool | None) -> Iterator[LimitGroup]:
    yield LimitGroup.ALL
    if not last_try_succeeded:
        yield LimitGroup.UNPROVEN
    if last_try_succeeded is False:
        yield LimitGroup.FAILING


def _decrement(counter: Counter[Any], key: Any) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


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
