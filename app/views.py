"""Values of the record as JSON: the shapes that app.schemas describes."""

from datetime import UTC, datetime
from typing import Any

import orjson

from jobs.catalog import Model, Snapshot
from jobs.config import ModelConfig
from jobs.events import Attempt
from jobs.record import Job, Server
from jobs.states import FINAL, State, Why
from routing.policies.forecast import Estimate
from routing.queues import Depths

# How clients of S1 know the two ways to be dead; the last attempt's own code stands beside it.
_DEAD_CODES = {Why.RETRIES_EXHAUSTED: "max_retries_exceeded", Why.CRASHES_EXHAUSTED: "max_crashes_exceeded"}


def time(at_ms: int | None) -> str | None:
    """ISO 8601 in UTC with milliseconds."""
    if at_ms is None:
        return None
    whole = datetime.fromtimestamp(at_ms // 1000, UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{at_ms % 1000:03d}Z"


def job(it: Job) -> dict[str, Any]:
    """JobView: a job without its result."""
    ended, placed = it.state in FINAL, it.state is State.RUNNING or it.state in FINAL
    return {
        "job_id": it.id,
        "model": it.model,
        "status": it.state.value,
        "why": it.why.value,
        "priority": it.tier,
        "tenant": it.tenant,
        "attempts": it.attempts,
        "failures": it.failures,
        "crashes": it.crashes,
        "server": it.server if placed else None,
        "slot": it.slot if placed else None,
        "error": error(it) if ended else None,
        "last_error": None if ended else error(it),
        "cancel_requested": it.cancel_requested_ms is not None,
        "callback_url": it.callback_url,
        "created_at": time(it.created_ms),
        "started_at": time(it.started_ms),
        "completed_at": time(it.finished_ms),
        "not_before": time(it.due_ms),
        "deadline": time(it.deadline_ms),
    }


def seconds(ms: int) -> float:
    return round(ms / 1000, 1)


def interval(estimate: Estimate | None) -> list[float] | None:
    """[earliest, latest] start, seconds from now, as it holds for nine jobs of ten."""
    return None if estimate is None else [seconds(estimate.low_ms), seconds(estimate.high_ms)]


def job_detail(it: Job, position: int | None, estimate: Estimate | None) -> dict[str, Any]:
    """JobDetail.  The result is handed on as the text that it is."""
    return job(it) | {
        "position": position,
        "estimated_start_s": estimate and seconds(estimate.mid_ms),
        "estimated_start_between_s": interval(estimate),
        "result": None if it.result is None else orjson.Fragment(it.result),
    }


def error(it: Job) -> dict[str, Any] | None:
    """JobError of a job, or of its last attempt."""
    if it.error_code is None:
        return None
    code = _DEAD_CODES.get(it.why) if it.state is State.DEAD else None
    if code is None:
        return {"code": it.error_code, "message": it.error_message, "last_code": None}
    return {"code": code, "message": it.error_message, "last_code": it.error_code}


def attempt(it: Attempt) -> dict[str, Any]:
    return {
        "attempt": it.attempt,
        "server": it.server,
        "slot": it.slot,
        "started_at": time(it.started_ms),
        "ended_at": time(it.ended_ms),
        "outcome": it.outcome,
        "error": None if it.error is None else {"last_code": None, **it.error},
    }


def server(it: Server) -> dict[str, Any]:
    return {
        "server": it.name,
        "fleet": it.fleet,
        "state": it.state,
        "slots": it.slots,
        "models": it.endpoints,
        "created_at": time(it.created_ms),
    }


def fleet(name: str, depths: Depths) -> dict[str, Any]:
    return {
        "fleet": name,
        "free": depths.free,
        "resting": depths.resting,
        "taken": depths.taken,
        "waiting": sum(depths.waiting.values()),
    }


def model(it: Model, catalog: Snapshot, depths: Depths | None) -> dict[str, Any]:
    return {
        "model": it.name,
        "fleet": it.fleet,
        "model_type": it.config.model_type,
        "policy": it.config.policy,
        "servers": sorted(found.name for found in catalog.servers.values() if it.name in found.endpoints),
        "slots": catalog.slots_of(it.name),
        "waiting": None if depths is None else depths.waiting.get(it.name, 0),
    }


def config(it: Model) -> dict[str, Any]:
    return {
        "model": it.name,
        "config": it.config.model_dump(),
        "overrides": dict(it.overrides),
        "defaults": ModelConfig().model_dump(),
    }
