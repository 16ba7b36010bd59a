"""One fleet's, or one job's, error is no other's."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from redis.exceptions import ConnectionError, TimeoutError

from slotkeeper.errors import DatabaseUnavailable

log = structlog.get_logger(__name__)

# Redis or the database is away, for everybody.
OUTAGES = (ConnectionError, TimeoutError, DatabaseUnavailable)


@contextmanager
def isolate_errors(act: str, **whose: str) -> Iterator[None]:
    """Log what goes wrong inside and go on; but that Redis or the database is away is raised."""
    try:
        yield
    except OUTAGES:
        raise
    except Exception as error:
        log.error(f"{act}_failed", error=repr(error), **whose)
