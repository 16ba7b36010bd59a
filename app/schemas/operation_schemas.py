"""Health, ledger, processes, the load of a model, and the audit log."""

from typing import Annotated, Any, Literal

from pydantic import Field

from app.schemas.base import From, ResponseSchema, Schema, Time, iso_time
from app.schemas.cursors import CURSOR
from routing.queries.process_list import Process
from slotkeeper.audit import ACTIONS, AuditRow
from slotkeeper.jobs import ledger

_Name = Annotated[str, Field(max_length=200)]
_TIME_SCHEMA: Any = {"format": "date-time"}
_ACT_SCHEMA: Any = {"examples": sorted(ACTIONS)}


class LedgerView(ResponseSchema, source=ledger.Ledger):
    """The number of accepted jobs, by current state, and by final state for removed jobs."""

    accepted: int
    by_state: dict[str, int]
    purged: Annotated[
        dict[str, int], From(lambda ledger: {str(name): count for name, count in ledger.purged.items() if count})
    ]
    balanced: bool


class PartStatus(ResponseSchema):
    ok: bool
    why: str | None


class ReadinessView(ResponseSchema):
    status: Literal["ok", "degraded", "unavailable"]
    parts: dict[str, PartStatus]


class LivenessView(ResponseSchema):
    status: Literal["ok"]


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
    alive: Annotated[bool, From("is_alive")]
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


class ModelStats(ResponseSchema):
    """A model's load.  `active` is `queued` and `running` together."""

    model: str
    queued: int
    running: int
    active: int
    slots: int


class AuditQuery(Schema):
    actor: _Name | None = Field(None, description="The name of the key that asked for the act.")
    act: str | None = Field(None, description="The kind of act, such as `server.drain`.", json_schema_extra=_ACT_SCHEMA)
    job_id: _Name | None = Field(None, description="The job that was changed.")
    model: _Name | None = None
    server: _Name | None = None
    tenant: _Name | None = None
    since: str | None = Field(
        None, max_length=40, description="Only acts at or after this time.", json_schema_extra=_TIME_SCHEMA
    )
    until: str | None = Field(
        None, max_length=40, description="Only acts before this time.", json_schema_extra=_TIME_SCHEMA
    )
    limit: int = Field(50, ge=1, le=1000)
    cursor: str | None = Field(None, max_length=20, json_schema_extra={"pattern": f"^{CURSOR}$"})


class AuditEntry(ResponseSchema, source=AuditRow):
    id: int = Field(description="The id of the event.")
    act: str
    at: Time
    actor: str = Field(description="The name of the key that asked for it.")
    interface: str | None = Field(description="REST, page, command line, Celery, or the process itself.")
    origin: str | None = Field(description="The network address that asked for it.")
    reason: str | None
    job_id: str | None
    model: str | None
    server: str | None
    tenant: str | None
    data: dict[str, Any] = Field(description="Further details of the act.")


class AuditList(ResponseSchema):
    acts: list[AuditEntry]
    next_cursor: str | None
