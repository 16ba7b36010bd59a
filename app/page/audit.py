"""The page of the audit log: the acts of operators."""

from typing import Any

from flask import request

from app.api import audit_views as audit_api
from app.api.audit_views import AuditQuery
from app.page.login import page_view
from app.page.rendering import render_page
from slotkeeper.audit import ACTIONS

_FILTERS = ("actor", "act", "job_id", "model", "server", "tenant")


@page_view("/page/audit", audit=True)
def audit() -> Any:
    wanted = {name: request.args.get(name, "").strip() for name in _FILTERS}
    asked = {name: value for name, value in wanted.items() if value}
    query = AuditQuery(**asked, limit=100, cursor=request.args.get("cursor") or None)
    entries, cursor = audit_api.find_acts(query)
    found = {"acts": entries, "next_cursor": cursor}
    return render_page("audit.html", found=found, wanted=wanted, acts=sorted(ACTIONS))
