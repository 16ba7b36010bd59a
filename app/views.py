"""Values of the record as JSON: the shapes that app.schemas describes."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import orjson

from insight.explain import Blocker, Explanation
from insight.interval import Estimate
from insight.load import Load
from insight.places import Place
from jobs.catalog import Model, Snapshot
from jobs.config import ModelConfig
from jobs.events import Attempt
from jobs.record import Accepted, Job, Server, TenantState
from jobs.rotations import Rotation
from jobs.secrets import Secret
from jobs.states import FINAL, Standing, State, Why
from jobs.tail import Entry
from jobs.tenants import Tenant
from jobs.withheld import Withheld
from routing import draining
from routing.policies.order import TIERS, longest_overtaking_s, longest_wait
from routing.policies.placement import show_needs
from routing.queues import Depths
from routing.slots import ServerStanding
from tasks.descriptions import effective
from tasks.servers import Health, HealthKind

# The two ways to be dead, as clients know them from elsewhere; the last attempt's own code stands beside it.
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
        "constraints": show_needs(it.needs),
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


def start(estimate: Estimate | None) -> dict[str, Any]:
    """When a job should start, seconds from now; the interval holds for nine jobs of ten."""
    return {
        "estimated_start_s": estimate and seconds(estimate.mid_ms),
        "estimated_start_between_s": estimate and [seconds(estimate.low_ms), seconds(estimate.high_ms)],
    }


def outlook(state: State, where: Place) -> str | None:
    """What comes next for a job, in one word; None: it has started or ended, as its status says."""
    match state:
        case State.DELAYED:
            return "later"
        case State.QUEUED if where.offered:
            return "starting"
        case State.QUEUED:
            return "unknown" if where.position is None else "waiting"
        case _:
            return None


def place(state: State, where: Place) -> dict[str, Any]:
    """Where a job stands, and when it should start."""
    return {"outlook": outlook(state, where), "position": where.position, **start(where.estimate)}


def receipt(it: Accepted) -> dict[str, Any]:
    return {"job_id": it.id, "status": it.state.value, "deduplicated": it.deduplicated}


def job_detail(it: Job, where: Place) -> dict[str, Any]:
    """JobDetail.  The result is handed on as the text that it is."""
    result = None if it.result is None else orjson.Fragment(it.result)
    return job(it) | place(it.state, where) | {"result": result}


def explanation(it: Job, found: Explanation) -> dict[str, Any]:
    waits_for = [
        {"code": one.code, "sentence": one.sentence, "subject": one.subject, "until": time(one.until_ms)}
        for one in found.waits_for
    ]
    return {
        "job_id": it.id,
        "status": it.state.value,
        "sentence": found.sentence,
        "waits_for": waits_for,
        "ahead": found.ahead,
        "before": list(found.before),
        "policy": found.policy,
        "longest_overtaking_s": found.longest_overtaking_s,
        "servers": {name: hindrance or None for name, hindrance in found.servers.items()},
        **start(found.estimate),
    }


def server_check(it: Server, reasons: Sequence[Blocker], health: Health | None) -> dict[str, Any]:
    """ServerCheck."""
    found = [
        {"code": one.code, "sentence": one.sentence, "subject": one.subject, "until": time(one.until_ms or None)}
        for one in reasons
    ]
    if health is not None and health.kind in _AILING:
        ailing = {"code": f"health_{health.kind}", "sentence": _AILING[health.kind], "subject": it.name, "until": None}
        found.insert(0, ailing)
    sentence = (
        "Nothing keeps it from jobs." if not found else f"{it.name}: " + "; ".join(str(r["sentence"]) for r in found)
    )
    return {"server": it.name, "sentence": sentence, "reasons": found, "health": health and health_report(health)}


_AILING = {
    HealthKind.BUSY: "its health check says that it is busy, or still loading; jobs are offered all the same",
    HealthKind.DOWN: "nobody answers its health check",
    HealthKind.FOREIGN: "what answers there does not know the path of its health check: wrong address, or wrong preset",
    HealthKind.GARBAGE: "its health check is answered with something else than its description expects",
}


def health_report(it: Health) -> dict[str, Any]:
    """HealthReport."""
    ids = None if it.job_ids is None else sorted(it.job_ids)
    return {"kind": it.kind.value, "active_jobs": it.active_jobs, "job_ids": ids, "message": it.message}


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


def happened(it: Entry) -> dict[str, Any]:
    """An event of a job."""
    event = it.event
    told = {
        "job_id": event.job_id,
        "model": it.model,
        "tenant": it.tenant,
        "tier": it.tier,
        "server": it.server,
        "attempt": event.attempt,
        "why": event.data.get("why"),
        "at": time(event.at_ms),
    }
    retry_in_ms = event.data.get("retry_in_ms")
    return told if retry_in_ms is None else told | {"retry_in_ms": retry_in_ms}


def state(it: Server | Model | TenantState) -> dict[str, Any]:
    """Whether it takes part, and who changed that, when and why."""
    return {
        "state": str(it.state),
        "reason": it.reason,
        "changed_by": it.changed_by,
        "changed_at": time(it.changed_ms),
    }


def server(it: Server) -> dict[str, Any]:
    return {
        "server": it.name,
        "fleet": it.fleet,
        **state(it),
        "slots": it.slots,
        "weight": it.weight,
        "attributes": {name: plain(value) for name, value in it.attributes.items()},
        "models": {model: shown_endpoint(url) for model, url in it.endpoints.items()},
        "described": {model: dict(own) for model, own in it.overrides.items()},
        "created_at": time(it.created_ms),
    }


def shown_endpoint(url: str) -> str:
    """Without the values of its query, which may be keys."""
    address, mark, query = url.partition("?")
    names = (part.partition("=") for part in query.split("&"))
    return address + mark + "&".join(name + equals + ("***" if value else "") for name, equals, value in names)


def plain(attribute: str | float) -> str | float | list[str]:
    """An attribute as it was given: a list is kept as one text."""
    return attribute.split(",") if isinstance(attribute, str) and "," in attribute else attribute


def standing(it: ServerStanding | None) -> dict[str, Any] | None:
    """How a server stands in the waiting room; None: that is not known now."""
    if it is None:
        return None
    return {
        "free": it.free,
        "resting": it.resting,
        "rested_at": time(it.rested_ms or None),
        "taken": it.taken,
        "breaker": it.breaker,
        "breaker_until": time(it.open_until_ms or None),
        "breaker_why": it.open_why or None,
        "breaker_opened": it.opened,
        "loaded": it.loaded or None,
        "swaps": it.swaps,
        "scores": {name: asdict(score) for name, score in it.scores.items()},
    }


def withheld(rows: Sequence[Withheld]) -> list[dict[str, Any]]:
    """Slots that are used by nothing of ours, and may not be used yet."""
    return [
        {
            "slot": row.slot,
            "job_id": row.job_id,
            "attempt": row.attempt,
            "reason": row.reason,
            "since": time(row.since_ms),
            "until": time(row.until_ms),
            "sentence": draining.sentence(row),
        }
        for row in rows
    ]


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
        **state(it),
        "servers": sorted(found.name for found in catalog.servers.values() if it.name in found.endpoints),
        "slots": catalog.slots_of(it.name),
        "waiting": None if depths is None else depths.waiting.get(it.name, 0),
    }


def model_detail(it: Model, catalog: Snapshot, load: Load | None) -> dict[str, Any]:
    bounds = {str(tier): longest_overtaking_s(tier, it.config) for tier in TIERS}
    return model(it, catalog, None) | {
        "waiting": load and load.waiting,
        "load": load and model_load(load),
        "longest_overtaking_s": bounds,
        "longest_wait": longest_wait(it.config),
    }


def model_load(it: Load) -> dict[str, Any]:
    return {
        "mean_run_s": it.run_ms and it.run_ms / 1000,
        "work_s": None if it.work_ms is None else seconds(it.work_ms),
        "limit": it.limit,
        "breaker": it.breaker,
        "breaker_until": time(it.open_until_ms or None),
    }


def webhook_secret(name: str, rotation: Rotation, secrets: list[str], now: int) -> dict[str, Any]:
    overlaps = len(rotation.valid(now)) > 1
    until = time(rotation.former_until_ms) if overlaps else None
    return {"tenant": name, "secrets": secrets, "rotation": rotation.number, "former_until": until}


def tenant(name: str, known: Tenant | None, stands: TenantState | None) -> dict[str, Any]:
    """`known`: it has a key; `stands`: it does not stand online."""
    return {
        "tenant": name,
        "has_key": known is not None,
        "admin": known is not None and known.admin,
        "rate_per_s": known and known.rate_per_s,
        "burst": known and known.burst,
        **state(stands or TenantState(name, Standing.ONLINE)),
    }


def config(it: Model) -> dict[str, Any]:
    return {
        "model": it.name,
        "config": it.config.model_dump(),
        "overrides": dict(it.overrides),
        "defaults": ModelConfig().model_dump(),
        "description": effective(it.config, it.described_by),
        "described_by": it.described_by,
    }


def secret(it: Secret) -> dict[str, Any]:
    models = None if it.models is None else sorted(it.models)
    return {"secret": it.name, "models": models, "set_by": it.set_by, "set_at": time(it.set_ms)}
