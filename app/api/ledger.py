"""The ledger: nothing that was accepted is missing (JOB-3)."""

from typing import Any

from app.admin import admin_blueprint
from app.context import dispatcher
from app.schemas import Ledger
from jobs import ledger

api = admin_blueprint("ledger", "Operation", "/admin")


@api.get("/ledger", responses={200: Ledger})
def get_ledger() -> dict[str, Any]:
    """Show the balance: accepted = the jobs in each state + those removed after their end."""
    found = ledger.read(dispatcher().store.database)
    return {
        "accepted": found.accepted,
        "by_state": {state.value: count for state, count in found.by_state.items()},
        "purged": {state.value: count for state, count in found.purged.items() if count},
        "balanced": found.balanced,
    }
