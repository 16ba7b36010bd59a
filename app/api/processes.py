"""Which processes of this installation live, on whatever host."""

from typing import Any

from app.admin import admin_blueprint
from app.watched import ProcessList, ProcessView
from tasks.wiring import processes

api = admin_blueprint("processes", "Operation", "/admin")


@api.get("/processes", responses={200: ProcessList})
def list_processes() -> dict[str, Any]:
    """List the processes that have said in the last minute that they live, and how they fare."""
    return ProcessList.of(processes=[ProcessView.of(it) for it in processes().all()])
