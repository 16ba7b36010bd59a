"""A process's copy of the catalog, at most a second old.

Each process reads the catalog's version at most once a second, and what has changed when it is another.  The copy in
Redis is written by the process that changes the catalog, and by the sweep.
"""

import threading
import time
from collections.abc import Callable

from slotkeeper.db.time_limits import LOOK_S, time_limit
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.snapshot import CatalogSnapshot, Model


class CatalogCache:
    """The catalog as a process uses it.  Thread-safe."""

    def __init__(self, catalog: Catalog, refresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._refresh_s = refresh_s
        self._clock = clock
        self._lock = threading.Lock()
        self._snapshot: CatalogSnapshot | None = None
        self._checked = 0.0

    def get(self) -> CatalogSnapshot:
        """Return the catalog, at most `refresh_s` old.  Raises DatabaseUnavailable only if it was never read."""
        found = self._snapshot
        if found is not None and self._clock() - self._checked < self._refresh_s:
            return found
        return self.refresh()

    def cached(self) -> CatalogSnapshot:
        """Return the catalog as it was last read, without asking the database, for code that must not wait."""
        return self._snapshot or self.refresh()

    def refresh(self) -> CatalogSnapshot:
        """Return the present catalog; the last one that was read while the database is unavailable.

        Threads that ask while another one looks share the next look.
        """
        asked = self._clock()
        with self._lock:
            if self._snapshot is None:
                self._checked = self._clock()
                self._snapshot = self._catalog.read()
            elif self._checked <= asked:
                self._checked = self._clock()
                try:
                    self._snapshot = self._look(self._snapshot)
                except DatabaseUnavailable:
                    self._checked = self._clock()  # Who waited meanwhile does not wait for the same once more.
            return self._snapshot

    def _look(self, known: CatalogSnapshot) -> CatalogSnapshot:
        with time_limit(LOOK_S):
            version = self._catalog.get_version()
        return known if version == known.version else self._catalog.read_after(known)

    def version(self) -> int:
        """Return the version of the catalog in the database.  Raises DatabaseUnavailable."""
        return self._catalog.get_version()

    def resolve(self, name: str) -> Model:
        """Return the model of this name.  Raises UnknownModel, after a second look for one that was just registered."""
        return self.get().model(name) or self.refresh().resolve(name)
