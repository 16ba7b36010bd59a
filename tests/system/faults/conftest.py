"""A worker whose server says what a test wants, and lanes in which lives are lived."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import pytest

from migrations import migrate
from slotkeeper.db.schema import metadata
from tests.system.faults.lanes import Lane, free_lanes
from tools.cluster.postgres_process import Postgres
from tools.cluster.valkey_process import NoValkey, Valkey

LANES, POSTGRES_LANES = 6, 3


@pytest.fixture(scope="session")
def quick_folder() -> Iterator[Path]:
    """In memory where there is such a place: hundreds of records are written, and none outlives the tests."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="lives-", dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def _lives_valkey(quick_folder: Path) -> Iterator[Valkey]:
    """One that no other test empties."""
    try:
        with Valkey(quick_folder / "valkey") as valkey:
            yield valkey
    except NoValkey as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def lanes(_lives_valkey: Valkey, _sqlite_template: Path) -> Iterator["SimpleQueue[Lane]"]:
    """Free lanes whose databases are SQLite files."""

    def fresh_record(home: Path) -> str:
        shutil.copy(_sqlite_template, home / "record.db")
        return f"sqlite:///{home / 'record.db'}"

    with free_lanes(Lane(number, _lives_valkey, fresh_record) for number in range(1, LANES + 1)) as free:
        yield free


@pytest.fixture(scope="session")
def postgres_lanes(_lives_valkey: Valkey, postgres: Postgres) -> Iterator["SimpleQueue[Lane]"]:
    """The same with PostgreSQL's: a database for each lane, emptied for each case."""

    def lane(number: int) -> Lane:
        url = postgres.create()
        migrate.upgrade(url)
        tables = [table.name for table in reversed(metadata.sorted_tables)]

        def fresh_record(_: Path) -> str:
            postgres.clear(url, tables)
            return url

        return Lane(number, _lives_valkey, fresh_record)

    with free_lanes(lane(LANES + number) for number in range(1, POSTGRES_LANES + 1)) as free:
        yield free
