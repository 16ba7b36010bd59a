"""How long generated tests search: the same way each time, or, with SLOTKEEPER_TEST_EXAMPLES, longer and at random."""

import os
from typing import Any

from hypothesis import HealthCheck, settings

_ASKED_FOR = os.environ.get("SLOTKEEPER_TEST_EXAMPLES")


def search(examples: int, **more: Any) -> settings:
    """Settings for so many examples, or as many as were asked for."""
    return settings(
        max_examples=int(_ASKED_FOR or examples),
        derandomize=_ASKED_FOR is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )
