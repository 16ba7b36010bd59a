"""The results of a batch's lines, in their order, page by page.

Jobs are read by their ids, which follow from the batch and the line.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import orjson
from sqlalchemy import bindparam, select

from slotkeeper.db import Database
from slotkeeper.jobs.batch_ids import line_job_id
from slotkeeper.jobs.batches import Batch, Batches, LineError
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.tables import jobs
from slotkeeper.jobs.terms import decode_terms

Row: TypeAlias = Any

_AT_ONCE = 200
_JOBS = select(
    *(jobs.c[name] for name in ("id", "state", "result", "error_code", "error_message", "terms", "server", "attempt"))
).where(jobs.c.id.in_(bindparam("p_ids", expanding=True)))


class ResultPage(NamedTuple):
    """Lines as JSON texts.  next_line: with which the next page begins; None: this is the last one."""

    lines: list[bytes]
    next_line: int | None


def read_results(
    database: Database, batch: Batch, first: int, limit: int, max_bytes: int, *, ended_only: bool
) -> ResultPage:
    """Return the results of at most `limit` lines from `first` on, and of no more than `max_bytes`, but of one line.

    ended_only: without those of jobs that have not ended.  Raises DatabaseUnavailable.
    """
    found: list[bytes] = []
    last, size, line = min(first + limit, batch.lines), 0, first
    while line < last:
        page = range(line, min(line + _AT_ONCE, last))
        for line, text in _read(database, batch, page, ended_only):
            size += len(text)
            if found and size > max_bytes:
                return ResultPage(found, line)
            found.append(text)
        line = page.stop
    return ResultPage(found, line if line < batch.lines else None)


def _read(database: Database, batch: Batch, page: range, ended_only: bool) -> Iterator[tuple[int, bytes]]:
    """Yield (line, JSON) of these lines."""
    ids = {line_job_id(batch.id, line): line for line in page}
    with database.read() as connection:
        rows = {ids[row.id]: row for row in connection.execute(_JOBS, {"p_ids": list(ids)})}
    errors = {error.line: error for error in Batches(database).list_errors(batch, page[0], page[-1], len(page))}
    for line in page:
        if line in errors:
            yield line, orjson.dumps(_refused(errors[line]))
        elif line in rows and not (ended_only and State(rows[line].state) not in FINAL_STATES):
            yield line, orjson.dumps(_result(line, rows[line]))
        elif line not in rows:
            yield line, orjson.dumps({"line": line, "job_id": line_job_id(batch.id, line), "status": "removed"})


def _refused(error: LineError) -> Mapping[str, Any]:
    about = {"code": error.code, "message": error.message, "field": error.field}
    return {"line": error.line, "custom_id": error.custom_id, "job_id": None, "status": "refused", "error": about}


def _result(line: int, row: Row) -> Mapping[str, Any]:
    shown = {"line": line, "custom_id": decode_terms(row.terms).custom_id, "job_id": row.id, "status": row.state}
    if row.state == State.COMPLETED:
        return shown | {"result": None if row.result is None else orjson.Fragment(row.result)}
    if row.error_code is not None:
        return shown | {"error": {"code": row.error_code, "message": row.error_message}}
    return shown
