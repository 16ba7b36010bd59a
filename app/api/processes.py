"""Which processes of this installation live, on whatever host."""

from typing import Annotated, Any

from app.api.catalog_changes import admin_blueprint
from app.schemas.base import From, ResponseSchema, Time, iso_time
from routing.queries.process_list import Process
from tasks.services import processes

api = admin_blueprint("processes", "Operation", "/admin")


def _fact(fact: str) -> From:
    """What a process says of itself; null: nothing."""
    return From(lambda it: it.facts.get(fact))


class ProcessView(ResponseSchema, source=Process):
    """`silent_s`: since it last said that it lives.  `log_lines_dropped`: because its log was not read in time.

    Of workers also: runs under way, of `capacity`; how long the last canary took, and how long ago it came.
    """

    name: str
    role: str
    host: str
    pid: Annotated[int | None, _fact("pid")]
    version: Annotated[str | None, _fact("version")]
    since: Annotated[Time | None, From(lambda it: iso_time(it.facts.get("since_ms")))]
    lives: Annotated[bool, From("is_alive")]
    silent_s: Annotated[float, From(lambda it: it.age_ms / 1000)]
    log_lines_dropped: Annotated[int | None, _fact("log_lines_dropped")]
    runs: Annotated[int | None, _fact("runs")]
    capacity: Annotated[int | None, _fact("capacity")]
    canary_ms: Annotated[float | None, _fact("canary_ms")]
    canary_age_s: Annotated[
        float | None, From(lambda it: None if it.canary_age_ms is None else it.canary_age_ms / 1000)
    ]


class ProcessList(ResponseSchema):
    processes: list[ProcessView]


@api.get("/processes", responses={200: ProcessList})
def list_processes() -> dict[str, Any]:
    """List the processes that have reported in the last minute, with their state."""
    return ProcessList.build(processes=[ProcessView.build(it) for it in processes().read_all()])
