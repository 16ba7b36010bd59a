"""The ledger, which shows that no accepted job is missing (JOB-3)."""

from typing import Any

from app.api.catalog_changes import admin_blueprint
from app.context import dispatcher
from app.schemas.operation_schemas import LedgerView
from slotkeeper.jobs import ledger

api = admin_blueprint("ledger", "Operation", "/admin")


@api.get("/ledger", responses={200: LedgerView})
def get_ledger() -> dict[str, Any]:
    """Show the balance: accepted jobs = jobs in each state + jobs that were removed after their end."""
    return LedgerView.build(ledger.read(dispatcher().store.database))
