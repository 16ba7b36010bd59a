"""All connections, and the bytes that are held for each owner.  Where there is no room, somebody gives way.

Of connections the one that has been silent for longest goes; one that is being answered stays.  So whoever holds
connections without using them loses them to whoever does, and a client that sends its request at once cannot be kept
out.  Half of the places is for those that have shown a valid key.  Of bytes whoever holds most gives way.
"""

from collections import Counter, OrderedDict
from itertools import chain
from typing import Protocol

_SHARE = 4  # An owner may hold one fourth of all bytes,
_OF_ADDRESS = (3, 4)  # an address three fourths of all connections.


class Guest(Protocol):
    """A connection, as far as the crowd looks at it."""

    address: str
    bytes_owner: str
    bytes_held: int

    @property
    def is_served(self) -> bool:
        """It waits for an answer."""

    def give_way(self) -> None:
        """Close at once."""

    def tick(self, now_s: float) -> None:
        """Close what takes too long."""

    def close_if_idle(self) -> None:
        """The process stops."""


class Crowd:
    """Counts them."""

    def __init__(self, most_connections: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most_connections, most_bytes
        # In each the one that was silent for longest comes first.
        self._strangers: OrderedDict[Guest, None] = OrderedDict()
        self._trusted: OrderedDict[Guest, None] = OrderedDict()
        self._addresses: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._held_by_all = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._strangers) + len(self._trusted)

    def guests(self) -> list[Guest]:
        return [*self._strangers, *self._trusted]

    def enter(self, guest: Guest) -> None:
        """Take a new connection in; another gives way if there is no room."""
        of_address = self.most * _OF_ADDRESS[0] // _OF_ADDRESS[1]
        if self._addresses[guest.address] >= of_address:
            self._evict(guest.address)
        elif len(self) >= self.most:
            self._evict(None)
        self._strangers[guest] = None
        self._addresses[guest.address] += 1

    def trust(self, guest: Guest) -> None:
        """It has shown a valid key."""
        if guest in self._strangers:
            del self._strangers[guest]
            self._trusted[guest] = None

    def heard(self, guest: Guest) -> None:
        """It has just sent something."""
        for part in (self._strangers, self._trusted):
            if guest in part:
                part.move_to_end(guest)

    def leave(self, guest: Guest) -> None:
        if guest not in self._strangers and guest not in self._trusted:
            return
        self._strangers.pop(guest, None)
        self._trusted.pop(guest, None)
        self.release(guest)
        self._addresses[guest.address] -= 1
        if not self._addresses[guest.address]:
            del self._addresses[guest.address]

    def _evict(self, address: str | None) -> None:
        """Let the one go that was silent for longest, of those at `address`; of strangers, if they hold half."""
        parts = [self._trusted, self._strangers]
        if len(self._strangers) >= self.most // 2:
            parts.reverse()
        there = (guest for guest in chain(*parts) if address in (None, guest.address))
        first = next(there, None)
        gone = next((guest for guest in chain([first], there) if guest and not guest.is_served), None)
        gone = gone or first  # All of them wait for answers: who came first has had most time.
        if gone is not None:
            self._send_away(gone)

    def _send_away(self, guest: Guest) -> None:
        self.evicted += 1
        self.leave(guest)
        guest.give_way()

    # -- bytes -------------------------------------------------------------------------------------------------

    def hold(self, guest: Guest, owner: str, size: int, *, whole: bool = False) -> bool:
        """Keep `size` bytes more for it.  False: its owner holds its share already, and nothing is kept.

        `whole`: its owner may hold all.
        """
        if self._held[owner] + size > (self.most_bytes if whole else self.most_bytes // _SHARE):
            return False
        guest.bytes_owner = owner
        guest.bytes_held += size
        self._held[owner] += size
        self._held_by_all += size
        while self._held_by_all > self.most_bytes and self._relieve(guest):
            pass
        return True

    def release(self, guest: Guest) -> None:
        """Nothing is kept for it any more."""
        size, guest.bytes_held = guest.bytes_held, 0
        self._held_by_all -= size
        self._held[guest.bytes_owner] -= size
        if not self._held[guest.bytes_owner]:
            del self._held[guest.bytes_owner]

    def _relieve(self, spared: Guest) -> bool:
        """Let the largest holding of whoever holds most go.  False: there is none that can."""
        greediest = self._held.most_common(1)[0][0]
        holding = [it for it in self.guests() if it.bytes_held and it.bytes_owner == greediest and not it.is_served]
        holding = [it for it in holding if it is not spared]
        if not holding:
            return False
        self._send_away(max(holding, key=lambda it: it.bytes_held))
        return True
