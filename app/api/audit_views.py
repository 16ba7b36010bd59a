"""The audit log: which key changed which job, server, model or tenant, and when.

Only keys with the right to audit, and administrators' keys, may read it.
"""

from typing import Annotated, Any

import orjson
from flask import Response, request
from pydantic import Field

from app.api.openapi import Schema, blueprint, problem_responses
from app.auth import access
from app.context import dispatcher
from app.request_json import parse_time
from app.schemas.base import ResponseSchema, Time
from app.schemas.cursors import CURSOR, decode_job_cursor
from slotkeeper import audit
from slotkeeper.audit import ACTIONS, AuditFilter, AuditRow

api = blueprint("audit", "Audit", "/admin")
api.before_request(access.require_audit)

_NDJSON = "application/x-ndjson"
_NEXT_CURSOR_HEADER = "Next-Cursor"
_Name = Annotated[str, Field(max_length=200)]
_TIME_SCHEMA: Any = {"format": "date-time"}
_ACT_SCHEMA: Any = {"examples": sorted(ACTIONS)}


class AuditQuery(Schema):
    actor: _Name | None = Field(None, description="The name of the key that asked for the act.")
    act: str | None = Field(None, description="The kind of act, such as `server.drain`.", json_schema_extra=_ACT_SCHEMA)
    job_id: _Name | None = Field(None, description="The job that was changed.")
    model: _Name | None = None
    server: _Name | None = None
    tenant: _Name | None = None
    since: str | None = Field(
        None, max_length=40, description="Only acts at or after this time.", json_schema_extra=_TIME_SCHEMA
    )
    until: str | None = Field(
        None, max_length=40, description="Only acts before this time.", json_schema_extra=_TIME_SCHEMA
    )
    limit: int = Field(50, ge=1, le=1000)
    cursor: str | None = Field(None, max_length=20, json_schema_extra={"pattern": f"^{CURSOR}$"})


class AuditEntry(ResponseSchema, source=AuditRow):
    id: int = Field(description="The id of the event.")
    act: str
    at: Time
    actor: str = Field(description="The name of the key that asked for it.")
    interface: str | None = Field(description="REST, page, command line, Celery, or the process itself.")
    origin: str | None = Field(description="The network address that asked for it.")
    reason: str | None
    job_id: str | None
    model: str | None
    server: str | None
    tenant: str | None
    data: dict[str, Any] = Field(description="Further details of the act.")


class AuditList(ResponseSchema):
    acts: list[AuditEntry]
    next_cursor: str | None


@api.get("/audit", responses={200: AuditList, **problem_responses(422)})
def list_acts(query: AuditQuery) -> dict[str, Any] | Response:
    """List acts of operators, the newest first.

    With `Accept: application/x-ndjson` the response has one act per line, and the cursor of the next page in the header
    Next-Cursor.
    """
    entries, cursor = find_acts(query)
    if request.accept_mimetypes.best_match(["application/json", _NDJSON]) != _NDJSON:
        return AuditList.build(acts=entries, next_cursor=cursor)
    lines = b"".join(orjson.dumps(entry) + b"\n" for entry in entries)
    return Response(lines, content_type=_NDJSON, headers={_NEXT_CURSOR_HEADER: cursor} if cursor else {})


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
