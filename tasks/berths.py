"""Berths: how many tries of webhooks may be under way at once, in all, for one tenant and for one receiver.

A receiver that never answers holds a try for as long as one may last.  So one that has not shown that it answers gets
one try at a time, those whose last try failed share a small part of all berths, and no tenant gets them all.
"""

from collections import Counter, OrderedDict

MOST = 512  # tries under way in all
MOST_OF_TENANT = 400
MOST_UNPROVEN = 400  # to receivers whose last try did not succeed, or that were never tried
MOST_FAILING = 128  # to receivers whose last try failed
MOST_OF_HOST = 8  # to a receiver that answers
_REMEMBERED = 20_000  # receivers


class Berths:
    """Counts the tries under way.  Not safe between threads: its owner has the lock."""

    def __init__(self) -> None:
        self._hosts: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()
        self._taken: Counter[bool | None] = Counter()  # by how the receiver stood when the try began
        self._answers: OrderedDict[str, bool] = OrderedDict()  # receiver -> whether its last try succeeded

    @property
    def taken(self) -> int:
        return self._taken.total()

    def admits(self, host: str, tenant: str) -> bool:
        """Whether one more try may begin."""
        standing = self._answers.get(host)
        if self.taken >= MOST or self._tenants[tenant] >= MOST_OF_TENANT:
            return False
        if standing:
            return self._hosts[host] < MOST_OF_HOST
        if standing is False and self._taken[False] >= MOST_FAILING:
            return False
        return self._hosts[host] == 0 and self._taken[False] + self._taken[None] < MOST_UNPROVEN

    def take(self, host: str, tenant: str) -> "Berth":
        """Begin a try."""
        berth = Berth(host, tenant, self._answers.get(host))
        self._hosts[host] += 1
        self._tenants[tenant] += 1
        self._taken[berth.standing] += 1
        return berth

    def leave(self, berth: "Berth", answered: bool | None) -> None:
        """End a try; `answered` None: it was not made after all."""
        for counter, key in ((self._hosts, berth.host), (self._tenants, berth.tenant)):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]
        self._taken[berth.standing] -= 1
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
