"""The page of the audit log: the acts of operators."""

from typing import Any

from flask import request

from app.api import audit_views as audit_api
from app.page.login import page_view
from app.page.rendering import render_page
from app.schemas.operation_schemas import AuditQuery
from slotkeeper.audit import ACTIONS

_FILTERS = ("actor", "act", "job_id", "model", "server", "tenant")


@page_view("/page/audit", audit=True)
def audit() -> Any:
    filters = {name: request.args.get(name, "").strip() for name in _FILTERS}
    given = {name: value for name, value in filters.items() if value}
    query = AuditQuery(**given, limit=100, cursor=request.args.get("cursor") or None)
    entries, next_cursor = audit_api.find_acts(query)
    return render_page("audit.html", entries=entries, next=next_cursor, filters=filters, actions=sorted(ACTIONS))
