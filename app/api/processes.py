"""The processes of this installation, on all hosts."""

from typing import Annotated, Any

from app.api.catalog_changes import admin_blueprint
from app.schemas.base import From, ResponseSchema, Time, iso_time
from routing.queries.process_list import Process
from tasks.services import processes

api = admin_blueprint("processes", "Operation", "/admin")


def _fact(name: str) -> From:
    """Read a field from what the process reports of itself; null: it does not report it."""
    return From(lambda process: process.facts.get(name))


class ProcessView(ResponseSchema, source=Process):
    """`silent_s`: time since its last heartbeat.  `log_lines_dropped`: lines lost because its log was not read in time.

    Workers also have: the number of `runs`, of at most `capacity`; how long the last canary took, and its age.
    """

    name: str
    role: str
    host: str
    pid: Annotated[int | None, _fact("pid")]
    version: Annotated[str | None, _fact("version")]
    since: Annotated[Time | None, From(lambda process: iso_time(process.facts.get("since_ms")))]
    lives: Annotated[bool, From("is_alive")]
    silent_s: Annotated[float, From(lambda process: process.age_ms / 1000)]
    log_lines_dropped: Annotated[int | None, _fact("log_lines_dropped")]
    runs: Annotated[int | None, _fact("runs")]
    capacity: Annotated[int | None, _fact("capacity")]
    canary_ms: Annotated[float | None, _fact("canary_ms")]
    canary_age_s: Annotated[
        float | None,
        From(lambda process: None if process.canary_age_ms is None else process.canary_age_ms / 1000),
    ]


class ProcessList(ResponseSchema):
    processes: list[ProcessView]


@api.get("/processes", responses={200: ProcessList})
def list_processes() -> dict[str, Any]:
    """List the processes that have reported in the last minute, with their state."""
    return ProcessList.build(processes=[ProcessView.build(process) for process in processes().read_all()])
