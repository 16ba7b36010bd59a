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
    "tests.fixtures.database",
    "tests.fixtures.queue",
    "tests.fixtures.api",
    "tests.fixtures.worker",
    "tests.fixtures.simulator",
    "tests.fixtures.network",
)
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2 << 30
_WORKERS_THREADS = {"event-loop", "heartbeat", "database-check"}


def pytest_configure(config: pytest.Config) -> None:
    """Put the folders of tests into memory if enough is free, as databases sync to the disk at every commit."""
    in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
    if in_memory and config.getoption("basetemp") is None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run generated tests first, in a fresh process, so that earlier tests do not change what they find."""
    items.sort(key=lambda item: "_properties" not in item.nodeid)


@pytest.fixture(scope="session", autouse=True)
def _own_settings() -> None:
    """Remove the settings of the user from the environment."""
    for name in [name for name in os.environ if name.startswith("SLOTKEEPER_") and name != ENVIRONMENT]:
        del os.environ[name]


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Restore the configuration of logging after each test."""
    root, hook, before = logging.getLogger(), threading.excepthook, structlog.get_config()
    level = root.level
    yield
    root.handlers = [handler for handler in root.handlers if not isinstance(handler, QueueHandler)]
    root.setLevel(level)
    structlog.configure(**before)
    threading.excepthook = hook


@pytest.fixture(autouse=True)
def _own_workers() -> Iterator[None]:
    """Wait for the threads of workers: they would go on to query the database and Redis during later tests."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name in _WORKERS_THREADS:
            thread.join(20)
            assert not thread.is_alive(), f"the worker's thread {thread.name!r} still runs"


@pytest.fixture(autouse=True)
def _own_clock() -> Iterator[None]:
    """Forget the clock offset that the test's database has set."""
    yield
    vars(clock).update(vars(Clock()))
