"""The audit log: which key changed which job, server, model or tenant, and when.

Only keys with the scope `audit` or `operate` may read it.
"""

from typing import Any

import orjson
from flask import Response, request

from app.api.openapi import blueprint, problem_responses
from app.context import dispatcher
from app.request_json import NDJSON, parse_time
from app.schemas.cursors import decode_job_cursor
from app.schemas.operation_schemas import AuditEntry, AuditList, AuditQuery
from slotkeeper import audit
from slotkeeper.audit import AuditFilter
from slotkeeper.registry.identity import Scope

api = blueprint("audit", "Audit", "/admin", scope=Scope.AUDIT)

_NEXT_CURSOR_HEADER = "Next-Cursor"


@api.get("/audit", responses={200: AuditList, **problem_responses(422)})
def list_acts(query: AuditQuery) -> dict[str, Any] | Response:
    """List acts of operators, the newest first.

    With `Accept: application/x-ndjson` the response has one act per line, and the cursor of the next page in the header
    Next-Cursor.
    """
    entries, cursor = find_acts(query)
    if request.accept_mimetypes.best_match(["application/json", NDJSON]) != NDJSON:
        return AuditList.build(acts=entries, next_cursor=cursor)
    lines = b"".join(orjson.dumps(entry) + b"\n" for entry in entries)
    return Response(lines, content_type=NDJSON, headers={_NEXT_CURSOR_HEADER: cursor} if cursor else {})


def find_acts(query: AuditQuery) -> tuple[list[dict[str, Any]], str | None]:
    """Return a page of acts, the newest first, and the cursor of the next page."""
    audit_filter = AuditFilter(
        query.actor,
        query.act,
        query.job_id,
        query.model,
        query.server,
        query.tenant,
        None if query.since is None else parse_time("since", query.since),
        None if query.until is None else parse_time("until", query.until),
    )
    entries = audit.find_entries(
        dispatcher().store.database, audit_filter, decode_job_cursor(query.cursor), query.limit
    )
    next_cursor = f"s{entries[-1].id}" if len(entries) == query.limit else None
    return [AuditEntry.build(entry) for entry in entries], next_cursor
