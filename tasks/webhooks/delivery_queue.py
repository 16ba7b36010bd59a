"""Choose the next messages to send: a fair queue of due messages, and limits of concurrent deliveries.

The queue is round robin over tenants, and for each tenant over its receivers.  So a tenant with thousands of receivers
gets no more turns than a tenant with one.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

MAX_PER_HOST = 8  # concurrent deliveries to a receiver whose last delivery succeeded
_MAX_REMEMBERED_HOSTS = 20_000  # receivers whose last result is kept


class LimitGroup(Enum):
    """Deliveries that share a limit.  A delivery may belong to several groups."""

    ALL = "all"
    UNPROVEN = "unproven"  # to receivers whose last delivery failed, or that have had none
    FAILING = "failing"  # to receivers whose last delivery failed


MAX_IN_GROUP = {LimitGroup.ALL: 512, LimitGroup.UNPROVEN: 400, LimitGroup.FAILING: 128}


class DeliveryLimits:
    """Counts the deliveries in progress and limits them.  Not thread-safe: the caller holds a lock.

    `host`, in all methods: the receiver, as in `DueMessage`.
    """

    def __init__(self) -> None:
        self._hosts: Counter[str] = Counter()
        self._taken: Counter[LimitGroup] = Counter()
        self._taken_by_tenant: Counter[tuple[str, LimitGroup]] = Counter()
        self._last_results: OrderedDict[str, bool] = OrderedDict()  # host -> whether its last delivery succeeded

    @property
    def running(self) -> int:
        """The number of deliveries in progress."""
        return self._taken[LimitGroup.ALL]

    def may_send_for(self, tenant: str) -> bool:
        """Return whether one more delivery for this tenant may start to a receiver whose last delivery succeeded."""
        return self._has_permit(tenant, LimitGroup.ALL)

    def may_send(self, host: str, tenant: str) -> bool:
        """Return whether one more delivery to this host for this tenant may start."""
        last_succeeded = self._last_results.get(host)
        if not all(self._has_permit(tenant, group) for group in _groups_of(last_succeeded)):
            return False
        return self._hosts[host] < (MAX_PER_HOST if last_succeeded else 1)

    def _has_permit(self, tenant: str, group: LimitGroup) -> bool:
        # A tenant may use at most as many as it leaves free, so there is always a share for the next tenant.
        return self._taken_by_tenant[tenant, group] < MAX_IN_GROUP[group] - self._taken[group]

    def acquire(self, host: str, tenant: str) -> "Permit":
        """Count a delivery that starts, and return its permit.  The limits are not checked."""
        permit = Permit(host, tenant, self._last_results.get(host))
        self._hosts[host] += 1
        for group in _groups_of(permit.last_succeeded):
            self._taken[group] += 1
            self._taken_by_tenant[tenant, group] += 1
        return permit

    def release(self, permit: "Permit", succeeded: bool | None) -> None:
        """Count a delivery that has ended.  `succeeded` None: nothing was sent."""
        _decrement(self._hosts, permit.host)
        for group in _groups_of(permit.last_succeeded):
            _decrement(self._taken, group)
            _decrement(self._taken_by_tenant, (permit.tenant, group))
        if succeeded is not None:
            self._last_results[permit.host] = succeeded
            self._last_results.move_to_end(permit.host)
            if len(self._last_results) > _MAX_REMEMBERED_HOSTS:
                self._last_results.popitem(last=False)


class Permit:
    """One delivery in progress.

    last_succeeded: whether the delivery before it to the same host succeeded; None: there was none.
    """

    __slots__ = ("host", "last_succeeded", "tenant")

    def __init__(self, host: str, tenant: str, last_succeeded: bool | None) -> None:
        self.host, self.tenant, self.last_succeeded = host, tenant, last_succeeded


def _groups_of(last_succeeded: bool | None) -> Iterator[LimitGroup]:
    yield LimitGroup.ALL
    if not last_succeeded:
        yield LimitGroup.UNPROVEN
    if last_succeeded is False:
        yield LimitGroup.FAILING


def _decrement(counter: Counter[Any], key: Any) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


_MAX_PER_RECEIVER = 256  # queued messages of one tenant and receiver
_MAX_QUEUED = 50_000  # messages; above it, one for each tenant and receiver
_MAX_RECEIVERS_CHECKED = 32  # receivers of a tenant in one turn


@dataclass(frozen=True, slots=True)
class DueMessage:
    """A message that is due.

    receiver: the key of its limits: the id of a webhook, or the host of a job's `callback_url`.
    """

    id: Hashable
    receiver: str
    tenant: str


def host_of_url(url: str) -> str:
    """Return the host and port of a URL, without user name; the URL itself if it cannot be parsed."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2].lower() or url
    except ValueError:
        return url


CanSend = Callable[[str, str], bool]
"""Returns whether a message for this receiver and tenant may be sent at once."""


class FairQueue:
    """Queues due messages by tenant and receiver, each message once.  Not thread-safe."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, deque[DueMessage]]] = OrderedDict()
        self._ids: set[Hashable] = set()

    def add(self, due: DueMessage) -> None:
        """Queue a message, unless it is queued already or the limit is reached; a later poll finds it again then."""
        queues = self._tenants.setdefault(due.tenant, OrderedDict())
        queue = queues.setdefault(due.receiver, deque())
        # Also a full queue accepts the first message of each receiver, so that a backlog does not block the others.
        limit = _MAX_PER_RECEIVER if len(self._ids) < _MAX_QUEUED else 1
        if due.id not in self._ids and len(queue) < limit:
            queue.append(due)
            self._ids.add(due.id)

    def take(self, limits: DeliveryLimits, limit: int) -> list[tuple[DueMessage, Permit]]:
        """Remove and return up to `limit` messages that may be sent at once, each with its acquired permit.

        Tenants take turns, one message a turn.
        """
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
        """Return the tenant's next receiver within its limits; None: none was found in this turn.

        Receivers that are at their limit move to the end, so that the next turn checks others.
        """
        queues = self._tenants[tenant]
        if not limits.may_send_for(tenant):
            return None
        for _ in range(min(_MAX_RECEIVERS_CHECKED, len(queues))):
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
