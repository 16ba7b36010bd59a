"""Fixtures for every test that needs the record.  What only one folder needs stands in its own conftest.

`database` and `store` run each test twice, on SQLite and on PostgreSQL, each time on a fresh record whose
schema comes from the migrations.  Time is an argument everywhere, so there is no clock to set.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import structlog
from sqlalchemy import event

from database.db import Database
from foundation import logs
from foundation.clock import Clock, clock
from jobs.store import Store
from migrations import migrate
from outbox import tables as _outbox_tables  # noqa: F401  Its tables are of the same record.
from outbox.webhooks import Webhooks
from registry.tables import metadata
from tests.support.postgres import ENVIRONMENT, NoPostgres, Postgres, running_postgres

_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2 << 30


def pytest_configure(config: pytest.Config) -> None:
    """Folders of tests lie in memory where there is room: records write through to the disk at every commit."""
    in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
    if in_memory and config.getoption("basetemp") is None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Generated tests come first, in a process that has done nothing yet: what they find shall not depend on it."""
    items.sort(key=lambda item: "tests/properties/" not in item.nodeid)


@pytest.fixture(scope="session", autouse=True)
def _own_settings() -> None:
    """The settings of whoever runs the tests are not those of the tests."""
    for name in [name for name in os.environ if name.startswith("SLOTKEEPER_") and name != ENVIRONMENT]:
        del os.environ[name]


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """What a process under test configures for its logs ends with the test."""
    root, hook, before = logging.getLogger(), threading.excepthook, structlog.get_config()
    level = root.level
    yield
    root.handlers = [it for it in root.handlers if not isinstance(it, logs._StandardError)]
    root.setLevel(level)
    structlog.configure(**before)
    threading.excepthook = hook


@pytest.fixture(autouse=True)
def _own_clock() -> Iterator[None]:
    """The common time that a test's record has told ends with it."""
    yield
    vars(clock).update(vars(Clock()))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for the whole session, started by the first test that asks for it."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(running_postgres())
        except NoPostgres as missing:
            pytest.skip(str(missing))
        yield server


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "record.db"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def _postgres_record(postgres: Postgres) -> Iterator[str]:
    url = postgres.create()
    migrate.upgrade(url)
    yield url
    postgres.drop(url)


@pytest.fixture
def sqlite_url(_sqlite_template: Path, tmp_path: Path) -> str:
    """A fresh SQLite record."""
    shutil.copy(_sqlite_template, tmp_path / "record.db")
    return f"sqlite:///{tmp_path / 'record.db'}"


@pytest.fixture
def postgres_url(postgres: Postgres, _postgres_record: str) -> str:
    """A record on PostgreSQL, as good as fresh."""
    postgres.clear(_postgres_record, [table.name for table in reversed(metadata.sorted_tables)])
    return _postgres_record


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param])


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    record = Database(database_url)
    yield record
    record.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


@pytest.fixture
def hooks(database: Database) -> Webhooks:
    return Webhooks(database)


@pytest.fixture
def faults(database: Database) -> Callable[[str], AbstractContextManager[None]]:
    """`with faults("INSERT INTO events"): …` makes every statement that begins so fail, with ZeroDivisionError."""

    @contextmanager
    def failing(beginning: str) -> Iterator[None]:
        def refuse(connection: object, cursor: object, statement: str, *_: object) -> None:
            if statement.startswith(beginning):
                raise ZeroDivisionError(f"{beginning} fails in this test")

        event.listen(database.engine, "before_cursor_execute", refuse)
        try:
            yield
        finally:
            event.remove(database.engine, "before_cursor_execute", refuse)

    return failing
