"""The results of a batch's lines, in their order, page by page.

Jobs are read by their ids, which follow from the batch and the line.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import orjson
from sqlalchemy import bindparam, func, select

from slotkeeper.db import Database
from slotkeeper.jobs.batch_ids import line_job_id
from slotkeeper.jobs.batches import Batch, Batches, LineError
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.tables import jobs
from slotkeeper.jobs.terms import decode_terms

Row: TypeAlias = Any

_AT_ONCE = 200
_OVERHEAD = 200  # bytes of a line without its result, roughly
_ARE_THESE = jobs.c.id.in_(bindparam("p_ids", expanding=True))
_JOBS = select(
    *(jobs.c[name] for name in ("id", "state", "error_code", "error_message", "terms")),
    func.coalesce(func.length(jobs.c.result), 0).label("size"),
).where(_ARE_THESE)
_RESULTS = select(jobs.c.id, jobs.c.result).where(_ARE_THESE)


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
        shown, sizes = _read(database, batch, page, ended_only)
        fitting = list[int]()
        for line in page:
            size += sizes.get(line, 0)
            if (found or fitting) and size > max_bytes:
                return ResultPage(found + _texts(database, batch, fitting, shown), line)
            fitting.append(line)
        found += _texts(database, batch, fitting, shown)
        line = page.stop
    return ResultPage(found, line if line < batch.lines else None)


def _read(
    database: Database, batch: Batch, page: range, ended_only: bool
) -> tuple[dict[int, dict[str, Any]], dict[int, int]]:
    """Return what is shown of each line but for its result, and the sizes of all."""
    ids = {line_job_id(batch.id, line): line for line in page}
    with database.read() as connection:
        rows = {ids[row.id]: row for row in connection.execute(_JOBS, {"p_ids": list(ids)})}
    errors = {error.line: error for error in Batches(database).list_errors(batch, page[0], page[-1], len(page))}
    shown, sizes = dict[int, dict[str, Any]](), dict[int, int]()
    for line in page:
        if line in errors:
            shown[line] = _refused(errors[line])
        elif line not in rows:
            shown[line] = {"line": line, "job_id": line_job_id(batch.id, line), "status": "removed"}
        elif not ended_only or State(rows[line].state) in FINAL_STATES:
            shown[line] = _about(line, rows[line])
            sizes[line] = rows[line].size
    return shown, {line: sizes.get(line, 0) + _OVERHEAD for line in shown}


def _texts(database: Database, batch: Batch, lines: Sequence[int], shown: Mapping[int, dict[str, Any]]) -> list[bytes]:
    """Return the JSON of these lines with their results."""
    completed = [line_job_id(batch.id, line) for line in lines if shown.get(line, {}).get("status") == State.COMPLETED]
    with database.read() as connection:
        results = {row.id: row.result for row in connection.execute(_RESULTS, {"p_ids": completed})}
    found = []
    for line in lines:
        if (about := shown.get(line)) is not None:
            result = results.get(about["job_id"])
            if about["status"] == State.COMPLETED:
                about["result"] = None if result is None else orjson.Fragment(result)
            found.append(orjson.dumps(about))
    return found


def _refused(error: LineError) -> dict[str, Any]:
    about = {"code": error.code, "message": error.message, "field": error.field}
    return {"line": error.line, "custom_id": error.custom_id, "job_id": None, "status": "refused", "error": about}


def _about(line: int, row: Row) -> dict[str, Any]:
    shown = {"line": line, "custom_id": decode_terms(row.terms).custom_id, "job_id": row.id, "status": row.state}
    if row.state != State.COMPLETED and row.error_code is not None:
        shown["error"] = {"code": row.error_code, "message": row.error_message}
    return shown
