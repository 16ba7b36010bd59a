"""Berths: how many tries of webhooks may be under way at once, in all, for one tenant and for one receiver.

A receiver that never answers holds a try for as long as one may last.  So one that has not shown that it answers gets
one try at a time, and those whose last try failed share a small part of all berths.  Of each part a tenant may have as
many as it leaves free: one alone gets half, and the next always finds room.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import Any

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
