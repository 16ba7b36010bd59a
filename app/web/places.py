"""Places that are bounded for each owner, and for all together."""

from collections import Counter


class Places:
    """Of one kind.  Called from the event loop's thread only."""

    def __init__(self, most: int, share: int) -> None:
        """`share`: that one owner may have."""
        self.most, self.share = most, max(share, 1)
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._taken.total()

    def take(self, owner: str) -> bool:
        """False: there is none."""
        if len(self) >= self.most or self._taken[owner] >= self.share:
            return False
        self._taken[owner] += 1
        return True

    def free(self, owner: str) -> None:
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
