"""The PostgreSQL that tests and the drill start for themselves."""

import os
import signal
from pathlib import Path

import psycopg
import pytest

from tests.support.builders import eventually
from tools.cluster.postgres_process import ENVIRONMENT, NoPostgres, running_postgres

_MEMORY = Path("/dev/shm")


@pytest.mark.postgres
@pytest.mark.skipif(ENVIRONMENT in os.environ, reason="that server is somebody else's")
@pytest.mark.skipif(not _MEMORY.is_dir(), reason="shared memory is seen as files on Linux only")
def test_one_that_is_killed_leaves_no_memory_behind():
    before = _segments()
    try:
        with running_postgres() as server, psycopg.connect(server.create()) as connection:
            folder = connection.execute("SHOW data_directory").fetchone()[0]
            os.kill(int((Path(folder) / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
            eventually(lambda: _is_gone(connection))
    except NoPostgres as missing:
        pytest.skip(str(missing))
    assert _segments() - before == set()


def _segments() -> set[str]:
    return {it.name for it in _MEMORY.glob("PostgreSQL.*")}


def _is_gone(connection: psycopg.Connection) -> bool:
    try:
        connection.execute("SELECT 1")
    except psycopg.Error:
        return connection.closed
    return False
