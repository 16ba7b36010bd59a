"""Bring the schema of a record to what this release needs, or say that it is not.

The steps lie beside this file; no alembic.ini is needed.  Several processes may
call `upgrade` at once: one migrates, the others wait and find nothing left to do.  Only that loads Alembic; all
processes `check`.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Engine, NullPool, create_engine, inspect, make_url
from sqlalchemy.exc import InterfaceError, OperationalError

from migrations.revisions import STEPS, read_revisions
from slotkeeper.db.time_limits import CONNECT_TIMEOUT_S
from slotkeeper.errors import Conflict, DatabaseUnavailable
from slotkeeper.state_folder import make_private_file, make_private_folder

if TYPE_CHECKING:
    from alembic.config import Config

_LOCK_KEY = 0x510715EE9E4  # any number, as long as every release uses the same
_PATIENCE_S = 120.0
_LOOK_EVERY_S = 0.05


def upgrade(url: str) -> None:
    """Bring the record at `url` to the newest schema; a new SQLite file is created with its folder.

    All or nothing.  Raises DatabaseUnavailable: the database cannot be reached, or is locked for too long;
    Conflict: a newer release has migrated it.
    """
    from alembic import command
    from alembic.util import CommandError

    with _answered(), _alone(url):
        try:
            command.upgrade(_config(url), "head")
        except CommandError as error:
            raise Conflict(check(url) or str(error)) from error


def migrate_to(url: str, revision: str) -> None:
    """Bring the schema of the database to `revision`, forwards or back.  All or nothing.

    Raises as `upgrade` does, and Conflict also if this release does not know the revision.
    """
    from alembic import command
    from alembic.script import ScriptDirectory

    known, _ = read_revisions(STEPS)
    if revision not in known:
        raise Conflict(f"This release does not know the schema {revision}; it knows {', '.join(sorted(known))}.")
    with _answered(), _alone(url):
        found = _revisions(url)
        if not found <= known:
            raise Conflict(str(check(url)))
        config = _config(url)
        earlier = {
            step.revision for step in ScriptDirectory.from_config(config).iterate_revisions(tuple(found), "base")
        }
        if revision in earlier - found:
            command.downgrade(config, revision)
        else:
            command.upgrade(config, revision)


def dropped_by(url: str, revision: str) -> list[str]:
    """Return the tables and columns (`table.column`) that `migrate_to` drops with their content; []: it drops nothing.

    Raises DatabaseUnavailable.
    """
    from alembic.script import ScriptDirectory

    known, _ = read_revisions(STEPS)
    found = _revisions(url)
    if revision not in known or not found <= known:
        return []
    script = ScriptDirectory.from_config(_config(url))
    kept = {step.revision for step in script.iterate_revisions(revision, "base")}
    steps = script.iterate_revisions(tuple(found), "base")
    return [name for step in steps if step.revision not in kept for name in getattr(step.module, "drops", ())]


def check(url: str) -> str | None:
    """None: the schema is the one that this release needs.  Else a sentence that says what to do."""
    known, followed = read_revisions(STEPS)
    needed = known - followed
    found = _revisions(url)
    if found == needed:
        return None
    if not found:
        return "The database has no schema of Slotkeeper yet; run `slotkeeper migrate`."
    here, there = ", ".join(sorted(found)), ", ".join(sorted(needed))
    if found <= known:
        return f"The database's schema is at {here} and this release needs {there}; run `slotkeeper migrate`."
    return (
        f"The database's schema is at {here}, which this release does not know (it needs {there}); "
        "install the release that migrated it, or a newer one."
    )


def _config(url: str) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(STEPS).replace("%", "%%"))
    config.attributes["url"] = _patient(url)
    return config


def _revisions(url: str) -> set[str]:
    path = _sqlite_path(url)
    if path is not None and not path.exists():
        return set()  # Asking would create it.
    with _answered(), _engine(url).connect() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return set()
        return set(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars())


@contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        reason = (str(error.orig).strip().splitlines() or ["no reason given"])[0]
        remedy = "create it (docs/how-to/postgresql.md)" if reason.endswith("does not exist") else "try again"
        raise DatabaseUnavailable(f"The schema could not be read or changed ({reason}): {remedy}.") from error


def _alone(url: str) -> AbstractContextManager[None]:
    path = _sqlite_path(url)
    return _file_lock(path) if path is not None else _advisory_lock(url)


@contextmanager
def _file_lock(database: Path) -> Iterator[None]:
    """Hold `<database>.migrate-lock`.  The file stays: removing it could let two in."""
    if not database.parent.exists():
        make_private_folder(database.parent)
    lock = database.with_name(f"{database.name}.migrate-lock")
    for path in (database, lock):
        make_private_file(path)
    with open(lock, "w") as file:
        _wait_for(lambda: _locked(file.fileno()))
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _advisory_lock(url: str) -> Iterator[None]:
    """Hold a lock of this session, on a connection of its own; it ends with the connection.

    Asked for again and again, because a query that waits has a snapshot open, on which a step that creates an
    index concurrently would wait in turn.  Needs a direct connection, not a pooler in transaction mode.
    """
    with _engine(url).connect() as connection:
        autocommit = connection.execution_options(isolation_level="AUTOCOMMIT")
        ask = f"SELECT pg_try_advisory_lock({_LOCK_KEY})"
        _wait_for(lambda: bool(autocommit.exec_driver_sql(ask).scalar()))
        yield


def _wait_for(lock: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not lock():
        if time.monotonic() > until:
            raise DatabaseUnavailable(
                f"Another process has been migrating this database for over {_PATIENCE_S:.0f} s; "
                "wait for it to end, or end it, and try again."
            )
        time.sleep(_LOOK_EVERY_S)


def _engine(url: str) -> Engine:
    return create_engine(_patient(url), poolclass=NullPool)


def _patient(url: str) -> str:
    """The same database, and how long to wait for it if it does not answer."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" or "connect_timeout" in parsed.query:
        return url
    patient = parsed.update_query_dict({"connect_timeout": str(CONNECT_TIMEOUT_S)})
    return patient.render_as_string(hide_password=False)


def _sqlite_path(url: str) -> Path | None:
    """The file of an SQLite record; None: it is no SQLite."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if parsed.database in (None, "", ":memory:"):
        raise ValueError(
            "A record in memory would be lost between two connections; name a file: sqlite:///var/record.db"
        )
    return Path(os.path.abspath(parsed.database))
