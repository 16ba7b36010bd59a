"""What is done for every test, asked or not; and the fixtures that any test may ask for.

What only one folder needs stands in its own conftest.
"""

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from logging.handlers import QueueHandler
from pathlib import Path

import pytest
import structlog

from slotkeeper.clock import Clock, clock
from tools.cluster.postgres_process import ENVIRONMENT

pytest_plugins = (
    "tests.fixtures.record",
    "tests.fixtures.room",
    "tests.fixtures.api",
    "tests.fixtures.worker",
    "tests.fixtures.simulator",
    "tests.fixtures.network",
)
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2 << 30
_WORKERS_THREADS = {"event-loop", "heartbeat", "database-check"}


def pytest_configure(config: pytest.Config) -> None:
    """Folders of tests lie in memory where there is room: records write through to the disk at every commit."""
    in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
    if in_memory and config.getoption("basetemp") is None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Generated tests come first, in a process that has done nothing yet: what they find shall not depend on it."""
    items.sort(key=lambda item: "_properties" not in item.nodeid)


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
    root.handlers = [it for it in root.handlers if not isinstance(it, QueueHandler)]
    root.setLevel(level)
    structlog.configure(**before)
    threading.excepthook = hook


@pytest.fixture(autouse=True)
def _own_workers() -> Iterator[None]:
    """No worker outlives its test: it would go on asking the record and Redis, and log it, in those that follow."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name in _WORKERS_THREADS:
            thread.join(20)
            assert not thread.is_alive(), f"a worker's thread {thread.name!r} was left behind"


@pytest.fixture(autouse=True)
def _own_clock() -> Iterator[None]:
    """The common time that a test's record has told ends with it."""
    yield
    vars(clock).update(vars(Clock()))
