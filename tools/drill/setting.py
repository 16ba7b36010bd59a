"""The cluster that a drill runs on, and which faults it allows."""

from collections.abc import Sequence
from dataclasses import dataclass

from tools.cluster import process_clocks
from tools.drill.fault_schedule import OUTSIDE, Kind

SQLITE, POSTGRESQL = "sqlite", "postgresql"


@dataclass(frozen=True, slots=True)
class DrillSetup:
    """The processes of a drill's cluster, and the faults that it must be ready for."""

    workers: int = 2
    slots: int = 8
    database: str = SQLITE
    """SQLITE; POSTGRESQL: the drill starts a server; or the URL of an empty PostgreSQL database."""
    kinds: Sequence[Kind] = ()
    seed: int = 0

    @property
    def owns_postgres(self) -> bool:
        return self.database == POSTGRESQL

    @property
    def has_postgres(self) -> bool:
        return self.database != SQLITE

    @property
    def has_proxy(self) -> bool:
        """Whether processes reach their servers through a proxy.

        The broker then has a separate Valkey too, so that it can fail without the queues.
        """
        return bool(OUTSIDE & set(self.kinds))

    @property
    def has_replica(self) -> bool:
        return bool({Kind.STALE, Kind.FAILOVER} & set(self.kinds))

    @property
    def has_receivers(self) -> bool:
        return Kind.RECEIVERS in self.kinds

    @property
    def has_unread_log(self) -> bool:
        return Kind.UNREAD in self.kinds

    @property
    def has_clocks(self) -> bool:
        return bool({Kind.CLOCK, Kind.STEP} & set(self.kinds))


def unavailable_reason(kind: Kind, database: str) -> str | None:
    """Return why this kind of fault cannot happen here; None: it can."""
    match kind:
        case Kind.COMMITS if database == SQLITE:
            return "SQLite has no connection that could lose the answer to a COMMIT; use --database postgresql"
        case Kind.DATABASE if database == SQLITE:
            return "SQLite has no process that could be killed; use --database postgresql"
        case Kind.DATABASE if database != POSTGRESQL:
            return "the drill kills only a database that it has started itself"
        case Kind.CLOCK | Kind.STEP if process_clocks.library() is None:
            return "libfaketime is not installed (Debian: apt-get install faketime)"
    return None
