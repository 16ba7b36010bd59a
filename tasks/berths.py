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


class Part(Enum):
    """Berths that are counted together.  A try may belong to several parts."""

    ALL = "all"
    UNPROVEN = "unproven"  # to receivers whose last try did not succeed, or that were never tried
    FAILING = "failing"  # to receivers whose last try failed


MOST = {Part.ALL: 512, Part.UNPROVEN: 400, Part.FAILING: 128}


class Berths:
    """Counts the tries under way.  Not safe between threads: its owner has the lock."""

    def __init__(self) -> None:
        self._hosts: Counter[str] = Counter()
        self._taken: Counter[Part] = Counter()
        self._of_tenants: Counter[tuple[str, Part]] = Counter()
        self._answers: OrderedDict[str, bool] = OrderedDict()  # receiver -> whether its last try succeeded

    @property
    def taken(self) -> int:
        return self._taken[Part.ALL]

    def has_room_for(self, tenant: str) -> bool:
        """Whether one more try of this tenant may begin, if its receiver answers."""
        return self._has_room(tenant, Part.ALL)

    def admits(self, host: str, tenant: str) -> bool:
        """Whether one more try may begin."""
        standing = self._answers.get(host)
        if not all(self._has_room(tenant, part) for part in _parts(standing)):
            return False
        return self._hosts[host] < (MOST_OF_HOST if standing else 1)

    def _has_room(self, tenant: str, part: Part) -> bool:
        return self._of_tenants[tenant, part] < MOST[part] - self._taken[part]

    def take(self, host: str, tenant: str) -> "Berth":
        """Begin a try."""
        berth = Berth(host, tenant, self._answers.get(host))
        self._hosts[host] += 1
        for part in _parts(berth.standing):
            self._taken[part] += 1
            self._of_tenants[tenant, part] += 1
        return berth

    def leave(self, berth: "Berth", answered: bool | None) -> None:
        """End a try; `answered` None: it was not made after all."""
        _lower(self._hosts, berth.host)
        for part in _parts(berth.standing):
            _lower(self._taken, part)
            _lower(self._of_tenants, (berth.tenant, part))
        if answered is not None:
            self._answers[berth.host] = answered
            self._answers.move_to_end(berth.host)
            if len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)


class Berth:
    """One try under way.  `standing`: whether the receiver's last try had succeeded; None: it was never tried."""

    __slots__ = ("host", "standing", "tenant")

    def __init__(self, host: str, tenant: str, standing: bool | None) -> None:
        self.host, self.tenant, self.standing = host, tenant, standing


def _parts(standing: bool | None) -> Iterator[Part]:
    yield Part.ALL
    if not standing:
        yield Part.UNPROVEN
    if standing is False:
        yield Part.FAILING


def _lower(counter: Counter[Any], key: Any) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
