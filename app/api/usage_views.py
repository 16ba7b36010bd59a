"""What tenants have used: time of slots, runs and jobs, by day and model."""

from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import Any

from flask import Response

from app.api.csv_response import csv_response, wants_csv
from app.api.openapi import blueprint, problem_responses
from app.auth.access import current_identity, visible_name
from app.schemas.tenant_schemas import TenantPath, UsageList, UsageQuery, UsageRow
from slotkeeper.clock import now_ms
from slotkeeper.errors import InvalidRequest
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.tenants import Tenants
from slotkeeper.registry.usage import Usage, UsageKey, month_start_ms, read_usage
from tasks.services import database

api = blueprint("usage", "Own tenant", "/tenants", scope=Scope.READ)

_EPOCH = date(1970, 1, 1).toordinal()


@api.get("/<path:tenant>/usage", responses={200: UsageList, **problem_responses(404, 422)})
def list_usage(path: TenantPath, query: UsageQuery) -> dict[str, Any] | Response:
    """List what a tenant has used, by UTC day and model, the oldest first.  `me` is the tenant of the key that is used.

    With `Accept: text/csv` the response is a table with a line of names.
    """
    tenant = visible_name(path.tenant)
    rows = usage_rows(tenant, query)
    if wants_csv():
        return csv_response(list(UsageRow.model_fields), rows)
    return UsageList.build(tenant=tenant, usage=rows)


def usage_rows(tenant: str, query: UsageQuery) -> list[dict[str, Any]]:
    """Return UsageRow of each day and model, or of each model.  Raises InvalidRequest."""
    now = now_ms()
    first = query.first or _date_of(month_start_ms(now))
    if not current_identity().operates:  # An earlier tenant may have had the name.
        first = max(first, _date_of(Tenants(database()).created_ms(tenant)))
    last = query.last or _date_of(now)
    if query.first is not None and query.last is not None and query.last < query.first:
        raise InvalidRequest("to", "to must not be before from")
    used = read_usage(database(), tenant, first.toordinal() - _EPOCH, last.toordinal() - _EPOCH)
    if query.by == "model":
        return [_row(None, model, usage) for model, usage in sorted(_sum_by_model(used.items()).items())]
    return [_row(date.fromordinal(key.day + _EPOCH).isoformat(), key.model, usage) for key, usage in used.items()]


def _date_of(at_ms: int) -> date:
    return datetime.fromtimestamp(at_ms / 1000, UTC).date()


def _sum_by_model(used: Iterable[tuple[UsageKey, Usage]]) -> dict[str, Usage]:
    sums: dict[str, Usage] = {}
    for key, usage in used:
        sums.setdefault(key.model, Usage()).add(usage)
    return sums


def _row(day: str | None, model: str, usage: Usage) -> dict[str, Any]:
    return UsageRow.build(
        day=day,
        model=model,
        slot_s=usage.slot_ms / 1000,
        runs=usage.runs,
        accepted=usage.accepted,
        completed=usage.completed,
        ended=usage.ended,
    )
