"""What the benchmarks share: empty databases, and lines of output."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from migrations import migrate
from tools.cluster.postgres_process import running_postgres


def print_line(text: str) -> None:
    """Print a line at once, also into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def empty_database(backend: str) -> Iterator[str]:
    """Context manager: the URL of a database with tables and no rows.

    backend: "sqlite"; "memory": SQLite in a file system in memory; "postgresql": on a server that is started for it.
    """
    with ExitStack() as stack:
        if backend == "postgresql":
            url = stack.enter_context(running_postgres()).create()
        else:
            folder = Path("/dev/shm") if backend == "memory" else None
            url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory(dir=folder))}/record.db"
        migrate.upgrade(url)
        yield url
