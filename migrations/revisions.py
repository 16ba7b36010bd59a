"""The revisions that this release knows, and whether a record in a file is at the newest: by neither SQLAlchemy nor
Alembic, so that who starts everything can tell in milliseconds that there is nothing to migrate."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

STEPS = Path(__file__).resolve().parent
_REVISIONS = re.compile(r'^(down_)?revision = (?:"(\w+)"|None)$', re.MULTILINE)


def read_revisions(steps: Path = STEPS) -> tuple[set[str], set[str]]:
    """Those that this release knows, and those of them that another follows."""
    known: set[str] = set()
    followed: set[str] = set()
    for path in (steps / "versions").glob("*.py"):
        for down, revision in _REVISIONS.findall(path.read_text()):
            (followed if down else known).add(revision)
    return known, followed


def is_current(url: str) -> bool:
    """Whether the record at `url` is an SQLite file that can be written and has the newest schema.

    False says nothing: what is so, and what is wrong with it, is for `migrate` to find out.
    """
    start, _, path = url.partition("///")
    if start != "sqlite:" or "?" in path:
        return False
    known, followed = read_revisions()
    try:
        file = f"{Path(path).as_uri()}?mode=rw"
        with closing(sqlite3.connect(file, timeout=0, isolation_level=None, uri=True)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            found = {revision for (revision,) in connection.execute("SELECT version_num FROM alembic_version")}
    except (sqlite3.Error, ValueError):  # Not there, locked, not to be written, no database, without a schema.
        return False
    return found == known - followed
