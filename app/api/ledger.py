"""The ledger: nothing that was accepted is missing (JOB-3)."""

from typing import Any

from app.admin import admin_blueprint
from app.context import dispatcher
from app.job_answers import Ledger
from slotkeeper.jobs import ledger

api = admin_blueprint("ledger", "Operation", "/admin")


@api.get("/ledger", responses={200: Ledger})
def get_ledger() -> dict[str, Any]:
    """Show the balance: accepted = the jobs in each state + those removed after their end."""
    return Ledger.of(ledger.read(dispatcher().store.database))
