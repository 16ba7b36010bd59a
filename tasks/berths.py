"""Berths: how many tries of webhooks may be under way at once, in all, for one tenant and for one receiver.

A receiver that never answers holds a try for as long as one may last.  So one that has not shown that it answers gets
one try at a time, and those whose last try failed share a small part of all berths.  Of each part a tenant may have as
many as it leaves free: one alone gets half, and the next always finds room.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import Any

MOST_OF_HOST = 8  # to a receiver that answers
_REMEMBERED = 20_000  # receivers


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
        self._of_tenants: Counter[tuple[str, LimitGroup]] = Counter()
        self._answers: OrderedDict[str, bool] = OrderedDict()  # receiver -> whether its last try succeeded

    @property
    def taken(self) -> int:
        return self._taken[LimitGroup.ALL]

    def has_room_for(self, tenant: str) -> bool:
        """Whether one more try of this tenant may begin, if its receiver answers."""
        return self._has_room(tenant, LimitGroup.ALL)

    def admits(self, host: str, tenant: str) -> bool:
        """Whether one more try may begin."""
        last_try_succeeded = self._answers.get(host)
        if not all(self._has_room(tenant, part) for part in _parts(last_try_succeeded)):
            return False
        return self._hosts[host] < (MOST_OF_HOST if last_try_succeeded else 1)

    def _has_room(self, tenant: str, part: LimitGroup) -> bool:
        return self._of_tenants[tenant, part] < MAX_IN_GROUP[part] - self._taken[part]

    def take(self, host: str, tenant: str) -> "Permit":
        """Begin a try."""
        berth = Permit(host, tenant, self._answers.get(host))
        self._hosts[host] += 1
        for part in _parts(berth.last_try_succeeded):
            self._taken[part] += 1
            self._of_tenants[tenant, part] += 1
        return berth

    def release(self, berth: "Permit", answered: bool | None) -> None:
        """End a try; `answered` None: it was not made after all."""
        _lower(self._hosts, berth.host)
        for part in _parts(berth.last_try_succeeded):
            _lower(self._taken, part)
            _lower(self._of_tenants, (berth.tenant, part))
        if answered is not None:
            self._answers[berth.host] = answered
            self._answers.move_to_end(berth.host)
            if len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)


class Permit:
    """One delivery under way.  `last_try_succeeded`: how the receiver's last delivery ended; None: there was none."""

    __slots__ = ("host", "last_try_succeeded", "tenant")

    def __init__(self, host: str, tenant: str, last_try_succeeded: bool | None) -> None:
        self.host, self.tenant, self.last_try_succeeded = host, tenant, last_try_succeeded


def _parts(last_try_succeeded: bool | None) -> Iterator[LimitGroup]:
    yield LimitGroup.ALL
    if not last_try_succeeded:
        yield LimitGroup.UNPROVEN
    if last_try_succeeded is False:
        yield LimitGroup.FAILING


def _lower(counter: Counter[Any], key: Any) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
