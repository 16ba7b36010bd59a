"""Audit: who did what, when, and to which job, server, model or tenant.  A right of its own, beside administering."""

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

_LINES = "application/x-ndjson"
_NEXT = "Next-Cursor"
_Name = Annotated[str, Field(max_length=200)]
_TIME: Any = {"format": "date-time"}
_ACT: Any = {"examples": sorted(ACTIONS)}


class AuditQuery(Schema):
    actor: _Name | None = Field(None, description="Who: the name of a key.")
    act: str | None = Field(None, description="What, such as `server.drain`.", json_schema_extra=_ACT)
    job_id: _Name | None = Field(None, description="To which job.")
    model: _Name | None = None
    server: _Name | None = None
    tenant: _Name | None = None
    since: str | None = Field(None, max_length=40, description="From then on.", json_schema_extra=_TIME)
    until: str | None = Field(None, max_length=40, description="Before then.", json_schema_extra=_TIME)
    limit: int = Field(50, ge=1, le=1000)
    cursor: str | None = Field(None, max_length=20, json_schema_extra={"pattern": f"^{CURSOR}$"})


class AuditEntry(ResponseSchema, source=AuditRow):
    id: int = Field(description="Of the event.")
    act: str
    at: Time
    actor: str = Field(description="The name of the key by which it was asked for.")
    interface: str | None = Field(description="REST, page, command line, Celery, or this process itself.")
    origin: str | None = Field(description="The address from which it was asked for.")
    reason: str | None
    job_id: str | None
    model: str | None
    server: str | None
    tenant: str | None
    data: dict[str, Any] = Field(description="What else is known of it.")


class AuditList(ResponseSchema):
    acts: list[AuditEntry]
    next_cursor: str | None


@api.get("/audit", responses={200: AuditList, **problem_responses(422)})
def list_acts(query: AuditQuery) -> dict[str, Any] | Response:
    """List acts of operators, the newest first.

    With `Accept: application/x-ndjson` they come one a line, and the cursor of the next page in the header Next-Cursor.
    """
    entries, cursor = find_acts(query)
    if request.accept_mimetypes.best_match(["application/json", _LINES]) != _LINES:
        return AuditList.build(acts=entries, next_cursor=cursor)
    lines = b"".join(orjson.dumps(entry) + b"\n" for entry in entries)
    return Response(lines, content_type=_LINES, headers={_NEXT: cursor} if cursor else {})


def find_acts(query: AuditQuery) -> tuple[list[dict[str, Any]], str | None]:
    """Return a page of acts, the newest first, and the cursor of the next page."""
    wanted = AuditFilter(
        query.actor,
        query.act,
        query.job_id,
        query.model,
        query.server,
        query.tenant,
        None if query.since is None else parse_time("since", query.since),
        None if query.until is None else parse_time("until", query.until),
    )
    found = audit.find_entries(dispatcher().store.database, wanted, decode_job_cursor(query.cursor), query.limit)
    cursor = f"s{found[-1].id}" if len(found) == query.limit else None
    return [AuditEntry.build(act) for act in found], cursor
