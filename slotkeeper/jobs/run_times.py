"""How long the latest runs of a model took."""

from sqlalchemy import bindparam, select

from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.group_commit import Database
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs

_LOOKED_AT = 2_000  # of all models' latest ends
_COUNTED = 200

_LATEST = (
    select(jobs.c.model, jobs.c.state, (jobs.c.finished_ms - jobs.c.started_ms).label("took_ms"))
    .where(jobs.c.finished_ms.is_not(None))
    .order_by(jobs.c.finished_ms.desc())
    .limit(_LOOKED_AT)
    .subquery()
)
_OF_MODEL = CompiledStatement(
    select(_LATEST.c.took_ms)
    .where(_LATEST.c.model == bindparam("p_model"), _LATEST.c.state == State.COMPLETED.value)
    .limit(_COUNTED)
)


def longest_usual_ms(database: Database, model: str) -> int | None:
    """Return the 99th percentile of what the model's latest completed runs took; None: none has ended lately.

    Raises RecordUnavailable.
    """
    with database.read() as connection:
        took = sorted(
            row.took_ms for row in _OF_MODEL.fetch_all(connection, {"p_model": model}) if row.took_ms is not None
        )
    return took[-1 - len(took) // 100] if took else None
