"""What a drill is played on, and which faults that allows."""

from collections.abc import Sequence
from dataclasses import dataclass

from tools.cluster import process_clocks
from tools.drill.fault_schedule import OUTSIDE, Kind

SQLITE, POSTGRESQL = "sqlite", "postgresql"


@dataclass(frozen=True, slots=True)
class DrillSetup:
    """What stands there."""

    workers: int = 2
    slots: int = 8
    database: str = SQLITE
    """SQLITE, POSTGRESQL for one of our own, or the URL of an empty database of PostgreSQL."""
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
        """Then the broker has a Valkey of its own, too, so that it can fail without the waiting room."""
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
    """Why this kind of fault cannot happen here; None: it can."""
    match kind:
        case Kind.COMMITS if database == SQLITE:
            return "SQLite has no connection on which the answer to a COMMIT could be lost: --database postgresql"
        case Kind.DATABASE if database == SQLITE:
            return "SQLite has no process that could be killed: --database postgresql"
        case Kind.DATABASE if database != POSTGRESQL:
            return "a database that the drill has not started is not killed"
        case Kind.CLOCK | Kind.STEP if process_clocks.library() is None:
            return "libfaketime is not installed (Debian: apt-get install faketime)"
    return None
