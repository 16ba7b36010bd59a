"""The registry as processes use it: a copy of the catalog, never older than a moment.

The record holds the truth.  Each process asks for its version at most once a second, and reads it again when
it has changed; the copy in Redis is written by whoever changes the catalog, and by the sweep.
"""

import threading
import time
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from slotkeeper.errors import DatabaseUnavailable, UnknownModel
from slotkeeper.registry.catalog import Catalog, CatalogSnapshot, Model

_FEW_LETTERS, _MOST_COMPARED = 3, 200  # A comparison takes up to 0.1 ms, and anybody may mistype.


class CatalogCache:
    """A process's view of models and servers.  Safe between threads."""

    def __init__(self, catalog: Catalog, refresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._refresh_s = refresh_s
        self._clock = clock
        self._lock = threading.Lock()
        self._snapshot: CatalogSnapshot | None = None
        self._checked = 0.0

    def get(self) -> CatalogSnapshot:
        """The catalog, at most `refresh_s` old.  Raises RecordUnavailable only if it was never read."""
        found = self._snapshot
        if found is not None and self._clock() - self._checked < self._refresh_s:
            return found
        return self.refresh()

    def cached(self) -> CatalogSnapshot:
        """The catalog as it was last read, which somebody else keeps new; waits for nobody if it was ever read."""
        return self._snapshot or self.refresh()

    def refresh(self) -> CatalogSnapshot:
        """The catalog as it stands now; the last one known while the database is away."""
        with self._lock:
            self._checked = self._clock()
            try:
                if self._snapshot is None or self._catalog.get_version() != self._snapshot.version:
                    self._snapshot = self._catalog.read()
            except DatabaseUnavailable:
                if self._snapshot is None:
                    raise
            return self._snapshot

    def version(self) -> int:
        """Of the catalog that the record has at this moment.  Raises RecordUnavailable."""
        return self._catalog.get_version()

    def resolve(self, name: str) -> Model:
        """Return the model; raises UnknownModel, after a second look for one that was registered just now."""
        found = self.get().model(name) or self.refresh().model(name)
        if found is None:
            raise UnknownModel("model", _unknown(name, self.get().models))
        return found


def _unknown(name: str, known: Iterable[str]) -> str:
    alike = [it for it in known if abs(len(it) - len(name)) <= _FEW_LETTERS]
    if near := get_close_matches(name, alike[:_MOST_COMPARED], n=1):
        return f"No model {name!r} is registered; did you mean {near[0]!r}?"
    return (
        f"No model {name!r} is registered; `slotkeeper models list` (GET /admin/models) names those that are, "
        "`slotkeeper servers register` (POST /admin/register) adds one with its server."
    )
