"""How many jobs may wait, and when to come again."""

import math

from slotkeeper.registry.model_config import ModelConfig

_UNKNOWN_RETRY_S = 30
_LONGEST_RETRY_S = 3600


def queue_limit(config: ModelConfig, slots: int) -> int | None:
    """Jobs that may wait: of each tenant where the policy is by tenant, of the whole model otherwise; None: any number.

    `slots`: of servers that are online.  With none left the bound stays that of one slot: what waits is parked, and
    an outage does not turn clients away at once.
    """
    per_slot = max((it for it in (config.capacity, config.capacity_per_slot) if it is not None), default=None)
    if per_slot is None:
        return config.max_waiting
    wanted = per_slot * max(slots, 1)
    return wanted if config.max_waiting is None else min(wanted, config.max_waiting)


def too_various(model: str, limit: int, tenant: str | None = None) -> str:
    """Why no more different constraints fit, and what can be done."""
    whose = "all tenants" if tenant is None else f"tenant {tenant!r}"
    return (
        f"Jobs of {whose} with {limit} different constraints wait for model {model!r} and those that share its "
        "servers, and no more kinds are taken; use constraints that wait already, or try again later."
    )


def refusal(model: str, waiting: int, limit: int, tenant: str | None = None) -> str:
    """Why no more jobs fit beside `waiting`, and what can be done."""
    whose = "jobs" if tenant is None else f"jobs of tenant {tenant!r}"
    return (
        f"{waiting} {whose} wait for model {model!r}, and it is configured to hold {limit}; "
        "try again later, or raise capacity or max_waiting at /admin/model-configs."
    )


def retry_after_s(over: int, slots: int, run_ms: float | None) -> int:
    """Whole seconds, 1 to 3600, until `over` jobs have drained: the Retry-After of a full queue."""
    if slots <= 0 or not run_ms:
        return _UNKNOWN_RETRY_S
    return math.ceil(min(max(over * run_ms / (slots * 1000), 1), _LONGEST_RETRY_S))
