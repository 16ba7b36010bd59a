"""By what a message of Celery's is known as a wake-up: it says that a job is offered, and may be lost."""

from collections.abc import Mapping
from typing import Any

OFFER_HEADER = "slotkeeper"


def is_wake_up(headers: Mapping[str, Any] | None) -> bool:
    """Whether a message carries an offer; else it is a bare task from a client without this code."""
    return OFFER_HEADER in (headers or {})
