"""The processes of this installation, on all hosts."""

from typing import Any

from app.api.catalog_changes import admin_blueprint
from app.schemas.operation_schemas import ProcessList, ProcessView
from tasks.services import processes

api = admin_blueprint("processes", "Operation", "/admin")


@api.get("/processes", responses={200: ProcessList})
def list_processes() -> dict[str, Any]:
    """List the processes that have reported in the last minute, with their state."""
    return ProcessList.build(processes=[ProcessView.build(process) for process in processes().read_all()])
