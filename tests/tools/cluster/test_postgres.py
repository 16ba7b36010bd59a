"""The PostgreSQL that tests and the drill start."""

import os
import signal
from pathlib import Path

import psycopg
import pytest

from tests.support.builders import eventually
from tools.cluster.postgres_process import ENVIRONMENT, NoPostgres, running_postgres

_MEMORY = Path("/dev/shm")


@pytest.mark.postgres
@pytest.mark.skipif(ENVIRONMENT in os.environ, reason="the server was not started by the tests")
@pytest.mark.skipif(not _MEMORY.is_dir(), reason="shared memory has files on Linux only")
def test_a_killed_server_leaves_no_shared_memory():
    before = _segments()
    try:
        with running_postgres() as server, psycopg.connect(server.create()) as connection:
            folder = connection.execute("SHOW data_directory").fetchone()[0]
            os.kill(int((Path(folder) / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
            eventually(lambda: _is_closed(connection))
    except NoPostgres as missing:
        pytest.skip(str(missing))
    assert _segments() - before == set()


def _segments() -> set[str]:
    return {path.name for path in _MEMORY.glob("PostgreSQL.*")}


def _is_closed(connection: psycopg.Connection) -> bool:
    try:
        connection.execute("SELECT 1")
    except psycopg.Error:
        return connection.closed
    return False
