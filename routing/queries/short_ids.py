"""Find a job by the beginning of its id, or by its last 8 characters, which the page shows."""

import re
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, func, select, text

from slotkeeper.db import Database
from slotkeeper.jobs.tables import ID_SUFFIX, jobs

SHORTEST = 8
_MOST = 5  # jobs that are named for an ambiguous id
_SMALLEST, _LARGEST = ("-".join(sign * n for n in (8, 4, 4, 4, 12)) for sign in "0f")
_END = re.compile("[0-9a-f]{8}")
_SHAPE = re.compile("[0-9a-f-]{8,35}")


@dataclass(frozen=True, slots=True)
class Found:
    """Ids that match a short id, at most 5.  `more`: there are others."""

    ids: tuple[str, ...]
    more: bool = False


def find(database: Database, short: str, tenant: str | None) -> Found:
    """Return the ids of jobs, of `tenant` or of all, that begin with `short` or end with it.

    Finds only ids that are UUIDs.  `short` has at least 8 characters.  Raises DatabaseUnavailable.
    """
    conditions = _conditions(short.lower())
    ids: set[str] = set()
    with database.read() as connection:
        for condition in conditions:
            query = select(jobs.c.id).where(condition)
            if tenant is not None:
                # A concatenated text, which no index has: the part of the id finds the rows.
                query = query.where(jobs.c.tenant.concat("") == tenant)
            ids.update(connection.execute(query.limit(_MOST + 1)).scalars())
    return Found(tuple(sorted(ids)[:_MOST]), len(ids) > _MOST)


def _conditions(short: str) -> list[ColumnElement[bool]]:
    """Return one condition for the beginning and one for the end, so that each uses its index."""
    if not _SHAPE.fullmatch(short):
        return []
    # The bounds are whole UUIDs: these have one order in every collation of a database, their beginnings have not.
    lowest, highest = short + _SMALLEST[len(short) :], short + _LARGEST[len(short) :]
    begins = and_(jobs.c.id.between(lowest, highest), func.substr(jobs.c.id, 1, len(short)) == short)
    if not _END.fullmatch(short):
        return [begins]
    return [begins, text(f"{ID_SUFFIX} = :end").bindparams(end=short)]  # type: ignore[list-item]
