"""By what a worker goes in its runs, as the catalog says: found out once for all that are alike."""

from collections.abc import Callable, Hashable
from typing import TypeVar, TypeVarTuple

from registry.cache import CatalogCache
from registry.catalog import Snapshot
from registry.values import attribute_text

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Ways:
    """Remembers what follows from the catalog for as long as that stays the same.  For the loop's thread alone."""

    def __init__(self, catalog: CatalogCache) -> None:
        self._catalog = catalog
        self._known: Snapshot | None = None
        self._found: dict[Hashable, object] = {}

    def find(self, find: Callable[[Snapshot, *Ts], T], *of: *Ts) -> T:
        """What `find` finds in the catalog as it was last read, for these.  Raises what it raises, again each time."""
        known = self._catalog.known()
        if known is not self._known:
            self._known, self._found = known, {}
        key = find, of
        try:
            return self._found[key]  # type: ignore[return-value]
        except KeyError:
            found = self._found[key] = find(known, *of)
            return found


def version_at(catalog: Snapshot, server: str, model: str) -> str:
    """Return a model's version, as its server was registered for it; "": it was registered without."""
    found = catalog.servers.get(server)
    return "" if found is None else attribute_text(found.declared(model, "model_version") or "")


def has_one_slot(catalog: Snapshot, server: str) -> bool:
    """Return whether a server has no more than one slot."""
    found = catalog.servers.get(server)
    return found is not None and found.slots == 1
