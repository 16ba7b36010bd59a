"""Which processes of this installation live, on whatever host."""

from typing import Annotated, Any

from app.admin import admin_blueprint
from app.answers import Answer, Read, Time, time
from routing.queries.process_list import Process
from tasks.services import processes

api = admin_blueprint("processes", "Operation", "/admin")


def _said(fact: str) -> Read:
    """What a process says of itself; null: nothing."""
    return Read(lambda it: it.facts.get(fact))


class ProcessView(Answer, shows=Process):
    """`silent_s`: since it last said that it lives.  Of workers also: runs under way, of `capacity`; how long the last
    canary took, and how long ago it came."""

    name: str
    role: str
    host: str
    pid: Annotated[int | None, _said("pid")]
    version: Annotated[str | None, _said("version")]
    since: Annotated[Time | None, Read(lambda it: time(it.facts.get("since_ms")))]
    lives: bool
    silent_s: Annotated[float, Read(lambda it: it.age_ms / 1000)]
    runs: Annotated[int | None, _said("runs")]
    capacity: Annotated[int | None, _said("capacity")]
    canary_ms: Annotated[float | None, _said("canary_ms")]
    canary_age_s: Annotated[
        float | None, Read(lambda it: None if it.canary_age_ms is None else it.canary_age_ms / 1000)
    ]


class ProcessList(Answer):
    processes: list[ProcessView]


@api.get("/processes", responses={200: ProcessList})
def list_processes() -> dict[str, Any]:
    """List the processes that have said in the last minute that they live, and how they fare."""
    return ProcessList.of(processes=[ProcessView.of(it) for it in processes().read_all()])
